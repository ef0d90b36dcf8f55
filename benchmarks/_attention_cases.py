"""What `bench_attention.py` checks and times."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["c4a", "c128a"]


@dataclasses.dataclass(frozen=True)
class Lists:
    """One of a check's two lists: its width, its lengths, and how many of its entries are no slots."""

    width: int
    lens: Literal["full", "random", "zero", "one", "past", "negative"] = "random"
    holes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Check:
    tokens: int
    heads: int
    kind: Kind
    window: Lists
    compressed: Lists | None
    sink: float | None = 0.0  # 0: random sinks


@dataclasses.dataclass(frozen=True)
class Shape:
    tokens: int
    heads: int
    kind: Kind
    rows: int  # compressed ones, beside 128 window rows
    calls: int  # of one program, on different inputs
    num_blocks: int = 170_000  # 8 GB


CHECKS: Mapping[str, Check] = {
    "ragged": Check(24, 128, "c4a", Lists(128, holes=0.05), Lists(1024, holes=0.05)),
    "full": Check(8, 64, "c4a", Lists(128, "full"), Lists(512, "full")),
    "c128a": Check(6, 128, "c128a", Lists(128), Lists(320, holes=0.1)),
    "window only": Check(140, 128, "c4a", Lists(128), None),
    "few heads, odd widths": Check(5, 16, "c4a", Lists(100, holes=0.2), Lists(37, holes=0.2)),
    "no keys": Check(3, 64, "c4a", Lists(128, "zero"), Lists(64, "zero")),
    "only holes": Check(3, 64, "c4a", Lists(128, "full", 1.0), Lists(192, "full", 1.0)),
    "lens past the ends": Check(4, 64, "c128a", Lists(128, "past"), Lists(64, "negative")),
    "one key, no sink": Check(2, 64, "c4a", Lists(128, "zero"), Lists(64, "one"), None),
    "infinite sink": Check(2, 64, "c4a", Lists(128), Lists(64), float("inf")),
}

SHAPES: Mapping[str, Shape] = {
    "256 tokens, 128 heads, 128+1024 rows": Shape(256, 128, "c4a", 1024, 6),
    "256 tokens, 64 heads, 128+512 rows": Shape(256, 64, "c4a", 512, 12),
    "256 tokens, 128 heads, 128+0 rows": Shape(256, 128, "c4a", 0, 12),
    "8 tokens, 128 heads, 128+1024 rows": Shape(8, 128, "c4a", 1024, 24),
    "64 tokens, 128 heads, 128+8192 rows": Shape(64, 128, "c128a", 8192, 4),
    "8 tokens, 128 heads, 128+8192 rows": Shape(8, 128, "c128a", 8192, 16),
}

# Arguments of the kernel's `Tuning`, by name. "default" is what users get.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "columns 128": {"scorer_columns": 128, "registers": (176, 232, 96)},
    "columns 64": {"scorer_columns": 64, "registers": (152, 256, 96)},
    "columns 256": {"scorer_columns": 256, "registers": (232, 176, 96)},
    "prefetch 0": {"prefetch": 0},
    "prefetch 1": {"prefetch": 1},
    "prefetch 4": {"prefetch": 4},
    "splits 1": {"splits": 1},
    "splits 2": {"splits": 2},
    "splits 5": {"splits": 5},
    "splits 8": {"splits": 8},
    "splits 16": {"splits": 16},
}
