"""Slots and indices on Mosaic GPU: one program a token, neighbouring columns in neighbouring lanes.

Each program finds its token's request, works out everything that was asked for, and only then stores it, so that the
reads of all block tables are under way together. Where nothing is to be computed, because there are no tokens, requests
or columns, the XLA versions make the empty results.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv4kv_jax.kernels import flashinfer, indices, mosaic_lanes, prefill, slots, step
from dsv4kv_jax.kernels._arguments import INT32_MAX
from dsv4kv_jax.kernels.mosaic_lanes import LANES, iota, lane_load, lane_store, splat
from dsv4kv_jax.kernels.slots import StepTokens
from dsv4kv_jax.kernels.step import StepIndex
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import cdiv, round_up

_COLUMNS = 1024  # of a row that one program makes; longer rows are shared

Store = Callable[[], None]
_I32 = jnp.int32


# --- Everything that depends on the block tables and the requests only ---


def step_indices(
    wanted: tuple[StepIndex, ...],
    tables: Mapping[int, jax.Array],
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    *,
    num_tokens: int,
) -> tuple[StepTokens, tuple[Any, ...]]:
    """`step.step_indices` for arguments that were checked, in one launch."""
    empty = not wanted or not num_tokens or any(not table.size for table in tables.values())
    if empty or any(not want.width for want in wanted if want.kind in ("window", "dense")):
        all_tables = [tables.get(group) for group in range(max(tables, default=-1) + 1)]
        return step.step_indices(
            wanted, all_tables, query_start_loc, seq_lens, num_tokens=num_tokens, implementation="xla"
        )
    positions, request, made = _step(
        tuple(tables[want.group] for want in wanted),
        query_start_loc,
        seq_lens,
        jobs=tuple(_Job(want.kind, want.block_size, want.compress_ratio, want.width, want.width) for want in wanted),
        num_tokens=num_tokens,
        interpreted=mosaic_lanes.is_interpreted(),
    )
    return StepTokens(positions, request, positions >= 0), made


def slot_mapping(table: Any, starts: Any, lens: Any, *, block_size: int, num_tokens: int) -> jax.Array:
    """`kernels.slot_mapping` for arguments that were checked."""
    job = _Job("slots", block_size, 1, 0, 0)
    empty = functools.partial(slots.slot_mapping, block_size=block_size)
    return _one_job(table, starts, lens, job, num_tokens, empty)


def compressed_slot_mapping(
    table: Any, starts: Any, lens: Any, *, block_size: int, compress_ratio: int, num_tokens: int
) -> jax.Array:
    """`kernels.compressed_slot_mapping` for arguments that were checked."""
    job = _Job("compressed_slots", block_size, compress_ratio, 0, 0)
    empty = functools.partial(slots.compressed_slot_mapping, block_size=block_size, compress_ratio=compress_ratio)
    return _one_job(table, starts, lens, job, num_tokens, empty)


def swa_indices(
    table: Any, starts: Any, lens: Any, *, block_size: int, window: int, width: int, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """`kernels.swa_indices` for arguments that were checked."""
    job = _Job("window", block_size, 1, width, window)
    empty = functools.partial(indices.swa_indices, block_size=block_size, window=window, width=width)
    return _one_job(table, starts, lens, job, num_tokens, empty)


def c128a_indices(
    table: Any,
    starts: Any,
    lens: Any,
    *,
    block_size: int,
    compress_ratio: int,
    width: int,
    num_tokens: int,
    local: bool,
) -> tuple[jax.Array, jax.Array]:
    """`kernels.c128a_indices` for arguments that were checked."""
    job = _Job("dense_local" if local else "dense", block_size, compress_ratio, width, 0)
    options: Any = {"block_size": block_size, "compress_ratio": compress_ratio, "width": width, "local": local}
    return _one_job(table, starts, lens, job, num_tokens, functools.partial(indices.c128a_indices, **options))


class _Job(NamedTuple):
    """A `StepIndex` without its group; the form in which the kernel is told what to make."""

    kind: str
    block_size: int
    compress_ratio: int
    width: int
    window: int

    @property
    def is_matrix(self) -> bool:
        return self.kind not in ("slots", "compressed_slots")


def _one_job(table: Any, starts: Any, lens: Any, job: _Job, num_tokens: int, empty: Callable[..., Any]) -> Any:
    if not num_tokens or not table.size or (job.is_matrix and not job.width):
        return empty(table, starts, lens, num_tokens=num_tokens, implementation="xla")
    interpreted = mosaic_lanes.is_interpreted()
    return _step((table,), starts, lens, jobs=(job,), num_tokens=num_tokens, interpreted=interpreted)[2][0]


@functools.partial(jax.jit, static_argnames=("jobs", "num_tokens", "interpreted"))
def _step(
    tables: tuple[jax.Array, ...],
    starts: jax.Array,
    lens: jax.Array,
    *,
    jobs: tuple[_Job, ...],
    num_tokens: int,
    interpreted: bool,
) -> tuple[jax.Array, jax.Array, tuple[Any, ...]]:
    per_token = jax.ShapeDtypeStruct((1, num_tokens), _I32)
    out_type = [per_token, per_token]
    for job in jobs:
        matrix = [jax.ShapeDtypeStruct((num_tokens, job.width), _I32)] if job.is_matrix else []
        out_type += [*matrix, per_token]
    parts = max(cdiv(job.width, _COLUMNS) for job in jobs) or 1
    positions, request, *outs = mosaic_lanes.kernel(
        functools.partial(_step_body, jobs=jobs), name="step_indices", out_type=out_type, grid=(num_tokens, parts)
    )(starts[None, :], lens[None, :], *tables)
    made: list[Any] = []
    for job in jobs:
        matrix = outs.pop(0) if job.is_matrix else None
        per_token = outs.pop(0)[0]
        made.append(per_token if matrix is None else (matrix, per_token))
    return positions[0], request[0], tuple(made)


def _step_body(starts: Any, lens: Any, *refs: Any, jobs: tuple[_Job, ...]) -> None:
    tables, outs = refs[: len(jobs)], list(refs[len(jobs) :])
    token, part = lax.axis_index("i"), lax.axis_index("j")
    request, position = _locate(starts, lens, token)
    valid = position >= 0
    stores = [_per_token(outs.pop(0), token, position), _per_token(outs.pop(0), token, request)]
    for job, table in zip(jobs, tables, strict=True):
        if not job.is_matrix:
            entry = position
            if job.kind == "compressed_slots":
                completes = valid & (lax.rem(position + 1, jnp.int32(job.compress_ratio)) == 0)
                entry = jnp.where(completes, lax.div(position, jnp.int32(job.compress_ratio)), -1)
            stores.append(
                _per_token(outs.pop(0), token, _slot(table, request, entry, job.block_size // job.compress_ratio))
            )
            continue
        matrix, lengths = outs.pop(0), outs.pop(0)
        column, layout = _line(job.width, part)
        if job.kind == "window":
            first = jnp.maximum(jnp.maximum(position - job.window + 1, 0), position + 1 - job.width)
            length = jnp.where(valid, position + 1 - first, 0)
        else:
            has_entries = valid if job.kind == "dense_local" else _slot(table, request, position, job.block_size) >= 0
            first = jnp.int32(0)
            length = jnp.where(
                has_entries, jnp.minimum(lax.div(position + 1, jnp.int32(job.compress_ratio)), job.width), 0
            )
        row = jnp.where(column < length, first + column, -1)
        if job.kind != "dense_local":
            row = _line_slots(table, request, row, job.block_size // job.compress_ratio, layout)
        stores += [_per_token(lengths, token, length), _line_store(matrix, token, column, row, layout)]
    for store in stores:
        store()


# --- Picked entries, and combined rows ---


def topk_to_slots(
    topk: jax.Array, request: jax.Array, table: jax.Array, *, storage_block_size: int
) -> tuple[jax.Array, jax.Array]:
    """`kernels.topk_to_slots` for arguments that were checked; `request` is -1 for tokens that are none."""
    if not topk.size or not table.size:
        return indices.topk_to_slots(topk, request, table, storage_block_size=storage_block_size, implementation="xla")
    return _topk(topk, request, table, rows=storage_block_size, interpreted=mosaic_lanes.is_interpreted())


@functools.partial(jax.jit, static_argnames=("rows", "interpreted"))
def _topk(topk: Any, request: Any, table: Any, *, rows: int, interpreted: bool) -> tuple[jax.Array, jax.Array]:
    num_tokens, width = topk.shape
    picked, lengths = mosaic_lanes.kernel(
        functools.partial(_topk_body, rows=rows),
        name="topk_to_slots",
        out_type=[jax.ShapeDtypeStruct((num_tokens, width), _I32), jax.ShapeDtypeStruct((1, num_tokens), _I32)],
        grid=(num_tokens,),
    )(topk, request, table)
    return picked, lengths[0]


def _topk_body(topk: Any, request: Any, table: Any, picked: Any, lengths: Any, *, rows: int) -> None:
    token = lax.axis_index("i")
    mine = request[token]
    column, layout = _line(topk.shape[1])
    entry = _line_load(topk, jnp.where(mine >= 0, token, -1), column, layout)
    slot = _line_slots(table, mine, entry, rows, layout)
    length = jnp.sum((entry >= 0).astype(_I32), dtype=_I32)
    _line_store(picked, token, column, slot, layout)()
    _per_token(lengths, token, length)()


def combine_topk_swa(
    topk: jax.Array,
    starts: jax.Array,
    lens: jax.Array,
    gathered: jax.Array,
    *,
    compress_ratio: int,
    compressed_rows: int,
    workspace_rows: int,
    window: int,
    width: int,
) -> tuple[jax.Array, jax.Array]:
    """`kernels.combine_topk_swa` for arguments that were checked."""
    geometry: Any = {
        "compress_ratio": compress_ratio,
        "compressed_rows": compressed_rows,
        "workspace_rows": workspace_rows,
        "window": window,
    }
    if not topk.shape[0] or not lens.shape[0]:
        extra = width - round_up(topk.shape[1] + window, indices.INDEX_ALIGNMENT)
        return prefill.combine_topk_swa(
            topk, starts, lens, gathered, max_image_tokens=extra, implementation="xla", **geometry
        )
    if not topk.shape[1]:
        topk = jnp.full((topk.shape[0], 1), -1, _I32)  # a column that is never looked at: no empty operands
        geometry["top_k"] = 0
    else:
        geometry["top_k"] = topk.shape[1]
    interpreted = mosaic_lanes.is_interpreted()
    options = tuple(sorted(geometry.items()))
    return _combine(topk, starts, lens, gathered, options=options, width=width, interpreted=interpreted)


@functools.partial(jax.jit, static_argnames=("options", "width", "interpreted"))
def _combine(
    topk: Any, starts: Any, lens: Any, gathered: Any, *, options: Any, width: int, interpreted: bool
) -> tuple[jax.Array, jax.Array]:
    num_tokens = topk.shape[0]
    combined, lengths = mosaic_lanes.kernel(
        functools.partial(_combine_body, **dict(options)),
        name="combine_topk_swa",
        out_type=[jax.ShapeDtypeStruct((num_tokens, width), _I32), jax.ShapeDtypeStruct((1, num_tokens), _I32)],
        grid=(num_tokens,),
    )(topk, starts[None, :], lens[None, :], gathered)
    return combined, lengths[0]


def _combine_body(
    topk: Any,
    starts: Any,
    lens: Any,
    gathered: Any,
    combined: Any,
    lengths: Any,
    *,
    compress_ratio: int,
    compressed_rows: int,
    workspace_rows: int,
    window: int,
    top_k: int,
) -> None:
    token, width = lax.axis_index("i"), combined.shape[1]
    request, position = _locate(starts, lens, token)
    valid = position >= 0
    oldest = lens[0, request] - gathered[request]
    first = jnp.maximum(jnp.maximum(position - window + 1, 0), oldest)
    num_picked = jnp.where(valid, jnp.minimum(lax.div(position + 1, jnp.int32(compress_ratio)), top_k), 0)
    num_window = jnp.where(valid, jnp.minimum(jnp.maximum(position + 1 - first, 0), width - top_k), 0)
    base = request * workspace_rows
    column, layout = _line(width)
    picked = _line_load(topk, token, jnp.where(column < top_k, column, topk.shape[1]), layout)
    picked = jnp.where(picked >= 0, picked + base, -1)
    behind = column - num_picked
    in_window = jnp.where(behind < num_window, base + compressed_rows + (first - oldest) + behind, -1)
    _line_store(combined, token, column, jnp.where(behind < 0, picked, in_window), layout)()
    _per_token(lengths, token, num_picked + num_window)()


def flashinfer_indices(
    swa: jax.Array,
    compressed: jax.Array,
    lens: jax.Array,
    *,
    swa_page: PageLayout,
    compressed_page: PageLayout,
    width: int,
) -> tuple[jax.Array, jax.Array]:
    """`kernels.flashinfer_indices` for arguments that were checked; `width` is that of the compressed part."""
    num_tokens, window_width = swa.shape
    if not num_tokens or not window_width + width:
        return jnp.zeros((num_tokens, window_width + width), _I32), window_width + lens
    empty = jnp.full((num_tokens, 1), -1, _I32)
    mixed = _mix(
        swa if swa.size else empty,
        compressed if compressed.size else empty,
        geometry=tuple((p.storage_block_size, flashinfer.rows_between_blocks(p)) for p in (swa_page, compressed_page)),
        window_width=window_width,
        width=window_width + width,
        interpreted=mosaic_lanes.is_interpreted(),
    )
    return mixed, window_width + lens


@functools.partial(jax.jit, static_argnames=("geometry", "window_width", "width", "interpreted"))
def _mix(swa: Any, compressed: Any, *, geometry: Any, window_width: int, width: int, interpreted: bool) -> jax.Array:
    return mosaic_lanes.kernel(
        functools.partial(_mix_body, geometry=geometry, window_width=window_width),
        name="flashinfer_indices",
        out_type=jax.ShapeDtypeStruct((swa.shape[0], width), _I32),
        grid=(swa.shape[0],),
    )(swa, compressed)


def _mix_body(swa: Any, compressed: Any, mixed: Any, *, geometry: Any, window_width: int) -> None:
    token = lax.axis_index("i")
    column, layout = _line(mixed.shape[1])
    in_window = column < window_width
    window_slots = _line_load(swa, token, jnp.where(in_window, column, swa.shape[1]), layout)
    other_slots = _line_load(
        compressed, token, jnp.where(in_window, compressed.shape[1], column - window_width), layout
    )
    offsets = [
        jnp.where(slot >= 0, lax.div(slot, jnp.int32(size)) * rows + lax.rem(slot, jnp.int32(size)), -1)
        for slot, (size, rows) in zip((window_slots, other_slots), geometry, strict=True)
    ]
    _line_store(mixed, token, column, jnp.where(in_window, *offsets), layout)()


# --- Parts of the kernels ---


def _locate(starts: Any, lens: Any, token: Any) -> tuple[jax.Array, jax.Array]:
    """(request, position) of a token; 0 and -1 for padding. `starts` is `[1, R + 1]`, `lens` `[1, R]`."""
    num_requests = lens.shape[1]
    shifted = token + starts[0, 0]
    size = round_up(min(_COLUMNS, num_requests), LANES)
    layout = mosaic_lanes.line_layout(size)
    ended = splat(0, (size,), layout)
    for first in range(0, num_requests, size):
        column = first + iota((size,), 0, layout)
        inside = column < num_requests
        end = lane_load(starts, jnp.where(inside, 0, -1), column + 1, layout)
        ended = ended + (inside & (end <= shifted)).astype(_I32)
    before = jnp.sum(ended, dtype=_I32)
    request = jnp.where(before < num_requests, before, 0)
    length = lens[0, request]
    position = length - starts[0, request + 1] + shifted
    return request, jnp.where((before < num_requests) & (position >= 0) & (position < length), position, -1)


def _slot(table: Any, request: Any, index: Any, rows: int) -> jax.Array:
    """The slot of one row, as `slots.row_slots` says."""
    column = lax.div(index, jnp.int32(rows))
    in_table = (index >= 0) & (column < table.shape[1])
    entry = table[request, jnp.where(in_table, column, 0)]
    is_block = in_table & (entry > 0) & (entry < (INT32_MAX + 1) // rows)
    return jnp.where(is_block, entry * rows + lax.rem(index, jnp.int32(rows)), -1)


def _line_slots(table: Any, request: Any, index: jax.Array, rows: int, layout: Any) -> jax.Array:
    """The slots of a line of rows of one request."""
    column = lax.div(index, jnp.int32(rows))
    in_table = (index >= 0) & (column < table.shape[1])
    entry = lane_load(table, jnp.where(in_table, request, -1), column, layout)
    is_block = (entry > 0) & (entry < (INT32_MAX + 1) // rows)  # what is not loaded is 0
    return jnp.where(is_block, entry * rows + lax.rem(index, jnp.int32(rows)), -1)


def _line(width: int, part: Any = None) -> tuple[jax.Array, Any]:
    """Columns of part `part` of a row, all of them by default; some lie past its end. And their layout."""
    size = round_up(width if part is None else min(width, _COLUMNS), LANES)
    layout = mosaic_lanes.line_layout(size)
    column = iota((size,), 0, layout)
    return (column if part is None else column + part * _COLUMNS), layout


def _line_load(matrix: Any, row: Any, column: jax.Array, layout: Any) -> jax.Array:
    """A row's values in these columns; -1 past the end, or where the row is -1."""
    inside = (column < matrix.shape[1]) & (splat(row, column.shape, layout) >= 0)
    return jnp.where(inside, lane_load(matrix, jnp.where(inside, row, -1), column, layout), -1)


def _line_store(matrix: Any, row: Any, column: jax.Array, values: jax.Array, layout: Any) -> Store:
    inside = column < matrix.shape[1]
    return lambda: lane_store(matrix, jnp.where(inside, row, -1), column, values, layout)


def _per_token(vector: Any, token: Any, value: Any) -> Store:
    def store() -> None:
        vector[0, token] = value

    return store
