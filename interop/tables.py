"""Block tables, slots, indices and lengths between the frameworks: int32 everywhere, wider ones converted openly."""

from typing import Any

import jax
import numpy as np

from dsv4kv_jax._integers import as_int32_numpy
from dsv4kv_jax.interop import _exchange
from dsv4kv_jax.interop._torch import require_torch

_INT32 = np.iinfo(np.int32)


def int32_tensor(name: str, value: Any, *, device: Any = None, stream: Any = None) -> Any:
    """`value` as an int32 torch tensor.

    A JAX array is shared, not copied; `stream` (PyTorch's current one by default) waits for its computation. An int64
    tensor is converted after its range was checked, for which the host waits for the device: keep tables in int32.

    Args:
      name: what to call it in errors.
      value: a torch tensor, a JAX array, a numpy array, or nested lists of Python integers.
      device: the `torch.device` on which it is needed; any by default. Host values are copied there.

    Raises:
      ValueError: not integers, out of int32's range, or on another device.
    """
    torch = require_torch()
    if isinstance(value, jax.Array):
        if value.dtype != np.int32:
            raise ValueError(
                f"{name} is a JAX array of {value.dtype}; tables and indices are int32: {name}.astype('int32')"
            )
        source = _exchange.only_device(value, name)
        tensor = _exchange.to_torch(value, source, _exchange.chosen_stream(source, stream))
    elif isinstance(value, torch.Tensor):
        tensor = _narrow(name, value)
    else:
        tensor = torch.from_numpy(as_int32_numpy(name, value))
        return tensor if device is None else tensor.to(device)
    if device is not None and tensor.device != torch.device(device):
        raise ValueError(f"{name} is on {tensor.device} and is needed on {device}: {name}.to({str(device)!r})")
    return tensor


def int32_array(name: str, tensor: Any, *, stream: Any = None) -> jax.Array:
    """A torch tensor of integers as an int32 JAX array, shared where it is compact int32 already.

    JAX programs that use it run after PyTorch's work now enqueued on `stream`. Do not write the tensor meanwhile.

    Raises:
      ValueError: not integers, out of int32's range, or on a device that JAX lacks.
    """
    torch = require_torch()
    from dsv4kv_jax.interop.shared import jax_device

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; pass a torch tensor")
    device = jax_device(tensor.device)
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; pass a dense tensor: {name}.to_dense()")
    stream = _exchange.chosen_stream(device, stream)
    return _exchange.to_jax(_narrow(name, tensor).contiguous(), device, stream)


def _narrow(name: str, tensor: Any) -> Any:
    torch = require_torch()
    if tensor.dtype == torch.int32:
        return tensor
    if tensor.dtype not in (torch.int8, torch.int16, torch.int64, torch.uint8):
        raise ValueError(f"{name} has dtype {tensor.dtype}; tables and indices are int32 integers")
    if tensor.dtype == torch.int64 and tensor.numel():
        low, high = (int(limit) for limit in torch.aminmax(tensor))
        if low < _INT32.min or high > _INT32.max:
            raise ValueError(
                f"{name} holds values from {low} to {high}, which do not fit in int32; slots and indices are int32, "
                f"and -1 stands for none"
            )
    return tensor.to(torch.int32)
