"""Integers as callers give them: of any integer type, checked, and made plain before anything is computed with them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4kv_jax.config import MAX_INT32


def as_count(name: str, value: Any, *, at_least: int = 0) -> int:
    """`value` as a Python int: arithmetic on one of numpy's narrow integers would wrap.

    Raises:
      ValueError: no integer (a bool is none), below `at_least`, or more than int32 holds.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not at_least <= value <= MAX_INT32:
        raise ValueError(f"{name}={value!r} must be an integer of at least {at_least} and at most {MAX_INT32}")
    return int(value)


def as_int32_numpy(name: str, value: Any) -> np.ndarray:
    """Host integers of any type (an array, nested lists, a number) as a numpy int32 array, range-checked.

    Raises:
      ValueError: not integers, or out of int32's range.
    """
    try:
        host = np.asarray(value)
    except (TypeError, ValueError):  # lists of different lengths, objects
        host = np.asarray(None)
    if not host.size and not isinstance(value, np.ndarray):
        host = host.astype(np.int32)  # numpy takes an empty list for one of floats
    if host.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {host.dtype}; tables and indices are int32 integers")
    limits = np.iinfo(np.int32)
    if host.size and (host.min() < limits.min or host.max() > limits.max):
        raise ValueError(
            f"{name} holds values from {host.min()} to {host.max()}, which do not fit in int32; slots and indices are "
            f"int32, and -1 stands for none"
        )
    return host.astype(np.int32)


def as_ids(verb: str, block_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Block ids as an integer array of one dimension, a copy only if they are none yet; their range is not checked.

    Raises:
      ValueError: anything else; `verb` says what cannot be done with them.
    """
    try:
        ids = np.asarray(block_ids)
    except ValueError:  # lists of different lengths
        ids = np.empty((0, 0))
    if ids.shape == (0,):
        ids = ids.astype(np.int32)  # numpy takes an empty list for one of floats
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"cannot {verb} {block_ids!r}: block ids must be a list of integers")
    return ids
