"""Doing a batch chunk by chunk, so that what is held at a time stays small."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsv4kv_jax.specs import cdiv


def map_chunks(function: Callable[..., Any], arrays: tuple[jax.Array, ...], chunk: int) -> Any:
    """`function(*arrays)`, computed for about `chunk` leading entries at a time.

    Args:
      function: maps arrays of n leading entries to a pytree of arrays of n leading entries, each entry by itself.
      arrays: at least one, all with the same number of leading entries. The last chunk is filled up with zeros.
      chunk: most entries at a time, at least 1.

    Returns:
      What `function` returns for all entries. One chunk is one plain call; more are a `lax.map`.
    """
    size = arrays[0].shape[0]
    if size <= chunk:
        return function(*arrays)
    num_chunks = cdiv(size, chunk)
    chunk = cdiv(size, num_chunks)

    def split(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, [(0, num_chunks * chunk - size), *[(0, 0)] * (array.ndim - 1)])
        return array.reshape(num_chunks, chunk, *array.shape[1:])

    result = jax.lax.map(lambda part: function(*part), tuple(map(split, arrays)))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:])[:size], result)
