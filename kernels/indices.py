"""Which rows each token's sparse attention reads, as slots, as vLLM 0.33 lists them for DeepSeek-V4.

Everywhere here a row of indices belongs to a token; -1 stands for none, and nothing else is ever returned for it.
`lens` counts the leading columns that a reader looks at; padding tokens have length 0 and a row of -1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv4kv_jax.kernels._arguments import as_int32, as_lengths, check_count
from dsv4kv_jax.kernels._implementation import mosaic_kernel
from dsv4kv_jax.kernels.slots import StepTokens, entries_per_block, row_slots, step_arguments, step_tokens, take
from dsv4kv_jax.specs import cdiv, round_up

INDEX_ALIGNMENT = 128  # columns; FlashMLA's prefill kernel takes multiples of this


def swa_indices(
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    *,
    block_size: int,
    window: int = 128,
    width: int | None = None,
    num_tokens: int,
    image_spans: Any = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Slots of each token's window, oldest first: positions `max(p - window + 1, 0)` to `p`, then -1.

    Tokens of an image see all of it, whatever lies ahead of them included, as DeepSeek-V4's vision variant has it; pass
    `image_spans` and a `width` of `window` plus the longest image's tokens. Where a row is too narrow, its oldest
    positions are left out.

    Args:
      block_table, query_start_loc, seq_lens, num_tokens: as in `slot_mapping`.
      block_size: tokens of a block.
      window: tokens that a token sees, itself included.
      width: columns; `window` by default, and never less.
      image_spans: int32 `[num_tokens, 2]`: first and last position of the image that the token is part of, or -1.
        Only the XLA version takes them.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      int32 `[num_tokens, width]` and int32 `[num_tokens]`, the lengths.

    Raises:
      ValueError: wrong dtypes, lengths or sizes, or an implementation that this operation does not have.
    """
    args = step_arguments(block_table, query_start_loc, seq_lens, num_tokens)
    check_count("block_size", block_size, at_least=1)
    width = _width(width, check_count("window", window, at_least=1))
    if kernel := mosaic_kernel("swa_indices", implementation):
        if image_spans is not None:
            raise ValueError(f"implementation={implementation!r} takes no image_spans; use 'xla' or None")
        return kernel(*args, block_size=block_size, window=window, width=width, num_tokens=num_tokens)
    step = step_tokens(*args[1:], num_tokens=num_tokens)
    first, last = visible_range(step, args[2], window, image_spans)
    return _range_slots(args[0], step, first, last, block_size, width)


