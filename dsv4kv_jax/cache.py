"""The cache itself: the slab on the device, and the layout that says what its bytes are."""

import dataclasses
import os
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax import leases, storage
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.layout import PackedLayout, PageLayout
from dsv4kv_jax.plan import MIN_BLOCKS, KVCachePlan

# For `jax.jit(step, donate_argnums=0, compiler_options=COMPILER_OPTIONS)`, on a GPU. When XLA estimates the memory of a
# program it counts the slab that the kernels update in place several times over. Where that seems not to fit, it
# computes small results anew for every use ("rematerialization"), at 25 more kernels a layer, to save memory that is
# not short.
COMPILER_OPTIONS = types.MappingProxyType({"xla_disable_hlo_passes": "rematerialization"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """One worker's KV cache: a pytree whose leaves are the slabs and whose layout is static.

    Donate it to a jitted function that writes it (`jax.jit(step, donate_argnums=0)`): the write then happens in place.
    Equal layouts cause no second trace. A cache that is lent to PyTorch cannot be passed to a jitted function.

    Attributes:
      slabs: one `uint32[num_blocks, rows_per_block, words_per_row]` array per buffer of the layout; a packed layout has
        one. A slab row is `layout.alignment` bytes: 144 words for fp8_ds_mla, 128 otherwise.
      layout: which bytes belong to which layer.
    """

    slabs: tuple[jax.Array, ...]
    layout: PackedLayout

    @classmethod
    def allocate(
        cls,
        plan: KVCachePlan,
        *,
        device: Any = None,
        num_blocks: int | None = None,
        worker: int = 0,
    ) -> "KVCache":
        """Allocates a zeroed cache for one worker of `plan`.

        Args:
          plan: the plan.
          device: a `jax.Device` or `Sharding` to put it on; JAX's default device if not given.
          num_blocks: blocks to allocate; by default all that were planned.
          worker: index into `plan.workers`.

        Raises:
          PlanError: no such worker, fewer than 2 blocks, or more than the plan has.
        """
        layout, blocks = layout_and_blocks(plan, worker, num_blocks)
        slabs = tuple(jnp.zeros(buffer.shape(blocks), jnp.uint32, device=device) for buffer in layout.buffers)
        return cls(slabs=slabs, layout=layout)

    def save(self, path: str | os.PathLike[str], plan: KVCachePlan, *, worker: int = 0) -> None:
        """Saves the slabs and the plan in one safetensors file; waits for the device.

        Raises:
          PlanError: the cache was not made from this worker of `plan`.
          OSError: the file cannot be written.
        """
        if (
            not 0 <= worker < len(plan.workers)
            or plan.workers[worker].layout != self.layout
            or self.num_blocks > plan.num_blocks
        ):
            raise PlanError(
                f"this cache is not worker {worker} of the given plan; save it with the plan that allocated it"
            )
        storage.save(path, tuple(np.asarray(slab) for slab in self.slabs), plan, worker)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        plan: KVCachePlan,
        *,
        device: Any = None,
        worker: int = 0,
    ) -> "KVCache":
        """Restores a cache saved with `save`.

        Raises:
          PlanError: no saved cache, damaged bytes, or saved from a plan or worker that differs.
          FileNotFoundError: no such file.
        """
        slabs, saved, saved_worker = storage.load(path)
        if saved != plan or saved_worker != worker:
            raise PlanError(
                f"{os.fspath(path)!r} was saved from another plan: {saved.model} {saved.cache_dtype} with "
                f"{saved.num_blocks} blocks, worker {saved_worker}; asked for was {plan.model} {plan.cache_dtype} with "
                f"{plan.num_blocks} blocks, worker {worker}"
            )
        # Copied: a cache is donated, and XLA donates no memory that numpy owns.
        on_device = tuple(jax.device_put(slab, device, may_alias=False) for slab in slabs)
        return cls(slabs=on_device, layout=plan.workers[worker].layout)

    @property
    def num_blocks(self) -> int:
        """Blocks of every slab; 0 for a model without layers."""
        return self.slabs[0].shape[0] if self.slabs else 0

    @property
    def nbytes(self) -> int:
        """Device bytes of all slabs."""
        return sum(slab.size * slab.dtype.itemsize for slab in self.slabs)

    @property
    def slab(self) -> jax.Array:
        """The one slab of a packed cache.

        Raises:
          PlanError: the layout has another number of buffers; use `slabs[page.buffer]`.
        """
        if len(self.slabs) != 1:
            raise PlanError(
                f"this cache has {len(self.slabs)} slabs (allocation form {self.layout.form!r}); use slabs[page.buffer]"
            )
        return self.slabs[0]

    def page(self, layer: str) -> PageLayout:
        """The static page description of a layer, which kernels take beside the slab.

        Raises:
          PlanError: this worker has no such layer.
        """
        return self.layout.page(layer)

    def slab_of(self, layer: str) -> jax.Array:
        """The slab that holds the layer's pages."""
        return self.slabs[self.page(layer).buffer]

    def with_slab(self, slab: jax.Array, buffer: int = 0) -> "KVCache":
        """The cache with slab number `buffer` replaced by `slab`, of the same shape and dtype.

        Raises:
          ValueError: another shape or dtype.
        """
        old = self.slabs[buffer]
        if slab.shape != old.shape or slab.dtype != old.dtype:
            raise ValueError(
                f"slab {buffer} is {old.dtype}{list(old.shape)}; it cannot become {slab.dtype}{list(slab.shape)}"
            )
        return dataclasses.replace(self, slabs=(*self.slabs[:buffer], slab, *self.slabs[buffer + 1 :]))

    def page_view(self, layer: str) -> jax.Array:
        """The bytes of a layer's pages, `uint8[num_blocks, page_size_bytes]`, padding included.

        A copy outside `jit`; inside, XLA fuses it into what reads it. Reading only: write with the kernels.
        """
        page = self.page(layer)
        rows = self.slab_of(layer)[:, page.first_row : page.first_row + page.num_rows]
        return jax.lax.bitcast_convert_type(rows, jnp.uint8).reshape(rows.shape[0], page.spec.page_size_bytes)

    def insert_rows(self, layer: str, slots: jax.Array, rows: jax.Array, **options: Any) -> "KVCache":
        """Quantises and writes rows of a layer; see `dsv4kv_jax.kernels.insert_rows`."""
        from dsv4kv_jax import kernels

        page = self.page(layer)
        slab = kernels.insert_rows(self.slabs[page.buffer], page, slots, rows, **options)
        return self.with_slab(slab, page.buffer)

    def gather_rows(self, layer: str, slots: jax.Array, **options: Any) -> jax.Array:
        """Reads and dequantises rows of a layer; see `dsv4kv_jax.kernels.gather_rows`."""
        from dsv4kv_jax import kernels

        page = self.page(layer)
        return kernels.gather_rows(self.slabs[page.buffer], page, slots, **options)


def layout_and_blocks(plan: KVCachePlan, worker: int, num_blocks: int | None) -> tuple[PackedLayout, int]:
    """The layout of a worker of `plan`, and how many blocks to allocate where `num_blocks` are asked for.

    Raises:
      PlanError: see `KVCache.allocate`.
    """
    if isinstance(worker, bool) or not isinstance(worker, int | np.integer) or not 0 <= worker < len(plan.workers):
        raise PlanError(f"worker={worker!r} does not exist; the plan has {len(plan.workers)}")
    blocks = plan.num_blocks if num_blocks is None else num_blocks
    if isinstance(blocks, bool) or not isinstance(blocks, int | np.integer):
        raise PlanError(f"num_blocks={num_blocks!r} must be an integer")
    layout = plan.workers[worker].layout
    if layout.buffers and not MIN_BLOCKS <= blocks <= plan.num_blocks:
        raise PlanError(
            f"num_blocks={blocks} must be from {MIN_BLOCKS} (the null block and one to own) to the planned "
            f"{plan.num_blocks}; plan with more memory for more"
        )
    return layout, int(blocks)


def _flatten(cache: KVCache) -> tuple[tuple[tuple[jax.Array, ...]], PackedLayout]:
    leases.check_not_lent(cache.slabs)
    return (cache.slabs,), cache.layout


def _flatten_with_keys(cache: KVCache) -> tuple[Any, PackedLayout]:
    (slabs,), layout = _flatten(cache)
    return ((jax.tree_util.GetAttrKey("slabs"), slabs),), layout


def _unflatten(layout: PackedLayout, children: Any) -> KVCache:
    return KVCache(slabs=children[0], layout=layout)


# Registered by hand, not as a dataclass: flattening is the one moment at which every jitted call can be refused.
jax.tree_util.register_pytree_with_keys(KVCache, _flatten_with_keys, _unflatten, _flatten)
