"""Static objects of jitted functions, hashed once."""

from typing import Any, TypeVar

T = TypeVar("T")


def cached_hash(cls: type[T]) -> type[T]:
    """Class decorator for a frozen dataclass that is static data of a pytree.

    JAX hashes and compares such data on every call of a jitted function; a plan holds hundreds of layers, so the hash
    is kept and equality of an object with itself does not look inside.
    """
    full_hash: Any = cls.__hash__
    full_eq: Any = cls.__eq__

    def __hash__(self: Any) -> int:
        try:
            return self.__dict__["_hash"]
        except KeyError:
            return self.__dict__.setdefault("_hash", full_hash(self))

    def __eq__(self: Any, other: object) -> Any:
        if self is other:
            return True
        if type(other) is not type(self):
            return NotImplemented
        return hash(self) == hash(other) and full_eq(self, other)

    cls.__hash__ = __hash__
    cls.__eq__ = __eq__
    return cls
