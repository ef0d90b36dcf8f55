"""Attention on lent views in plain PyTorch: what a layer attends to, recomputed from the strided tensors alone.

No fused kernel and none of the library's device code: a second opinion on what the cache holds.
"""

from typing import Any

from dsv4kv_jax import formats
from dsv4kv_jax.interop._attention import layer_views
from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.interop.lease import TensorViews


def attention(
    views: TensorViews,
    layer: str,
    q: Any,
    window: tuple[Any, Any],
    compressed: tuple[Any, Any] | None = None,
    *,
    sink: Any = None,
    scale: float = 512**-0.5,
    kv_scale: float = 1.0,
) -> tuple[Any, Any]:
    """Attends from each query token to its listed rows of a layer, in float32.

    Args:
      views: of a lent or shared cache.
      layer: an attention layer, such as `model.layers.2.attn`.
      q: `[T, H, 512]`, rotated.
      window: int32 slots `[T, W]` and lengths `[T]` in the layer's window cache.
      compressed: the same in its C4A or C128A cache, or None.
      sink: float32 `[H]`, or None.
      scale: factor on the dot products.
      kv_scale: scale of plain fp8 rows.

    Returns:
      float32 tensors `out` `[T, H, 512]`, before the inverse rotation, and `lse` `[T, H]` without the sink. A token
      without rows gets 0 and +inf.

    Raises:
      ValueError: no such layer.
    """
    torch = require_torch()
    window_view, compressed_view = layer_views(views, layer)
    parts = [(window_view, views.layout.page(f"{layer}.swa_cache").format.name, window)]
    if compressed is not None and compressed_view is not None:
        parts.append((compressed_view, views.layout.page(layer).format.name, compressed))
    keys, masks = [], []
    for view, format_name, (indices, lengths) in parts:
        slots = torch.as_tensor(indices, device=view.device).to(torch.int64)
        lengths = torch.as_tensor(lengths, device=view.device)
        valid = (slots >= 0) & (torch.arange(slots.shape[1], device=view.device) < lengths[:, None])
        rows = read_rows(view, format_name, torch.where(valid, slots, 0), kv_scale)
        keys.append(torch.where(valid[..., None], rows, 0.0))
        masks.append(valid)
    key, mask = torch.cat(keys, dim=1), torch.cat(masks, dim=1)
    logits = torch.einsum("thd,tkd->thk", torch.as_tensor(q, device=key.device).float(), key) * scale
    logits = logits.masked_fill(~mask[:, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.where(torch.isfinite(lse)[..., None], torch.exp(logits - lse[..., None]), 0.0)
    out = torch.einsum("thk,tkd->thd", weights, key)
    if sink is not None:
        out = out / (1 + torch.exp(torch.as_tensor(sink, device=key.device) - lse)[..., None])
    return out, torch.where(mask.any(dim=1)[:, None], lse, float("inf"))


def read_rows(view: Any, format_name: str, slots: Any, kv_scale: float = 1.0) -> Any:
    """float32 `[..., 512]`: the rows at int64 `slots` of a latent page view, dequantised.

    Raises:
      ValueError: rows of another kind than latents.
    """
    torch = require_torch()
    rows = view.shape[1]
    block, row = slots // rows, slots % rows
    if format_name in ("bfloat16", "float8_e4m3fn"):
        # PyTorch indexes no float8 on a CPU; the bytes go through uint8.
        raw = view.view(torch.uint8)[block, row].view(view.dtype)
        return raw.float() * kv_scale
    if format_name != formats.FP8_DS_MLA.name:
        raise ValueError(f"rows of format {format_name!r} are no latents; attention reads fp8_ds_mla, bf16 or fp8 rows")
    data, scale = formats.FP8_DS_MLA.sections
    # The 584 of the view's shape is nominal: all data rows come first, then all scales.
    pages = torch.as_strided(view, (view.shape[0], rows * view.shape[2]), (view.stride(0), 1), view.storage_offset())
    column = torch.arange(data.row_bytes, device=view.device)
    values = pages[block[..., None], row[..., None] * data.row_bytes + column]
    first = formats.FP8_DS_MLA.section_start(1, rows)
    column = torch.arange(scale.fields[0].count, device=view.device)
    exponents = pages[block[..., None], first + row[..., None] * scale.row_bytes + column]
    split = data.fields[0].size_bytes
    nope = values[..., :split].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (exponents.shape[-1], -1))
    nope = (nope * torch.exp2(exponents.float() - 127)[..., None]).flatten(-2)
    return torch.cat([nope, values[..., split:].contiguous().view(torch.bfloat16).float()], dim=-1)
