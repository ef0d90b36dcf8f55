"""Sparse attention on Hopper: what the fused kernel takes, how the keys are split over blocks, and the combination."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dsv4kv_jax.formats import FP8_DS_MLA
from dsv4kv_jax.kernels import mosaic_attention_rows as rows
from dsv4kv_jax.kernels.mosaic_attention_kernel import HEADS, Tuning, attention_kernel
from dsv4kv_jax.kernels.mosaic_attention_rows import TILE, Source
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import cdiv

_MULTIPROCESSORS = 132  # of an H100 or H200; another number costs time only
_MAX_SPLITS = 32
# Estimated costs, in units of one tile's time: what a block does before its first tile and after its last, and the
# launch that combines a split's parts.
_BLOCK_OVERHEAD, _COMBINE_OVERHEAD = 2, 2


def why_not(q: jax.Array, pages: Sequence[PageLayout]) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    if q.dtype != jnp.bfloat16:
        return f"q has dtype {q.dtype}; the kernel computes on bfloat16"
    for page in pages:
        if page.format != FP8_DS_MLA:
            return f"layer {page.name!r} holds {page.format.name!r} rows; the kernel reads {FP8_DS_MLA.name!r} rows"
        if page.spec.alignment != rows.ROW_BYTES:
            return f"layer {page.name!r} has slab rows of {page.spec.alignment} bytes; the kernel takes 576"
        size = page.storage_block_size
        if size & (size - 1) or size * rows.SCALE_BYTES > rows.ROW_BYTES:
            return f"layer {page.name!r} has {size} rows a page; the kernel takes powers of two up to 64"
    return None


def sparse_attention(
    q: jax.Array,
    slab: jax.Array,
    swa_page: PageLayout,
    swa_indices: jax.Array,
    swa_lens: jax.Array,
    compressed_page: PageLayout | None = None,
    compressed_indices: jax.Array | None = None,
    compressed_lens: jax.Array | None = None,
    compressed_slab: jax.Array | None = None,
    *,
    sink: jax.Array | None = None,
    scale: float = 512**-0.5,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`attention.sparse_attention` by the fused kernel; arguments are checked there.

    Raises:
      ValueError: arguments that the kernel cannot take (`why_not`).
    """
    pages = (swa_page,) if compressed_page is None else (swa_page, compressed_page)
    if reason := why_not(q, pages):
        raise ValueError(f"implementation='mosaic_gpu': {reason}; use 'xla' or None")
    tuning = tuning or Tuning()
    if compressed_page is None or compressed_indices is None or compressed_lens is None:
        compressed_page, compressed_slab = swa_page, slab
        compressed_indices, compressed_lens = swa_indices[:, :0], jnp.zeros_like(swa_lens)
    slabs = (slab, slab if compressed_slab is None else compressed_slab)
    lists, lens = (swa_indices, compressed_indices), (swa_lens, compressed_lens)
    sources = (_source(swa_page, slabs[0], lists[0]), _source(compressed_page, slabs[1], lists[1]))
    tokens, heads, _ = q.shape
    if not tokens or not heads:
        return jnp.zeros_like(q), jnp.zeros((tokens, heads), jnp.float32)
    padding = -heads % HEADS
    # A list without columns has no address. The kernel never reads this column, for the width that it knows is 0.
    window, compressed = (indices if indices.shape[1] else jnp.full((tokens, 1), -1, jnp.int32) for indices in lists)
    sink = jnp.full((heads,), -jnp.inf, jnp.float32) if sink is None else sink
    tiles = sum(cdiv(source.width, TILE) for source in sources)
    splits = tuning.splits or num_splits(tokens * (heads + padding) // HEADS, tiles)
    out, lse = attention_kernel(
        jnp.pad(q, ((0, 0), (0, padding), (0, 0))),
        slabs,
        (window, compressed),
        lens,
        jnp.pad(sink, (0, padding), constant_values=-jnp.inf),
        sources=sources,
        scale=scale,
        splits=splits,
        tuning=tuning,
    )
    if splits > 1:
        out, lse = _combine(out[:, :, :heads], lse[:, :, :heads], sink)
    return out[:, :heads].astype(q.dtype), lse[:, :heads]


def _source(page: PageLayout, slab: jax.Array, indices: jax.Array) -> Source:
    return Source(page=page, num_blocks=slab.shape[0], rows_per_block=slab.shape[1], width=indices.shape[1])


def num_splits(blocks: int, tiles: int) -> int:
    """How many blocks share the keys of one (token, 64 heads), so that all multiprocessors are busy.

    Args:
      blocks: (token, 64 heads) pairs.
      tiles: most tiles of 64 keys that a token can have.
    """

    def cost(splits: int) -> float:
        waves = cdiv(blocks * splits, _MULTIPROCESSORS)
        return waves * (cdiv(tiles, splits) + _BLOCK_OVERHEAD) + (_COMBINE_OVERHEAD if splits > 1 else 0)

    return min(range(1, max(min(tiles, _MAX_SPLITS), 1) + 1), key=cost)


def _combine(out: jax.Array, lse: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over all keys from parts `out` `[S, T, H, 512]` and `lse` `[S, T, H]`, -inf for a part without keys."""
    top = jnp.max(lse, axis=0)
    empty = top == -jnp.inf
    top = jnp.where(empty, jnp.float32(0), top)
    weights = jnp.exp(lse - top)
    total = jnp.sum(weights, axis=0)
    inverse = jnp.where(empty, jnp.float32(0), 1 / (total + jnp.exp(sink - top)))
    combined = jnp.sum(out * (weights * inverse)[..., None], axis=0)
    return combined, jnp.where(empty, jnp.inf, top + jnp.log(total))
