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
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax import ModelConfig, kernels
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.indexer import fold_query
from dsv4kv_jax.kernels.step import StepIndex, step_indices
from dsv4kv_jax.layout import PackedLayout, PageLayout
from dsv4kv_jax.specs import layer_specs

CONFIG = ModelConfig(name="small", num_hidden_layers=3, compress_ratios=(4, 128, 1))
NUM_BLOCKS = 3
MOSAIC: Any = {"implementation": "mosaic_gpu"}
START = time.monotonic()


def ints(values: Any) -> np.ndarray:
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


def compressor_and_indexer(layout: PackedLayout) -> None:
    rng = np.random.default_rng(0)
    page, keys = layout.page("model.layers.0.attn.compressor.state_cache"), "model.layers.0.attn.indexer.k_cache"
    slab = np.zeros(layout.buffers[0].shape(NUM_BLOCKS), np.uint32)
    table, positions = ints([[1, 2, -1, 5]]), ints([3, 6, 7])
    width = page.spec.head_size // 2
    parts = [rng.standard_normal(shape, np.float32) for shape in ((3, width), (3, width), (4, width))]
    rows = kernels.StateRows(*parts, positions)
    run(
        "insert_rows, states",
        lambda slab, rows: kernels.insert_rows(slab, page, ints([4, -1, 11]), rows, **MOSAIC),
        slab,
        rows,
    )
    windows = kernels.StateWindows(page, table, ints([0, 0, -1]), ints([3, 7, -1]), 4, np.int32(2))
    run("window_means", lambda slab: kernels.window_means(slab, [windows], **MOSAIC), slab)
    q = rng.standard_normal((3, 64, 128), np.float32).astype(jnp.bfloat16)
    weights, cos_sin = rng.standard_normal((3, 64), np.float32), rng.standard_normal((3, 64), np.float32)
    codes, weights = run("fold_query", lambda *args: fold_query(*args, **MOSAIC), q, weights, cos_sin)
    scores = run(
        "index_scores",
        lambda slab, *args: kernels.index_scores(slab, layout.page(keys), *args, **MOSAIC),
        slab,
        ints([[1, 2, -1], [2, 9, 1]]),
        ints([0, 1, 3]),
        codes,
        weights,
        ints([100, 0, 192]),
    )
    run("top_k_indices", lambda *args: kernels.top_k_indices(*args, 37, **MOSAIC), scores, ints([100, 0, 192]))
    long = rng.standard_normal((2, 20_001), np.float32)
    run("top_k_indices, rounds", lambda *args: kernels.top_k_indices(*args, 512, **MOSAIC), long, ints([20_001, 9000]))


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
    compressor_and_indexer(plain)
    print("done")


if __name__ == "__main__":
    main()
