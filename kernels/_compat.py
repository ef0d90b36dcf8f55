"""Differences between the supported JAX versions, all in this file."""

from typing import Any

import jax

JAX_VERSION: tuple[int, ...] = jax.__version_info__

# From here on Pallas has the Mosaic GPU interpreter, and a kernel can alias its output through a reference.
MIN_MOSAIC_JAX = (0, 11, 2)


def why_no_mosaic() -> str | None:
    """Why the installed JAX cannot run the Mosaic GPU kernels, or None if it can."""
    if JAX_VERSION < MIN_MOSAIC_JAX:
        needed = ".".join(map(str, MIN_MOSAIC_JAX))
        return f"the Mosaic GPU kernels need JAX {needed} or newer, this is {jax.__version__}"
    return None


def is_hopper() -> bool:
    """Whether JAX's default device is a GPU of NVIDIA's Hopper generation, the one that the Mosaic kernels are for."""
    config: Any = jax.config
    device: Any = config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"
