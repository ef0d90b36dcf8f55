"""The library's Mosaic GPU kernels for PyTorch stacks: `gather_rows` and `insert_rows` on shared or lent memory.

They are the kernels that JAX programs use, compiled once by JAX for PyTorch (`plgpu.as_torch_kernel`) and launched on
PyTorch's current stream; no JAX array is involved. PyTorch only reinterprets bytes around them, because such a kernel
stands alone: everything else that the JAX side does in the same program happens in the tensors' shapes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax import formats
from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.interop.lease import TensorViews
from dsv4kv_jax.interop.tables import int32_tensor
from dsv4kv_jax.kernels import _compat, codecs
from dsv4kv_jax.kernels.codecs import ScaleFloor
from dsv4kv_jax.kernels.rows import default_scale_floor
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import round_up

MIN_ROWS = 16  # of a launch
MAX_ROWS = 8192  # of a launch that inserts; longer inputs are several launches, in order


def gather_rows(views: TensorViews, layer: str, slots: Any, *, fill: float = 0.0, dtype: Any = None) -> Any:
    """Reads and dequantises rows, as `dsv4kv_jax.kernels.gather_rows` does: `[*slots.shape, num_values]`.

    Args:
      views: a `Lease` or a `SharedSlab` on a GPU.
      layer: the layer's name.
      slots: int32, any shape; a slot of -1 or past the cache gives a row of `fill`.
      fill: what stands for a missing row.
      dtype: `torch.bfloat16` or `torch.float32`; by default bfloat16, and for float32 rows float32.

    Raises:
      ValueError: no such layer, slots that are not int32 on the cache's device, or a JAX without these kernels.
    """
    torch = require_torch()
    page, buffer = _check(views, layer)
    slots = int32_tensor("slots", slots, device=buffer.device)
    own = codecs.default_dtype(page.format)
    name = str(own if dtype is None else dtype).removeprefix("torch.")
    shape, count = slots.shape, slots.numel()
    if not count:
        return torch.empty((*shape, page.format.num_values), dtype=getattr(torch, name), device=buffer.device)
    kernel, dtypes, out_dtype = _gather_kernel(_where(page), name, float(fill), max(count, MIN_ROWS))
    slots = _padded(slots.reshape(-1), max(count, MIN_ROWS))
    pages = [buffer.view(getattr(torch, view)).view(views.num_blocks, -1) for view in dtypes]
    values = _launchable(kernel)(
        slots, _one(page.offset_bytes // formats.WORD_BYTES, buffer), _one(1.0, buffer), *pages
    )
    return values[:count].view(getattr(torch, out_dtype)).reshape(*shape, page.format.num_values)


def insert_rows(
    views: TensorViews, layer: str, slots: Any, rows: Any, *, scale_floor: ScaleFloor | None = None
) -> None:
    """Quantises rows and writes them in place, as `dsv4kv_jax.kernels.insert_rows` does.

    Args:
      views: a `Lease` or a `SharedSlab` on a GPU.
      layer: the layer's name.
      slots: int32 `[T]`; a slot of -1 or past the cache is dropped, the last of equal slots wins.
      rows: `[T, num_values]`, bfloat16 or float32.
      scale_floor: as the JAX function takes it.

    Raises:
      ValueError: no such layer, tensors of other shapes or dtypes, a plain fp8 cache, or a JAX without these kernels.
    """
    torch = require_torch()
    page, buffer = _check(views, layer)
    slots = int32_tensor("slots", slots, device=buffer.device)
    count, width = slots.numel(), page.format.num_values
    if slots.ndim != 1 or tuple(rows.shape) != (count, width) or rows.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"slots has shape {tuple(slots.shape)} and rows are {rows.dtype}{tuple(rows.shape)}; they must be [T] and "
            f"bfloat16 or float32 [T, {width}]"
        )
    rows = rows.to(getattr(torch, _stored_dtype(page.format))).contiguous()
    floor = scale_floor or default_scale_floor(page)
    pages = buffer.view(torch.uint32).view(views.num_blocks, -1)
    offset = _one(page.offset_bytes // formats.WORD_BYTES, buffer)
    for start in range(0, count, MAX_ROWS):
        part, some = rows[start : start + MAX_ROWS], slots[start : start + MAX_ROWS]
        size = max(len(some), MIN_ROWS)
        part = torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
        kernel, operands = _insert_kernel(_where(page), floor, size)
        inputs = [part.view(getattr(torch, operand.dtype.name)).view(operand.shape) for operand in operands]
        _launchable(kernel)(_padded(some, round_up(size, 256)), offset, *inputs, pages)


def _check(views: TensorViews, layer: str) -> tuple[PageLayout, Any]:
    """The layer's page and its buffer."""
    if reason := _compat.why_no_mosaic():
        raise ValueError(f"torch_kernels: {reason}")
    page = views.layout.page(layer)
    buffer = views.buffers[page.buffer]
    if not buffer.is_cuda:
        raise ValueError(f"torch_kernels run on a CUDA GPU; this cache is on {buffer.device}")
    return page, buffer


