"""The same bytes for PyTorch code: one buffer, two frameworks. Import as `dsv4kv_jax.interop`.

`lend` shows a cache that JAX owns for the length of a `with` block; a `SharedSlab` is PyTorch's memory that JAX writes
step by step. PyTorch is imported when a function needs it, never by importing this package.
"""

if __name__ != "dsv4kv_jax.interop":
    raise ImportError(
        f"this package is dsv4kv_jax.interop, not {__name__}: importing it under a second name would make a second "
        f"copy of its classes; use `from dsv4kv_jax import interop`"
    )

from dsv4kv_jax.interop import flash_mla as flash_mla
from dsv4kv_jax.interop import flashinfer as flashinfer
from dsv4kv_jax.interop import vllm as vllm
from dsv4kv_jax.interop.binding import bind as bind
from dsv4kv_jax.interop.lease import Lease as Lease
from dsv4kv_jax.interop.lease import lend as lend
from dsv4kv_jax.interop.shared import SharedSlab as SharedSlab
from dsv4kv_jax.interop.tables import int32_array as int32_array
from dsv4kv_jax.interop.tables import int32_tensor as int32_tensor
from dsv4kv_jax.interop.transfer import Region as Region
from dsv4kv_jax.interop.transfer import blocks_from_host as blocks_from_host
from dsv4kv_jax.interop.transfer import blocks_to_host as blocks_to_host
from dsv4kv_jax.interop.transfer import blocks_to_resume as blocks_to_resume
from dsv4kv_jax.interop.transfer import regions as regions
from dsv4kv_jax.interop.transfer import whole_block_view as whole_block_view
from dsv4kv_jax.interop.views import PageView as PageView
from dsv4kv_jax.interop.views import page_view as page_view
from dsv4kv_jax.leases import LeaseError as LeaseError
from dsv4kv_jax.leases import check_donatable as check_donatable
from dsv4kv_jax.leases import checked_step as checked_step

__all__ = [
    "Lease",
    "LeaseError",
    "PageView",
    "Region",
    "SharedSlab",
    "bind",
    "blocks_from_host",
    "blocks_to_host",
    "blocks_to_resume",
    "check_donatable",
    "checked_step",
    "flash_mla",
    "flashinfer",
    "int32_array",
    "int32_tensor",
    "lend",
    "page_view",
    "regions",
    "vllm",
    "whole_block_view",
]
