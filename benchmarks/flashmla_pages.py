"""Whether FlashMLA's compiled kernel reads window pages that are not vLLM's 64 rows long, as optimised geometries have.

For each page length: random rows in a packed slab, random lists, FlashMLA's output against PyTorch on the same views.

    python benchmarks/flashmla_pages.py --flash-mla _flashmla_C.abi3.so --output flashmla-pages-h200.json
"""

import argparse
import dataclasses
import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from _results import Row, report

from dsv4kv_jax import KVCache, ModelConfig, interop, layer_specs, plan_from_specs
from dsv4kv_jax.interop import reference

LAYER = "model.layers.2.attn"
TOKENS, HEADS, WINDOW, COMPRESSED = 64, 128, 128, 512
MAX_ERROR = 3e-3


def largest_error(page_rows: int, rng: np.random.Generator) -> float:
    """||FlashMLA - PyTorch|| / ||PyTorch|| for a C4A layer whose window pages have `page_rows` rows."""
    specs = layer_specs(ModelConfig.preset("deepseek-v4-pro"), layers=[2, 3])
    window = f"{LAYER}.swa_cache"
    for name in [name for name in specs if name.endswith(".swa_cache")]:
        specs[name] = dataclasses.replace(specs[name], block_size=page_rows)
    cache = KVCache.allocate(plan_from_specs(specs, 0, num_gpu_blocks_override=64))
    lists = []
    # A block belongs to one group at a time: the first half to the window's, the second to the compressed cache's.
    for layer, width, first, last in ((window, WINDOW, 1, 32), (LAYER, COMPRESSED, 32, 64)):
        rows = cache.page(layer).storage_block_size
        slots = np.arange(first * rows, last * rows, dtype=np.int32)
        values = jnp.asarray(rng.standard_normal((len(slots), 512)), jnp.float32)
        cache = cache.insert_rows(layer, jnp.asarray(slots), values)
        lengths = rng.integers(1, width + 1, TOKENS).astype(np.int32)
        indices = rng.choice(slots, (TOKENS, width)).astype(np.int32)
        lists.append((np.where(np.arange(width) < lengths[:, None], indices, -1).astype(np.int32), lengths))
    q = torch.as_tensor(rng.standard_normal((TOKENS, HEADS, 512)), dtype=torch.bfloat16, device="cuda")
    sink = torch.as_tensor(rng.standard_normal(HEADS), dtype=torch.float32, device="cuda")
    on_gpu = [tuple(torch.as_tensor(array, device="cuda") for array in part) for part in lists]
    with interop.lend(jax.block_until_ready(cache)) as views:
        want, _ = reference.attention(views, LAYER, q, *on_gpu, sink=sink)
        got, *_ = torch.ops._flashmla_C.sparse_decode_fwd(
            q[:, None],
            views[window][:, :, None],
            on_gpu[0][0][:, None],
            on_gpu[0][1],
            sink,
            None,
            None,
            views[LAYER][:, :, None],
            on_gpu[1][0][:, None],
            on_gpu[1][1],
            512,
            512**-0.5,
            None,
        )
        error = torch.linalg.vector_norm(got[:, 0].double() - want.double()) / torch.linalg.vector_norm(want.double())
    return float(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flash-mla", required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    args = parser.parse_args()
    torch.ops.load_library(args.flash_mla)
    rng = np.random.default_rng(0)
    rows, worst = [], 0.0
    for page_rows in (16, 32, 64, 128):
        error = largest_error(page_rows, rng)
        worst = max(worst, error if np.isfinite(error) else np.inf)
        note = f"relative error {error:.2e}, bound {MAX_ERROR}"
        case = f"window pages of {page_rows} rows, {TOKENS} tokens, {HEADS} heads"
        rows.append(Row(name="flashmla_pages", case=case, implementation="FlashMLA", us=None, note=note))
        print(case, note, file=sys.stderr)
    report(rows, as_json=args.json, output=args.output)
    sys.exit(0 if worst <= MAX_ERROR else 1)


if __name__ == "__main__":
    main()
