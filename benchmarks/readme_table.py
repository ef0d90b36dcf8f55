"""Writes the README's benchmark table from `benchmarks/results/*.json`. `--check` fails where the README differs."""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def table() -> str:
    lines = ["| row | case | implementation | us | reference | us | ratio | card |"]
    lines.append("|---|---|---|--:|---|--:|--:|---|")
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for row in data["rows"]:
            if row.get("us") is None or row.get("in_readme") is False:
                continue
            ratio = f"{row['ratio']:.2f}" if row.get("ratio") is not None else ""
            reference_us = f"{row['reference_us']:,.1f}" if row.get("reference_us") is not None else ""
            card = "H200" if "H200" in str(data["card"]) else "CPU"
            lines.append(
                f"| {row['name']} | {row['case']} | {row['implementation']} | {row['us']:,.1f} "
                f"| {row.get('reference') or ''} | {reference_us} | {ratio} | {card} |"
            )
    return "\n".join(lines)


def updated(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    new = updated(readme)
    if args.check:
        message = "README.md: the benchmark table is not that of benchmarks/results; run without --check"
        sys.exit(0 if new == readme else message)
    path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
