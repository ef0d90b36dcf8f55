"""One tiny run of every cache kernel, for NVIDIA's memory checker, which is slow; nothing is compared.

compute-sanitizer --tool memcheck python benchmarks/sanitize_kernels.py

Each kernel is one jitted program on arrays that are exact allocations of their own, and a line says when it is done.
"""

import os
import time
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"  # every array its own allocation, whose ends the checker knows
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="

import jax
import numpy as np

from dsv4kv_jax import ModelConfig, kernels
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.kernels.step import StepIndex, step_indices
from dsv4kv_jax.layout import PackedLayout, PageLayout
from dsv4kv_jax.specs import layer_specs

CONFIG = ModelConfig(name="small", num_hidden_layers=3, compress_ratios=(4, 128, 1))
NUM_BLOCKS = 3
MOSAIC: Any = {"implementation": "mosaic_gpu"}
START = time.monotonic()


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def run(name: str, function: Any, *args: Any) -> Any:
    """The result of one program, as numpy arrays."""
    result = jax.device_get(jax.jit(function)(*args))
    print(f"{time.monotonic() - START:6.1f} s  {name}", flush=True)
    return result


def rows_and_blocks(layout: PackedLayout, name: str) -> None:
    page: PageLayout = layout.page(name)
    kind = f"{page.format.name} rows"
    slab = np.zeros(layout.buffers[0].shape(NUM_BLOCKS), np.uint32)
    limit = NUM_BLOCKS * page.storage_block_size
    slots = ints([-1, 0, limit - 1, limit, 2**31 - 1, -(2**31), 1, 1, limit - 2, limit + 1])
    rows = np.random.default_rng(0).standard_normal((slots.size, page.format.num_values), np.float32)
    slab = run(
        f"insert_rows, {kind}", lambda *args: kernels.insert_rows(args[0], page, *args[1:], **MOSAIC), slab, slots, rows
    )
    run(f"gather_rows, {kind}", lambda *args: kernels.gather_rows(args[0], page, args[1], **MOSAIC), slab, slots)


def blocks(layout: PackedLayout) -> None:
    slab = np.zeros(layout.buffers[0].shape(NUM_BLOCKS), np.uint32)
    source, target = ints([1, 2, 9, 2]), ints([2, 1, 1, -1])
    run("copy_blocks", lambda *args: kernels.copy_blocks(*args, **MOSAIC), slab, source, target)
    run("zero_blocks", lambda *args: kernels.zero_blocks(*args, **MOSAIC), slab, ints([NUM_BLOCKS - 1, 7, -1]))


def indices() -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(-1, 90, (3, 7), np.int32)
    starts, lens = ints([0, 2, 2, 5]), ints([500, 0, 449])
    wanted = (
        StepIndex(kind="slots", group=0, block_size=64),
        StepIndex(kind="window", group=0, block_size=64, width=128),
        StepIndex(kind="compressed_slots", group=1, block_size=256, compress_ratio=4),
        StepIndex(kind="dense", group=1, block_size=256, compress_ratio=128, width=1300),
    )
    tables = table, np.ascontiguousarray(table[:, :2])
    run("step_indices", lambda *args: step_indices(wanted, *args, num_tokens=7, **MOSAIC), tables, starts, lens)
    topk, request = rng.integers(-1, 900, (7, 37), np.int32), ints([0, 0, 2, 2, 2, -1, 3])
    run(
        "topk_to_slots",
        lambda *args: kernels.topk_to_slots(*args, storage_block_size=64, **MOSAIC),
        topk,
        request,
        table,
    )
    geometry: Any = {"compress_ratio": 4, "compressed_rows": 125, "workspace_rows": 256}
    gathered = ints([129, 0, 130])
    combine = (topk, starts, lens, gathered)
    run("combine_topk_swa", lambda *args: kernels.combine_topk_swa(*args, **geometry, **MOSAIC), *combine)


def main() -> None:
    print(f"{time.monotonic() - START:6.1f} s  {jax.devices()[0].device_kind}", flush=True)
    mla = PackedLayout.from_groups(group_layers(layer_specs(CONFIG, "fp8_ds_mla", indexer="mxfp4")))
    plain = PackedLayout.from_groups(group_layers(layer_specs(CONFIG, "bf16", indexer="fp8")))
    rows_and_blocks(mla, "model.layers.2.attn.swa_cache")
    indices()
    blocks(mla)
    rows_and_blocks(mla, "model.layers.0.attn.indexer.k_cache")
    rows_and_blocks(plain, "model.layers.1.attn")
    rows_and_blocks(plain, "model.layers.0.attn.indexer.k_cache")
    print("done")


if __name__ == "__main__":
    main()
