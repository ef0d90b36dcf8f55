"""Slabs lent out of JAX: the register that `interop.lend` fills and that every use of a `KVCache` by JAX consults.

A buffer that PyTorch looks at must not be donated: XLA refuses on a GPU, and on a CPU it copies the buffer without a
word, so that PyTorch goes on reading bytes nobody writes any more. Nor may JAX and PyTorch use it in an unknown order.
So a cache belongs to one side at a time, and a `KVCache` that is lent does not flatten: no jitted function takes it
until the lease ends. What is left to the user is a bare slab array taken out of the cache: JAX has no hook there, so
reading it during a lease is allowed, and `check_donatable` is for those who donate it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import jax.core


class LeaseError(ValueError):
    """A lent cache was used by JAX, or a view of it outlives its lease."""


class Borrower(Protocol):
    """Who holds views of a slab. The register forgets it once `is_over()`."""

    def is_over(self) -> bool: ...

    def why_not(self) -> str:
        """Why the slab is not free, and how to free it; ends a sentence that begins with what was refused."""
        ...


_borrowers: dict[int, Borrower] = {}  # by device address of the slab


def register(address: int, borrower: Borrower) -> None:
    """Notes that `borrower` holds views of the slab at `address`."""
    for old in [old for old, other in _borrowers.items() if other.is_over()]:
        release(old)
    _borrowers[address] = borrower


def release(address: int) -> None:
    """Forgets the borrower of the slab at `address`, if any."""
    _borrowers.pop(address, None)


def borrower_of(array: Any) -> Borrower | None:
    """Who holds views of `array`; None for anything but a concrete array of one device."""
    if not _borrowers or not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return None
    if array.is_deleted() or len(array.devices()) != 1:
        return None
    address = array.unsafe_buffer_pointer()
    borrower = _borrowers.get(address)
    if borrower is not None and borrower.is_over():
        release(address)
        return None
    return borrower


def check_not_lent(arrays: Iterable[Any]) -> None:
    """Raises `LeaseError` if one of `arrays` is lent; costs one comparison while nothing is."""
    if not _borrowers:
        return
    for array in arrays:
        if borrower := borrower_of(array):
            raise LeaseError(f"JAX cannot take this cache, because {borrower.why_not()}")


def check_donatable(tree: Any) -> None:
    """Checks that every array in `tree` (a cache, a slab, any pytree) may be donated now.

    Call it before a jitted function that donates a bare slab; a `KVCache` argument is checked anyway.

    Raises:
      LeaseError: an array is lent to PyTorch, or was donated before.
    """
    for array in jax.tree.leaves(tree):
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
            raise LeaseError(
                f"this {array.dtype}{list(array.shape)} array was donated already; use what that function returned"
            )
        check_not_lent([array])


def checked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Debug mode for a step that donates a cache: checks every call before and after it.

    `step` is a jitted function that donates its first argument, a `KVCache` or a slab, and returns the new one, alone
    or as the first of a tuple. The check costs a few microseconds and does not wait for the device.

    Raises (when called):
      LeaseError: the argument is lent or was donated before; or the result lies elsewhere than the argument did: the
        step copied the whole slab instead of writing in place.
    """

    @functools.wraps(step)
    def checked(cache: Any, *args: Any, **kwargs: Any) -> Any:
        check_donatable(cache)
        before = [slab.unsafe_buffer_pointer() for slab in jax.tree.leaves(cache)]
        result = step(cache, *args, **kwargs)
        new = result[0] if isinstance(result, tuple) else result
        after = [slab.unsafe_buffer_pointer() for slab in jax.tree.leaves(new)]
        if after != before:
            raise LeaseError(
                f"the step copied the cache: its slabs were at {list(map(hex, before))} and are at "
                f"{list(map(hex, after))}; jit it with donate_argnums=0, keep no other view of the slab (np.asarray "
                f"makes one on a CPU), and let every write depend on an earlier read"
            )
        return result

    return checked
