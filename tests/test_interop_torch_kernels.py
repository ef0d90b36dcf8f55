"""Our Mosaic kernels for PyTorch: each must lower to one kernel and nothing else, or JAX cannot hand it over."""

import re

import jax
import jax.numpy as jnp
import pytest

import dsv4kv_jax
from dsv4kv_jax import KVCache
from dsv4kv_jax.interop import torch_kernels
from dsv4kv_jax.kernels import _compat
from dsv4kv_jax.specs import layer_specs

FLASH = dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash")
SPECS = layer_specs(FLASH, layers=(2, 3))
BLOCKS = 5
PLAN = dsv4kv_jax.plan_from_specs(SPECS, 1 << 23)
needs_mosaic = pytest.mark.skipif(_compat.why_no_mosaic() is not None, reason=_compat.why_no_mosaic() or "")


def operations(function, *arguments):
    """The operations of the program that `function` lowers to for a CUDA GPU, and the operands it writes in place."""
    module = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compiler_ir()
    (main,) = module.body.operations
    names = [operation.operation.name for operation in main.body.blocks[0].operations]
    aliases = re.findall(r"operand_index = (\d+)", str(module))
    return names, [int(index) for index in aliases]


def pages(dtypes):
    stride = PLAN.layout.block_stride_bytes
    return [jax.ShapeDtypeStruct((BLOCKS, stride // jnp.dtype(d).itemsize), d) for d in dtypes]


@needs_mosaic
@pytest.mark.mosaic
@pytest.mark.parametrize("layer", PLAN.layout.pages)
def test_reading_is_one_kernel(layer):
    page = PLAN.layout.page(layer)
    dtype = "float32" if page.format.page_dtype == "float32" else "bfloat16"
    kernel, dtypes, _ = torch_kernels._gather_kernel(torch_kernels._where(page), dtype, 0.0, 40)
    scalars = [jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.float32)]
    found = operations(kernel, jax.ShapeDtypeStruct((1, 40), jnp.int32), *scalars, *pages(dtypes))
    assert found == (["stablehlo.custom_call", "func.return"], [])


@needs_mosaic
@pytest.mark.mosaic
@pytest.mark.parametrize("layer", PLAN.layout.pages)
def test_writing_is_one_kernel_in_place(layer):
    page = PLAN.layout.page(layer)
    kernel, operands = torch_kernels._insert_kernel(torch_kernels._where(page), "amax", 24)
    slots = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    found = operations(kernel, slots, jax.ShapeDtypeStruct((1,), jnp.int32), *operands, *pages([jnp.uint32]))
    assert found == (["stablehlo.custom_call", "func.return"], [2 + len(operands)])  # the slab is the last operand


@needs_mosaic
@pytest.mark.mosaic
def test_kernels_are_made_once():
    page = PLAN.layout.page("model.layers.2.attn")
    where = torch_kernels._where(page)
    assert torch_kernels._gather_kernel(where, "bfloat16", 0.0, 32) is torch_kernels._gather_kernel(
        torch_kernels._where(page), "bfloat16", 0.0, 32
    )
    with pytest.raises(ValueError, match="rows are read as"):
        torch_kernels._gather_kernel(where, "float16", 0.0, 32)


def test_a_cpu_is_told_what_is_missing():
    torch = pytest.importorskip("torch")
    from dsv4kv_jax.interop import lend

    reason = "Mosaic GPU kernels need JAX" if _compat.why_no_mosaic() else "run on a CUDA GPU; this cache is on cpu"
    with lend(KVCache.allocate(PLAN)) as views:
        slots = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(ValueError, match=reason):
            torch_kernels.gather_rows(views, "model.layers.2.attn", slots)
        with pytest.raises(ValueError, match=reason):
            torch_kernels.insert_rows(views, "model.layers.2.attn", slots, torch.zeros(1, 512))
