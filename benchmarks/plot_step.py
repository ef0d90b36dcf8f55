"""Draws the time of a decode step's cache work over the bytes it must move, from a result file of `bench_model.py`.

python benchmarks/plot_step.py benchmarks/results/model-h200.json docs/step.png
"""

import argparse
import json
import pathlib

from matplotlib.figure import Figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    args = parser.parse_args()
    data = json.loads(args.results.read_text(encoding="utf-8"))
    steps = sorted(
        (row for row in data["rows"] if row["name"].startswith("step_all_layers")), key=lambda row: row["bytes"]
    )
    gigabytes = [row["bytes"] / 1e9 for row in steps]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(gigabytes, [row["us"] / 1e3 for row in steps], "o-", label="measured")
    axes.plot(gigabytes, [row["reference_us"] / 1e3 for row in steps], "--", label="its bytes at the rate of a copy")
    for x, row in zip(gigabytes, steps, strict=True):
        axes.annotate(
            row["name"].rsplit("_", 1)[1], (x, row["us"] / 1e3), textcoords="offset points", xytext=(-4, 8), ha="right"
        )
    axes.set(xlabel="bytes that must be moved (GB)", ylabel="ms", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"Cache work of one decode step, all layers ({data['card']})", fontsize="medium")
    axes.legend(loc="lower right")
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
