"""Dataclasses of arrays as pytrees: every field is data, none is static."""

import dataclasses
from typing import TypeVar

import jax

_Class = TypeVar("_Class", bound=type)


def pytree(cls: _Class) -> _Class:
    """Registers a dataclass whose fields are all arrays or pytrees; None is an empty pytree."""
    names = [field.name for field in dataclasses.fields(cls)]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])
