"""Capacity figures as rows: the one source of the command line's table, its JSON and the HTML report."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsv4kv_jax.capacity import capacity
from dsv4kv_jax.config import PRESETS
from dsv4kv_jax.explain import format_bytes
from dsv4kv_jax.footprint import WASTE, bytes_read, mean_bytes_by_cause
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.plots import short_tokens

if TYPE_CHECKING:
    from dsv4kv_jax.optimize import Optimized
    from dsv4kv_jax.plan import KVCachePlan

Table = tuple[list[str], list[list[str]]]  # headers, rows


def capacity_rows(
    plan: "KVCachePlan", lengths: Sequence[int], schedule: Schedule, *, index_topk: int | None = None
) -> list[dict[str, Any]]:
    """All figures of each context length, as JSON holds them.

    `bytes_read` is None where the model is no preset and `index_topk` is not given.

    Raises:
      PlanError: see `capacity.capacity`.
    """
    rows = []
    for num_tokens in lengths:
        one = capacity(plan, num_tokens, schedule)
        known = index_topk is not None or plan.model in PRESETS
        read = bytes_read(plan, num_tokens, index_topk=index_topk) if known else None
        rows.append(
            {
                "num_tokens": num_tokens,
                "num_requests": one.num_requests,
                "concurrency": one.concurrency,
                "worst_case_concurrency": one.worst_case_concurrency,
                "decoding_blocks": list(one.decoding),
                "exact_blocks": list(one.exact),
                "prefilling_blocks": list(one.prefilling),
                "worst_case_blocks": list(one.worst_case),
                "fixed_blocks": one.fixed_blocks,
                "peak_blocks": one.peak_blocks,
                "decoding_bytes": one.decoding_bytes,
                "held_bytes": mean_bytes_by_cause(plan, num_tokens, schedule),
                "bytes_read": dataclasses.asdict(read) | {"total": read.total} if read else None,
            }
        )
    return rows


def capacity_table(rows: Sequence[dict[str, Any]]) -> Table:
    """How many requests fit, and what one costs."""
    headers = ["context", "requests", "blocks", "fixed", "growing", "memory each", "prefill peak", "all prefilling"]
    return headers, [
        [
            short_tokens(row["num_tokens"]),
            f"{row['num_requests']:,}",
            f"{sum(row['decoding_blocks']):,}",
            f"{row['fixed_blocks']:,}",
            f"{sum(row['decoding_blocks']) - row['fixed_blocks']:,}",
            format_bytes(row["decoding_bytes"]),
            f"{row['peak_blocks']:,}",
            f"{row['worst_case_concurrency']:,.1f}",
        ]
        for row in rows
    ]


def waste_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Shares of the bytes that a request holds, by cause."""
    headers = ["context", "held", "live", "page padding", "slack", "tails", "beyond window", "stale states"]
    table = []
    for row in rows:
        total = round(sum(row["held_bytes"].values()))
        shares = [f"{100 * row['held_bytes'][cause] / total:.1f}%" for cause in ("live", *WASTE)]
        table.append([short_tokens(row["num_tokens"]), format_bytes(total), *shares])
    return headers, table


def read_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Bytes that decoding one token reads, by component; no rows where they are not known."""
    parts = ("window", "compressed", "indexer", "state", "total")
    return ["context", *parts], [
        [short_tokens(row["num_tokens"]), *(format_bytes(row["bytes_read"][part]) for part in parts)]
        for row in rows
        if row["bytes_read"]
    ]


def optimized_figures(found: "Optimized") -> dict[str, Any]:
    """A geometry that was found, as JSON holds it."""
    return {
        "compatible": found.compatible,
        "workload": dict(zip(map(str, found.mix.lengths), found.mix.weights, strict=True)),
        "num_requests": found.num_requests,
        "default_requests": found.default_requests,
        "gain": found.gain if found.default_requests else None,
        "hit_granularity": found.hit_granularity,
        "pools": [_pool_figures(pool) for pool in found.pools],
        "default": _pool_figures(found.default),
    }


def _pool_figures(pool: "KVCachePlan") -> dict[str, Any]:
    return {
        "block_bytes": pool.layout.bytes_per_block,
        "num_blocks": pool.num_blocks,
        "memory_bytes": pool.workers[0].memory_bytes,
        "groups": [
            {
                "block_size": group.block_size,
                "sliding_window": group.sliding_window,
                "num_layers": len(group.layers),
                "used_bytes": group.page_size_bytes,
            }
            for group in pool.groups
        ],
    }


def optimized_text(found: "Optimized") -> str:
    """A geometry that was found, in words."""
    mix = " + ".join(
        f"{weight:g} x {short_tokens(length)}" if len(found.mix.lengths) > 1 else short_tokens(length)
        for length, weight in zip(found.mix.lengths, found.mix.weights, strict=True)
    )
    gain = f"{found.gain:.3f}x" if found.default_requests else "where the default admits none"
    lines = [
        f"geometry for requests of {mix} tokens, pages for {found.compatible!r}: {found.num_requests:,} requests "
        f"instead of "
        f"{found.default_requests:,} ({gain})"
    ]
    if found.pools == (found.default,):
        return lines[0] + "; vLLM's geometry is kept, no other admits more"
    for index, pool in enumerate(found.pools):
        name = "one slab" if len(found.pools) == 1 else f"pool {index}"
        share = "" if len(found.pools) == 1 else f" ({format_bytes(pool.workers[0].memory_bytes)})"
        lines.append(f"  {name}: {pool.num_blocks:,} blocks of {pool.layout.bytes_per_block:,} bytes{share}")
        for group in pool.groups:
            keeps = f"window {group.sliding_window}" if group.sliding_window else "keeps all"
            kinds = ", ".join(dict.fromkeys(_kinds(group)))
            lines.append(f"    {len(group.layers):>3} caches, {group.block_size:>4} tokens, {keeps:<10}  {kinds}")
    lines.append(f"  prefix hits end at multiples of {found.hit_granularity} tokens")
    return "\n".join(lines)


def _kinds(group: Any) -> list[str]:
    from dsv4kv_jax.roles import describe

    return [describe(spec) for spec in group.specs]


def as_text(table: Table) -> str:
    """A table with aligned columns."""
    headers, rows = table
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (headers, *rows)]
    return "\n".join(line.rstrip() for line in lines)
