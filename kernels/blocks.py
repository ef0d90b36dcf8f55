"""Whole blocks: copy-on-write and clearing."""

import jax
import jax.numpy as jnp
from jax import lax

from dsv4kv_jax import formats
from dsv4kv_jax.kernels._arguments import as_int32, check_page, check_slab
from dsv4kv_jax.kernels._implementation import mosaic_kernel
from dsv4kv_jax.kernels.rows import keep_last
from dsv4kv_jax.layout import PageLayout


def copy_blocks(slab: jax.Array, src: jax.Array, dst: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Copies block `src[i]` over block `dst[i]` for every i, all layers at once: copy-on-write of shared blocks.

    Every block is read before any is written, so a block may be a source and a destination. A pair does nothing where
    either id is negative or past the pool, or where the destination is the null block 0. Where a destination occurs
    several times, its last pair that does something wins.

    Args:
      slab: `uint32[num_blocks, rows_per_block, words_per_row]`. Donate it, or the whole slab is copied.
      src, dst: int32 `[N]` block ids. The copied blocks are held a second time while they are in flight.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Raises:
      ValueError: arguments that do not fit together, or an implementation that this operation does not have.
    """
    check_slab(slab)
    src, dst = as_int32("src", src, ndim=1), as_int32("dst", dst, ndim=1)
    if src.shape != dst.shape:
        raise ValueError(f"src has {src.shape[0]} block ids and dst {dst.shape[0]}; they are pairs")
    if kernel := mosaic_kernel("copy_blocks", implementation):
        return kernel(slab, src, dst)
    num_blocks = slab.shape[0]
    valid = (src >= 0) & (src < num_blocks) & (dst > 0) & (dst < num_blocks)
    target = keep_last(jnp.where(valid, dst, -1))
    content = jnp.asarray(slab).at[jnp.where(target > 0, src, 0)].get(mode="promise_in_bounds")
    return jnp.asarray(slab).at[_drop_invalid(target, num_blocks)].set(content, mode="drop", unique_indices=True)


def zero_blocks(
    slab: jax.Array, block_ids: jax.Array, page: PageLayout | None = None, *, implementation: str | None = None
) -> jax.Array:
    """Fills blocks with zeros, or only one layer's rows in them.

    Ids that are negative or past the pool do nothing.

    Args:
      slab: `uint32[num_blocks, rows_per_block, words_per_row]`. Donate it, or the whole slab is copied.
      block_ids: int32 `[N]`.
      page: if given, only this layer's rows become zero: neither its neighbours' pages nor the padding behind it.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Raises:
      ValueError: arguments that do not fit together, or an implementation that this operation does not have.
    """
    check_slab(slab)
    if page is not None:
        check_page(slab, page)
    block_ids = as_int32("block_ids", block_ids, ndim=1)
    if kernel := mosaic_kernel("zero_blocks", implementation):
        return kernel(slab, block_ids, page)
    num_blocks, rows_per_block, words_per_row = slab.shape
    block = _drop_invalid(keep_last(block_ids), num_blocks)
    if page is None:
        return _zero_rows(slab, block, 0, rows_per_block, words_per_row)
    full, rest = divmod(page.spec.real_page_size_bytes // formats.WORD_BYTES, words_per_row)
    if full:
        slab = _zero_rows(slab, block, page.first_row, full, words_per_row)
    if rest:
        slab = _zero_rows(slab, block, page.first_row + full, 1, rest)
    return slab


def _drop_invalid(block_ids: jax.Array, num_blocks: int) -> jax.Array:
    """Ids outside the pool replaced by ids past its end, all different: a scatter drops those, but wraps -1."""
    valid = (block_ids >= 0) & (block_ids < num_blocks)
    return jnp.where(valid, block_ids, num_blocks + lax.iota(jnp.int32, block_ids.shape[0]))


def _zero_rows(slab: jax.Array, block: jax.Array, first_row: int, num_rows: int, num_words: int) -> jax.Array:
    """Zeros the first `num_words` words of slab rows `first_row`, ..., `first_row + num_rows - 1` of each block."""
    start = jnp.stack([block, jnp.full_like(block, first_row), jnp.zeros_like(block)], axis=-1)
    return lax.scatter(
        jnp.asarray(slab),
        start,
        jnp.zeros((block.shape[0], num_rows, num_words), jnp.uint32),
        lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1, 2)
        ),
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