def draft_indices(
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    *,
    block_size: int,
    window: int = 128,
    draft_tokens: int,
    num_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Window rows of a draft block, whose tokens see one another in both directions (DSpark).

    Each request's tokens in this step are one block; all of them share one range, the `window` positions before the
    block and the block itself.

    Args:
      block_table, query_start_loc, seq_lens, num_tokens: as in `slot_mapping`.
      block_size: tokens of a cache block.
      window: context tokens before the draft block.
      draft_tokens: the longest draft block.

    Returns:
      int32 `[num_tokens, round_up(window + draft_tokens, 128)]` and int32 `[num_tokens]`, the lengths.

    Raises:
      ValueError: wrong dtypes, lengths or sizes.
    """
    args = step_arguments(block_table, query_start_loc, seq_lens, num_tokens)
    check_count("block_size", block_size, at_least=1)
    width = round_up(
        check_count("window", window, at_least=1) + check_count("draft_tokens", draft_tokens), INDEX_ALIGNMENT
    )
    block_table, query_start_loc, seq_lens = args
    step = step_tokens(query_start_loc, seq_lens, num_tokens=num_tokens)
    context = seq_lens - (query_start_loc[1:] - query_start_loc[:-1])
    first = take(jnp.maximum(context - window, 0), step.token_to_req)
    last = take(seq_lens, step.token_to_req) - 1
    return _range_slots(block_table, step, first, last, block_size, width)


def topk_to_slots(
    topk: Any,
    token_to_req: Any,
    block_table: Any,
    *,
    storage_block_size: int,
    valid: Any = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Slots of the compressed entries that the indexer picked.

    Args:
      topk: int32 `[T, k]`: entries counted within the token's request, packed to the left, -1 behind them.
      token_to_req: int32 `[T]`.
      block_table: int32 `[R, max_blocks]`.
      storage_block_size: entries of a block.
      valid: bool `[T]`; False for padding tokens. All tokens are valid by default.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      int32 `[T, k]`, where -1 stays in place, and int32 `[T]`: how many of a token's `topk` are not negative. A picked
      entry that the table does not hold becomes -1, but counts, so that the entries behind it are still read.

    Raises:
      ValueError: wrong dtypes, lengths or sizes, or an implementation that this operation does not have.
    """
    topk = as_int32("topk", topk, ndim=2)
    num_tokens = topk.shape[0]
    request = as_lengths("token_to_req", token_to_req, size=num_tokens)
    block_table = as_int32("block_table", block_table, ndim=2)
    check_count("storage_block_size", storage_block_size, at_least=1)
    is_token = (request >= 0) & (request < block_table.shape[0])
    if valid is not None:
        if valid.shape != (num_tokens,) or valid.dtype != jnp.bool_:
            raise ValueError(f"valid is {valid.dtype}{list(valid.shape)}; it must be bool[{num_tokens}]")
        is_token = is_token & valid
    if kernel := mosaic_kernel("topk_to_slots", implementation):
        request = jnp.where(is_token, request, -1)
        return kernel(topk, request, block_table, storage_block_size=storage_block_size)
    picked = jnp.where(is_token[:, None], topk, -1)
    request = jnp.broadcast_to(jnp.where(is_token, request, 0)[:, None], topk.shape)
    slots = row_slots(block_table, request, picked, storage_block_size)
    return slots, jnp.sum((picked >= 0).astype(jnp.int32), axis=1, dtype=jnp.int32)


def c128a_width(max_seq_len: int, max_model_len: int, *, compress_ratio: int = 128) -> int:
    """Columns of `c128a_indices` for a step whose longest request has `max_seq_len` tokens.

    The next power of two, at least 128 and at most the rounded-up need of `max_model_len` tokens.
    """
    cap = round_up(cdiv(check_count("max_model_len", max_model_len, at_least=1), compress_ratio), INDEX_ALIGNMENT)
    needed = max(check_count("max_seq_len", max_seq_len) // compress_ratio, 1)
    return min(max(1 << (needed - 1).bit_length(), INDEX_ALIGNMENT), cap)


def c128a_indices(
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    *,
    block_size: int = 256,
    compress_ratio: int = 128,
    width: int,
    num_tokens: int,
    local: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Every compressed entry that each token sees, in order: entries 0 to `(p + 1) // compress_ratio - 1`, then -1.

    Args:
      block_table, query_start_loc, seq_lens, num_tokens: as in `slot_mapping`.
      block_size: tokens of a block.
      compress_ratio: tokens of an entry.
      width: columns, such as `c128a_width` gives; entries past it are left out.
      local: True for the prefill form, whose columns are the entries' numbers within the request; False for slots.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      int32 `[num_tokens, width]` and int32 `[num_tokens]`, the lengths. In the slot form the length of a token that has
      no slot itself is 0.

    Raises:
      ValueError: wrong dtypes, lengths or sizes, a block that holds no whole number of entries, or an implementation
        that this operation does not have.
    """
    args = step_arguments(block_table, query_start_loc, seq_lens, num_tokens)
    entries = entries_per_block(block_size, compress_ratio)
    check_count("width", width)
    if kernel := mosaic_kernel("c128a_indices", implementation):
        options = {"block_size": block_size, "compress_ratio": compress_ratio, "width": width, "local": local}
        return kernel(*args, num_tokens=num_tokens, **options)
    block_table = args[0]
    step = step_tokens(*args[1:], num_tokens=num_tokens)
    has_entries = step.valid
    if not local:
        has_entries = row_slots(block_table, step.token_to_req, step.positions, block_size) >= 0
    lens = jnp.where(has_entries, jnp.minimum((step.positions + 1) // compress_ratio, width), 0)
    entry = jnp.broadcast_to(lax.iota(jnp.int32, width), (num_tokens, width))
    entry = jnp.where(entry < lens[:, None], entry, -1)
    if local:
        return entry, lens
    request = jnp.broadcast_to(step.token_to_req[:, None], entry.shape)
    return row_slots(block_table, request, entry, entries), lens


def _width(width: int | None, window: int) -> int:
    if width is None:
        return window
    if check_count("width", width) < window:
        raise ValueError(f"width={width} is less than window={window}; a row must hold the whole window")
    return width


def visible_range(step: StepTokens, seq_lens: jax.Array, window: int, image_spans: Any) -> tuple[jax.Array, jax.Array]:
    """First and last position that each token sees of the window cache."""
    first, last = jnp.maximum(step.positions - window + 1, 0), step.positions
    if image_spans is None:
        return first, last
    spans = as_int32("image_spans", image_spans, ndim=2)
    if spans.shape != (step.positions.shape[0], 2):
        raise ValueError(f"image_spans has shape {spans.shape}; it must be [{step.positions.shape[0]}, 2]")
    inside = (spans[:, 0] >= 0) & (spans[:, 0] <= step.positions) & (step.positions <= spans[:, 1])
    end = jnp.minimum(spans[:, 1], take(seq_lens, step.token_to_req) - 1)
    return jnp.where(inside, jnp.minimum(first, spans[:, 0]), first), jnp.where(inside, end, last)


def _range_slots(
    block_table: jax.Array, step: StepTokens, first: jax.Array, last: jax.Array, block_size: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Slots of positions `first` to `last` of each token's request; the newest `width` of them where they are more."""
    first = jnp.maximum(first, last + 1 - width)
    lens = jnp.where(step.valid, last + 1 - first, 0)
    column = lax.iota(jnp.int32, width)[None, :]
    position = jnp.where(column < lens[:, None], first[:, None] + column, -1)
    request = jnp.broadcast_to(step.token_to_req[:, None], position.shape)
    return row_slots(block_table, request, position, block_size), lens
