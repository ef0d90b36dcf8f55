"""Arguments for FlashMLA's sparse decode kernel (`flash_mla_with_kvcache`), checked before it runs.

The kernel checks little and reads what it is told to: a wrong stride or index is an illegal access or silent nonsense.
The constraints are those of FlashMLA's host code for SM90 and SM100 and of its kernels' load instructions.
"""

from typing import Any

from dsv4kv_jax import formats
from dsv4kv_jax.interop import _attention
from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.interop.lease import TensorViews
from dsv4kv_jax.interop.tables import int32_tensor
from dsv4kv_jax.metadata import DENSE_RATIO, StepMetadata

HEAD_COUNTS = (64, 128)
INDEX_ALIGNMENT = 64  # columns the kernel reads at once
TMA_ROW_BYTES = 576  # SM100 reads rows of this size from one map over the whole pool
LOAD_BYTES = 16
SCALE_FACTOR = _attention.HEAD_DIM**-0.5
_INT32_MAX = 2**31 - 1


def decode_arguments(
    views: TensorViews,
    layer: str,
    q: Any,
    *,
    swa_indices: Any,
    swa_lens: Any,
    compressed_indices: Any = None,
    compressed_lens: Any = None,
    sink: Any = None,
    scale: float = SCALE_FACTOR,
    check_values: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of `flash_mla_with_kvcache`, all but `tile_scheduler_metadata`.

    Every query token is a batch row of its own, whatever request it belongs to: causality is in the indices. Make one
    scheduler object (`get_mla_metadata()`) a step and kind of layer (window-only, C4A, C128A), shared by the layers of
    that kind. Drop the padded heads of the result: `out[:, 0, :heads]`, `lse[:, :heads]`.

    Args:
      views: a `Lease` or a `SharedSlab` of an fp8_ds_mla cache.
      layer: an attention layer, such as `"model.layers.2.attn"`.
      q: bfloat16 `[T, heads, 512]` or `[T, 1, heads, 512]`; padded to 64 or 128 heads.
      swa_indices: int32 `[T, width]` slots, exactly -1 where there is none, as the function of this name gives; a JAX
        array (shared, not copied) or a tensor. So are the others.
      swa_lens: int32 `[T]`.
      compressed_indices: int32 `[T, width]`, from `topk_to_slots` (C4A) or `c128a_indices`; for layers that compress.
      compressed_lens: int32 `[T]`.
      sink: float32 `[heads]`, or None.
      scale: of the logits.
      check_values: also check that every index is -1 or a slot of the cache. Waits for the device: for debugging.

    Raises:
      ValueError: a constraint of the kernel is not met; names it and the way out.
    """
    torch = require_torch()
    window, compressed = _attention.layer_views(views, layer)
    q = _check_q(q, window.device)
    num_tokens, _, heads, _ = q.shape
    _attention.check_sink(sink, heads, window.device)
    q, sink = _attention.pad_heads(q, sink, HEAD_COUNTS)
    sm100 = window.is_cuda and torch.cuda.get_device_capability(window.device)[0] >= 10
    arguments = {
        "q": q,
        "k_cache": _cache(views, layer + _attention.WINDOW_SUFFIX, window, sm100),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": _attention.HEAD_DIM,
        "softmax_scale": scale,
        "causal": False,
        "is_fp8_kvcache": True,
        "indices": _indices("swa_indices", swa_indices, num_tokens, window, check_values),
        "topk_length": _lengths("swa_lens", swa_lens, num_tokens, window.device),
        "attn_sink": sink,
    }
    if (compressed is None) != (compressed_indices is None):
        has = "compresses no tokens" if compressed is None else "has a compressed cache"
        raise ValueError(
            f"layer {layer!r} {has}; compressed_indices must be {'None' if compressed is None else 'given'}"
        )
    if compressed is not None:
        arguments |= {
            "extra_k_cache": _cache(views, layer, compressed, sm100),
            "extra_indices_in_kvcache": _indices(
                "compressed_indices", compressed_indices, num_tokens, compressed, check_values
            ),
            "extra_topk_length": _lengths("compressed_lens", compressed_lens, num_tokens, compressed.device),
        }
    _attention.keep_arrays(views, swa_indices, swa_lens, compressed_indices, compressed_lens)
    return arguments


def step_arguments(
    views: TensorViews, layer: str, q: Any, metadata: StepMetadata, *, topk: Any = None, **options: Any
) -> dict[str, Any]:
    """`decode_arguments` with the indices of a step's metadata.

    Args:
      views, layer, q: as `decode_arguments` takes them; `q` has the step's tokens, padding included.
      metadata: of the step, computed by JAX.
      topk: for a C4A layer, what its indexer picked, int32 `[T, k]` (a JAX array), as `StepMetadata.picked` takes it.
      **options: as `decode_arguments` takes them.

    Raises:
      ValueError: as `decode_arguments`; or a `topk` that is missing or that the layer has no use for.
    """
    window, lens = metadata.window(layer + _attention.WINDOW_SUFFIX)
    compressed: tuple[Any, Any] = (None, None)
    page = views.layout.layers.get(layer)
    picks = page is not None and page.spec.compress_ratio != DENSE_RATIO
    if picks != (topk is not None):
        raise ValueError(f"layer {layer!r} {'needs' if picks else 'has no use for'} topk, what an indexer picked")
    if page is not None:
        compressed = metadata.picked(page, topk) if picks else metadata.dense(page)
    return decode_arguments(
        views,
        layer,
        q,
        swa_indices=window,
        swa_lens=lens,
        compressed_indices=compressed[0],
        compressed_lens=compressed[1],
        **options,
    )


def check_cache_view(view: Any, *, sm100: bool = True) -> None:
    """Checks a strided view `[num_blocks, rows, 584]` against what the kernel assumes about it.

    Raises:
      ValueError: names the constraint.
    """
    row_bytes = formats.FP8_DS_MLA.row_bytes
    torch = require_torch()
    if view.dtype not in (torch.uint8, torch.int8, torch.float8_e4m3fn) or view.shape[-1] != row_bytes:
        raise ValueError(
            f"the cache view is {view.dtype}{tuple(view.shape)}; FlashMLA tells DeepSeek-V4 pages by one-byte elements "
            f"and a last dimension of {row_bytes}: it reads fp8_ds_mla caches only"
        )
    if view.stride(-1) != 1 or view.stride(1) != row_bytes:
        raise ValueError(f"the cache view has strides {view.stride()}; a page must be compact, (..., {row_bytes}, 1)")
    stride = view.stride(0)
    if stride > _INT32_MAX:
        raise ValueError(f"stride(0)={stride} B does not fit in the int32 that FlashMLA passes it in")
    if stride % LOAD_BYTES or view.data_ptr() % LOAD_BYTES:
        raise ValueError(
            f"stride(0)={stride} B and address {view.data_ptr():#x} must be multiples of {LOAD_BYTES}: rows are loaded "
            f"{LOAD_BYTES} bytes at a time"
        )
    if sm100 and stride % TMA_ROW_BYTES:
        raise ValueError(
            f"stride(0)={stride} B is no multiple of {TMA_ROW_BYTES}: on SM100 one memory map with rows of "
            f"{TMA_ROW_BYTES} B covers the pool, so pages must be padded to {TMA_ROW_BYTES}"
        )


def _cache(views: TensorViews, name: str, view: Any, sm100: bool) -> Any:
    try:
        check_cache_view(view, sm100=sm100)
    except ValueError as error:
        raise ValueError(f"layer {name!r} ({views.layout.page(name).format.name}): {error}") from None
    return view.unsqueeze(-2)


def _check_q(q: Any, device: Any) -> Any:
    torch = require_torch()
    shape = tuple(q.shape)
    if q.ndim == 3:
        q = q.unsqueeze(1)
    if q.dtype != torch.bfloat16 or q.ndim != 4 or q.shape[1] != 1 or q.shape[-1] != _attention.HEAD_DIM:
        raise ValueError(f"q is {q.dtype}{shape}; it must be bfloat16 [T, heads, 512] or [T, 1, heads, 512]")
    if q.stride(-1) != 1:
        raise ValueError(f"q has strides {q.stride()}; its last dimension must be contiguous: q.contiguous()")
    if q.device != device:
        raise ValueError(f"q is on {q.device} and the cache on {device}")
    return q


def _indices(name: str, value: Any, num_tokens: int, view: Any, check_values: bool) -> Any:
    indices = int32_tensor(name, value, device=view.device)
    if indices.ndim == 3 and indices.shape[1] == 1:
        indices = indices[:, 0]
    if indices.ndim != 2 or indices.shape[0] != num_tokens:
        raise ValueError(f"{name} has shape {tuple(indices.shape)}; it must be [{num_tokens}, width], a row a token")
    width = indices.shape[1]
    if not width or width % INDEX_ALIGNMENT:
        raise ValueError(
            f"{name} has {width} columns; the kernel reads {INDEX_ALIGNMENT} at a time: pad with -1 to a multiple of "
            f"{INDEX_ALIGNMENT}"
        )
    if indices.stride(-1) != 1:
        raise ValueError(f"{name} has strides {indices.stride()}; its last dimension must be contiguous")
    if check_values and num_tokens:
        num_slots = view.shape[0] * view.shape[1]
        low, high = int(indices.min()), int(indices.max())
        if low < -1 or high >= num_slots:
            raise ValueError(f"{name} holds values from {low} to {high}; they must be -1 or a slot below {num_slots}")
    return indices.unsqueeze(1)


def _lengths(name: str, value: Any, num_tokens: int, device: Any) -> Any:
    if value is None:
        raise ValueError(f"{name} is needed beside the indices: how many of each row count")
    lengths = int32_tensor(name, value, device=device)
    if tuple(lengths.shape) != (num_tokens,) or not lengths.is_contiguous():
        raise ValueError(f"{name} has shape {tuple(lengths.shape)}; it must be contiguous [{num_tokens}]")
    return lengths
