"""Sparse decode attention: the fused kernel and its variants, XLA, and FlashMLA's compiled kernel in one run.

`--check` compares every case of `_attention_cases.CHECKS` with a float64 reference first. Jobs run in a second process,
so that one that hangs or kills its process costs its own result only.

    python benchmarks/bench_attention.py --check --output attention.json --flash-mla _flashmla_C.abi3.so
"""

import argparse
import dataclasses
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from typing import Any

from _attention_cases import CHECKS, SHAPES, VARIANTS
from _results import Row, report

WORKER = pathlib.Path(__file__).with_name("_attention_worker.py")
FIRST = "256 tokens, 128 heads, 128+1024 rows"
SMALL = [name for name in SHAPES if name.startswith("8 tokens")]


def jobs(args: argparse.Namespace) -> list[str]:
    """What to do, the most important first."""
    checks, more_checks = [], []
    if args.check:
        checks = [f"check/{name}/default" for name in CHECKS]
        more_checks = [f"check/{name}/{variant}" for name in CHECKS for variant in ("splits 1", "splits 5")]
    compared = ("default", *(["flash_mla"] if args.flash_mla else []))
    times = [f"time/{name}/{variant}" for name in SHAPES for variant in compared]
    columns = [name for name in VARIANTS if name.startswith("columns")]
    splits = [name for name in VARIANTS if name.startswith("splits")]
    prefetches = [name for name in VARIANTS if name.startswith("prefetch")]
    tuning = [f"time/{FIRST}/{variant}" for variant in (*columns, *prefetches)]
    tuning += [f"time/{name}/{variant}" for name in SMALL for variant in splits]
    tuning += [f"time/{name}/{variant}" for name in list(SHAPES)[1:3] for variant in columns]
    xla = [f"time/{name}/xla" for name in SHAPES]
    wanted = [*checks, *times, *(tuning if args.tune else []), *more_checks, *xla]
    return [job for job in wanted if not args.only or any(part in job for part in args.only)]


def run(wanted: list[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Results by job; a job that gave none has an "error"."""
    results: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + args.limit
    while (left := [job for job in wanted if job not in results]) and time.monotonic() < deadline:
        command = [sys.executable, str(WORKER), *left, *(["--flash-mla", args.flash_mla] if args.flash_mla else [])]
        lines: queue.Queue[str | None] = queue.Queue()
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # FlashMLA's jobs need room for torch
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as worker:

            def read(stream: Any = worker.stdout, lines: queue.Queue[str | None] = lines) -> None:
                for line in stream:
                    lines.put(line)
                lines.put(None)

            threading.Thread(target=read, daemon=True).start()
            current = left[0]
            while True:
                try:
                    line = lines.get(timeout=max(min(args.patience, deadline - time.monotonic()), 0.1))
                except queue.Empty:
                    worker.kill()
                    results[current] = {"error": "no answer in time"}
                    break
                if line is None:
                    results.setdefault(current, {"error": f"the process ended with {worker.wait()}"})
                    break
                if not line.startswith("{"):
                    continue
                answer = json.loads(line)
                current = answer.get("start", current)
                if job := answer.pop("job", None):
                    results[job] = answer
                    print(f"{job}: {json.dumps(answer)}", file=sys.stderr, flush=True)
                if "card" in answer:
                    results["environment"] = answer
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with a float64 reference first")
    parser.add_argument("--tune", action="store_true", help="time the variants of the kernel too")
    parser.add_argument("--flash-mla", metavar="PATH", help="FlashMLA's compiled extension, to compare with")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only jobs whose name holds one of these texts")
    parser.add_argument("--limit", type=float, default=230, help="seconds for everything")
    parser.add_argument("--patience", type=float, default=60, help="seconds without an answer before a job is given up")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    args = parser.parse_args()
    results = run(jobs(args), args)
    rows = []
    for name in SHAPES:
        flash = results.get(f"time/{name}/flash_mla", {}).get("us")
        for variant in (*VARIANTS, "xla", "flash_mla"):
            if us := results.get(f"time/{name}/{variant}", {}).get("us"):
                implementation = {"default": "mosaic_gpu", "xla": "xla", "flash_mla": "flash_mla"}.get(
                    variant, f"mosaic_gpu, {variant}"
                )
                row = Row(name="decode_attention", case=name, implementation=implementation, us=us)
                rows.append(dataclasses.replace(row, reference="FlashMLA", reference_us=flash) if flash else row)
    environment = results.pop("environment", {})
    checks = {job: result for job, result in results.items() if job.startswith("check/")}
    failed = [job for job, result in results.items() if result.get("error") or not result.get("ok", True)]
    card = environment.get("card", "")
    extra = {"card": card, "device": "h200" if "H200" in card else card or "cpu"} if card else {}
    report(rows, as_json=args.json, output=args.output, **extra, checks=checks, failed={j: results[j] for j in failed})
    if failed:
        sys.exit(f"{len(failed)} jobs failed: {failed}")


if __name__ == "__main__":
    main()
