"""Slots of one step's tokens, as vLLM 0.33 computes them for DeepSeek-V4.

A step's tokens lie one request after another: request r owns tokens `query_start_loc[r]` to
`query_start_loc[r + 1] - 1`, the last ones of its `seq_lens[r]`. Tokens past `query_start_loc[-1]` are padding.

A *slot* is `block_id * rows_per_block + row`; -1 stands for none. A table entry of 0 (the null block) or less holds no
rows, nor does a position past the table.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv4kv_jax.kernels._arguments import INT32_MAX, as_int32, as_query_start_loc, check_count
from dsv4kv_jax.kernels._implementation import mosaic_kernel


class StepTokens(NamedTuple):
    """Where each of a step's tokens belongs; all `[num_tokens]`."""

    positions: jax.Array
    """int32: absolute position in its request; -1 for padding."""
    token_to_req: jax.Array
    """int32: its request; 0 for padding."""
    valid: jax.Array
    """bool: False for padding."""


def step_tokens(query_start_loc: Any, seq_lens: Any, *, num_tokens: int) -> StepTokens:
    """Positions and requests of a step's tokens.

    Args:
      query_start_loc: int32 `[R + 1]`, non-decreasing. It may start above 0, for a part of a step; token 0 is the
        first of request 0 all the same.
      seq_lens: int32 `[R]`, this step's tokens included.
      num_tokens: tokens of the result, padding included.

    Raises:
      ValueError: wrong dtypes or lengths.
    """
    num_tokens = check_count("num_tokens", num_tokens)
    seq_lens = as_int32("seq_lens", seq_lens, ndim=1)
    num_requests = seq_lens.shape[0]
    query_start_loc = as_query_start_loc(query_start_loc, num_requests)
    if not num_requests:
        none = jnp.full(num_tokens, -1, jnp.int32)
        return StepTokens(none, jnp.zeros_like(none), none >= 0)
    token = lax.iota(jnp.int32, num_tokens)
    ends = query_start_loc[1:] - query_start_loc[0]
    request = jnp.sum((token[:, None] >= ends[None, :]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    is_token = request < num_requests
    request = jnp.where(is_token, request, 0)
    length = take(seq_lens, request)
    position = length - take(ends, request) + token
    valid = is_token & (position >= 0) & (position < length)
    return StepTokens(jnp.where(valid, position, -1), request, valid)


def row_slots(block_table: jax.Array, request: jax.Array, index: jax.Array, rows_per_block: int) -> jax.Array:
    """Slots of rows `index` (any shape, counted as the page stores them) of requests `request` (same shape).

    The one place where a block table is read: -1 for an index that is negative or past the table, and for an entry that
    is no block or whose slots would not fit in int32.
    """
    if not block_table.size:
        return jnp.full(index.shape, -1, jnp.int32)
    column = index // rows_per_block
    in_table = (index >= 0) & (column < block_table.shape[1])
    entry = block_table.at[request, jnp.where(in_table, column, 0)].get(mode="promise_in_bounds")
    is_block = in_table & (entry > 0) & (entry <= (INT32_MAX - rows_per_block + 1) // rows_per_block)
    return jnp.where(is_block, entry * rows_per_block + index % rows_per_block, -1)


def slot_mapping(
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    *,
    block_size: int,
    num_tokens: int,
    implementation: str | None = None,
) -> jax.Array:
    """The slot of each token in a group that stores one row a token (window latents, compressor states).

    Args:
      block_table: int32 `[R, max_blocks]`.
      query_start_loc: int32 `[R + 1]`.
      seq_lens: int32 `[R]`, this step's tokens included.
      block_size: tokens of a block.
      num_tokens: tokens of the result, padding included.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      int32 `[num_tokens]`.

    Raises:
      ValueError: wrong dtypes, lengths or sizes, or an implementation that this operation does not have.
    """
    args = step_arguments(block_table, query_start_loc, seq_lens, num_tokens)
    check_count("block_size", block_size, at_least=1)
    if kernel := mosaic_kernel("slot_mapping", implementation):
        return kernel(*args, block_size=block_size, num_tokens=num_tokens)
    step = step_tokens(*args[1:], num_tokens=num_tokens)
    return row_slots(args[0], step.token_to_req, step.positions, block_size)


def compressed_slot_mapping(
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    *,
    block_size: int,
    compress_ratio: int,
    num_tokens: int,
    implementation: str | None = None,
) -> jax.Array:
    """The slot of the entry that each token completes: -1 but for the last token of a group of `compress_ratio`.

    Args:
      block_table, query_start_loc, seq_lens, num_tokens: as in `slot_mapping`.
      block_size: tokens of a block; it holds `block_size // compress_ratio` entries.
      compress_ratio: tokens of an entry.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      int32 `[num_tokens]`.

    Raises:
      ValueError: wrong dtypes, lengths or sizes, a block that holds no whole number of entries, or an implementation
        that this operation does not have.
    """
    args = step_arguments(block_table, query_start_loc, seq_lens, num_tokens)
    entries = entries_per_block(block_size, compress_ratio)
    if kernel := mosaic_kernel("compressed_slot_mapping", implementation):
        return kernel(*args, block_size=block_size, compress_ratio=compress_ratio, num_tokens=num_tokens)
    step = step_tokens(*args[1:], num_tokens=num_tokens)
    completes = step.valid & ((step.positions + 1) % compress_ratio == 0)
    # An entry lies in the block of its last token, so this also is -1 where the token itself has no slot.
    return row_slots(args[0], step.token_to_req, jnp.where(completes, step.positions // compress_ratio, -1), entries)


def step_arguments(
    block_table: Any, query_start_loc: Any, seq_lens: Any, num_tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(block_table, query_start_loc, seq_lens) as checked int32 arrays."""
    check_count("num_tokens", num_tokens)
    seq_lens = as_int32("seq_lens", seq_lens, ndim=1)
    block_table = as_int32("block_table", block_table, ndim=2)
    if block_table.shape[0] != seq_lens.shape[0]:
        raise ValueError(f"block_table has {block_table.shape[0]} rows for {seq_lens.shape[0]} requests")
    return block_table, as_query_start_loc(query_start_loc, seq_lens.shape[0]), seq_lens


def take(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[index]` for indices known to be in range; zeros where there are no values."""
    if not values.size:
        return jnp.zeros(index.shape, values.dtype)
    return values.at[index].get(mode="promise_in_bounds")


def entries_per_block(block_size: int, compress_ratio: int) -> int:
    check_count("block_size", block_size, at_least=1)
    check_count("compress_ratio", compress_ratio, at_least=1)
    if block_size % compress_ratio:
        raise ValueError(
            f"block_size={block_size} is no multiple of compress_ratio={compress_ratio}; a block must hold a whole "
            f"number of entries"
        )
    return block_size // compress_ratio
