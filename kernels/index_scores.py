"""Scores of a request's compressed entries for each of its query tokens: what the indexer's top-k is taken of.

    score[t, e] = sum over heads h of  weights[t, h] * relu(codes[t, h] . key[e])

Source: DeepSeek-V4's "lightning indexer", as DeepGEMM's `fp8_paged_mqa_logits` computes it for vLLM.
"""

import jax
import jax.numpy as jnp

from dsv4kv_jax.kernels._arguments import as_int32, as_lengths, as_query_start_loc, check_page
from dsv4kv_jax.kernels._chunks import map_chunks
from dsv4kv_jax.kernels._dots import einsum_f32
from dsv4kv_jax.kernels._implementation import Implementation, mosaic_kernel
from dsv4kv_jax.kernels._tiles import Tiles
from dsv4kv_jax.kernels.rows import gather_sequence
from dsv4kv_jax.layout import PageLayout

_WORKSPACE_BYTES = 1 << 28  # XLA: keys and scores per head that are held at a time
_TILE_TOKENS = 64  # XLA: most query tokens of one request that share one reading of its keys


def index_scores(
    slab: jax.Array,
    page: PageLayout,
    block_table: jax.Array,
    query_start_loc: jax.Array,
    codes: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Scores every compressed entry of its request for each query token.

    A key's scale must be positive, as those that `insert_rows` writes are: it is taken out of the sum over heads.

    Args:
      slab: `uint32[num_blocks, rows_per_block, words_per_row]`; not changed.
      page: the indexer key cache's pages in it.
      block_table: int32 `[R, max_blocks]` of its group. Entries of 0 or less, or past the pool, hold no keys.
      query_start_loc: int32 `[R + 1]`: request r owns tokens `query_start_loc[r]` to `query_start_loc[r + 1] - 1`.
      codes: bfloat16 `[T, H, D]`, the quantised queries: values of float8_e4m3fn.
      weights: float32 `[T, H]`, the head weights with all scales of the queries folded in.
      visible: int32 `[T]`, entries each token can see; 0 for tokens of no request.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      float32 `[T, max_blocks * page.storage_block_size]`, a score for each entry number; 0 where the table has no
      block. Scores of entries that the token cannot see mean nothing, not even that they are the same in every run.

    Raises:
      ValueError: arguments that do not fit together, or an implementation that this operation does not have.
    """
    check_page(slab, page)
    block_table = as_int32("block_table", block_table, ndim=2)
    num_requests = block_table.shape[0]
    query_start_loc = as_query_start_loc(query_start_loc, num_requests)
    dim = page.format.num_values
    if codes.ndim != 3 or codes.shape[2] != dim or codes.dtype != jnp.bfloat16:
        raise ValueError(
            f"codes are {codes.dtype}{list(codes.shape)}; they must be bfloat16[tokens, heads, {dim}], with as many "
            f"values a head as the rows of layer {page.name!r}"
        )
    num_tokens, heads, _ = codes.shape
    if weights.shape != (num_tokens, heads) or weights.dtype != jnp.float32:
        raise ValueError(
            f"weights are {weights.dtype}{list(weights.shape)}; they must be float32[{num_tokens}, {heads}], one value "
            f"for each head of codes"
        )
    visible = as_lengths("visible", visible, size=num_tokens)
    num_keys = block_table.shape[1] * page.storage_block_size
    if not (num_requests and num_tokens and heads and num_keys):
        return jnp.zeros((num_tokens, num_keys), jnp.float32)
    score = mosaic_kernel("index_scores", implementation, page, given=(page, heads)) or _xla
    return score(slab, page, block_table, query_start_loc, codes, weights, visible)


def _xla(
    slab: jax.Array,
    page: PageLayout,
    block_table: jax.Array,
    query_start_loc: jax.Array,
    codes: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
) -> jax.Array:
    num_tokens, heads, dim = codes.shape
    num_keys = block_table.shape[1] * page.storage_block_size
    most = max(_WORKSPACE_BYTES // (heads * num_keys * 4), 1)
    tiles = Tiles.cut(query_start_loc, num_tokens, min(_TILE_TOKENS, most))

    def of_tiles(request: jax.Array, tokens: jax.Array) -> jax.Array:
        def pick(array: jax.Array) -> jax.Array:
            return array.at[tokens].get(mode="fill", fill_value=0)

        table = block_table.at[request].get(mode="fill", fill_value=-1)
        seen = jnp.max(pick(visible), axis=1)
        keys = gather_sequence(slab, page, table, seen, max_rows=num_keys, dtype=jnp.bfloat16, implementation="xla")
        # Codes and keys are exact in bfloat16, so only the sums are rounded.
        dots = einsum_f32("gchd,gnd->gchn", pick(codes), keys)
        return jnp.sum(jnp.maximum(dots, 0) * pick(weights)[..., None], axis=2)

    tile_bytes = num_keys * (tiles.size * heads * 4 + dim * 2)
    scores = map_chunks(of_tiles, (tiles.request, tiles.tokens), max(_WORKSPACE_BYTES // tile_bytes, 1))
    return tiles.by_token(scores.reshape(-1, num_keys))
