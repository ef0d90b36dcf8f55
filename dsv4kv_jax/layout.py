"""Where every page lies: the packed slab's geometry, and that of the two simpler allocation forms.

* packed: one buffer; the pages of a group lie one after another in each block, and all groups overlay the same block.
  A page is at `block_id * block_stride_bytes + offset_bytes`.
* pools: every page of every group has one size; buffer k is shared by the k-th layer of each group.
* uniform: one group; one buffer a layer.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax

from dsv4kv_jax import formats
from dsv4kv_jax._static import cached_hash
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.specs import KVCacheSpec

Form = Literal["none", "packed", "pools", "uniform"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """The pages of one layer's cache: in every block of buffer `buffer`, `page_size_bytes` bytes at `offset_bytes`.

    It is static and hashable: kernels take it beside the slab. Rows are addressed by *slot*,
    `slot = block_id * storage_block_size + row`.
    """

    name: str
    spec: KVCacheSpec
    group: int
    buffer: int
    offset_bytes: int
    block_stride_bytes: int

    @property
    def format(self) -> formats.RowFormat:
        return self.spec.format

    @property
    def storage_block_size(self) -> int:
        """Rows of one page."""
        return self.spec.storage_block_size

    @property
    def words_per_row(self) -> int:
        """uint32 words in one row of the slab."""
        return self.spec.alignment // formats.WORD_BYTES

    @property
    def first_row(self) -> int:
        """The slab row, inside a block, on which the page starts."""
        return self.offset_bytes // self.spec.alignment

    @property
    def num_rows(self) -> int:
        """Slab rows that the page takes."""
        return self.spec.page_size_bytes // self.spec.alignment

    def view_shape(self, num_blocks: int) -> tuple[int, int, int]:
        """Shape of the strided tensor that PyTorch code binds for this layer, `[num_blocks, rows, row width]`.

        Its dtype is `format.page_dtype`; its strides are `view_strides`.
        """
        return (num_blocks, self.storage_block_size, self.format.view_width)

    @property
    def view_strides(self) -> tuple[int, int, int]:
        """Strides of that tensor in elements of `format.page_dtype`.

        Raises:
          PlanError: the block stride is no multiple of the element, which no built-in format has.
        """
        item = formats.numpy_dtype(self.format.page_dtype).itemsize
        if self.block_stride_bytes % item or self.offset_bytes % item:
            raise PlanError(
                f"layer {self.name!r}: block stride {self.block_stride_bytes} B and offset {self.offset_bytes} B are "
                f"not multiples of the {item}-byte {self.format.page_dtype}, so no tensor can show its pages"
            )
        return (self.block_stride_bytes // item, self.format.view_width, 1)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One device allocation: `num_blocks` blocks of `block_stride_bytes` each.

    As an array it is `uint32[num_blocks, rows_per_block, words_per_row]`.
    """

    block_stride_bytes: int
    alignment: int

    def shape(self, num_blocks: int) -> tuple[int, int, int]:
        rows = self.block_stride_bytes // self.alignment
        return (num_blocks, rows, self.alignment // formats.WORD_BYTES)


@jax.tree_util.register_static
@cached_hash
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """The geometry of one worker's cache, without its number of blocks.

    Only the groups, the form and the shared layers are stored; pages and buffers follow from them.

    Attributes:
      groups: the worker's groups; empty ones stay, so that group ids mean the same on every worker.
      form: how the pages are allocated.
      shared: (layer, owner) pairs: `layer` reads and writes `owner`'s pages.
    """

    groups: tuple[KVCacheGroup, ...]
    form: Form
    shared: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        alignments = {spec.alignment for group in self.groups for spec in group.specs}
        if len(alignments) > 1:
            raise PlanError(
                f"the layers have alignments {sorted(alignments)}; one slab has rows of one length, so give every spec "
                f"the same alignment"
            )
        for layer, owner in self.shared:
            if layer in self.pages:
                raise PlanError(
                    f"layer {layer!r} shares the cache of {owner!r} but has pages of its own; drop its spec"
                )
            if owner not in self.pages:
                raise PlanError(f"layer {layer!r} shares the cache of {owner!r}, which has no pages on this worker")

    @classmethod
    def from_groups(
        cls, groups: Sequence[KVCacheGroup], *, form: Form | None = None, shared: Sequence[tuple[str, str]] = ()
    ) -> "PackedLayout":
        """The layout of `groups`; the allocation form is vLLM's choice for them unless given."""
        return cls(groups=tuple(groups), form=form or allocation_form(groups), shared=tuple(shared))

    @functools.cached_property
    def alignment(self) -> int:
        """Bytes of one slab row."""
        return next((spec.alignment for group in self.groups for spec in group.specs), formats.WORD_BYTES)

    @functools.cached_property
    def block_stride_bytes(self) -> int:
        """Bytes between two blocks of the packed slab; 0 in the other forms, whose buffers have their own strides."""
        if self.form != "packed":
            return 0
        return max((group.page_size_bytes for group in self.groups), default=0)

    @functools.cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        if self.form == "packed":
            strides = [self.block_stride_bytes] if self.block_stride_bytes else []
        elif self.form == "pools":
            widest = max(self.groups, key=lambda group: len(group.specs))
            strides = [spec.page_size_bytes for spec in widest.specs]
        else:
            strides = [spec.page_size_bytes for group in self.groups for spec in group.specs]
        return tuple(Buffer(block_stride_bytes=stride, alignment=self.alignment) for stride in strides)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block id costs over all buffers (rule P15)."""
        return sum(buffer.block_stride_bytes for buffer in self.buffers)

    @functools.cached_property
    def pages(self) -> dict[str, PageLayout]:
        """Every layer that owns pages, group by group in page order. Do not mutate."""
        pages: dict[str, PageLayout] = {}
        for index, group in enumerate(self.groups):
            offset = 0
            for position, (name, spec) in enumerate(zip(group.layers, group.specs, strict=True)):
                packed = self.form == "packed"
                pages[name] = PageLayout(
                    name=name,
                    spec=spec,
                    group=index,
                    buffer=0 if packed else position,
                    offset_bytes=offset if packed else 0,
                    block_stride_bytes=self.block_stride_bytes if packed else spec.page_size_bytes,
                )
                offset += spec.page_size_bytes
        return pages

    @functools.cached_property
    def layers(self) -> dict[str, PageLayout]:
        """`pages`, and the layers that share another's. Do not mutate."""
        return self.pages | {layer: self.pages[owner] for layer, owner in self.shared}

    def page(self, layer: str) -> PageLayout:
        """The pages that `layer` reads and writes.

        Raises:
          PlanError: this worker has no such layer.
        """
        try:
            return self.layers[layer]
        except KeyError:
            close = [name for name in self.layers if layer and layer in name][:3] or list(self.layers)[:3]
            raise PlanError(f"no layer {layer!r} here; this worker holds {len(self.layers)}, such as {close}") from None

    @functools.cached_property
    def needs_zeroing(self) -> bool:
        """Whether caches of several precisions share blocks, so that new blocks should be zeroed (rule P19)."""
        specs = [spec for group in self.groups for spec in group.specs or (group.spec,)]
        return len({(spec.dtype, spec.is_quantized) for spec in specs}) > 1

    def slack_bytes(self, group: int) -> int:
        """Bytes of every block that `group` leaves unused under the common stride."""
        return max(self.block_stride_bytes - self.groups[group].page_size_bytes, 0) if self.form == "packed" else 0


def allocation_form(groups: Sequence[KVCacheGroup]) -> Form:
    """vLLM's allocation form for a whole model's groups (rules P8 and P18)."""
    if not groups:
        return "none"
    if len(groups) == 1:
        return "uniform"
    sizes = {spec.page_size_bytes for group in groups for spec in group.specs}
    return "pools" if len(sizes) == 1 else "packed"
