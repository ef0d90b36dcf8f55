"""Checks that FlashMLA's and FlashInfer's arguments have in common."""

from typing import Any

import jax

from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.interop.lease import TensorViews

HEAD_DIM = 512
WINDOW_SUFFIX = ".swa_cache"


def layer_views(views: TensorViews, layer: str) -> tuple[Any, Any]:
    """(window view, compressed view or None) of an attention layer such as `model.layers.2.attn`.

    Raises:
      ValueError: no such layer.
    """
    if layer + WINDOW_SUFFIX not in views.layout.layers:
        layers = [name.removesuffix(WINDOW_SUFFIX) for name in views.layout.layers if name.endswith(WINDOW_SUFFIX)]
        raise ValueError(f"no attention layer {layer!r}; this cache holds {len(layers)}, such as {layers[:3]}")
    return views[layer + WINDOW_SUFFIX], views[layer] if layer in views.layout.layers else None


def pad_heads(q: Any, sink: Any, counts: tuple[int, ...]) -> tuple[Any, Any]:
    """`q` [..., h, 512] and `sink` [h] padded to the next of the kernel's head counts, with zeros and -inf.

    A padded head's sink of -inf keeps it from becoming NaN; its output is dropped afterwards.

    Raises:
      ValueError: more heads than the kernel has.
    """
    torch = require_torch()
    heads = q.shape[-2]
    padded = next((count for count in counts if count >= heads), None)
    if padded is None or not heads:
        raise ValueError(f"q has {heads} heads; the kernel takes 1 to {counts[-1]}: split the heads over more ranks")
    if padded == heads:
        return q, sink
    q = torch.nn.functional.pad(q, (0, 0, 0, padded - heads))
    if sink is not None:
        sink = torch.nn.functional.pad(sink, (0, padded - heads), value=float("-inf"))
    return q, sink


def check_sink(sink: Any, heads: int, device: Any) -> None:
    """Raises `ValueError` unless `sink` is None or a contiguous float32 `[heads]` on `device`."""
    if sink is None:
        return
    torch = require_torch()
    good = sink.dtype == torch.float32 and tuple(sink.shape) == (heads,) and sink.is_contiguous()
    if not good or sink.device != device:
        raise ValueError(
            f"sink is {sink.dtype}{tuple(sink.shape)} on {sink.device}; it must be contiguous float32 of shape "
            f"({heads},) on {device}, one value a head"
        )


def keep_arrays(views: TensorViews, *values: Any) -> None:
    """Keeps the JAX arrays among `values` until JAX waits for PyTorch's stream again."""
    for value in values:
        if isinstance(value, jax.Array):
            views.keep_alive(value)
