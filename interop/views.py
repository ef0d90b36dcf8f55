"""The tensors that PyTorch code expects for a layer's pages: dtype, shape, strides and offset, without PyTorch.

Four forms, after vLLM's: *packed* (pages of several layers in one block), *padded* (a layer's own pages, each followed
by padding), *kv_first* (pages of a K half and a V half, shown with the halves as the outermost dimension) and
*contiguous* (no padding, any order of the dimensions in memory).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from dsv4kv_jax import formats
from dsv4kv_jax._integers import as_count
from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import KVCacheSpec

ViewForm = Literal["packed", "padded", "kv_first", "contiguous"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageView:
    """A strided tensor on a buffer.

    Attributes:
      dtype: numpy name, which is also PyTorch's.
      shape: as the consumer indexes it.
      strides: in elements of `dtype`.
      offset: elements from the start of the buffer.

    Raises:
      ValueError: negative numbers or no integers, as many strides as there are not dimensions, or an unknown dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        formats.numpy_dtype(self.dtype)
        for name, values in (("shape", self.shape), ("strides", self.strides), ("offset", (self.offset,))):
            if any(type(value) is not int or value < 0 for value in values):
                raise ValueError(f"a view's {name} {values} must be integers of at least 0")
        if len(self.shape) != len(self.strides):
            raise ValueError(f"a view of shape {self.shape} needs a stride a dimension, not {self.strides}")

    @classmethod
    def of_page(cls, page: PageLayout, num_blocks: int) -> "PageView":
        """The view `[num_blocks, rows, row width]` that vLLM binds for a layer."""
        item = formats.numpy_dtype(page.format.page_dtype).itemsize
        return cls(
            dtype=page.format.page_dtype,
            shape=page.view_shape(num_blocks),
            strides=page.view_strides,
            offset=page.offset_bytes // item,
        )

    @functools.cached_property
    def end_bytes(self) -> int:
        """Bytes of the buffer up to the last element of the view."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        elements = self.offset + last + 1 if math.prod(self.shape) else self.offset
        return elements * formats.numpy_dtype(self.dtype).itemsize

    def on(self, flat: Any) -> Any:
        """The view as a tensor on `flat`, a compact one-dimensional tensor of bytes or of `dtype`.

        Raises:
          ValueError: another kind of tensor, or a view that would pass its end.
        """
        torch = require_torch()
        if not isinstance(flat, torch.Tensor) or flat.ndim != 1 or not flat.is_contiguous():
            found = f"{tuple(flat.shape)}, strides {flat.stride()}" if isinstance(flat, torch.Tensor) else repr(flat)
            raise ValueError(f"a view lies on a compact one-dimensional tensor, not on {found}: tensor.reshape(-1)")
        dtype, size = getattr(torch, self.dtype), flat.numel() * flat.element_size()
        if self.end_bytes > size:
            raise ValueError(
                f"a view of shape {self.shape} and strides {self.strides} needs {self.end_bytes} B, and the buffer has "
                f"{size} B"
            )
        typed = flat if flat.dtype == dtype else flat.view(dtype)
        # as_strided counts from the start of the storage, not of the tensor.
        return torch.as_strided(typed, self.shape, self.strides, typed.storage_offset() + self.offset)


def page_view(
    spec: KVCacheSpec,
    num_blocks: int,
    *,
    form: ViewForm,
    block_stride_bytes: int | None = None,
    offset_bytes: int = 0,
    stride_order: Sequence[int] | None = None,
    kernel_block_size: int | None = None,
) -> PageView:
    """The view of a layer's pages in one of the four forms.

    Args:
      spec: the layer's spec.
      num_blocks: blocks of the buffer.
      form: see the module. The logical shape is `[num_blocks, rows, width]`, for `"kv_first"`
        `[2, num_blocks, rows, width / 2]`.
      block_stride_bytes: bytes between two pages of this layer; needed for `"packed"`, by default the page size.
      offset_bytes: where the layer's first page starts in the buffer.
      stride_order: the logical dimensions from the outermost to the innermost in memory; by default in their order,
        for `"kv_first"` with the blocks outermost.
      kernel_block_size: tokens of one kernel block, where the attention kernel counts smaller blocks than the cache;
        the view then has `num_blocks * block_size // kernel_block_size` of them.

    Raises:
      ValueError: the view cannot be expressed by strides; says why.
    """
    check_spec(spec)
    num_blocks = as_count("num_blocks", num_blocks)
    offset_bytes = as_count("offset_bytes", offset_bytes)
    if block_stride_bytes is not None:
        block_stride_bytes = as_count("block_stride_bytes", block_stride_bytes)
    if form not in ("packed", "padded", "kv_first", "contiguous"):
        raise ValueError(f"form={form!r} must be 'packed', 'padded', 'kv_first' or 'contiguous'")
    if form == "packed" and block_stride_bytes is None:
        raise ValueError("form='packed' needs block_stride_bytes, the bytes of one block of the slab")
    page_bytes = spec.real_page_size_bytes if form == "contiguous" else spec.page_size_bytes
    stride_bytes = page_bytes if block_stride_bytes is None else block_stride_bytes
    if stride_bytes < spec.real_page_size_bytes:
        raise ValueError(
            f"block_stride_bytes={stride_bytes} is less than a page's {spec.real_page_size_bytes} B, so pages overlap"
        )
    if form == "contiguous" and stride_bytes != spec.real_page_size_bytes:
        raise ValueError(
            f"form='contiguous' has no gaps, and blocks of {stride_bytes} B hold pages of "
            f"{spec.real_page_size_bytes} B: use form='padded'"
        )
    rows = spec.storage_block_size
    if kernel_block_size is not None and kernel_block_size != spec.block_size:
        num_blocks, rows, stride_bytes = _split(spec, num_blocks, stride_bytes, kernel_block_size, form)
    item = formats.numpy_dtype(spec.format.page_dtype).itemsize
    if stride_bytes % item or offset_bytes % item:
        raise ValueError(
            f"a block stride of {stride_bytes} B and an offset of {offset_bytes} B must be multiples of the {item} B "
            f"of {spec.format.page_dtype}"
        )
    width = spec.format.view_width
    if form == "kv_first":
        shape, block_dim = (2, num_blocks, rows, _half(spec, width)), 1
    else:
        shape, block_dim = (num_blocks, rows, width), 0
    order = tuple(stride_order) if stride_order is not None else _default_order(len(shape), block_dim)
    if any(type(dim) is not int for dim in order) or sorted(order) != list(range(len(shape))):
        raise ValueError(f"stride_order={order} must hold each of the dimensions 0 to {len(shape) - 1} once")
    if form != "contiguous" and order[0] != block_dim:
        raise ValueError(
            f"stride_order={order} does not put the blocks (dimension {block_dim}) outermost; a {form} view steps over "
            f"other bytes between blocks, so they must be: use form='contiguous' for a buffer of its own"
        )
    if len(spec.format.sections) > 1 and order.index(len(shape) - 1) != len(shape) - 1:
        raise ValueError(
            f"stride_order={order} moves the row width; a {spec.format.name} page stores all data rows and then all "
            f"scale rows, which only the natural order can name"
        )
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    if form != "contiguous":
        strides[block_dim] = stride_bytes // item
    return PageView(dtype=spec.format.page_dtype, shape=shape, strides=tuple(strides), offset=offset_bytes // item)


def check_spec(spec: Any) -> None:
    """Raises `ValueError` for a spec of another kind than the two of this library, naming it."""
    if not isinstance(spec, KVCacheSpec):
        raise ValueError(
            f"a {type(spec).__name__} has no pages of rows; supported are MLAAttentionSpec and SlidingWindowMLASpec"
        )


def _default_order(num_dims: int, block_dim: int) -> tuple[int, ...]:
    return (block_dim, *(dim for dim in range(num_dims) if dim != block_dim))


def _half(spec: KVCacheSpec, width: int) -> int:
    if len(spec.format.sections) > 1 or width % 2:
        raise ValueError(
            f"form='kv_first' shows a K half and a V half, and {spec.format.name} rows of {width} cannot be halved: a "
            f"latent row is both K and V; use form='packed' or 'padded'"
        )
    return width // 2


def _split(
    spec: KVCacheSpec, num_blocks: int, stride_bytes: int, kernel_block_size: int, form: str
) -> tuple[int, int, int]:
    """(blocks, rows a block, bytes between blocks) counted in kernel blocks."""
    refused = f"kernel_block_size={kernel_block_size} cannot divide blocks of {spec.block_size} tokens: "
    if (
        type(kernel_block_size) is not int
        or kernel_block_size < 1
        or spec.block_size % kernel_block_size
        or kernel_block_size % spec.compress_ratio
    ):
        raise ValueError(
            refused + f"it must divide them and be a multiple of the {spec.compress_ratio} token(s) of one row"
        )
    if len(spec.format.sections) > 1:
        raise ValueError(refused + f"a {spec.format.name} page stores all scale rows behind all data rows")
    if form == "kv_first":
        raise ValueError(refused + "the V half of a page comes after its whole K half")
    if stride_bytes != spec.real_page_size_bytes:
        raise ValueError(
            refused + f"a page has {spec.real_page_size_bytes} B and the next one starts {stride_bytes} B later, so "
            f"kernel blocks are not evenly spaced; use blocks of {kernel_block_size} tokens, or a contiguous buffer"
        )
    ratio = spec.block_size // kernel_block_size
    return num_blocks * ratio, kernel_block_size // spec.compress_ratio, stride_bytes // ratio
