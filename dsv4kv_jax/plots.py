"""Plots against context length: what requests cost and how many fit, and which bytes a decode step reads."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsv4kv_jax.capacity import capacity
from dsv4kv_jax.footprint import bytes_read
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.picture import figure_class

if TYPE_CHECKING:
    from dsv4kv_jax.plan import KVCachePlan

# Colours of `picture`, for the component that each mostly stands for.
_COMPONENTS = {"window": "#009E73", "state": "#E69F00", "compressed": "#0072B2", "indexer": "#CC79A7"}
_LINES = ("#222222", "#0072B2", "#D55E00", "#009E73")
_FIXED, _GROWING = "#E69F00", "#0072B2"
_SIZE_INCHES = (8.0, 3.6)


def context_lengths(longest: int) -> list[int]:
    """Powers of two from 1,024 tokens, and `longest`: the rows of tables and the points of plots."""
    lengths = [1 << power for power in range(10, 40) if 1 << power <= longest]
    return lengths if lengths and lengths[-1] == longest else [*lengths, longest]


def plot_capacity(plans: Mapping[str, Sequence["KVCachePlan"]], longest: int, schedule: Schedule | None = None) -> Any:
    """Left: requests that fit against context length, for each entry of `plans` (a label to its pools).

    One entry is drawn in numbers; more are drawn relative to the first, whose numbers stand at its line.
    Right: for the first entry, the share of a request's memory that is fixed and the share that grows with its tokens.
    """
    figure = figure_class()(figsize=_SIZE_INCHES, dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    lengths = context_lengths(longest)
    counts = {
        label: [min(capacity(pool, n, schedule).num_requests for pool in pools) for n in lengths]
        for label, pools in plans.items()
    }
    first = next(iter(counts.values()))
    relative = len(counts) > 1
    for (label, row), color in zip(counts.items(), _LINES, strict=False):
        values = [n / base if base else float("nan") for n, base in zip(row, first, strict=True)] if relative else row
        left.plot(lengths, values, color=color, marker="o", markersize=3, linewidth=1.5, label=label)
    if relative:
        for n, count in list(zip(lengths, first, strict=True))[1::2]:
            left.annotate(f"{count:,}", (n, 1), (0, -11), textcoords="offset points", ha="center", fontsize=7.5)
        left.set_ylim(0)
        left.set_ylabel(f"requests, relative to {next(iter(counts))}", fontsize=9)
    else:
        left.set_yscale("log")
        left.set_ylabel("requests that decode together", fontsize=9)
    left.set_title("How many fit", fontsize=10, loc="left", fontweight="bold")
    left.legend(fontsize=8, frameon=False, loc="lower left")
    pools = next(iter(plans.values()))
    each = [[capacity(pool, n, schedule) for pool in pools] for n in lengths]
    total = [sum(one.decoding_bytes for one in row) for row in each]
    fixed = [
        100 * sum(one.fixed_blocks * one.block_bytes for one in row) / size
        for row, size in zip(each, total, strict=True)
    ]
    right.stackplot(
        lengths,
        fixed,
        [100 - share for share in fixed],
        colors=(_FIXED, _GROWING),
        labels=("fixed: windows and states", "grows with the context"),
    )
    right.set_ylim(0, 100)
    right.set_ylabel("% of one request's memory", fontsize=9)
    right.set_title("Where a request's memory goes", fontsize=10, loc="left", fontweight="bold")
    right.legend(fontsize=8, loc="upper right", framealpha=0.9)
    for axes in (left, right):
        _context_axis(axes, lengths)
    return figure


def plot_bytes_read(plan: "KVCachePlan", longest: int, index_topk: int | None = None) -> Any:
    """Bytes of the cache read per decoded token, by component, against context length."""
    figure = figure_class()(figsize=_SIZE_INCHES, dpi=100, layout="constrained")
    axes = figure.subplots()
    lengths = context_lengths(longest)
    reads = [bytes_read(plan, n, index_topk=index_topk) for n in lengths]
    for name, color in _COMPONENTS.items():
        sizes = [getattr(read, name) / 1e6 for read in reads]
        if any(sizes):
            axes.plot(lengths, sizes, color=color, marker="o", markersize=3, linewidth=1.5, label=name)
    axes.plot(
        lengths, [read.total / 1e6 for read in reads], color="#222222", linestyle="--", linewidth=1.2, label="total"
    )
    axes.set_yscale("log")
    axes.set_ylabel("MB", fontsize=9)
    axes.set_title(f"Bytes read to decode one token, {plan.model}", fontsize=10, loc="left", fontweight="bold")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    _context_axis(axes, lengths)
    return figure


def short_tokens(count: int) -> str:
    """A number of tokens as people say it: `"2K"`, `"1M"`."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"


def _context_axis(axes: Any, lengths: Sequence[int]) -> None:
    if len(lengths) > 1:
        axes.set_xscale("log", base=2)
        axes.set_xlim(lengths[0], lengths[-1])
    shown = lengths[:: max(1, (len(lengths) + 5) // 6)]
    axes.set_xticks(shown, [short_tokens(n) for n in shown], fontsize=8.5)
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="y", labelsize=8.5)
    axes.set_xlabel("tokens in the context", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
