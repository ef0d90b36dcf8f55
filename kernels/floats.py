"""Exact arithmetic on the number formats of cache rows: UE8M0 scales, e4m3 and e2m1 values.

Whatever decides a byte is integer arithmetic on float32 bit patterns. XLA flushes subnormal floats to zero on a CPU and
not on a GPU, and its logarithms round: integers give the same bytes everywhere.

e4m3 is the finite-only form of arXiv:2209.05433 (+-448); e2m1 (+-6) and UE8M0 are those of the OCP Microscaling
specification v1.0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_INFINITY_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF
_NAN_BITS = 0x7FC00000


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 values of `x` rounded to the nearest bfloat16, ties to even.

    A cast to bfloat16 and back is not the same: XLA may drop such a pair as excess precision, and does so on a GPU.
    """
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 (or bfloat16) to bfloat16: ties to even; every NaN of a float32 becomes a quiet one of its sign, 0x7FC0.

    By integers, because devices disagree about the NaN that a cast makes.
    """
    if x.dtype == jnp.bfloat16:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))) >> 16
    nan = ((bits >> 16) & jnp.uint32(0x8000)) | jnp.uint32(_NAN_BITS >> 16)
    is_nan = (bits & jnp.uint32(0x7FFFFFFF)) > jnp.uint32(_INFINITY_BITS)
    return lax.bitcast_convert_type(jnp.where(is_nan, nan, rounded).astype(jnp.uint16), jnp.bfloat16)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`x * 2**exponent` for float32 `x`, by integers, so that subnormal operands and results are exact on every device.

    Results that lose bits below 2**-149 are cut off, not rounded; no value that a row can hold has such bits.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & jnp.int32(0x7FFFFFFF)
    # A subnormal is its bit pattern times 2**-149; as a converted integer it is a normal float.
    is_subnormal = magnitude <= _MANTISSA_BITS
    as_normal = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.int32)
    normal = jnp.where(is_subnormal, as_normal, magnitude)
    exponent = jnp.where(is_subnormal, exponent - 149, exponent)
    biased = (normal >> 23) + exponent
    scaled = normal + (exponent << 23)
    below = ((normal & jnp.int32(_MANTISSA_BITS)) | jnp.int32(1 << 23)) >> jnp.clip(1 - biased, 0, 31)
    result = jnp.where(biased > 0, scaled, below)
    result = jnp.where(biased >= 255, jnp.int32(_INFINITY_BITS), result)
    unchanged = (magnitude == 0) | (magnitude >= _INFINITY_BITS)
    result = jnp.where(unchanged, magnitude, result)
    return lax.bitcast_convert_type(result | (bits & jnp.int32(-(2**31))), jnp.float32)


def scale_byte(blocks: jax.Array, largest: float, smallest_byte: int) -> jax.Array:
    """UE8M0 byte of each block: the least b with `max|block| <= largest * 2**(b - 127)`, at least `smallest_byte`.

    Args:
      blocks: float32 `[..., n]`. NaNs do not count; an infinity counts as the largest finite magnitude.
      largest: the element format's largest value, a normal float32.
      smallest_byte: the floor.

    Returns:
      int32 `[...]`, without the last dimension.
    """
    return scale_byte_of_amax(jnp.max(magnitude_bits(blocks), axis=-1), largest, smallest_byte)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bits of `abs(x)` as int32, which order as the magnitudes do; 0 for NaN, so that a maximum leaves it out."""
    magnitude = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    return jnp.where(magnitude > _INFINITY_BITS, jnp.int32(0), magnitude)


def scale_byte_of_amax(amax: jax.Array, largest: float, smallest_byte: int) -> jax.Array:
    """`scale_byte` of blocks whose largest `magnitude_bits` is `amax`."""
    limit = int(np.float32(largest).view(np.int32))
    # ceil(log2(amax / largest)) is the difference of the exponents, plus one where amax has the larger significand:
    # adding `largest`'s distance from a full significand carries into the exponent exactly then.
    carry = _MANTISSA_BITS - (limit & _MANTISSA_BITS)
    return jnp.maximum(((amax + carry) >> 23) - ((limit >> 23) - 127), smallest_byte)


def ue8m0_to_float32(byte: jax.Array) -> jax.Array:
    """The float32 that a UE8M0 scale byte stands for: 2**(byte - 127), byte 0 being a subnormal; 255 is NaN.

    Raises:
      TypeError: not bytes; a float here is a scale that was decoded already.
    """
    if byte.dtype != jnp.uint8:
        raise TypeError(f"UE8M0 scales are uint8 exponents, got {byte.dtype}; a float is a decoded scale already")
    exponent = byte.astype(jnp.int32)  # 8-bit arithmetic does not exist in the GPU kernels that use this
    bits = jnp.where(exponent == 255, jnp.int32(_NAN_BITS), exponent << 23)
    return lax.bitcast_convert_type(jnp.where(exponent == 0, jnp.int32(1 << 22), bits), jnp.float32)


def times_ue8m0(values: jax.Array, byte: jax.Array) -> jax.Array:
    """float32 `values` times the scales that `byte` stands for (same shape, or broadcast); exact."""
    if byte.dtype != jnp.uint8:
        raise TypeError(f"UE8M0 scales are uint8 exponents, got {byte.dtype}; a float is a decoded scale already")
    scaled = times_power_of_two(values, byte.astype(jnp.int32) - 127)
    return jnp.where(byte == 255, jnp.float32(jnp.nan), scaled)


def to_e4m3(x: jax.Array) -> jax.Array:
    """float32 to float8_e4m3fn: ties to even, saturating at +-448, infinities too; every NaN becomes 0x7F."""
    # XLA's own conversion turns all above 464 into NaN.
    finite = jnp.clip(x, -E4M3_MAX, E4M3_MAX)
    return jnp.where(jnp.isnan(x), jnp.float32(jnp.nan), finite).astype(jnp.float8_e4m3fn)


def to_e2m1(x: jax.Array) -> jax.Array:
    """float32 to 4-bit e2m1 codes, as uint8: ties to even, saturating at +-6; NaN becomes +6, as in PTX's satfinite."""
    a = jnp.abs(x)
    # A code is the number of rounding boundaries below |x|; at a boundary the even code wins.
    above = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0]
    code = sum((bound.astype(jnp.int32) for bound in above[1:]), above[0].astype(jnp.int32))
    code = code | ((lax.bitcast_convert_type(x, jnp.int32) >> 28) & 8)
    return jnp.where(jnp.isnan(x), jnp.int32(7), code).astype(jnp.uint8)


def from_e2m1(code: jax.Array) -> jax.Array:
    """The float32 values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of the low three bits, negated where bit 3 is set."""
    c = code.astype(jnp.int32)
    magnitude = c & 7
    # From 1.0 on: two exponent bits over one mantissa bit.
    normal = lax.bitcast_convert_type((((magnitude >> 1) + 126) << 23) | ((c & 1) << 22), jnp.float32)
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where((c & 8) != 0, -value, value)
