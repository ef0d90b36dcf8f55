"""The indexer of C4A layers: scores every compressed entry a token can see and keeps the best `top_k`.

    score_c = sum_h w_h relu(q_h . k_c)

`q` is quantised to fp8 per head, its scale folded into `w`; `k` are the indexer cache's rows. Source: DeepSeek-V4's
"lightning indexer" as vLLM folds it for DeepGEMM's `fp8_paged_mqa_logits`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax import formats
from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.kernels import codecs
from dsv4kv_jax.kernels._chunks import map_chunks
from dsv4kv_jax.kernels._dots import einsum_f32
from dsv4kv_jax.kernels._implementation import Implementation, mosaic_kernel
from dsv4kv_jax.kernels.index_scores import index_scores
from dsv4kv_jax.kernels.top_k import top_k_indices
from dsv4kv_jax.rope import rotate

_WORKSPACE_BYTES = 1 << 28  # scores held at a time


def hadamard(x: jax.Array) -> jax.Array:
    """The normalised Hadamard transform of the last dimension (a power of two), in float32.

    It is orthogonal, so doing it to queries and keys leaves their products as they are and only spreads outliers before
    quantisation. A cache written with it needs queries with it.
    """
    size = x.shape[-1]
    bits = np.arange(size)
    signs = 1.0 - 2.0 * (np.bitwise_count(bits[:, None] & bits) % 2)
    matrix = jnp.asarray(signs * size**-0.5, jnp.float32)
    return einsum_f32("...i,ij->...j", x.astype(jnp.float32), matrix)


def fold_query(
    q: jax.Array,
    weights: jax.Array,
    cos_sin: jax.Array,
    *,
    use_hadamard: bool = False,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Quantises the indexer's queries and folds all scales into the head weights.

    Args:
      q: `[T, H, D]`, float32 or bfloat16, before rotation.
      weights: float32 `[T, H]`, the head weights as projected.
      cos_sin: float32 `[T, 64]`, the layer's rope table at each token's position.
      use_hadamard: rotate by `hadamard` after RoPE, as the keys must have been.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default. The kernel takes bfloat16 queries of 128 values
        without `use_hadamard`. Where the last bit of a rotated value decides about a rounding, the two may differ.

    Returns:
      bfloat16 `[T, H, D]`, the fp8 codes as numbers, and float32 `[T, H]`, weights times the query's scale, `D**-0.5`
      and `H**-0.5`.

    Raises:
      ValueError: an implementation that cannot take these arguments.
    """
    if kernel := mosaic_kernel("fold_query", implementation, given=(q, cos_sin, use_hadamard)):
        return kernel(q, weights, cos_sin)
    _, heads, dim = q.shape
    q = rotate(q.astype(jnp.float32), cos_sin[:, None])
    if use_hadamard:
        q = hadamard(q)
    codes, scale = codecs.encode(formats.INDEXER_FP8, q)  # a query head is quantised as an fp8 key is
    codes = codecs.from_words(codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    scale = codecs.from_words(scale, jnp.float32)[..., 0]
    return codes, weights * scale * jnp.float32((dim * heads) ** -0.5)


def select_top_k(
    cache: KVCache,
    layer: str,
    block_table: jax.Array,
    query_start_loc: jax.Array,
    codes: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
    *,
    top_k: int,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The compressed entries that each token attends to: exactly the `top_k` with the best scores, or all it can see.

    The work grows with `block_table`'s width, so pass no more columns than the longest request needs. Where the table
    cannot hold more than `top_k` entries nothing is scored.

    Args:
      cache: the cache, with this step's keys written.
      layer: name of the indexer key cache.
      block_table: int32 `[R, max_blocks]` of its group.
      query_start_loc: int32 `[R + 1]`.
      codes, weights: from `fold_query`.
      visible: int32 `[T]`, entries each token can see, `(position + 1) // 4`; 0 for padding.
      top_k: entries to keep.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default of each operation.

    Returns:
      int32 `[T, top_k]`, entry numbers within the request, left-packed, then -1. All visible entries in order where
      there are at most `top_k`; of equal scores the earlier entries are kept.
    """
    page = cache.page(layer)
    num_keys = block_table.shape[1] * page.storage_block_size
    if num_keys <= top_k or not visible.shape[0]:
        return top_k_indices(jnp.zeros((*visible.shape, num_keys), jnp.float32), visible, top_k)

    def of_tokens(token: jax.Array, codes: jax.Array, weights: jax.Array, visible: jax.Array) -> jax.Array:
        # What the requests own of these tokens, which follow one another.
        here = jnp.clip(query_start_loc - token[0], 0, token.shape[0])
        slab = cache.slabs[page.buffer]
        scores = index_scores(slab, page, block_table, here, codes, weights, visible, implementation=implementation)
        return top_k_indices(scores, visible, top_k, implementation=implementation)

    token = jnp.arange(visible.shape[0], dtype=jnp.int32)
    return map_chunks(of_tokens, (token, codes, weights, visible), max(_WORKSPACE_BYTES // (num_keys * 4), 1))
