"""`lend`: PyTorch looks at a cache that JAX owns, for the length of a `with` block."""

import contextlib
import functools
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dsv4kv_jax import leases
from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.interop import _exchange
from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.interop.views import PageView
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.leases import LeaseError

ENDED = "this view has ended with its lease: lend the cache again, or hold a SharedSlab for long-lived views"


class TensorViews(Mapping[str, Any]):
    """The strided tensors of all layers on given buffers, made when first asked for.

    A mapping from layer name to tensor, over `layout.layers`: layers that share another's cache have its tensor.
    """

    def __init__(self, layout: PackedLayout, buffers: tuple[Any, ...], num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._buffers = buffers  # flat uint8 tensors
        self._described = _page_views(layout, num_blocks)
        self._typed: dict[tuple[int, str], Any] = {}  # the buffers in other dtypes
        self._views: dict[str | int, Any] = {}  # by layer; whole blocks by buffer
        self._kept: list[Any] = []

    def __getitem__(self, layer: str) -> Any:
        self._check_open()
        if layer not in self._described:
            raise KeyError(f"no layer {layer!r} here; this cache holds {len(self)}, such as {list(self)[:3]}")
        owner, buffer, view = self._described[layer]
        found = self._views.get(owner)
        if found is None:
            typed = self._typed.get((buffer, view.dtype))
            if typed is None:
                typed = self._buffers[buffer].view(getattr(require_torch(), view.dtype))
                self._typed[buffer, view.dtype] = typed
            found = self._views[owner] = view.on(typed)
        return found

    def __iter__(self) -> Iterator[str]:
        self._check_open()
        return iter(self.layout.layers)

    def __len__(self) -> int:
        return len(self.layout.layers)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """The slabs as flat `torch.uint8` tensors."""
        self._check_open()
        return self._buffers

    def whole_blocks(self, buffer: int = 0) -> Any:
        """`uint8[num_blocks, block_stride_bytes]` of a buffer at offset 0: all layers and all padding.

        Raises:
          ValueError: no such buffer.
        """
        self._check_open()
        if isinstance(buffer, bool) or not isinstance(buffer, int) or not 0 <= buffer < len(self._buffers):
            raise ValueError(f"buffer={buffer!r} does not exist; the layout has {len(self._buffers)}")
        if buffer not in self._views:
            self._views[buffer] = self._buffers[buffer].view(self.num_blocks, -1)
        return self._views[buffer]

    def keep_alive(self, array: Any) -> None:
        """Keeps a JAX array whose memory PyTorch reads (indices, say) until JAX waits for PyTorch's stream again.

        Freed before, its memory could go to a JAX program that runs while PyTorch still reads.
        """
        self._kept.append(array)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses copying and pickling: PyTorch's references to the memory may be given up once."""
        raise TypeError(f"a {type(self).__name__} stands for one piece of memory and cannot be copied or pickled")

    def _check_open(self) -> None:
        """Raises if the tensors may not be handed out any more."""

    def _end_views(self) -> None:
        """Turns every tensor handed out into one that raises on use, and lets go of the memory."""
        held = list(map(weakref.ref, self._views.values()))
        self._views, self._typed, self._buffers = {}, {}, ()
        alive = [view for view in (reference() for reference in held) if view is not None]
        held.clear()  # a tensor with a weak reference cannot be swapped
        for view in alive:
            _end_view(view)


class Lease(TensorViews):
    """The views of a lent cache; what `lend` gives. Enter it with `with`."""

    def __init__(self, cache: KVCache, stream: Any, after: Any) -> None:
        super().__init__(cache.layout, (), cache.num_blocks)
        self._slabs = cache.slabs
        self._addresses: tuple[int, ...] = ()
        self._storages: list[Any] = []
        self._stream = stream
        self._after = after
        self._device: _exchange.Device | None = None
        self._state = "new"  # then "open", "ended" while tensors made from views are alive, "over"

    def __enter__(self) -> "Lease":
        if self._state != "new":
            raise LeaseError("a lease is entered once; call lend(cache) again")
        check_slabs(self._slabs, self.layout, self.num_blocks)
        devices = {_exchange.only_device(slab, f"slab {i}") for i, slab in enumerate(self._slabs)}
        if len(devices) > 1:
            raise ValueError(f"the cache's slabs are on {len(devices)} devices; one lease is for one device")
        for slab in self._slabs:
            if borrower := leases.borrower_of(slab):
                raise LeaseError(f"this cache cannot be lent, because {borrower.why_not()}")
        self._device = next(iter(devices), None)
        if self._device is not None:
            self._open(self._device)
        self._state = "open"
        return self

    def _open(self, device: _exchange.Device) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        torch = require_torch()
        self._stream = _exchange.chosen_stream(device, self._stream)
        if self._stream is not None:
            _exchange.compute_stream(device)  # waits for the device, once
        _exchange.torch_waits_for(self._after, device, self._stream)
        bases = [_exchange.to_torch(slab, device, self._stream) for slab in self._slabs]
        self._storages = [StorageWeakRef(base.untyped_storage()) for base in bases]
        self._buffers = tuple(base.view(-1).view(torch.uint8) for base in bases)
        self._addresses = tuple(slab.unsafe_buffer_pointer() for slab in self._slabs)
        self._register()

    def _register(self) -> None:
        for address in self._addresses:
            leases.register(address, self)

    def _release(self) -> None:
        for address in self._addresses:
            leases.release(address)

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """While JAX runs a program on the lent memory with the borrower's consent (`SharedSlab.from_cache`)."""
        self._release()
        try:
            yield
        finally:
            self._register()

    def __exit__(self, exc_type: type[BaseException] | None, exc: object, traceback: object) -> None:
        deleted = [index for index, slab in enumerate(self._slabs) if slab.is_deleted()]
        self.finish()
        if deleted and exc_type is None:
            raise LeaseError(f"slab {deleted[0]} was donated or deleted while it was lent: what PyTorch saw is stale")

    def finish(self, *, patience_s: float = 0.0) -> None:
        """Ends every view, and the lease if no tensor made from one is alive; else the cache stays lent until then.

        Args:
          patience_s: how long to wait for JAX to let go of views that it imported itself.
        """
        if self._state != "open":
            return
        self._end_views()
        self._state, self._slabs = "ended", ()
        deadline = time.monotonic() + patience_s
        while not self.is_over() and time.monotonic() < deadline:
            time.sleep(1e-4)
        if self.is_over():
            self._release()

    def is_over(self) -> bool:
        """Whether no tensor can reach the slabs any more; from the first time that is so, JAX waits for PyTorch."""
        if self._state == "ended" and all(storage.expired() for storage in self._storages):
            if self._device is not None:
                _exchange.jax_waits_for(self._device, self._stream)
            self._state, self._after, self._kept = "over", (), []
        return self._state == "over"

    def why_not(self) -> str:
        if self._state == "open":
            return "it is lent to PyTorch: leave the `with lend(...)` block first"
        return (
            "a tensor made from one of its views outlives the lease: delete slices and reshapes of lent views (or make "
            "them inside a function), and clone what you want to keep"
        )

    def _check_open(self) -> None:
        if self._state == "new":
            raise LeaseError("enter the lease first: `with lend(cache) as views:`")
        if self._state != "open":
            raise LeaseError(ENDED)


def lend(cache: KVCache, *, stream: Any = None, after: Any = ()) -> Lease:
    """Lends a JAX-owned cache to PyTorch: `with lend(cache) as views: ... views["model.layers.2.attn"] ...`.

    `views` maps each layer's name to the tensor that vLLM would bind: `uint8[num_blocks, 64, 584]` for fp8_ds_mla,
    `[num_blocks, 2, 584]` for C128A, `[num_blocks, 64, 132]` for the indexer, `float32[num_blocks, block, dim]` for
    states, with `stride(0)` = the block stride and the layer's offset as storage offset. They are the slab's own
    memory; nothing is copied.

    Until the block ends the cache is PyTorch's: a jitted function that takes the `KVCache` raises `LeaseError` before
    it runs. After it the tensors raise on any use, and JAX may write and donate in place again. Tensors made from them
    (slices, reshapes) cannot be made to raise; while one is alive, the cache stays lent.

    Stream order, without the host waiting: PyTorch's work on `stream` runs after the JAX program that computed the
    cache, and JAX's later programs run after PyTorch's work on `stream`. A PyTorch stream other than `stream` must be
    joined to it (`stream.wait_stream(other)`) before the block ends.

    Args:
      cache: the cache, outside jit, on one device.
      stream: the `torch.cuda.Stream` that will use the views; the current one by default. None on a CPU.
      after: outputs of JAX programs that only *read* the cache and may still run. PyTorch waits for them too; needed
        where it writes through a view.

    Raises:
      ValueError: a donated, traced or sharded cache, slabs that are not its layout's, a device that PyTorch cannot see,
        or a stream of another kind.
      LeaseError: the cache is already lent; at the end of the block, it was deleted meanwhile.
    """
    if not isinstance(cache, KVCache):
        raise ValueError(f"lend takes a KVCache, not {type(cache).__name__}")
    require_torch()
    return Lease(cache, stream, after)


def check_slabs(slabs: tuple[Any, ...], layout: PackedLayout, num_blocks: int) -> None:
    """Raises `ValueError` unless `slabs` are the buffers of `layout`: views on anything else would name wrong bytes."""
    found = [(slab.dtype, slab.shape) if isinstance(slab, jax.Array) else type(slab).__name__ for slab in slabs]
    if found != [(np.uint32, buffer.shape(num_blocks)) for buffer in layout.buffers]:
        raise ValueError(
            f"the cache has slabs {found}; its layout makes them JAX arrays "
            f"{[f'uint32{list(buffer.shape(num_blocks))}' for buffer in layout.buffers]}"
        )


@functools.lru_cache(maxsize=16)
def _page_views(layout: PackedLayout, num_blocks: int) -> dict[str, tuple[str, int, PageView]]:
    """For each layer (the owner of its pages, their buffer, the view)."""
    return {
        layer: (page.name, page.buffer, PageView.of_page(page, num_blocks)) for layer, page in layout.layers.items()
    }


def _end_view(view: Any) -> None:
    """Turns `view` into a tensor that raises on every use and holds no memory."""
    torch = require_torch()
    # It fails where someone else holds the tensor (autograd, say): then its storage is alive, and the lease says so.
    with contextlib.suppress(RuntimeError):
        torch.utils.swap_tensors(view, torch.empty(0).as_subclass(_ended_view()))


def _ended_view() -> Any:
    global _EndedView
    if _EndedView is None:
        torch = require_torch()

        class EndedView(torch.Tensor):
            """What a lent view becomes when its lease ends."""

            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                raise LeaseError(ENDED)

        _EndedView = EndedView
    return _EndedView


_EndedView: Any = None
