"""Indices in the forms that FlashInfer's sparse MLA kernels take."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv4kv_jax.kernels._arguments import as_int32, as_lengths, check_count
from dsv4kv_jax.kernels._implementation import mosaic_kernel
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import round_up

COLUMN_ALIGNMENT = 4  # of the compressed part of the mixed matrix


def storage_offsets(slots: jax.Array, page: PageLayout) -> jax.Array:
    """Slots as row numbers in the layer's strided view, counted in rows of that view from its first byte.

    FlashInfer calls these storage offsets. -1 stays.

    Raises:
      ValueError: the distance between two blocks is no whole number of rows. For fp8_ds_mla pages, whose rows of 584 B
        never divide a stride that is a multiple of 576 B, that is always so.
    """
    size, rows = page.storage_block_size, rows_between_blocks(page)
    return jnp.where(slots >= 0, slots // size * rows + slots % size, -1)


def rows_between_blocks(page: PageLayout) -> int:
    """Rows of the layer's view from one block to the next; raises `ValueError` where that is no whole number."""
    rows, rest = divmod(page.block_stride_bytes, page.format.row_bytes)
    if rest:
        raise ValueError(
            f"layer {page.name!r}: blocks lie {page.block_stride_bytes} B apart, which is no multiple of the row's "
            f"{page.format.row_bytes} B ({rest} B remain), so storage offsets cannot address its rows; use bf16 or fp8 "
            f"caches whose block stride is a multiple, or a reader that takes slots"
        )
    return rows


def flashinfer_indices(
    swa_indices: Any,
    compressed_indices: Any = None,
    compressed_lens: Any = None,
    *,
    swa_page: PageLayout,
    compressed_page: PageLayout | None = None,
    top_k: int = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """FlashInfer's mixed matrix: the window's columns, then the compressed ones, as storage offsets.

    Args:
      swa_indices: int32 `[T, window]` slots, as the function of this name gives.
      compressed_indices: int32 `[T, k]` slots of compressed entries, or None for layers without.
      compressed_lens: int32 `[T]`, their lengths.
      swa_page, compressed_page: the layer's pages.
      top_k: the compressed part has at least this many columns.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      int32 `[T, window + round_up(max(top_k, k), 4)]`, and int32 `[T]`: `window` plus the compressed length. All
      window columns always count, so the reader must skip -1 in them.

    Raises:
      ValueError: wrong dtypes or lengths, pages that `storage_offsets` refuses, or an implementation that this
        operation does not have.
    """
    swa = as_int32("swa_indices", swa_indices, ndim=2)
    num_tokens, window_width = swa.shape
    if compressed_indices is None:
        compressed, lens = jnp.zeros((num_tokens, 0), jnp.int32), jnp.zeros(num_tokens, jnp.int32)
        compressed_page = compressed_page or swa_page
    elif compressed_page is None or compressed_lens is None:
        raise ValueError("compressed_indices needs compressed_page and compressed_lens")
    else:
        compressed = as_int32("compressed_indices", compressed_indices, ndim=2)
        lens = as_lengths("compressed_lens", compressed_lens, size=num_tokens)
    if compressed.shape[0] != num_tokens:
        raise ValueError(f"compressed_indices has {compressed.shape[0]} rows for {num_tokens} rows of swa_indices")
    width = round_up(max(check_count("top_k", top_k), compressed.shape[1]), COLUMN_ALIGNMENT)
    for page in (swa_page, compressed_page):
        rows_between_blocks(page)  # refuses, whatever implementation follows
    if kernel := mosaic_kernel("flashinfer_indices", implementation):
        return kernel(swa, compressed, lens, swa_page=swa_page, compressed_page=compressed_page, width=width)
    padding = jnp.full((num_tokens, width - compressed.shape[1]), -1, jnp.int32)
    parts = [storage_offsets(swa, swa_page), storage_offsets(compressed, compressed_page), padding]
    return jnp.concatenate(parts, axis=1), window_width + lens
