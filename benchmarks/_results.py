"""Benchmark rows: one shape for all benchmarks, printed as a table, written as the file behind the README's table."""

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
import shlex
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement in microseconds; `reference` names what it is compared with in the same run.

    `us` is None for a check that has no time. Such rows and those with `in_readme` off are not in the README's table.
    """

    name: str
    case: str
    implementation: str
    us: float | None
    bytes: int | None = None
    reference: str | None = None
    reference_us: float | None = None
    note: str | None = None
    in_readme: bool = True

    @property
    def ratio(self) -> float | None:
        return self.us / self.reference_us if self.us is not None and self.reference_us else None

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"ratio": self.ratio}


def report(rows: Sequence[Row], *, as_json: bool, output: str | None, **extra: object) -> None:
    """Prints the rows, as a table or as JSON, and writes the JSON to `output` if given."""
    data = environment() | extra | {"rows": [row.to_dict() for row in rows]}
    text = json.dumps(data, indent=1)
    if output:
        pathlib.Path(output).write_text(text + "\n", encoding="utf-8")
    print(text if as_json else table(rows))


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'row':<22} {'case':<44} {'implementation':<16} {'us':>12} {'reference':<24} {'us':>12} {'ratio':>7}"]
    for row in rows:
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else "-"
        us, reference_us = (f"{us:,.1f}" if us is not None else "-" for us in (row.us, row.reference_us))
        lines.append(
            f"{row.name:<22} {row.case:<44} {row.implementation:<16} {us:>12} {row.reference or '-':<24} "
            f"{reference_us:>12} {ratio:>7}"
        )
    return "\n".join(lines)


def environment() -> dict[str, object]:
    """Device, card, versions, date and command of this run."""
    card = gpu_name()
    names = ("jax", "jaxlib", "numpy", "torch", "triton")
    return {
        "device": "h200" if card and "H200" in card else (card or "cpu"),
        "card": card or cpu_name(),
        "versions": {"python": platform.python_version()} | {name: v for name in names if (v := version(name))},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_name() -> str | None:
    """The GPU that JAX runs on, if this process has started JAX on one."""
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    devices = jax.devices()
    return devices[0].device_kind if devices[0].platform == "gpu" else None


def cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
