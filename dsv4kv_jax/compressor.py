"""The compressor: a learned, per-channel weighted mean of 8 (C4A) or 128 (C128A) tokens becomes one cache row.

Every token leaves a float32 *state row* in its request's state pages, at a slot that follows from its position alone:

    [ kv (W values) | score + ape[position % ratio] (W values) ]       W = 512 (C128A), 2 x 512 (C4A, whose groups
    overlap)

The token that completes a group of `ratio` tokens reads the state rows of its window and writes the compressed row.
Because slots follow from positions, rejected tokens need no rollback: their rows are rewritten before they are read.
Source: DeepSeek-V4's compressor as vLLM computes it, in float32 until the row is quantised. See `docs/compressor.md`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.kernels.indices import row_slots
from dsv4kv_jax.kernels.rows import gather_rows
from dsv4kv_jax.rope import rotate

# Groups compressed at once; more are done in a loop that stops at the last group there is. A decode step of many
# requests completes few 128-token groups, each of which reads 128 rows, so there the loop saves most of the reading.
_GROUPS_AT_ONCE = {4: 2048, 128: 16}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "requests", "positions", "count"],
    meta_fields=["compress_ratio"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundaries:
    """The tokens of a step that complete a group of `compress_ratio` tokens, left-packed.

    There are at most `max_boundaries(...)` of them, which is the length B of the arrays; unused entries are -1.

    Attributes:
      slots: int32 `[B]`, where the compressed row goes, in rows of the compressed and indexer caches.
      requests: int32 `[B]`.
      positions: int32 `[B]`, the completing token's position.
      count: int32 `[]`, entries in use.
    """

    slots: jax.Array
    requests: jax.Array
    positions: jax.Array
    count: jax.Array
    compress_ratio: int

    @classmethod
    def find(
        cls,
        compressed_slots: jax.Array,
        token_to_req: jax.Array,
        positions: jax.Array,
        *,
        compress_ratio: int,
        num_requests: int,
    ) -> "Boundaries":
        """Packs the tokens whose entry of `compressed_slots` (int32 `[T]`) is not -1."""
        tokens = compressed_slots.shape[0]
        size = max_boundaries(tokens, num_requests, compress_ratio)
        (found,) = jnp.nonzero(compressed_slots >= 0, size=size, fill_value=tokens)

        def pick(array: jax.Array) -> jax.Array:
            return array.at[found].get(mode="fill", fill_value=-1)

        return cls(
            slots=pick(compressed_slots),
            requests=pick(token_to_req),
            positions=pick(positions),
            count=jnp.sum(compressed_slots >= 0, dtype=jnp.int32),
            compress_ratio=compress_ratio,
        )


def max_boundaries(num_tokens: int, num_requests: int, compress_ratio: int) -> int:
    """Most groups that `num_tokens` new tokens of `num_requests` requests can complete.

    A request's q tokens complete at most ceil(q / ratio) groups, whatever its position.
    """
    return min(num_tokens, (num_tokens + num_requests * (compress_ratio - 1)) // compress_ratio)


def save_states(
    cache: KVCache,
    layer: str,
    slots: jax.Array,
    positions: jax.Array,
    kv: jax.Array,
    score: jax.Array,
    ape: jax.Array,
) -> KVCache:
    """Writes the state row of every token.

    Args:
      cache: the cache; donate it.
      layer: name of the state cache.
      slots: int32 `[T]` of the state cache's group, -1 for tokens that write nothing.
      positions: int32 `[T]`.
      kv, score: float32 `[T, W]`, the two projections of the token.
      ape: float32 `[ratio, W]`, the learned position bias of the scores; row 0 belongs to a group's first token.

    Returns:
      The cache with the rows written.
    """
    bias = ape.at[jnp.maximum(positions, 0) % ape.shape[0]].get(mode="fill", fill_value=0)
    return cache.insert_rows(layer, slots, jnp.concatenate([kv, score + bias], axis=1))


def compress(
    cache: KVCache,
    layer: str,
    block_table: jax.Array,
    boundaries: Boundaries,
    *,
    norm: jax.Array,
    rope_table: jax.Array,
    eps: float = 1e-6,
) -> jax.Array:
    """The compressed rows of all groups that this step completes, normalised and rotated, not yet quantised.

    Per channel: softmax of the window's scores, weighted sum of its kv values; then RMSNorm over the row and RoPE at
    the group's *first* position. Positions before the request's start have no weight.

    Args:
      cache: the cache, with this step's states saved.
      layer: name of the state cache; its head size and window give d and whether groups overlap.
      block_table: int32 `[R, max_blocks]` of the state cache's group.
      boundaries: which groups.
      norm: float32 `[d]`, RMSNorm's weight.
      rope_table: float32 `[max_position, 64]`.
      eps: RMSNorm's epsilon.

    Returns:
      float32 `[B, d]`; rows of unused entries are finite and mean nothing.
    """
    ratio = boundaries.compress_ratio
    groups = functools.partial(_compress_groups, cache, layer, block_table, ratio, norm, rope_table, eps)
    size = boundaries.positions.shape[0]
    chunk = _GROUPS_AT_ONCE[ratio]
    if size <= chunk:
        return groups(boundaries.requests, boundaries.positions)
    num_chunks = -(-size // chunk)

    def split(array: jax.Array) -> jax.Array:
        return jnp.pad(array, (0, num_chunks * chunk - size), constant_values=-1).reshape(num_chunks, chunk)

    requests, positions = split(boundaries.requests), split(boundaries.positions)
    rows = jax.lax.fori_loop(
        0,
        (boundaries.count + (chunk - 1)) // chunk,
        lambda i, rows: rows.at[i].set(groups(requests[i], positions[i])),
        jnp.zeros((num_chunks, chunk, norm.shape[0]), jnp.float32),
    )
    return rows.reshape(-1, norm.shape[0])[:size]


def _compress_groups(
    cache: KVCache,
    layer: str,
    block_table: jax.Array,
    ratio: int,
    norm: jax.Array,
    rope_table: jax.Array,
    eps: float,
    requests: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """float32 `[n, d]` for the groups completed at `positions` (int32 `[n]`, -1 for none) of `requests`."""
    spec = cache.page(layer).spec
    assert spec.window is not None  # states are a sliding cache
    window = jnp.arange(spec.window, dtype=jnp.int32)
    span = positions[:, None] + (window - (spec.window - 1))
    slots = row_slots(
        block_table, jnp.broadcast_to(jnp.maximum(requests, 0)[:, None], span.shape), span, spec.block_size
    )
    kv, score = _read_states(cache, layer, slots, ratio, norm.shape[0])
    score = jnp.where(slots[:, :, None] >= 0, score, -jnp.inf)
    top = jnp.max(score, axis=1, keepdims=True)
    weights = jnp.exp(score - jnp.where(top == -jnp.inf, jnp.float32(0), top))
    total = jnp.sum(weights, axis=1, keepdims=True)
    mean = jnp.sum(weights / jnp.where(total == 0, jnp.float32(1), total) * kv, axis=1)
    row = mean * jax.lax.rsqrt(jnp.mean(mean * mean, axis=1, keepdims=True) + jnp.float32(eps)) * norm
    first = jnp.maximum(positions + (1 - ratio), 0)
    return rotate(row, rope_table.at[first].get(mode="fill", fill_value=0))


def _read_states(
    cache: KVCache, layer: str, slots: jax.Array, ratio: int, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """kv and score, float32 `[n, window, head_dim]` each, that the states at `slots` (int32 `[n, window]`) give.

    Where groups overlap, the previous group's tokens lend the first half of their columns and the group's own tokens
    give the second. Only the columns in use are read: a state row is seen as `parts` rows of `head_dim` values.
    """
    page = cache.page(layer)
    parts = page.spec.head_size // head_dim
    spec = dataclasses.replace(page.spec, head_size=head_dim, block_size=page.spec.block_size * parts)
    halves = parts // 2
    half = jnp.arange(slots.shape[1], dtype=jnp.int32) // ratio  # 0 for the previous group, 1 for its own; 0 for C128A
    part = jnp.stack([half, halves + half], axis=-1)
    part_slots = jnp.where(slots[:, :, None] >= 0, slots[:, :, None] * parts + part, -1)
    rows = gather_rows(cache.slabs[page.buffer], dataclasses.replace(page, spec=spec), part_slots, dtype=jnp.float32)
    return rows[:, :, 0], rows[:, :, 1]
