"""Whole blocks on Mosaic GPU: copy-on-write and clearing.

A program moves 16 KiB, 16 bytes a lane at a time, and asks for all of them before it stores the first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsv4kv_jax import formats
from dsv4kv_jax.kernels import mosaic_lanes
from dsv4kv_jax.kernels.mosaic_lanes import iota, lane_load, lane_store, splat
from dsv4kv_jax.kernels.mosaic_pages import one
from dsv4kv_jax.kernels.rows import keep_last
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import cdiv

_CHUNK = 4096  # words of one program


def copy_blocks(slab: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """`kernels.copy_blocks` for arguments that were checked; in place where the slab is donated."""
    if not src.shape[0]:
        return slab
    return _copy(slab, src, dst, interpreted=mosaic_lanes.is_interpreted())


def zero_blocks(slab: jax.Array, block_ids: jax.Array, page: PageLayout | None) -> jax.Array:
    """`kernels.zero_blocks` for arguments that were checked; in place where the slab is donated."""
    if not block_ids.shape[0]:
        return slab
    _, rows_per_block, words_per_row = slab.shape
    first, count = 0, rows_per_block * words_per_row
    if page is not None:
        first = page.offset_bytes // formats.WORD_BYTES
        count = page.spec.real_page_size_bytes // formats.WORD_BYTES
    wide = not (first % 4 or count % 4 or words_per_row % 4)
    interpreted = mosaic_lanes.is_interpreted()
    return _zero(slab, block_ids, one(first, jnp.int32), count=count, wide=wide, interpreted=interpreted)


@functools.partial(jax.jit, static_argnames="interpreted")
def _copy(slab: jax.Array, src: jax.Array, dst: jax.Array, *, interpreted: bool) -> jax.Array:
    num_blocks, rows_per_block, words_per_row = slab.shape
    num_words, wide = rows_per_block * words_per_row, not words_per_row % 4
    valid = (src >= 0) & (src < num_blocks) & (dst > 0) & (dst < num_blocks)
    target = keep_last(jnp.where(valid, dst, -1))
    source = jnp.where(target >= 0, src, -1)
    # A block that one pair reads and another overwrites is set aside first. There hardly ever is one.
    is_overwritten = (source >= 0) & (source[:, None] == target[None, :]).any(axis=1)
    aside, direct = jnp.where(is_overwritten, source, -1), jnp.where(is_overwritten, -1, source)
    grid = (source.shape[0], cdiv(num_words, _CHUNK))
    kept = mosaic_lanes.kernel(
        functools.partial(_keep_body, wide=wide),
        name="set_blocks_aside",
        out_type=jax.ShapeDtypeStruct((source.shape[0], num_words), jnp.uint32),
        grid=grid,
    )(aside, slab.reshape(num_blocks, -1))
    blocks = jax.new_ref(slab.reshape(num_blocks, -1))
    body = functools.partial(_copy_body, wide=wide)
    mosaic_lanes.kernel(body, name="copy_blocks", out_type=(), grid=grid)(direct, target, kept, blocks)
    return blocks[...].reshape(slab.shape)


def _keep_body(aside: Any, slab: Any, kept: Any, *, wide: bool) -> None:
    pair, block = lax.axis_index("i"), aside[lax.axis_index("i")]
    word, layout = _words(wide)
    tile = lane_load(slab, _rows(block, word, kept.shape[1]), word, layout, streaming=True)
    lane_store(kept, _rows(jnp.where(block >= 0, pair, -1), word, kept.shape[1]), word, tile, layout)


def _copy_body(direct: Any, target: Any, kept: Any, blocks: Any, *, wide: bool) -> None:
    pair, source, num_words = lax.axis_index("i"), direct[lax.axis_index("i")], blocks.shape[1]
    word, layout = _words(wide)
    is_kept = (source < 0) & (target[pair] >= 0)
    # What is read here is not a target of this launch, so it does not matter who comes first.
    here = lane_load(blocks, _rows(source, word, num_words), word, layout, streaming=True)
    there = lane_load(kept, _rows(jnp.where(is_kept, pair, -1), word, num_words), word, layout, streaming=True)
    # A tile that is not read is zero.
    lane_store(blocks, _rows(target[pair], word, num_words), word, here | there, layout)


@functools.partial(jax.jit, static_argnames=("count", "wide", "interpreted"))
def _zero(
    slab: jax.Array, block_ids: jax.Array, first: jax.Array, *, count: int, wide: bool, interpreted: bool
) -> jax.Array:
    blocks = jax.new_ref(slab.reshape(slab.shape[0], -1))
    body = functools.partial(_zero_body, count=count, wide=wide)
    grid = (block_ids.shape[0], cdiv(count, _CHUNK))
    mosaic_lanes.kernel(body, name="zero_blocks", out_type=(), grid=grid)(block_ids, first, blocks)
    return blocks[...].reshape(slab.shape)


def _zero_body(block_ids: Any, first: Any, blocks: Any, *, count: int, wide: bool) -> None:
    block = block_ids[lax.axis_index("i")]
    block = jnp.where(block < blocks.shape[0], block, -1)
    word, layout = _words(wide)
    zero = splat(0, word.shape, layout, jnp.uint32)
    lane_store(blocks, _rows(block, word, count), first[0] + word, zero, layout)


def _words(wide: bool) -> tuple[jax.Array, Any]:
    """The words of a block, or of a part of it, that this program moves, and their layout."""
    layout = plgpu.Layout.WG_STRIDED((_CHUNK,), vec_size=4 if wide else 1)
    return lax.axis_index("j") * _CHUNK + iota((_CHUNK,), 0, layout), layout


def _rows(block: Any, word: jax.Array, num_words: int) -> jax.Array:
    """The block of every word, -1 past the end."""
    return jnp.where(word < num_words, block, -1)
