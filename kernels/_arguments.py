"""Checks of arguments on the host, before anything runs: dtypes, shapes, and whether a page belongs to a slab."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax import formats
from dsv4kv_jax.layout import PageLayout

INT32_MAX = np.iinfo(np.int32).max


def as_int32(name: str, value: Any, *, ndim: int | None = None) -> jax.Array:
    """`value` as an int32 device array.

    Indices are int32 everywhere on the device, because 64-bit types are off in JAX unless asked for. Wider *host*
    integers (numpy arrays, lists) are converted after their range was checked; a wider device array is refused, since
    its values cannot be checked here and narrowing it would wrap.

    Raises:
      ValueError: not integers, out of int32's range, a device array of another dtype, or the wrong number of
        dimensions.
    """
    if isinstance(value, jax.Array):
        if value.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {value.dtype}; pass int32, e.g. {name}.astype(jnp.int32)")
        array = value
    else:
        host = np.asarray(value)
        if host.size == 0 and not isinstance(value, np.ndarray):
            host = host.astype(np.int32)
        if host.dtype.kind not in "iu":
            raise ValueError(f"{name} has dtype {host.dtype}; pass int32 integers")
        if host.dtype != np.int32 and host.size and (host.min() < -(2**31) or host.max() > INT32_MAX):
            raise ValueError(
                f"{name} holds values from {host.min()} to {host.max()}, which do not fit in int32; slots and indices "
                f"are int32, and -1 stands for none"
            )
        array = jnp.asarray(host.astype(np.int32))
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; it must have {ndim} dimension(s)")
    return array


def as_lengths(name: str, value: Any, *, size: int) -> jax.Array:
    """`value` as int32[size].

    Raises:
      ValueError: as `as_int32`, or another length.
    """
    array = as_int32(name, value, ndim=1)
    if array.shape[0] != size:
        raise ValueError(f"{name} has {array.shape[0]} entries; {size} are needed")
    return array


def as_query_start_loc(value: Any, num_requests: int) -> jax.Array:
    """`value` as int32[num_requests + 1].

    Raises:
      ValueError: as `as_lengths`, or host values that decrease. A device array is not looked at: tokens that belong to
        no request are padding.
    """
    array = as_lengths("query_start_loc", value, size=num_requests + 1)
    if not isinstance(value, jax.Array):
        (falls,) = np.nonzero(np.diff(np.asarray(value, np.int64)) < 0)
        if falls.size:
            request = int(falls[0])
            raise ValueError(
                f"query_start_loc falls from {value[request]} to {value[request + 1]} at request {request}; the tokens "
                f"of a step lie one request after another, so it must not decrease"
            )
    return array


def check_slab(slab: Any) -> None:
    """Raises `ValueError` unless `slab` is a uint32 array of three dimensions."""
    if not isinstance(slab, jax.Array | np.ndarray) or slab.dtype != jnp.uint32 or slab.ndim != 3:
        found = f"{slab.dtype}{list(slab.shape)}" if hasattr(slab, "dtype") else type(slab).__name__
        raise ValueError(
            f"slab is {found}; it must be uint32[num_blocks, rows_per_block, words_per_row], as KVCache.slab is"
        )


def check_page(slab: Any, page: PageLayout) -> None:
    """Raises `ValueError` unless `page` lies in the blocks of `slab`."""
    check_slab(slab)
    _, rows, words = slab.shape
    if words != page.words_per_row or rows * words * formats.WORD_BYTES != page.block_stride_bytes:
        raise ValueError(
            f"slab has shape {slab.shape}: {rows} rows of {words} words a block; layer {page.name!r} lies in blocks of "
            f"{page.block_stride_bytes} B with rows of {page.words_per_row} words: pass the slab of the same plan"
        )


def check_count(name: str, value: int, *, at_least: int = 0) -> int:
    """`value` as a Python int of at least `at_least`, and of int32; raises `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ValueError(f"{name}={value!r} must be a Python integer of at least {at_least}")
    if value > INT32_MAX:
        raise ValueError(f"{name}={value!r} must be at most {INT32_MAX}; counts and indices are int32")
    return int(value)
