"""Handing one buffer from JAX to PyTorch and back: the DLPack calls, and the order of the two frameworks' work.

On a GPU both sides enqueue work on streams of their own. Every hand-over makes the receiver's stream wait, on the
device, for what the giver had enqueued; the host never waits. On a CPU PyTorch is synchronous and JAX is not, so the
host waits for JAX before PyTorch looks.
"""

import functools
import os
import warnings
from typing import Any, TypeAlias

import jax
import jax.core

from dsv4kv_jax.interop._compute_stream import compute_stream_handle
from dsv4kv_jax.interop._torch import require_torch

Device: TypeAlias = Any  # a jax.Device, which is no class to a type checker

_DL_CUDA = 2  # DLDeviceType of the DLPack protocol
_LEGACY_DEFAULT_STREAM = 1  # how DLPack and the CUDA runtime spell PyTorch's default stream, whose handle is 0

try:  # What `jax.dlpack` and `Array.__dlpack__` call, without their look-ups, which cost more than the hand-over.
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    _capsule_to_array: Any = _jax.dlpack_managed_tensor_to_buffer
    _array_to_capsule = _jax.buffer_to_dlpack_managed_tensor
except (ImportError, AttributeError):
    _capsule_to_array = None

    def _array_to_capsule(array: Any, stream: Any = None) -> Any:
        return array.__dlpack__(stream=stream)


def is_gpu(device: Device) -> bool:
    return device.platform != "cpu"


def only_device(array: jax.Array, what: str) -> Device:
    """The device of a concrete, live, unsharded array.

    Raises:
      ValueError: traced, donated or deleted, sharded or replicated over several devices, or on no CPU or CUDA GPU.
    """
    if isinstance(array, jax.core.Tracer):
        raise ValueError(f"{what} is being traced; PyTorch can only look at it outside jit")
    if array.is_deleted():
        raise ValueError(f"{what} was donated or deleted; use the cache that the donating function returned")
    devices = array.devices()
    if len(devices) != 1:
        raise ValueError(
            f"{what} is spread over {len(devices)} devices, and a PyTorch tensor lives on one: allocate one cache a "
            f"device, or pass each of `array.addressable_shards`"
        )
    (device,) = devices
    if device.platform not in ("cpu", "gpu"):
        raise ValueError(
            f"{what} is on platform {device.platform!r}; PyTorch can share memory on 'cpu' and 'gpu' (CUDA)"
        )
    if is_gpu(device):
        warn_of_preallocation()
    return device


def current_stream(device: Device) -> Any:
    """PyTorch's current stream on `device`; None on a CPU."""
    if not is_gpu(device):
        return None
    return _cuda().current_stream(device.local_hardware_id)


def chosen_stream(device: Device, stream: Any) -> Any:
    """`stream`, or where it is None PyTorch's current one on `device`; None on a CPU.

    Raises:
      ValueError: no stream of PyTorch's, or one for a CPU, which has none.
    """
    if stream is None:
        return current_stream(device)
    if not is_gpu(device) or not hasattr(stream, "cuda_stream"):
        raise ValueError(f"stream={stream!r} must be a torch.cuda.Stream, or None on a CPU, which has no streams")
    return stream


@functools.cache
def _cuda() -> Any:
    torch = require_torch()
    if not torch.cuda.is_available():
        raise ValueError(
            f"the cache is on a GPU, and this PyTorch ({torch.__version__}) has no CUDA: install a CUDA build, or "
            f"allocate the cache on jax.devices('cpu')[0]"
        )
    return torch.cuda


def to_torch(array: Any, device: Device, stream: Any) -> Any:
    """A tensor on the memory of `array`, whose pending computation `stream` waits for."""
    if stream is None:
        array.block_until_ready()
    # No newer version of the protocol is asked for: its capsules mark JAX's memory read-only.
    capsule = array.__dlpack__(stream=None if stream is None else _handle(stream))
    return require_torch().utils.dlpack.from_dlpack(capsule)


