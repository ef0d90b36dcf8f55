"""Exact top-k of scores."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax.kernels._arguments import as_int32, check_count
from dsv4kv_jax.kernels._implementation import mosaic_kernel


def top_k_indices(scores: Any, visible: Any, top_k: int, *, implementation: str | None = None) -> jax.Array:
    """The indices of the `top_k` largest of the first `visible` scores of each row, exactly.

    Among equal scores, -0 and 0 too, the earlier ones are picked. What lies at or past `visible` may be any bits.

    Args:
      scores: float32 `[..., n]`, no NaNs among the visible ones; n may be less than `top_k`.
      visible: int32 `[...]`; less than 0 counts as 0, more than n as n.
      top_k: how many.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default. The kernel picks at most 8,192; the default
        for more is `"xla"`.

    Returns:
      int32 `[..., top_k]`, left-packed, then -1. Rows with no more than `top_k` visible scores have all of them in
      order. Otherwise the picked set is exact and its order is unspecified: `"xla"` gives falling scores,
      `"mosaic_gpu"` rising indices.

    Raises:
      ValueError: wrong dtypes or shapes, or an implementation that this operation does not have.
    """
    if not isinstance(scores, jax.Array | np.ndarray) or scores.dtype != jnp.float32 or scores.ndim < 1:
        found = f"{scores.dtype}{list(scores.shape)}" if hasattr(scores, "dtype") else type(scores).__name__
        raise ValueError(f"scores is {found}; it must be float32[..., n]")
    visible, top_k = as_int32("visible", visible), check_count("top_k", top_k)
    *batch, num_scores = scores.shape
    if visible.shape != tuple(batch):
        raise ValueError(f"visible has shape {visible.shape}; scores of shape {scores.shape} need {tuple(batch)}")
    kernel = mosaic_kernel("top_k_indices", implementation, given=(top_k,))
    picked = column = jnp.arange(top_k, dtype=jnp.int32)
    if num_scores > top_k > 0 and visible.size:
        if kernel:
            rows = jnp.asarray(scores).reshape(-1, num_scores)
            return kernel(rows, visible.reshape(-1), top_k).reshape(*batch, top_k)
        visible = jnp.clip(visible, 0, num_scores)
        picked = jnp.where(visible[..., None] <= top_k, column, _best(jnp.asarray(scores), visible, top_k))
    return jnp.where(column < visible[..., None], picked, -1)


def _best(scores: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
    # As integers in the same order: backends differ in how they compare zeros and numbers below the smallest normal.
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    least = jnp.int32(np.iinfo(np.int32).min)
    keys = jnp.where(bits >= 0, bits, jnp.where(bits == least, 0, bits ^ np.int32(np.iinfo(np.int32).max)))
    is_visible = jnp.arange(scores.shape[-1], dtype=jnp.int32) < visible[..., None]
    return jax.lax.top_k(jnp.where(is_visible, keys, least), top_k)[1].astype(jnp.int32)
