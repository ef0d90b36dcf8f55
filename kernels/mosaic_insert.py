"""Quantising rows and writing them into pages, on Mosaic GPU.

A program makes 16 rows, eight lanes a row. It asks for all their values at once, and while those are on their way looks
up where the rows go, and whether a later row overwrites them. Then the lanes of a row agree on its block scales by
shuffles, pack their codes into words and store them. Nothing is staged in shared memory and no lane waits for another
row.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from dsv4kv_jax import formats
from dsv4kv_jax.formats import RowFormat
from dsv4kv_jax.kernels import codecs, floats, mosaic_lanes, mosaic_pages
from dsv4kv_jax.kernels.codecs import ScaleFloor
from dsv4kv_jax.kernels.mosaic_lanes import iota, lane_load, lane_store, per_row
from dsv4kv_jax.kernels.mosaic_pages import PER_ROW, ROWS, Rows
from dsv4kv_jax.layout import PageLayout

plgpu: Any = mosaic_gpu  # whose types differ between JAX versions

# Within a launch a row looks for later rows of its slot, which costs O(rows) a row. Launches follow one another, so
# between launches the later row wins by itself.
_ROWS_PER_LAUNCH = 8192
_COMPARED = 256  # slots that a row is compared with at a time

# Writes `words`, a tile `[ROWS, n]` or one word a row, of the given layout, at word `start` of a section of each row.
Store = Callable[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Encoder:
    """How a format's rows are made: `encode(load(refs, base, part), store)` writes part `part` of rows `base` and on.

    Everything that `load` reads is asked for before anything is stored: the compiler moves no read past a store.
    """

    load: Callable[[Any, Any, Any], Any]
    encode: Callable[[Any, Store], None]
    operands: tuple[jax.Array, ...]
    parts: int = 1


class _Job(NamedTuple):
    """What the code that writes to a page depends on: layers of a kind share their kernels."""

    where: Rows
    scale_floor: ScaleFloor


def insert_rows(
    slab: jax.Array,
    page: PageLayout,
    slots: jax.Array,
    rows: jax.Array,
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
    all_slots, encoders = [], []
    for job, (slots, _, rows, inverse_scale) in zip(jobs, arrays, strict=True):
        if slots.shape[0] < ROWS:
            rows = jnp.pad(rows, ((0, ROWS - slots.shape[0]), (0, 0)))
        encoders.append(_encoder(job.where.format, rows, job.scale_floor, inverse_scale))
        all_slots.append(jnp.pad(slots, (0, -slots.shape[0] % _COMPARED), constant_values=-1)[None, :])
    counts = [max(slots.shape[0], ROWS) for slots, *_ in arrays]
    per_launch = max(counts) if unique_slots else _ROWS_PER_LAUNCH
    for start in range(0, max(counts), per_launch):
        spans, operands = [], []
        for index, (job, encoder) in enumerate(zip(jobs, encoders, strict=True)):
            if start < counts[index]:
                spans.append(_Span(job.where, encoder, start, min(start + per_launch, counts[index])))
                operands += [all_slots[index], arrays[index][1], *encoder.operands]
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
    encoder: _Encoder
    start: int
    end: int

    @property
    def num_programs(self) -> int:
        return -(-(self.end - self.start) // ROWS) * self.encoder.parts


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
    chunks, size = jnp.int32(-(-end // _COMPARED)), jnp.int32(_COMPARED)
    behind = lax.div(base + (ROWS - 1), size) + 1
    least = lax.fori_loop(lax.div(base, size), behind, near, least)
    least = lax.fori_loop(behind, chunks, far, least)
    return jnp.min(least, axis=1) == 0


def _encoder(fmt: RowFormat, rows: jax.Array, scale_floor: ScaleFloor, inverse_scale: jax.Array) -> _Encoder:
    if fmt == formats.FP8_DS_MLA:
        rows = floats.to_bfloat16(rows)
        return _Encoder(
            load=functools.partial(_load_fp8_ds_mla, fmt=fmt),
            encode=functools.partial(_encode_fp8_ds_mla, fmt=fmt, smallest=codecs.SMALLEST_SCALE_BYTE[scale_floor]),
            operands=(_in_words(rows, 4), codecs.as_words(rows)),
        )
    if fmt in (formats.INDEXER_FP8, formats.INDEXER_FP8_UE8M0):
        return _Encoder(
            load=functools.partial(_load_values, num_words=fmt.num_values // 4),
            encode=functools.partial(_encode_indexer, fmt=fmt),
            operands=(_in_words(floats.to_bfloat16(rows), 4),),
        )
    if fmt == formats.INDEXER_MXFP4:
        operands = (_in_words(floats.to_bfloat16(rows), 8),)
        return _Encoder(load=_load_mxfp4, encode=_encode_mxfp4, operands=operands)
    if fmt.page_dtype == "float8_e4m3fn":
        operands = (_in_words(rows, 4), inverse_scale)
        return _Encoder(load=_load_plain_fp8, encode=_encode_plain_fp8, operands=operands)
    dtype = formats.numpy_dtype(fmt.page_dtype)
    words = codecs.as_words(floats.to_bfloat16(rows) if dtype == jnp.bfloat16 else rows.astype(dtype))
    parts = -(-words.shape[1] // mosaic_pages.WORDS_PER_PART)
    return _Encoder(load=_load_words, encode=_encode_words, operands=(words,), parts=parts)


def _load_values(refs: Any, base: Any, part: Any, *, num_words: int) -> list[jax.Array]:
    """Tiles `[ROWS, num_words, 4]` of the rows' values, four of which make a word of codes."""
    (values, *_), layout = refs, mosaic_lanes.word_layout(4)
    return [
        plgpu.load(values.at[pl.ds(base, ROWS), pl.ds(first, num_words)], layout=layout, optimized=False)
        for first in range(0, values.shape[1], num_words)
    ]