def to_jax(tensor: Any, device: Device, stream: Any) -> jax.Array:
    """An array on the memory of `tensor`; whatever uses it runs after the work now enqueued on `stream`.

    The tensor must be compact.
    """
    torch = require_torch()
    if _capsule_to_array is None:
        if stream is None:
            return jax.dlpack.from_dlpack(tensor)
        with torch.cuda.stream(stream):
            return jax.dlpack.from_dlpack(tensor)
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    if stream is None:
        return _capsule_to_array(capsule, device, None, None)
    handle = device.get_stream_for_external_ready_events()
    _follow(_external_stream(handle, device.local_hardware_id), stream)
    return _capsule_to_array(capsule, device, handle, None, _DL_CUDA)


def torch_waits_for(arrays: Any, device: Device, stream: Any) -> None:
    """Makes `stream` (on a CPU: the host) wait for the programs that compute `arrays`, a pytree.

    Raises:
      ValueError: one of them was donated or deleted.
    """
    leaves = jax.tree.leaves(arrays)
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        raise ValueError("an array to wait for was donated or deleted; pass what the donating function returned")
    if stream is None:
        jax.block_until_ready(leaves)
        return
    for array in leaves:
        if isinstance(array, jax.Array) and array.size and array.devices() == {device}:
            torch_waits_for_array(array, stream)


def torch_waits_for_array(array: Any, stream: Any) -> None:
    """As `torch_waits_for`, for one array of the stream's device."""
    # Exporting is what waits; the capsule is dropped unused. What DLPack cannot carry is waited for by the host.
    try:
        _array_to_capsule(array, stream=_handle(stream))
    except (BufferError, TypeError, ValueError, RuntimeError):
        jax.block_until_ready(array)


def _handle(stream: Any) -> int:
    return stream.cuda_stream or _LEGACY_DEFAULT_STREAM


def jax_waits_for(device: Device, stream: Any) -> None:
    """Makes every JAX program dispatched to `device` from now on run after the work now enqueued on `stream`.

    A GPU runs the programs of one JAX device in order on one stream. Where XLA does not tell which, one tiny program
    that waits does the same, and costs the host some ten times as much.
    """
    if stream is None:
        return
    own = compute_stream(device)
    if own is None:
        _tiny_program(to_jax(_fence(device.local_hardware_id), device, stream))
    else:
        _follow(own, stream)


@functools.cache
def compute_stream(device: Device) -> Any:
    """The stream of a GPU's JAX programs, or None where XLA does not tell."""
    try:
        handle = compute_stream_handle(device)
    except Exception:  # whatever XLA raises for a call that it does not take; there is another way
        handle = None
    return None if handle is None else _external_stream(handle, device.local_hardware_id)


def _follow(follower: Any, stream: Any) -> None:
    """Makes what is enqueued on `follower` from now on wait for the work now enqueued on `stream`; on the device."""
    event = _event(stream.cuda_stream, stream.device_index)
    event.record(stream)
    event.wait(follower)


@jax.jit
def _tiny_program(x: jax.Array) -> jax.Array:
    return x + x


@functools.cache
def _fence(index: int) -> Any:
    torch = require_torch()
    return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", index))


@functools.cache
def _external_stream(handle: int, index: int) -> Any:
    torch = require_torch()
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))


@functools.cache
def _event(handle: int, index: int) -> Any:
    """The event for all hand-overs from a stream: a wait refers to what was recorded when it was enqueued."""
    torch = require_torch()
    with torch.cuda.device(index):
        return torch.cuda.Event()


@functools.cache
def warn_of_preallocation() -> None:
    """Warns, once a process, that PyTorch will find little memory where JAX preallocates most of the GPU's."""
    message = preallocation_message(os.environ)
    if message:
        warnings.warn(message, stacklevel=4)


def preallocation_message(environ: Any) -> str | None:
    """What to tell the user about JAX's share of the GPU under these environment variables; None if nothing."""
    off = environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
    if off or environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() in ("platform", "cuda_async"):
        return None
    set_by_user = environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or environ.get("XLA_CLIENT_MEM_FRACTION")
    if set_by_user:
        return None
    return (
        "JAX has preallocated 75% of this GPU's memory, which PyTorch cannot use. Before importing JAX set "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false, or XLA_PYTHON_CLIENT_MEM_FRACTION to the share that JAX may have"
    )
