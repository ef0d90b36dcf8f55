"""`SharedSlab`: memory that PyTorch holds for good and JAX writes in place, step by step."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dsv4kv_jax.cache import KVCache, layout_and_blocks
from dsv4kv_jax.interop import _exchange
from dsv4kv_jax.interop._exchange import Device
from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.interop.lease import Lease, TensorViews, check_slabs, lend
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.leases import LeaseError
from dsv4kv_jax.plan import KVCachePlan

ALIGNMENT_BYTES = 64  # XLA's for memory that it does not own
_CONTAINER_DTYPES = ("int8", "uint8", "int32", "uint32")


class SharedSlab(TensorViews):
    """A cache in PyTorch's memory, with views that live as long as it does: a mapping from layer to tensor.

    JAX gets the memory for one program at a time: `step` donates it to a jitted function and checks that the function
    wrote in place. What the function returned is what the next step donates, so the memory is imported once. The
    streams are ordered both ways and the host does not wait.

    XLA writes in place into memory of others on a GPU only. On a CPU it would silently work on a copy, so there a
    `SharedSlab` is refused unless `copy_on_cpu=True`: then every step copies the whole slab back.

    Args:
      tensors: one compact tensor a buffer of `layout` (a packed layout has one), such as the `int8` backing tensor that
        vLLM allocates; of 1- or 4-byte integers. It is adopted, not copied.
      layout: which bytes belong to which layer.
      copy_on_cpu: accept a copy of the whole slab in every step on a CPU.

    Raises:
      ValueError: tensors that JAX cannot share (see the message for the way out), or a CPU without `copy_on_cpu`.
    """

    def __init__(self, tensors: Any, layout: PackedLayout, *, copy_on_cpu: bool = False) -> None:
        torch = require_torch()
        tensors = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
        if not isinstance(layout, PackedLayout):
            raise ValueError(f"layout is a {type(layout).__name__}; pass a PackedLayout, such as plan.layout")
        if len(tensors) != len(layout.buffers):
            raise ValueError(f"{len(tensors)} tensors were given, and the layout has {len(layout.buffers)} buffers")
        counts = set()
        for index, (tensor, buffer) in enumerate(zip(tensors, layout.buffers, strict=True)):
            _check_tensor(tensor, f"tensors[{index}]")
            counts.add(_num_blocks(tensor, buffer.block_stride_bytes, f"tensors[{index}]"))
        if len(counts) > 1:
            raise ValueError(f"the tensors hold {sorted(counts)} blocks; all buffers of a layout have the same number")
        num_blocks = counts.pop() if counts else 0
        _check_apart(tensors)
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(f"the tensors are on {sorted(map(str, devices))}; a SharedSlab is on one device")
        self._device = jax_device(devices.pop()) if devices else jax.devices("cpu")[0]
        if not _exchange.is_gpu(self._device) and not copy_on_cpu:
            raise ValueError(
                "on a CPU XLA does not write into PyTorch's memory, it silently works on a copy: let JAX own the cache "
                "and use `lend`, or accept a copy of the whole slab in every step with copy_on_cpu=True"
            )
        flat = tuple(tensor.reshape(-1).view(torch.uint8) for tensor in tensors)
        super().__init__(layout, flat, num_blocks)
        self._slabs = tuple(
            tensor.view(torch.uint32).view(buffer.shape(num_blocks))
            for tensor, buffer in zip(flat, layout.buffers, strict=True)
        )
        self._addresses = [tensor.data_ptr() for tensor in flat]
        if _exchange.is_gpu(self._device):
            _exchange.compute_stream(self._device)  # waits for the device, once
        self._cache: KVCache | None = None  # the memory as JAX has it between steps; on a GPU
        self._lease: Lease | None = None
        self._closed = False

    @classmethod
    def allocate(
        cls,
        plan: KVCachePlan,
        *,
        device: Any = "cuda",
        num_blocks: int | None = None,
        worker: int = 0,
        copy_on_cpu: bool = False,
    ) -> "SharedSlab":
        """A zeroed cache for one worker of `plan`, allocated by PyTorch on `device`.

        Raises:
          PlanError: as `KVCache.allocate`.
          ValueError: as the class.
        """
        torch = require_torch()
        layout, blocks = layout_and_blocks(plan, worker, num_blocks)
        tensors = [
            torch.zeros(buffer.block_stride_bytes * blocks, dtype=torch.uint8, device=device)
            for buffer in layout.buffers
        ]
        return cls(tensors, layout, copy_on_cpu=copy_on_cpu)

    @classmethod
    def from_cache(cls, cache: KVCache) -> "SharedSlab":
        """The memory of a cache that JAX allocated, shared until `close`. It counts against JAX's share, not PyTorch's.

        `cache` is lent meanwhile; after `close` it is usable again and holds what was written.

        Raises:
          ValueError: as the class; the memory must be on a GPU.
          LeaseError: the cache is lent already.
        """
        lease = lend(cache)
        lease.__enter__()
        try:
            shared = cls(lease.buffers, cache.layout)
        except ValueError:
            lease.finish()
            raise
        shared._lease = lease
        weakref.finalize(shared, lease.finish).atexit = False  # dropped without close: then its views keep the lease
        return shared

    @property
    def device(self) -> Device:
        """The JAX device that the memory is on."""
        return self._device

    def step(self, fn: Callable[..., Any], *args: Any, stream: Any = None, **kwargs: Any) -> Any:
        """Runs `fn(cache, *args, **kwargs)`, which writes the shared memory.

        Args:
          fn: a jitted function that donates its first argument, a `KVCache`, and returns the new one, alone or as the
            first of a tuple. Only programs wait for PyTorch: it must not copy the cache to the host.
          *args: passed on, as `**kwargs` are.
          stream: the `torch.cuda.Stream` of the work before and after the step; PyTorch's current one by default.

        Returns:
          What `fn` returned after the cache: nothing, the one other value, or a tuple of them.

        Raises:
          ValueError: `fn` returned no cache, or did not write in place; the shared memory then holds the old bytes.
          LeaseError: the slab is closed.
        """
        self._check_open()
        stream = _exchange.chosen_stream(self._device, stream)
        if stream is None:
            result = self._call(fn, self._imported(None), args, kwargs)
            new, rest = self._checked(result)
            check_slabs(new.slabs, self.layout, self.num_blocks)
            self._copy_back(new)
        else:
            _exchange.jax_waits_for(self._device, stream)
            cache, self._cache = self._cache, None
            if cache is None or any(slab.is_deleted() for slab in cache.slabs):
                cache = self._imported(stream)
            new, rest = self._checked(self._call(fn, cache, args, kwargs))
            if [slab.unsafe_buffer_pointer() for slab in new.slabs] != self._addresses:
                raise ValueError(
                    "the step wrote a new buffer, which PyTorch does not see: jit it with donate_argnums=0, and return "
                    "the cache that it wrote"
                )
            for slab in new.slabs:
                _exchange.torch_waits_for_array(slab, stream)
            self._cache = new
        return rest[0] if len(rest) == 1 else rest or None

    def read(self, fn: Callable[..., Any], *args: Any, stream: Any = None, **kwargs: Any) -> Any:
        """Runs `fn(cache, *args, **kwargs)`, which only reads the shared memory, and returns what it returns.

        PyTorch's later writes on `stream` wait until `fn` has read. `fn` must not donate the cache.

        Raises:
          LeaseError: the slab is closed.
        """
        self._check_open()
        stream = _exchange.chosen_stream(self._device, stream)
        _exchange.jax_waits_for(self._device, stream)
        result = self._call(fn, self._imported(stream), args, kwargs)
        _exchange.torch_waits_for(result, self._device, stream)
        return result

    def close(self) -> None:
        """Ends every view: using one raises from now on. PyTorch frees the memory when nobody holds it.

        A cache whose memory it was (`from_cache`) is JAX's again, once no tensor made from a view is alive.
        """
        self._closed = True
        self._end_views()
        self._slabs, self._cache = (), None
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.finish(patience_s=10.0)  # JAX drops its last import when the program that used it has ended

    def __enter__(self) -> "SharedSlab":
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseError("this SharedSlab is closed; its memory belongs to nobody here")

    def _imported(self, stream: Any) -> KVCache:
        """The memory as a cache that JAX has not seen before: programs and copies of it wait for `stream`."""
        slabs = tuple(_exchange.to_jax(tensor, self._device, stream) for tensor in self._slabs)
        return KVCache(slabs=slabs, layout=self.layout)

    def _call(self, fn: Callable[..., Any], cache: KVCache, args: Any, kwargs: Any) -> Any:
        self._kept = []  # JAX's programs now wait for what PyTorch read
        if self._lease is None:
            return fn(cache, *args, **kwargs)
        with self._lease.taken_back():
            return fn(cache, *args, **kwargs)

    def _checked(self, result: Any) -> tuple[KVCache, tuple[Any, ...]]:
        """What a step returned: (the cache, the rest)."""
        self._check_open()
        new, rest = (result[0], result[1:]) if isinstance(result, tuple) and result else (result, ())
        if not isinstance(new, KVCache) or (new.layout is not self.layout and new.layout != self.layout):
            raise ValueError(
                f"the step returned {type(new).__name__}; it must return the cache that it was given, after its "
                f"writes, alone or as the first of a tuple"
            )
        return new, rest

    def _copy_back(self, cache: KVCache) -> None:
        for tensor, slab in zip(self._slabs, cache.slabs, strict=True):
            tensor.copy_(_exchange.to_torch(slab, self._device, None))


def jax_device(device: Any) -> Device:
    """The JAX device of a `torch.device`.

    Raises:
      ValueError: JAX has no such device here.
    """
    if device.type == "cpu":
        return jax.devices("cpu")[0]
    if device.type != "cuda":
        raise ValueError(f"device {device} cannot be shared with JAX; use 'cuda', or 'cpu' with copy_on_cpu=True")
    try:
        gpus = jax.local_devices(backend="gpu")
    except RuntimeError:
        raise ValueError(f"a tensor on {device} needs a JAX with CUDA: pip install 'dsv4kv_jax[cuda13]'") from None
    index = require_torch().cuda.current_device() if device.index is None else device.index
    for gpu in gpus:
        if gpu.local_hardware_id == index:
            return gpu
    raise ValueError(f"JAX does not see {device}; it has {gpus}: check CUDA_VISIBLE_DEVICES and jax.distributed")


def _check_tensor(tensor: Any, name: str) -> None:
    torch = require_torch()
    if isinstance(tensor, jax.Array):
        raise ValueError(
            f"{name} is a JAX array, which PyTorch may not write: use `lend` for a while, or `SharedSlab.from_cache`"
        )
    if isinstance(tensor, np.ndarray):
        way = "torch.from_numpy" if tensor.flags.writeable else "torch.from_numpy(array.copy()), since it is read-only"
        raise ValueError(f"{name} is a numpy array; pass a torch tensor: {way}")
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; pass the torch tensor that backs the whole cache")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _CONTAINER_DTYPES:
        raise ValueError(
            f"{name} has dtype {dtype}; a slab is bytes or words, one of {', '.join(_CONTAINER_DTYPES)}: pass the "
            f"backing tensor, or tensor.view(torch.uint8)"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; JAX takes compact memory only: "
            f"pass the whole slab and let the layout make the strided views"
        )
    if tensor.numel() and tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(
            f"{name} starts at address {tensor.data_ptr():#x}, which is not a multiple of {ALIGNMENT_BYTES}: XLA would "
            f"copy it. Pass a tensor of its own, not one that starts inside another"
        )


def _check_apart(tensors: list[Any]) -> None:
    """Raises `ValueError` if two tensors share bytes: what one buffer holds would change with another."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), i) for i, t in enumerate(tensors))
    for (_, end, index), (start, _, other) in itertools.pairwise(spans):
        if start < end and start:
            raise ValueError(f"tensors[{index}] and tensors[{other}] overlap in memory; give every buffer its own")


def _num_blocks(tensor: Any, block_stride_bytes: int, name: str) -> int:
    size = tensor.numel() * tensor.element_size()
    if size % block_stride_bytes or not size:
        raise ValueError(
            f"{name} has {size} B, which is no whole number of blocks of {block_stride_bytes} B: pass "
            f"exactly the blocks, tensor[: num_blocks * {block_stride_bytes}] in bytes"
        )
    return size // block_stride_bytes
