"""How the rows of each format are read, quantised and stored by the kernel that writes rows, `mosaic_insert`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from dsv4kv_jax import formats
from dsv4kv_jax.formats import RowFormat
from dsv4kv_jax.kernels import codecs, floats, mosaic_lanes, mosaic_pages
from dsv4kv_jax.kernels.codecs import ScaleFloor
from dsv4kv_jax.kernels.mosaic_lanes import iota, lane_load, per_row
from dsv4kv_jax.kernels.mosaic_pages import PER_ROW, ROWS
from dsv4kv_jax.kernels.rows import StateRows
from dsv4kv_jax.specs import cdiv

plgpu: Any = mosaic_gpu  # whose types differ between JAX versions

# Writes `words`, a tile `[ROWS, n]` or one word a row, of the given layout, at word `start` of a section of each row.
Store = Callable[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """How a format's rows are made: `encode(load(refs, base, part), store)` writes part `part` of rows `base` and on.

    Everything that `load` reads is asked for before anything is stored: the compiler moves no read past a store.
    """

    load: Callable[[Any, Any, Any], Any]
    encode: Callable[[Any, Store], None]
    operands: tuple[jax.Array, ...]
    parts: int = 1


def encoders(
    fmt: RowFormat, rows: jax.Array | StateRows, scale_floor: ScaleFloor, inverse_scale: jax.Array
) -> list[Encoder]:
    """What writes the rows, or `ROWS` rows where there are fewer: each of the encoders a part of every row."""
    rows = _padded(rows)
    if not isinstance(rows, StateRows):
        return [_encoder(fmt, rows, scale_floor, inverse_scale)]
    width = rows.kv.shape[1]
    options: Any = {"parts": cdiv(width, mosaic_pages.WORDS_PER_PART)}
    kv = Encoder(load=_load_words, encode=_encode_words, operands=(codecs.as_words(rows.kv),), **options)
    score = Encoder(
        load=_load_scores,
        encode=functools.partial(_encode_words, first_word=width),
        operands=(rows.score, rows.ape, rows.positions[None, :]),
        **options,
    )
    return [kv, score]


def _padded(rows: Any) -> Any:
    """Zero rows behind those there are, so that there is a program's worth of them."""
    if isinstance(rows, StateRows):
        kv, score, positions = map(_padded, (rows.kv, rows.score, rows.positions))
        return StateRows(kv, score, rows.ape, positions)
    missing = max(ROWS - rows.shape[0], 0)
    return jnp.pad(rows, ((0, missing), *((0, 0),) * (rows.ndim - 1))) if missing else rows


def _encoder(fmt: RowFormat, rows: jax.Array, scale_floor: ScaleFloor, inverse_scale: jax.Array) -> Encoder:
    if fmt == formats.FP8_DS_MLA:
        rows = floats.to_bfloat16(rows)
        return Encoder(
            load=functools.partial(_load_fp8_ds_mla, fmt=fmt),
            encode=functools.partial(_encode_fp8_ds_mla, fmt=fmt, smallest=codecs.SMALLEST_SCALE_BYTE[scale_floor]),
            operands=(_in_words(rows, 4), codecs.as_words(rows)),
        )
    if fmt in (formats.INDEXER_FP8, formats.INDEXER_FP8_UE8M0):
        return Encoder(
            load=functools.partial(_load_values, num_words=fmt.num_values // 4),
            encode=functools.partial(_encode_indexer, fmt=fmt),
            operands=(_in_words(floats.to_bfloat16(rows), 4),),
        )
    if fmt == formats.INDEXER_MXFP4:
        operands = (_in_words(floats.to_bfloat16(rows), 8),)
        return Encoder(load=_load_mxfp4, encode=_encode_mxfp4, operands=operands)
    if fmt.page_dtype == "float8_e4m3fn":
        operands = (_in_words(rows, 4), inverse_scale)
        return Encoder(load=_load_plain_fp8, encode=_encode_plain_fp8, operands=operands)
    dtype = formats.numpy_dtype(fmt.page_dtype)
    words = codecs.as_words(floats.to_bfloat16(rows) if dtype == jnp.bfloat16 else rows.astype(dtype))
    parts = cdiv(words.shape[1], mosaic_pages.WORDS_PER_PART)
    return Encoder(load=_load_words, encode=_encode_words, operands=(words,), parts=parts)


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
        tile = lane_load(words, mosaic_pages.only(inside, row), column, layout, streaming=True)
        loaded.append((first, tile, layout, inside))
    return loaded


def _load_scores(refs: Any, base: Any, part: Any) -> list[Any]:
    score, ape, positions = refs  # float32 [T, W], float32 [ratio, W], int32 [1, T]
    position = base + iota((ROWS,), 0, PER_ROW)
    position = lane_load(positions, jnp.zeros_like(position), position, PER_ROW)
    bias_row, loaded = lax.rem(jnp.maximum(position, 0), jnp.int32(ape.shape[0])), []
    for first, shape, layout in mosaic_pages.word_tiles(score.shape[1], part):
        row, column = base + iota(shape, 0, layout), first + iota(shape, 1, layout)
        inside = mosaic_pages.inside(column, score.shape[1])
        tile = lane_load(score, mosaic_pages.only(inside, row), column, layout, streaming=True)
        bias = lane_load(ape, mosaic_pages.only(inside, per_row(bias_row, shape)), column, layout)
        loaded.append((first, (tile, bias), layout, inside))
    return [
        (first, lax.bitcast_convert_type(tile + bias, jnp.uint32), layout, inside)
        for first, (tile, bias), layout, inside in loaded
    ]


def _encode_words(loaded: list[Any], store: Store, *, first_word: int = 0) -> None:
    for first, tile, layout, inside in loaded:
        store(0, first_word + first, tile, layout, inside)


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
