"""The one place that imports PyTorch."""

import functools
from typing import Any


@functools.cache
def require_torch() -> Any:
    """The torch module.

    Raises:
      ImportError: PyTorch is not installed; says which extra installs it.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "this function of dsv4kv_jax.interop needs PyTorch: pip install 'dsv4kv_jax[torch]'"
        ) from error
    return torch
