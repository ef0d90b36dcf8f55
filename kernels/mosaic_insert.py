"""Quantising rows and writing them into pages, on Mosaic GPU.

A program makes 16 rows, eight lanes a row. It asks for all their values at once, and while those are on their way looks
up where the rows go, and whether a later row overwrites them. Then the lanes of a row agree on its block scales by
shuffles, pack their codes into words and store them. Nothing is staged in shared memory and no lane waits for another
row.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from dsv4kv_jax import formats
from dsv4kv_jax.kernels import mosaic_lanes, mosaic_pages
from dsv4kv_jax.kernels.codecs import ScaleFloor
from dsv4kv_jax.kernels.mosaic_encoders import Encoder, encoders
from dsv4kv_jax.kernels.mosaic_lanes import iota, lane_load, lane_store, per_row
from dsv4kv_jax.kernels.mosaic_pages import PER_ROW, ROWS, Rows
from dsv4kv_jax.kernels.rows import StateRows
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import cdiv

plgpu: Any = mosaic_gpu  # whose types differ between JAX versions

# Within a launch a row looks for later rows of its slot, which costs O(rows) a row. Launches follow one another, so
# between launches the later row wins by itself.
_ROWS_PER_LAUNCH = 8192
_COMPARED = 256  # slots that a row is compared with at a time


class _Job(NamedTuple):
    """What the code that writes to a page depends on: layers of a kind share their kernels."""

    where: Rows
    scale_floor: ScaleFloor


def insert_rows(
    slab: jax.Array,
    page: PageLayout,
    slots: jax.Array,
    rows: jax.Array | StateRows,
    *,
    scale_floor: ScaleFloor,
    kv_scale: Any,
    unique_slots: bool,
) -> jax.Array:
    """`kernels.insert_rows` for arguments that were checked; in place where the slab is donated."""
    write = page, slots, rows, scale_floor, kv_scale
    return insert_many(slab, [write], unique_slots=unique_slots)


def insert_many(slab: jax.Array, writes: Sequence[tuple[Any, ...]], *, unique_slots: bool) -> jax.Array:
    """`kernels.insert_many` for writes (page, slots, rows, scale floor, scale) that were checked, in one launch."""
    jobs, arrays = [], []
    for page, slots, rows, scale_floor, kv_scale in writes:
        if slots.shape[0]:
            where, offset = mosaic_pages.split(page)
            inverse = 1.0 / kv_scale if isinstance(kv_scale, int | float) else 1.0 / kv_scale.astype(jnp.float32)
            jobs.append(_Job(where, scale_floor))
            arrays.append((slots, offset, rows, mosaic_pages.one(inverse, jnp.float32)))
    if not jobs:
        return slab
    options: Any = {"unique_slots": unique_slots, "interpreted": mosaic_lanes.is_interpreted()}
    return _insert(slab, tuple(arrays), jobs=tuple(jobs), **options)


@functools.partial(jax.jit, static_argnames=("jobs", "unique_slots", "interpreted"))
def _insert(
    slab: jax.Array, arrays: tuple[Any, ...], *, jobs: tuple[_Job, ...], unique_slots: bool, interpreted: bool
) -> jax.Array:
    blocks = jax.new_ref(slab.reshape(slab.shape[0], -1))
    tasks = []  # of one encoder each: (page, encoder, rows, slots, offset)
    for job, (slots, offset, rows, inverse_scale) in zip(jobs, arrays, strict=True):
        count = max(slots.shape[0], ROWS)
        slots = jnp.pad(slots, (0, -slots.shape[0] % _COMPARED), constant_values=-1)[None, :]
        for encoder in encoders(job.where.format, rows, job.scale_floor, inverse_scale):
            tasks.append((job.where, encoder, count, slots, offset))
    longest = max(count for _, _, count, *_ in tasks)
    per_launch = longest if unique_slots else _ROWS_PER_LAUNCH
    for start in range(0, longest, per_launch):
        spans, operands = [], []
        for where, encoder, count, slots, offset in tasks:
            if start < count:
                spans.append(_Span(where, encoder, start, min(start + per_launch, count)))
                operands += [slots, offset, *encoder.operands]
        mosaic_lanes.kernel(
            functools.partial(_insert_body, spans=spans, unique_slots=unique_slots),
            name="insert_rows",
            out_type=(),
            grid=(sum(span.num_programs for span in spans),),
        )(*operands, blocks)
    return blocks[...].reshape(slab.shape)


class _Span(NamedTuple):
    """Rows `start` to `end` - 1 of a job: what one launch writes of it."""

    where: Rows
    encoder: Encoder
    start: int
    end: int

    @property
    def num_programs(self) -> int:
        return cdiv(self.end - self.start, ROWS) * self.encoder.parts


def _insert_body(*refs: Any, spans: Sequence[_Span], unique_slots: bool) -> None:
    refs, blocks, first = refs[:-1], refs[-1], 0
    for span in spans:
        count, width = span.num_programs, 2 + len(span.encoder.operands)
        slots, offset, *operands = refs[:width]
        refs = refs[width:]
        write = functools.partial(_write_span, span, slots, offset, operands, blocks, unique_slots)
        program = lax.axis_index("i") - first
        if len(spans) == 1:
            write(program)
        else:
            pl.when((program >= 0) & (program < count))(functools.partial(write, program))
        first += count


def _write_span(
    span: _Span, slots: Any, offset: Any, operands: list[Any], blocks: Any, unique_slots: bool, program: jax.Array
) -> None:
    where, encoder, parts = span.where, span.encoder, jnp.int32(span.encoder.parts)
    # The last program starts earlier instead of running past the end; a row written twice gets the same bytes.
    base = jnp.minimum(span.start + lax.div(program, parts) * ROWS, span.end - ROWS)
    position = base + iota((ROWS,), 0, PER_ROW)
    mine = lane_load(slots, jnp.zeros_like(position), position, PER_ROW)
    loaded = encoder.load(operands, base, lax.rem(program, parts))
    block, row = where.locate(mine, blocks.shape[0])
    if not unique_slots:
        block = jnp.where(_is_overwritten(slots, mine, base, span.end), -1, block)
    origin = offset[0]

    def store(section: int, start: Any, words: jax.Array, layout: Any, inside: Any = None) -> None:
        word = where.first_element(section, origin, row, formats.WORD_BYTES) + start
        if words.ndim == 1:
            lane_store(blocks, block, word, words, layout)
        else:
            word = per_row(word, words.shape) + iota(words.shape, 1, layout)
            lane_store(blocks, mosaic_pages.only(inside, per_row(block, words.shape)), word, words, layout)

    encoder.encode(loaded, store)


def _is_overwritten(slots: Any, mine: jax.Array, base: Any, end: int) -> jax.Array:
    """Whether a later row of the launch, before `end`, has the same slot.

    Rows behind `end` that are looked at as well do no harm: the next launch writes them. What pads the slots is -1, and
    a row without a slot is not written anyway.
    """
    layout = mosaic_lanes.row_layout(4)
    shape = (ROWS, _COMPARED)
    my_slot, my_position = (
        lax.bitcast_convert_type(per_row(mine, shape), jnp.uint32),
        base + iota(shape, 0, layout),
    )

    def differences(chunk: Any) -> jax.Array:
        first = chunk * _COMPARED
        others = plgpu.load(slots.at[0, pl.ds(first, _COMPARED)], layout=layout.reduce(0), optimized=False)
        return lax.bitcast_convert_type(lax.broadcast_in_dim(others, shape, (1,)), jnp.uint32) ^ my_slot

    def near(chunk: Any, least: jax.Array) -> jax.Array:
        position = chunk * _COMPARED + iota(shape, 1, layout)
        return jnp.minimum(least, jnp.where(position > my_position, differences(chunk), jnp.uint32(1)))

    def far(chunk: Any, least: jax.Array) -> jax.Array:
        return jnp.minimum(least, differences(chunk))

    # Only the first chunk or two hold rows that are not later than all of the program's: the rest, which is most of the
    # work, is one difference and one minimum a pair.
    least = mosaic_lanes.splat(1, shape, layout, jnp.uint32)
    chunks, size = jnp.int32(cdiv(end, _COMPARED)), jnp.int32(_COMPARED)
    behind = lax.div(base + (ROWS - 1), size) + 1
    least = lax.fori_loop(lax.div(base, size), behind, near, least)
    least = lax.fori_loop(behind, chunks, far, least)
    return jnp.min(least, axis=1) == 0
