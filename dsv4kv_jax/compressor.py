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
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.kernels.states import StateWindows, window_means
from dsv4kv_jax.rope import rotate


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


class Compression(NamedTuple):
    """What a step compresses from one state cache.

    Attributes:
      states: name of the state cache; its rows and its window give d and whether groups overlap.
      block_table: int32 `[R, max_blocks]` of the state cache's group.
      boundaries: which groups.
      norm: float32 `[d]`, RMSNorm's weight.
      rope_table: float32 `[max_position, 64]`.
    """

    states: str
    block_table: jax.Array
    boundaries: Boundaries
    norm: jax.Array
    rope_table: jax.Array


def compress(
    cache: KVCache, compressions: Sequence[Compression], *, eps: float = 1e-6, implementation: str | None = None
) -> list[jax.Array]:
    """The compressed rows of all groups that this step completes, normalised and rotated, not yet quantised.

    Per channel: softmax of the window's scores, weighted sum of its kv values; then RMSNorm over the row and RoPE at
    the group's *first* position. Positions before the request's start have no weight.

    Args:
      cache: the cache, with this step's states saved (`kernels.StateRows`).
      compressions: one for each state cache, such as those of a C4A layer's entries and of its indexer's keys.
      eps: RMSNorm's epsilon.
      implementation: of reading the states; see `kernels.window_means`.

    Returns:
      Float32 `[B, d]` for each of `compressions`; rows of unused entries are finite and mean nothing.
    """
    pages = [cache.page(compression.states) for compression in compressions]
    means: dict[int, jax.Array] = {}
    for buffer, slab in enumerate(cache.slabs):
        inside = [index for index, page in enumerate(pages) if page.buffer == buffer]
        windows = [_windows(cache, compressions[index]) for index in inside]
        means |= zip(inside, window_means(slab, windows, implementation=implementation), strict=True)
    return [_finished(means[index], compression, eps) for index, compression in enumerate(compressions)]


def _windows(cache: KVCache, compression: Compression) -> StateWindows:
    found = compression.boundaries
    return StateWindows(
        page=cache.page(compression.states),
        block_table=compression.block_table,
        requests=found.requests,
        positions=found.positions,
        count=found.count,
        compress_ratio=found.compress_ratio,
    )


def _finished(mean: jax.Array, compression: Compression, eps: float) -> jax.Array:
    row = mean * jax.lax.rsqrt(jnp.mean(mean * mean, axis=1, keepdims=True) + jnp.float32(eps)) * compression.norm
    found = compression.boundaries
    first = jnp.maximum(found.positions + (1 - found.compress_ratio), 0)
    return rotate(row, compression.rope_table.at[first].get(mode="fill", fill_value=0))
