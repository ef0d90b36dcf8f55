"""Rotary embedding of the last 64 values of a row, in interleaved pairs.

Window-only layers use plain frequencies; every layer that compresses uses its own theta with YaRN (arXiv:2309.00071)
for its queries, window rows, compressed rows and indexer. There is no attention factor.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax.config import RopeConfig


def rope_frequencies(rope: RopeConfig, compress_ratio: int) -> np.ndarray:
    """Angle per position of each pair, float32 `[rope.dim // 2]`, for a layer of this ratio.

    With YaRN, pairs that turn more than `beta_fast` times over the original context keep their frequency, pairs that
    turn less than `beta_slow` times have it divided by `factor`, and a linear ramp joins the two.
    """
    theta = rope.theta if compress_ratio == 1 else rope.compress_theta
    frequencies = 1 / theta ** (np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim))
    if compress_ratio == 1 or rope.factor == 1:
        return frequencies.astype(np.float32)

    def pair_that_turns(times: float) -> float:
        turns = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), rope.dim - 1)
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - low) / np.float32(max(high - low, 0.001))
    keep = 1 - np.clip(ramp, 0, 1)
    return (frequencies / rope.factor * (1 - keep) + frequencies * keep).astype(np.float32)


def rope_table(rope: RopeConfig, compress_ratio: int, num_positions: int) -> np.ndarray:
    """float32 `[num_positions, rope.dim]`: cosines of all pairs, then their sines.

    Made on the host, so that all devices rotate by the same bits; 256 bytes a position.
    """
    frequencies = rope_frequencies(rope, compress_ratio)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1, dtype=np.float32)


def rotate(x: jax.Array, cos_sin: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotates the last `cos_sin.shape[-1]` values of x, computed in float32 and returned in x's dtype.

    Args:
      x: `[..., D]`.
      cos_sin: float32 rows of a `rope_table`, broadcastable to `[..., 64]` (a row a token: `[T, 64]` for x `[T, D]`,
        `[T, 1, 64]` for x `[T, H, D]`).
      inverse: rotate backwards; attention outputs need it, because V carries rotated values.
    """
    dim = cos_sin.shape[-1]
    cos, sin = jnp.split(cos_sin, 2, axis=-1)
    if inverse:
        sin = -sin
    tail = x[..., -dim:].astype(jnp.float32)
    # Both values of a pair by one expression: XLA fuses that with what comes after, but not a `stack` of two.
    pairs = tail.reshape(*tail.shape[:-1], dim // 2, 2)
    signs = jnp.asarray([-1, 1], jnp.float32)
    tail = (pairs * cos[..., None] + pairs[..., ::-1] * (sin[..., None] * signs)).reshape(tail.shape)
    return jnp.concatenate([x[..., :-dim], tail.astype(x.dtype)], axis=-1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["plain", "compressed"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeTables:
    """A model's rope tables, float32 `[max_position, 64]`: for window-only layers, and for those that compress."""

    plain: jax.Array
    compressed: jax.Array

    @classmethod
    def make(cls, rope: RopeConfig, num_positions: int) -> "RopeTables":
        """Tables for positions 0 to `num_positions - 1`, computed on the host."""
        plain, compressed = (jnp.asarray(rope_table(rope, ratio, num_positions)) for ratio in (1, 4))
        return cls(plain=plain, compressed=compressed)

    @property
    def num_positions(self) -> int:
        return self.plain.shape[0]

    def of(self, compress_ratio: int) -> jax.Array:
        """The table of a layer of this ratio."""
        return self.plain if compress_ratio == 1 else self.compressed