def _load_fp8_ds_mla(refs: Any, base: Any, part: Any, *, fmt: RowFormat) -> Any:
    values, words = refs  # bf16 [T, 128, 4] and uint32 [T, 256], the same rows
    nope, num_blocks = fmt.sections[0].fields[0].count, fmt.sections[1].fields[0].count
    rope = plgpu.load(
        words.at[pl.ds(base, ROWS), pl.ds(nope // 2, 32)], layout=mosaic_lanes.row_layout(4), optimized=False
    )
    return _load_values((values.at[:, pl.ds(0, nope // 4)],), base, part, num_words=nope // num_blocks // 4), rope


def _encode_fp8_ds_mla(loaded: Any, store: Store, *, fmt: RowFormat, smallest: int) -> None:
    blocks, rope = loaded
    block_words = fmt.sections[0].fields[0].count // len(blocks) // 4
    scales = [jnp.zeros((ROWS,), jnp.uint32)] * 2
    for index, block in enumerate(blocks):
        codes, byte = _quantise(block, smallest)
        store(0, block_words * index, *codes)
        scales[index // 4] |= byte.astype(jnp.uint32) << jnp.uint32(8 * (index % 4))
    store(0, block_words * len(blocks), rope, mosaic_lanes.row_layout(4))
    for index, scale in enumerate(scales):
        store(1, index, scale, PER_ROW)


def _encode_indexer(loaded: Any, store: Store, *, fmt: RowFormat) -> None:
    codes, byte = _quantise(loaded[0], codecs.SMALLEST_SCALE_BYTE["amax"])
    store(0, 0, *codes)
    if fmt == formats.INDEXER_FP8:
        scale = lax.bitcast_convert_type(floats.ue8m0_to_float32(byte.astype(jnp.uint8)), jnp.uint32)
    else:
        scale = byte.astype(jnp.uint32) * jnp.uint32(0x01010101)
    store(1, 0, scale, PER_ROW)


def _quantise(block: jax.Array, smallest: int) -> tuple[Any, jax.Array]:
    """One scaled block `[ROWS, words, 4]` as e4m3: ((words [ROWS, words], layout), scale bytes int32 [ROWS])."""
    layout, x = mosaic_lanes.word_layout(4), block.astype(jnp.float32)
    byte = _scale_byte(x, floats.E4M3_MAX, smallest)
    # Exact: the product of a bf16 and a power of two, and both are normal floats wherever the code is not zero.
    scaled = x * per_row(floats.ue8m0_to_float32((254 - byte).astype(jnp.uint8)), x.shape)
    return (_pack(floats.to_e4m3(scaled), layout), layout.reduce(2)), byte


def _load_mxfp4(refs: Any, base: Any, part: Any) -> jax.Array:
    (values,) = refs  # bf16 [T, 16, 8]: eight codes a word, four words a scaled block
    return plgpu.load(values.at[pl.ds(base, ROWS)], layout=mosaic_lanes.word_layout(8), optimized=False)


def _encode_mxfp4(loaded: jax.Array, store: Store) -> None:
    layout, x = mosaic_lanes.word_layout(8), loaded.astype(jnp.float32)
    amax = jnp.max(floats.magnitude_bits(x), axis=2)
    block = iota(amax.shape, 1, layout.reduce(2)) // 4
    scale, byte_of_word = jnp.zeros((ROWS,), jnp.uint32), jnp.zeros_like(block)
    for index in range(4):
        largest = jnp.max(jnp.where(block == index, amax, 0), axis=1)
        byte = floats.scale_byte_of_amax(largest, floats.E2M1_MAX, codecs.SMALLEST_MXFP4_BYTE)
        scale |= byte.astype(jnp.uint32) << jnp.uint32(8 * index)
        byte_of_word = jnp.where(block == index, per_row(byte, block.shape), byte_of_word)
    exponent = lax.broadcast_in_dim(127 - byte_of_word, x.shape, (0, 1))
    codes = floats.to_e2m1(floats.times_power_of_two(x, exponent)).astype(jnp.uint32)
    store(
        0,
        0,
        jnp.sum(codes << (4 * iota(x.shape, 2, layout)).astype(jnp.uint32), axis=2, dtype=jnp.uint32),
        layout.reduce(2),
    )
    store(1, 0, scale, PER_ROW)


def _load_plain_fp8(refs: Any, base: Any, part: Any) -> Any:
    values, inverse_scale = refs  # bf16 or float32 [T, words, 4] and float32 [1]
    num_words = math.gcd(values.shape[1], 16)
    return _load_values((values,), base, part, num_words=num_words), inverse_scale[0]


def _encode_plain_fp8(loaded: Any, store: Store) -> None:
    tiles, inverse_scale = loaded
    layout, first = mosaic_lanes.word_layout(4), 0
    for tile in tiles:
        codes = floats.to_e4m3(tile.astype(jnp.float32) * inverse_scale)
        store(0, first, _pack(codes, layout), layout.reduce(2))
        first += tile.shape[1]


def _load_words(refs: Any, base: Any, part: Any) -> list[Any]:
    (words,), loaded = refs, []  # uint32 [T, words]
    for first, shape, layout in mosaic_pages.word_tiles(words.shape[1], part):
        row, column = base + iota(shape, 0, layout), first + iota(shape, 1, layout)
        inside = mosaic_pages.inside(column, words.shape[1])
        tile = lane_load(words, mosaic_pages.only(inside, row), column, layout)
        loaded.append((first, tile, layout, inside))
    return loaded


def _encode_words(loaded: list[Any], store: Store) -> None:
    for first, tile, layout, inside in loaded:
        store(0, first, tile, layout, inside)


def _in_words(rows: jax.Array, values: int) -> jax.Array:
    """`[T, n]` as `[T, words, values of a word]`."""
    return rows.reshape(rows.shape[0], -1, values)


def _scale_byte(x: jax.Array, largest: float, smallest_byte: int) -> jax.Array:
    """`floats.scale_byte` over everything but the first dimension."""
    amax = floats.magnitude_bits(x)
    for axis in reversed(range(1, x.ndim)):
        amax = jnp.max(amax, axis=axis)
    return floats.scale_byte_of_amax(amax, largest, smallest_byte)


def _pack(codes: jax.Array, layout: Any) -> jax.Array:
    """Words `[ROWS, n]` from e4m3 codes `[ROWS, n, 4]`."""
    raw = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint32)
    return jnp.sum(raw << (8 * iota(raw.shape, 2, layout)).astype(jnp.uint32), axis=2, dtype=jnp.uint32)
