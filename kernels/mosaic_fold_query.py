"""The indexer's queries on Mosaic GPU: rotated, quantised and their scales folded into the head weights, in one launch.

A program takes 16 heads of 128 values, eight lanes a head. A pair that is rotated together is one word, so that every
lane has all it needs but the head's largest magnitude, on which the lanes of a head agree by shuffles.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv4kv_jax.formats import INDEXER_FP8
from dsv4kv_jax.kernels import codecs, floats, mosaic_lanes
from dsv4kv_jax.kernels.mosaic_lanes import iota, lane_load, lane_store, per_row
from dsv4kv_jax.kernels.mosaic_pages import PER_ROW, ROWS
from dsv4kv_jax.specs import cdiv

_DIM = INDEXER_FP8.num_values
_PAIRS = _DIM // 4  # of the half that is rotated, and of the one that is not
_HIGH = 0xFFFF0000


def why_not(q: jax.Array, cos_sin: jax.Array, use_hadamard: bool) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    tokens, heads, dim = q.shape
    if q.dtype != jnp.bfloat16:
        return f"q has dtype {q.dtype}; the kernel reads bfloat16"
    if (dim, cos_sin.shape[1]) != (_DIM, 2 * _PAIRS):
        return f"heads have {dim} values, {cos_sin.shape[1]} of them rotated; the kernel takes {_DIM} and {2 * _PAIRS}"
    if tokens * heads < ROWS:
        return f"q has {tokens * heads} heads in all; the kernel takes {ROWS} or more"
    return "the kernel has no Hadamard transform" if use_hadamard else None


def fold_query(q: jax.Array, weights: jax.Array, cos_sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`indexer.fold_query` for arguments that were checked, and for which `why_not` is None."""
    return _fold_query(q, weights, cos_sin, interpreted=mosaic_lanes.is_interpreted())


@functools.partial(jax.jit, static_argnames="interpreted")
def _fold_query(
    q: jax.Array, weights: jax.Array, cos_sin: jax.Array, *, interpreted: bool
) -> tuple[jax.Array, jax.Array]:
    tokens, heads, dim = q.shape
    count = tokens * heads
    kernel = mosaic_lanes.kernel(
        functools.partial(_body, heads=heads),
        name="fold_query",
        out_type=(
            jax.ShapeDtypeStruct((count, dim // 2), jnp.uint32),
            jax.ShapeDtypeStruct((1, count), jnp.float32),
        ),
        grid=(cdiv(count, ROWS),),
    )
    words = codecs.as_words(q.reshape(count, dim))
    codes, folded = kernel(words, weights.reshape(1, count), cos_sin)
    return codecs.from_words(codes, jnp.bfloat16).reshape(q.shape), folded.reshape(tokens, heads)


def _body(q: Any, weights: Any, cos_sin: Any, codes_out: Any, weights_out: Any, *, heads: int) -> None:
    layout, shape = mosaic_lanes.row_layout(4), (ROWS, _PAIRS)
    # The last program's rows may be those of the one before, too: both write the same.
    base = jnp.minimum(lax.axis_index("i").astype(jnp.int32) * ROWS, q.shape[0] - ROWS)
    row, pair = base + iota(shape, 0, layout), iota(shape, 1, layout)
    plain, rotated = (lane_load(q, row, start + pair, layout, streaming=True) for start in (0, _PAIRS))
    token = lax.div(row, jnp.int32(heads))
    cos, sin = (lane_load(cos_sin, token, start + pair, layout) for start in (0, _PAIRS))
    place = base + iota((ROWS,), 0, PER_ROW)
    weight = lane_load(weights, jnp.zeros_like(place), place, PER_ROW)

    even, odd = _unpack(rotated)
    halves = (_unpack(plain), (even * cos - odd * sin, even * sin + odd * cos))
    values = [[floats.to_bfloat16(x).astype(jnp.float32) for x in half] for half in halves]
    amax = functools.reduce(jnp.maximum, (floats.magnitude_bits(x) for half in values for x in half))
    byte = floats.scale_byte_of_amax(jnp.max(amax, axis=1), floats.E4M3_MAX, codecs.SMALLEST_SCALE_BYTE["amax"])
    inverse = per_row(floats.ue8m0_to_float32((254 - byte).astype(jnp.uint8)), shape)
    for start, half in zip((0, _PAIRS), values, strict=True):
        codes = [floats.to_e4m3(x * inverse).astype(jnp.float32) for x in half]
        lane_store(codes_out, row, start + pair, _pack(*codes), layout)
    scale = floats.ue8m0_to_float32(byte.astype(jnp.uint8))
    folded = weight * scale * jnp.float32((_DIM * heads) ** -0.5)
    lane_store(weights_out, jnp.zeros_like(place), place, folded, PER_ROW)


def _unpack(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The float32 values of pairs of bfloat16."""
    bits = words << jnp.uint32(16), words & jnp.uint32(_HIGH)
    even, odd = (lax.bitcast_convert_type(half, jnp.float32) for half in bits)
    return even, odd


def _pack(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Pairs of bfloat16, of float32 values that bfloat16 holds exactly."""
    low, high = (lax.bitcast_convert_type(x, jnp.uint32) for x in (even, odd))
    return (low >> jnp.uint32(16)) | (high & jnp.uint32(_HIGH))
