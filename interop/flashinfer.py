"""Arguments for FlashInfer's sparse MLA decode of DeepSeek-V4 (`trtllm_batch_decode_sparse_mla_dsv4`).

The kernel takes one index matrix for the window and the compressed rows, counted in rows of a strided view (*storage
offsets*): `dsv4kv_jax.kernels.flashinfer_indices` makes it. It reads bf16 and per-tensor fp8 caches, whose block
strides are whole numbers of rows.
"""

from typing import Any

from dsv4kv_jax.interop import _attention
from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.interop.lease import TensorViews
from dsv4kv_jax.interop.tables import int32_tensor
from dsv4kv_jax.kernels.flashinfer import rows_between_blocks

HEAD_COUNTS = (8, 16, 32, 64, 128)
SCALE_FACTOR = _attention.HEAD_DIM**-0.5
_QUERY_DTYPES = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn"}


def decode_arguments(
    views: TensorViews,
    layer: str,
    q: Any,
    *,
    indices: Any,
    lens: Any,
    sink: Any = None,
    scale: float = SCALE_FACTOR,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    head_counts: tuple[int, ...] = HEAD_COUNTS,
) -> dict[str, Any]:
    """Keyword arguments of the kernel that concern the cache; workspace, output and batch are the caller's.

    Args:
      views: a `Lease` or a `SharedSlab` of a bf16 or fp8 cache.
      layer: an attention layer, such as `"model.layers.2.attn"`.
      q: `[T, heads, 512]` in the cache's dtype; padded to the next of `head_counts`.
      indices: int32 `[T, width]` of `flashinfer_indices`: storage offsets, window columns first.
      lens: int32 `[T]` of the same function.
      sink: float32 `[heads]`, or None.
      scale: of the logits.
      q_scale: of an fp8 query.
      kv_scale: of an fp8 cache.
      head_counts: what the installed FlashInfer takes; before 0.6.14 it was (64, 128).

    Raises:
      ValueError: a constraint of the kernel is not met; names it and the way out.
    """
    torch = require_torch()
    window, compressed = _attention.layer_views(views, layer)
    names = [layer + _attention.WINDOW_SUFFIX] + ([layer] if compressed is not None else [])
    for name in names:
        page = views.layout.page(name)
        if page.format.page_dtype not in _QUERY_DTYPES:
            raise ValueError(
                f"layer {name!r} holds {page.format.name} rows; this kernel reads bf16 and per-tensor fp8 caches: plan "
                f"with cache_dtype='bf16' or 'fp8', or use FlashMLA"
            )
        rows_between_blocks(page)
    dtype = getattr(torch, views.layout.page(names[0]).format.page_dtype)
    if q.dtype != dtype or q.ndim != 3 or q.shape[-1] != _attention.HEAD_DIM:
        raise ValueError(f"q is {q.dtype}{tuple(q.shape)}; it must be {dtype}[T, heads, 512], as the cache is")
    num_tokens, heads, _ = q.shape
    _attention.check_sink(sink, heads, window.device)
    q, sink = _attention.pad_heads(q, sink, head_counts)
    matrix = int32_tensor("indices", indices, device=window.device)
    lengths = int32_tensor("lens", lens, device=window.device)
    if matrix.ndim != 2 or matrix.shape[0] != num_tokens or tuple(lengths.shape) != (num_tokens,):
        raise ValueError(
            f"indices has shape {tuple(matrix.shape)} and lens {tuple(lengths.shape)}; they must be "
            f"[{num_tokens}, width] and [{num_tokens}]"
        )
    _attention.keep_arrays(views, indices, lens)
    quantized = dtype == torch.float8_e4m3fn
    return {
        "query": q.contiguous(),
        "swa_kv_cache": window.unsqueeze(-2),
        "compressed_kv_cache": (window if compressed is None else compressed).unsqueeze(-2),
        "sparse_indices": matrix,
        "sparse_topk_lens": lengths,
        "sinks": sink,
        "bmm1_scale": scale * q_scale * kv_scale if quantized else scale,
        "bmm2_scale": kv_scale if quantized else 1.0,
        "sparse_indices_are_storage_offsets": True,
    }
