"""Products that are summed in float32 on every backend."""

from typing import Any

import jax
import jax.numpy as jnp


def einsum_f32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum(subscripts, a, b)` of operands of one dtype, float32 or bfloat16, with float32 sums and result.

    float32 operands are not rounded to anything shorter on the way, as GPUs do by default. XLA's CPU backend has no
    bfloat16 product with float32 sums, so there the operands are widened first, which changes no bit of a product.
    """
    if a.dtype == jnp.float32:
        return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)

    def narrow(a: jax.Array, b: jax.Array) -> Any:
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    def widened(a: jax.Array, b: jax.Array) -> Any:
        return jnp.einsum(subscripts, a.astype(jnp.float32), b.astype(jnp.float32))

    return jax.lax.platform_dependent(a, b, cpu=widened, default=narrow)
