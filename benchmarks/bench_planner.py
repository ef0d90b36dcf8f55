"""Time of `plan()` after import, against vLLM 0.27.1's planner on a machine of the same size (7 ms, recorded)."""

import argparse
import statistics
import time

from _results import Row, report

from dsv4kv_jax import ModelConfig, plan

VLLM_US = 7_000.0  # vLLM 0.27.1 planning V4-Pro on 2 cores
GOAL_US = 3_500.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    args = parser.parse_args()
    rows = []
    for preset in ("deepseek-v4-pro", "deepseek-v4-flash"):
        config = ModelConfig.preset(preset)
        start = time.perf_counter()
        plan(config, 10 * 2**30)
        first = (time.perf_counter() - start) * 1e6
        times = []
        for _ in range(200):
            start = time.perf_counter()
            plan(config, 10 * 2**30)
            times.append((time.perf_counter() - start) * 1e6)
        reference = ("vLLM 0.27.1, recorded", VLLM_US) if preset == "deepseek-v4-pro" else (None, None)
        for case, us in (("first call", first), ("median of 200", statistics.median(times))):
            rows.append(
                Row(
                    name="plan",
                    case=f"{preset}, 1 worker, {case}",
                    implementation="python",
                    us=us,
                    reference=reference[0],
                    reference_us=reference[1],
                )
            )
    report(rows, as_json=args.json, output=args.output)


if __name__ == "__main__":
    main()