def _where(page: PageLayout) -> Any:
    from dsv4kv_jax.kernels import mosaic_pages

    return mosaic_pages.split(page)[0]


def _stored_dtype(fmt: formats.RowFormat) -> str:
    """What the kernel takes rows as: bfloat16 to be quantised, else what is stored."""
    if fmt.page_dtype == "float8_e4m3fn":
        raise ValueError("torch_kernels.insert_rows has no form for per-tensor fp8 rows; insert them from JAX")
    return fmt.page_dtype if codecs.is_plain(fmt) else "bfloat16"


@functools.cache
def _gather_kernel(where: Any, dtype: str, fill: float, num_rows: int) -> tuple[Any, tuple[str, ...], str]:
    """(the kernel, the dtypes in which it reads the slab, the dtype of its result)."""
    from dsv4kv_jax.kernels import mosaic_gather

    kernel, decoder = mosaic_gather.gather_kernel(where, jnp.dtype(dtype), np.full(1, fill, dtype).tobytes(), num_rows)
    if decoder.dtype != jnp.dtype(dtype):
        raise ValueError(
            f"dtype={dtype}: {where.format.name} rows are read as {decoder.dtype} here; convert afterwards"
        )
    return kernel, tuple(jnp.dtype(view).name for view in decoder.views), decoder.dtype.name


@functools.cache
def _insert_kernel(where: Any, scale_floor: ScaleFloor, num_rows: int) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """(the kernel, the shapes in which it takes the rows); its last argument is written in place."""
    from dsv4kv_jax.kernels import mosaic_encoders, mosaic_insert, mosaic_lanes

    found = []

    def operands(rows: jax.Array) -> tuple[jax.Array, ...]:
        found.extend(mosaic_encoders.encoders(where.format, rows, scale_floor, jnp.ones(1, jnp.float32)))
        return found[-1].operands

    rows = jax.ShapeDtypeStruct((num_rows, where.format.num_values), _stored_dtype(where.format))
    shapes = jax.eval_shape(operands, rows)
    span = mosaic_insert._Span(where, found[-1], 0, num_rows)
    body = functools.partial(mosaic_insert._insert_body, spans=(span,), unique_slots=False)
    call = mosaic_lanes.kernel(body, name="insert_rows", out_type=(), grid=(span.num_programs,))

    def kernel(*arguments: jax.Array) -> jax.Array:
        *inputs, slab = arguments
        blocks = jax.new_ref(slab)
        call(*inputs, blocks)
        return blocks[...]

    return kernel, shapes


@functools.cache
def _launchable(kernel: Any) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "as_torch_kernel"):
        raise ValueError(f"JAX {jax.__version__} cannot compile kernels for PyTorch; use a newer one")
    return plgpu.as_torch_kernel(kernel)


def _padded(slots: Any, size: int) -> Any:
    """int32 `[1, size]`, -1 behind the slots."""
    torch = require_torch()
    return torch.nn.functional.pad(slots, (0, size - len(slots)), value=-1)[None].contiguous()


@functools.cache
def _number(value: float, device: Any) -> Any:
    torch = require_torch()
    dtype = torch.int32 if isinstance(value, int) else torch.float32
    return torch.full((1,), value, dtype=dtype, device=device)


def _one(value: float, like: Any) -> Any:
    """A number as the kernels read it, an array of one on the device of `like`."""
    return _number(value, like.device)
