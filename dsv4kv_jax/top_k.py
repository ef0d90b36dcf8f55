"""Exact top-k of scores, two ways: by sorting, and by finding the k-th score digit by digit.

Both return the same set of entries; among equal scores the earlier entries win. Sorting is what `lax.top_k` does on
every backend. The search reads the scores a fixed number of times, whatever their number, and never moves them; a GPU
prefers it for long rows.
"""

from typing import Literal

import jax
import jax.numpy as jnp

TopKMethod = Literal["sort", "search"]

_DIGIT_BITS = 4  # of the k-th score, found in one reading of the scores with 15 counts


def top_k_indices(scores: jax.Array, visible: jax.Array, top_k: int, *, method: TopKMethod = "sort") -> jax.Array:
    """The indices of the `top_k` largest of the first `visible` scores of each row.

    Args:
      scores: float32 `[..., n]`, no NaNs among the visible ones; n may be less than `top_k`.
      visible: int32 `[...]`, at most n.
      top_k: how many.
      method: "sort" returns them by falling score, "search" in order.

    Returns:
      int32 `[..., top_k]`, left-packed, then -1. All visible indices in order where they are no more than `top_k`.

    Raises:
      ValueError: an unknown method.
    """
    if method not in ("sort", "search"):
        raise ValueError(f"method={method!r} is not known; use 'sort' or 'search'")
    num_scores = scores.shape[-1]
    in_order = jnp.arange(top_k, dtype=jnp.int32)
    if num_scores > top_k:
        scores = jnp.where(scores == 0, jnp.float32(0), scores)  # -0 is not less than 0
        is_visible = jnp.arange(num_scores, dtype=jnp.int32) < visible[..., None]
        if method == "sort":
            best = jax.lax.top_k(jnp.where(is_visible, scores, -jnp.inf), top_k)[1]
        else:
            best = _search(_sortable(scores, is_visible), top_k)
        in_order = jnp.where(visible[..., None] <= top_k, in_order, best)
    return jnp.where(jnp.arange(top_k, dtype=jnp.int32) < visible[..., None], in_order, -1)


def _sortable(scores: jax.Array, is_visible: jax.Array) -> jax.Array:
    """uint32 keys in the order of the scores; 0, below every score, where not visible."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(is_visible, jnp.where(bits >= sign, ~bits, bits | sign), jnp.uint32(0))


def _search(keys: jax.Array, top_k: int) -> jax.Array:
    """int32 `[..., top_k]`: indices of the `top_k` largest keys, in order."""

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, axis=-1, dtype=jnp.int32)

    def add_digit(i: jax.Array, prefix: jax.Array) -> jax.Array:
        """The largest next digit for which `top_k` keys are at or above the prefix; the counts fall as it grows."""
        shift = (32 - _DIGIT_BITS * (i + 1)).astype(jnp.uint32)
        digits = [prefix | (jnp.uint32(digit) << shift) for digit in range(1, 1 << _DIGIT_BITS)]
        enough = [count(keys >= candidate[..., None]) >= top_k for candidate in digits]
        digit = sum((one.astype(jnp.uint32) for one in enough), jnp.zeros_like(prefix))
        return prefix | (digit << shift)

    start = jnp.zeros(keys.shape[:-1], jnp.uint32)
    kth = jax.lax.fori_loop(0, 32 // _DIGIT_BITS, add_digit, start)[..., None]
    above, equal = keys > kth, keys == kth
    wanted = top_k - count(above)
    taken = above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= wanted[..., None]))
    # Scatter each taken index to its place; what is not taken goes past the end and is dropped.
    place = jnp.where(taken, jnp.cumsum(taken, axis=-1, dtype=jnp.int32) - 1, top_k)
    flat = place.reshape(-1, keys.shape[-1])
    row = jnp.broadcast_to(jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None], flat.shape)
    index = jnp.broadcast_to(jnp.arange(flat.shape[1], dtype=jnp.int32), flat.shape)
    packed = jnp.zeros((flat.shape[0], top_k), jnp.int32).at[row, flat].set(index, mode="drop")
    return packed.reshape(*keys.shape[:-1], top_k)
