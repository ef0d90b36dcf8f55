"""Reading rows out of pages and dequantising them, on Mosaic GPU.

A program reads 16 rows. All its loads are under way before the first value is needed, nothing is staged in shared
memory, and a row that does not exist is not read.

Lanes are dealt out in one of two ways. For fp8_ds_mla rows, neighbouring lanes take neighbouring runs of 8 codes, from
row to row, so that a warp stores 512 bytes in a line. For all other formats eight lanes share a row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4kv_jax import formats
from dsv4kv_jax.formats import RowFormat
from dsv4kv_jax.kernels import codecs, floats, mosaic_lanes, mosaic_pages
from dsv4kv_jax.kernels.mosaic_lanes import iota, lane_load, lane_store, per_row
from dsv4kv_jax.kernels.mosaic_pages import PER_ROW, ROWS, Rows
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import cdiv

# Reads a tile of the given shape and layout from element `start` of a section of each row, as values of a dtype; zeros
# where the row does not exist, or outside of the mask.
Load = Callable[..., jax.Array]
# Writes a tile to columns `start` and on of the result; the fill value where the row does not exist.
Emit = Callable[..., None]


_HINT = ".cs"  # of all stores: what is written is not read again soon


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """How a format's rows are read.

    Attributes:
      body: the kernel's body; keyword arguments `where` and `fill` are added to it.
      views: the dtypes that the body reads the slab as.
      out_width, out_dtype: of the kernel's result.
      dtype: of the values; differs from `out_dtype` where whole words are moved.
      keeps_zeros: whether bytes that are all zero stand for zeros, whatever the per-tensor scale. What is not read is
        zero, so that rows which do not exist need no further care where zero is also the fill value.
      parts: how many programs share 16 rows.
    """

    body: Callable[..., None]
    views: tuple[Any, ...]
    out_width: int
    out_dtype: Any
    dtype: Any
    keeps_zeros: bool = True
    parts: int = 1


def gather_rows(
    slab: jax.Array, page: PageLayout, slots: jax.Array, *, fill: float, kv_scale: Any, dtype: Any
) -> jax.Array:
    """`kernels.gather_rows` for arguments that were checked."""
    fmt, shape = page.format, (*slots.shape, page.format.num_values)
    slots = slots.reshape(-1)
    if slots.shape[0] == 0:
        return jnp.full(shape, fill, dtype)
    where, offset = mosaic_pages.split(page)
    own = _decoder(fmt, dtype).dtype
    converted = own != dtype  # afterwards; then the fill value is set there too, in its own dtype
    values = _gather(
        slab,
        offset,
        slots,
        mosaic_pages.one(kv_scale, jnp.float32),
        where=where,
        dtype=own,
        fill=np.full(1, 0.0 if converted else fill, own).tobytes(),
        interpreted=mosaic_lanes.is_interpreted(),
    )
    if converted:
        valid = where.locate(slots, slab.shape[0])[0] >= 0
        values = jnp.where(valid[:, None], values.astype(dtype), jnp.asarray(fill, dtype))
    return values.reshape(shape)


@functools.partial(jax.jit, static_argnames=("where", "dtype", "fill", "interpreted"))
def _gather(
    slab: jax.Array,
    offset: jax.Array,
    slots: jax.Array,
    scale: jax.Array,
    *,
    where: Rows,
    dtype: Any,
    fill: bytes,
    interpreted: bool,
) -> jax.Array:
    count, num_rows = slots.shape[0], max(slots.shape[0], ROWS)
    call, decoder = gather_kernel(where, dtype, fill, num_rows)
    padded = jnp.pad(slots, (0, num_rows - count), constant_values=-1)[None, :]
    values = call(padded, offset, scale, *(_view(slab, view) for view in decoder.views))[:count]
    if decoder.dtype != decoder.out_dtype:
        values = codecs.from_words(values, decoder.dtype)
    return values


def gather_kernel(where: Rows, dtype: Any, fill: bytes, num_rows: int) -> tuple[Callable[..., Any], Decoder]:
    """The kernel `(slots [1, num_rows], offset, scale, *views of the slab) -> rows`, and how it reads them.

    Args:
      where: the page, without its offset.
      dtype: of the values.
      fill: the bytes of the fill value in that dtype; as bytes, -0.0 differs from 0.0, also among the keys of caches.
      num_rows: at least `ROWS`.
    """
    decoder = _decoder(where.format, dtype)
    pattern = None if decoder.keeps_zeros and not any(fill) else np.frombuffer(fill * 4, decoder.out_dtype)[0]
    kernel = mosaic_lanes.kernel(
        functools.partial(decoder.body, where=where, fill=pattern),
        name="gather_rows",
        out_type=jax.ShapeDtypeStruct((num_rows, decoder.out_width), decoder.out_dtype),
        grid=(cdiv(num_rows, ROWS), decoder.parts),
    )
    return kernel, decoder


def _by_row(
    slots: Any, offset: Any, scale: Any, *refs: Any,
    where: Rows, fill: Any, views: tuple[Any, ...], decode: Callable[[Any, Any, Load, Emit], None],
) -> None:  # fmt: skip
    """The body for formats whose rows are shared by eight lanes: `decode(scale, part, load, emit)` emits the values.

    `scale` refers to the per-tensor scale, float32 [1]; `part` is the part of the program's rows to emit.
    """
    *slabs, out = refs
    view_of = dict(zip(views, slabs, strict=True))
    base = jnp.minimum(lax.axis_index("i") * ROWS, out.shape[0] - ROWS)
    position = base + iota((ROWS,), 0, PER_ROW)
    slot = lane_load(slots, jnp.zeros_like(position), position, PER_ROW)
    block, row = where.locate(slot, refs[0].shape[0])
    origin = offset[0]

    def load(section: int, dtype: Any, start: Any, shape: Any, layout: Any, inside: Any = None) -> jax.Array:
        element = where.first_element(section, origin, row, jnp.dtype(dtype).itemsize) + start
        if not shape:
            return lane_load(view_of[dtype], block, element, layout)
        shape = (ROWS, *shape)
        element = per_row(element, shape) + iota(shape, 1, layout)
        block_of = mosaic_pages.only(inside, per_row(block, shape))
        return lane_load(view_of[dtype], block_of, element, layout, streaming=True)

    def emit(start: Any, values: jax.Array, layout: Any, inside: Any = None) -> None:
        values = _filled(values, block, fill)
        row, column = base + iota(values.shape, 0, layout), iota(values.shape, 1, layout)
        if values.ndim == 3:  # values of words
            column = column * values.shape[2] + iota(values.shape, 2, layout)
        column = start + column
        lane_store(out, mosaic_pages.only(inside, row), column, values, layout, hint=_HINT)

    decode(scale, lax.axis_index("j"), load, emit)


def _filled(values: jax.Array, block: jax.Array, fill: Any) -> jax.Array:
    """The fill value, if there is need for one, where the block is none. A select, never a product."""
    if fill is None:
        return values
    return jnp.where(per_row(block, values.shape) >= 0, values, jnp.full_like(values, fill))


def _in_lines(
    slots: Any, offset: Any, scale: Any, fp8: Any, bf16: Any, words: Any, out: Any, *, where: Rows, fill: Any
) -> None:
    """The body for fp8_ds_mla rows: neighbouring lanes take neighbouring units of 8 values, from row to row."""
    fmt, base, origin = where.format, jnp.minimum(lax.axis_index("i") * ROWS, out.shape[0] - ROWS), offset[0]
    nope, width = fmt.sections[0].fields[0].count, jnp.int32(fmt.sections[0].fields[0].count // 8)
    layout = mosaic_lanes.unit_layout(8)
    line, shape = layout.reduce(1), (ROWS * nope // 8, 8)
    unit = iota(shape[:1], 0, line)
    row_of_unit, column = lax.div(unit, width), lax.rem(unit, width)

    def find(position: jax.Array, layout: Any) -> tuple[jax.Array, jax.Array]:
        return where.locate(lane_load(slots, jnp.zeros_like(position), position, layout), words.shape[0])

    def emit(block: jax.Array, row: jax.Array, first: jax.Array, values: jax.Array, layout: Any) -> None:
        values = _filled(values, block, fill)
        element = per_row(first, values.shape) + iota(values.shape, 1, layout)
        lane_store(out, per_row(row, values.shape), element, values, layout, hint=_HINT)

    block, row = find(base + row_of_unit, line)
    element = where.first_element(0, origin, row, 1) + 8 * column
    code = lane_load(
        fp8, per_row(block, shape), per_row(element, shape) + iota(shape, 1, layout), layout, streaming=True
    )
    word = lane_load(words, block, where.first_element(1, origin, row, 4) + lax.div(column, jnp.int32(32)), line)
    rope_layout, rope_shape = mosaic_lanes.row_layout(8), (ROWS, 64)
    rope_row = base + iota((ROWS,), 0, PER_ROW)
    rope_block, row = find(rope_row, PER_ROW)
    element = per_row(where.first_element(0, origin, row, 2) + nope // 2, rope_shape) + iota(rope_shape, 1, rope_layout)
    rope = lane_load(bf16, per_row(rope_block, rope_shape), element, rope_layout, streaming=True)
    byte = word >> (8 * lax.rem(lax.div(column, jnp.int32(8)), jnp.int32(4))).astype(jnp.uint32)
    values = code.astype(jnp.float32) * per_row(_scale(byte, 0), shape)
    emit(block, base + row_of_unit, 8 * column, values.astype(jnp.bfloat16).astype(out.dtype), layout)
    emit(rope_block, rope_row, jnp.full_like(rope_row, nope), rope.astype(out.dtype), rope_layout)


def _decoder(fmt: RowFormat, dtype: Any) -> Decoder:
    fp8, words = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint32)
    out = jnp.dtype(dtype if dtype in (jnp.bfloat16, jnp.float32) else codecs.default_dtype(fmt))
    row: Any = {"out_width": fmt.num_values, "out_dtype": out, "dtype": out}
    if fmt == formats.FP8_DS_MLA:
        return Decoder(body=_in_lines, views=(fp8, jnp.dtype(jnp.bfloat16), words), **row)
    decode, views = functools.partial(_decode_words, num_words=fmt.row_bytes // formats.WORD_BYTES), (words,)
    if fmt in (formats.INDEXER_FP8, formats.INDEXER_FP8_UE8M0):
        decode, views = functools.partial(_decode_indexer, fmt=fmt, dtype=out), (fp8, words)
    elif fmt == formats.INDEXER_MXFP4:
        decode = functools.partial(_decode_mxfp4, dtype=out)
    elif fmt.page_dtype == "float8_e4m3fn":
        decode, views = functools.partial(_decode_plain_fp8, fmt=fmt, dtype=out), (fp8,)
        row["keeps_zeros"] = False
    else:
        num_words = fmt.row_bytes // formats.WORD_BYTES
        row = {"out_width": num_words, "out_dtype": words, "dtype": formats.numpy_dtype(fmt.page_dtype)}
        row["parts"] = cdiv(num_words, mosaic_pages.WORDS_PER_PART)
    return Decoder(body=functools.partial(_by_row, views=views, decode=decode), views=views, **row)


def _decode_indexer(scale: Any, part: Any, load: Load, emit: Emit, *, fmt: RowFormat, dtype: Any) -> None:
    word = load(1, jnp.dtype(jnp.uint32), 0, (), PER_ROW)
    layout = mosaic_lanes.row_layout(4)  # of the 32 values that share a byte of MX scales
    for index in range(fmt.num_values // 32):
        code = load(0, jnp.dtype(jnp.float8_e4m3fn), 32 * index, (32,), layout)
        is_float = fmt == formats.INDEXER_FP8
        scale = lax.bitcast_convert_type(word, jnp.float32) if is_float else _scale(word, index)
        emit(32 * index, (code.astype(jnp.float32) * per_row(scale, code.shape)).astype(dtype), layout)


def _decode_mxfp4(scale: Any, part: Any, load: Load, emit: Emit, *, dtype: Any) -> None:
    layout = mosaic_lanes.word_layout(8)
    packed = load(0, jnp.dtype(jnp.uint32), 0, (16,), layout.reduce(2))
    scales = load(1, jnp.dtype(jnp.uint32), 0, (), PER_ROW)
    # Four words share a scale byte.
    byte = per_row(scales, packed.shape) >> (8 * (iota(packed.shape, 1, layout.reduce(2)) // 4)).astype(jnp.uint32)
    shape = (*packed.shape, 8)
    codes = lax.broadcast_in_dim(packed, shape, (0, 1)) >> (4 * iota(shape, 2, layout)).astype(jnp.uint32)
    values = floats.from_e2m1((codes & jnp.uint32(15)).astype(jnp.uint8))
    emit(0, (values * lax.broadcast_in_dim(_scale(byte, 0), shape, (0, 1))).astype(dtype), layout)


def _decode_plain_fp8(scale: Any, part: Any, load: Load, emit: Emit, *, fmt: RowFormat, dtype: Any) -> None:
    layout = mosaic_lanes.row_layout(8)
    for first in range(0, fmt.num_values, 64):
        code = load(0, jnp.dtype(jnp.float8_e4m3fn), first, (64,), layout)
        emit(first, (code.astype(jnp.float32) * scale[0]).astype(dtype), layout)


def _decode_words(scale: Any, part: Any, load: Load, emit: Emit, *, num_words: int) -> None:
    for first, shape, layout in mosaic_pages.word_tiles(num_words, part):
        inside = mosaic_pages.inside(first + iota(shape, 1, layout), num_words)
        emit(first, load(0, jnp.dtype(jnp.uint32), first, shape[1:], layout, inside), layout, inside)


def _scale(word: jax.Array, index: int) -> jax.Array:
    """The float32 that byte `index` of a word of UE8M0 scales stands for."""
    return floats.ue8m0_to_float32((word >> jnp.uint32(8 * index)).astype(jnp.uint8))


def _view(slab: jax.Array, dtype: Any) -> jax.Array:
    """The slab as `[num_blocks, elements of a block]` of another dtype: a bitcast, not a copy."""
    return lax.bitcast_convert_type(slab, dtype).reshape(slab.shape[0], -1)
