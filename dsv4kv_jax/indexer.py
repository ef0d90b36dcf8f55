"""The indexer of C4A layers: scores every compressed entry a token can see and keeps the best `top_k`.

    score_c = sum_h w_h relu(q_h . k_c)

`q` is quantised to fp8 per head, its scale folded into `w`; `k` are the indexer cache's rows. Source: DeepSeek-V4's
"lightning indexer" as vLLM folds it for DeepGEMM's `fp8_paged_mqa_logits`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax import formats
from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.kernels import codecs
from dsv4kv_jax.kernels._chunks import map_chunks
from dsv4kv_jax.kernels._dots import einsum_f32
from dsv4kv_jax.kernels.rows import gather_sequence
from dsv4kv_jax.rope import rotate
from dsv4kv_jax.top_k import TopKMethod, top_k_indices

_WORKSPACE_BYTES = 1 << 28  # keys and per-head scores held at a time
_TILE_TOKENS = 64  # most query tokens of one request that share one reading of its keys


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
    q: jax.Array, weights: jax.Array, cos_sin: jax.Array, *, use_hadamard: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Quantises the indexer's queries and folds all scales into the head weights.

    Args:
      q: `[T, H, D]`, float32 or bfloat16, before rotation.
      weights: float32 `[T, H]`, the head weights as projected.
      cos_sin: float32 `[T, 64]`, the layer's rope table at each token's position.
      use_hadamard: rotate by `hadamard` after RoPE, as the keys must have been.

    Returns:
      bfloat16 `[T, H, D]`, the fp8 codes as numbers, and float32 `[T, H]`, weights times the query's scale, `D**-0.5`
      and `H**-0.5`.
    """
    _, heads, dim = q.shape
    q = rotate(q.astype(jnp.float32), cos_sin[:, None])
    if use_hadamard:
        q = hadamard(q)
    codes, scale = codecs.encode(formats.INDEXER_FP8, q)  # a query head is quantised as an fp8 key is
    codes = codecs.from_words(codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    scale = codecs.from_words(scale, jnp.float32)[..., 0]
    return codes, weights * scale * jnp.float32(dim**-0.5) * jnp.float32(heads**-0.5)


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
    method: TopKMethod = "sort",
) -> jax.Array:
    """The compressed entries that each token attends to: exactly the `top_k` with the best scores, or all it can see.

    The work grows with `block_table`'s width, so pass no more columns than the longest request needs. Tokens of one
    request share one reading of its keys. Where the table cannot hold more than `top_k` entries nothing is scored.

    Args:
      cache: the cache, with this step's keys written.
      layer: name of the indexer key cache.
      block_table: int32 `[R, max_blocks]` of its group.
      query_start_loc: int32 `[R + 1]`.
      codes, weights: from `fold_query`.
      visible: int32 `[T]`, entries each token can see, `(position + 1) // 4`; 0 for padding.
      top_k: entries to keep.
      method: how the best are found; see `top_k_indices`.

    Returns:
      int32 `[T, top_k]`, entry numbers within the request, left-packed, then -1. All visible entries in order where
      there are at most `top_k`; of equal scores the earlier entries are kept.
    """
    page = cache.page(layer)
    num_keys = block_table.shape[1] * page.storage_block_size
    if num_keys <= top_k:
        return top_k_indices(jnp.zeros((*visible.shape, 0)), visible, top_k)
    num_tokens, heads, dim = codes.shape
    tiles = _Tiles.cut(query_start_loc, num_tokens, max(_WORKSPACE_BYTES // (heads * num_keys * 4), 1))

    def of_tiles(request: jax.Array, tokens: jax.Array) -> jax.Array:
        def pick(array: jax.Array) -> jax.Array:
            return array.at[tokens].get(mode="fill", fill_value=0)

        seen = pick(visible)
        table = block_table.at[request].get(mode="fill", fill_value=-1)
        keys = gather_sequence(
            cache.slabs[page.buffer], page, table, jnp.max(seen, axis=1), max_rows=num_keys, dtype=jnp.bfloat16
        )
        # Codes and keys are exact in bfloat16, so only the sum over D is rounded.
        dots = einsum_f32("gchd,gnd->gchn", pick(codes), keys)
        scores = jnp.sum(jnp.maximum(dots, 0) * pick(weights)[..., None], axis=2)
        return top_k_indices(scores, seen, top_k, method=method)

    tile_bytes = num_keys * (tiles.tokens.shape[1] * heads * 4 + dim * 2)
    picked = map_chunks(of_tiles, (tiles.request, tiles.tokens), max(_WORKSPACE_BYTES // tile_bytes, 1))
    return picked.reshape(-1, top_k).at[tiles.place].get(mode="fill", fill_value=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiles:
    """A step's tokens cut into tiles of at most C tokens of one request.

    Attributes:
      request: int32 `[N]`, the tile's request; R for unused tiles.
      tokens: int32 `[N, C]`, its tokens; T where there is none.
      place: int32 `[T]`, where each token is in `tokens.reshape(-1)`; past the end for padding.
    """

    request: jax.Array
    tokens: jax.Array
    place: jax.Array

    @classmethod
    def cut(cls, query_start_loc: jax.Array, num_tokens: int, most_tokens: int) -> "_Tiles":
        num_requests = query_start_loc.shape[0] - 1
        size = min(_TILE_TOKENS, most_tokens, max(num_tokens // max(num_requests, 1), 1))
        num_tiles = (num_tokens + num_requests * (size - 1)) // size
        starts, stops = query_start_loc[:-1], query_start_loc[1:]
        tiles_of = (stops - starts + (size - 1)) // size
        last = jnp.cumsum(tiles_of, dtype=jnp.int32)
        first = last - tiles_of
        tile = jnp.arange(num_tiles, dtype=jnp.int32)
        request = jnp.searchsorted(last, tile, side="right").astype(jnp.int32)

        def of(array: jax.Array, request: jax.Array) -> jax.Array:
            return array.at[request].get(mode="fill", fill_value=0)

        begin = of(starts, request) + (tile - of(first, request)) * size
        tokens = begin[:, None] + jnp.arange(size, dtype=jnp.int32)
        tokens = jnp.where(tokens < of(stops, request)[:, None], tokens, num_tokens)
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        owner = jnp.searchsorted(stops, token, side="right").astype(jnp.int32)
        place = of(first, owner) * size + token - of(starts, owner)
        return cls(request=request, tokens=tokens, place=jnp.where(owner < num_requests, place, num_tiles * size))
