"""PyTorch owns the memory, as vLLM does; JAX writes it in place, step by step, and the views stay bound.

In place on a GPU. On a CPU XLA cannot write into PyTorch's memory, so there every step copies the slab back, openly.
Runs on both: `python examples/interop_torch_owned.py`.
"""

import types

import jax
import jax.numpy as jnp
import torch

import dsv4kv_jax as dsv4
from dsv4kv_jax import interop, kernels
from dsv4kv_jax.interop import reference

LAYER = "model.layers.0.attn"
STEPS, HEADS = 20, 4
device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"

# What an engine has: a KVCacheConfig, and the one int8 tensor that all of its layers lie in.
plan = dsv4.plan(dsv4.ModelConfig.preset("deepseek-v4-flash"), memory_bytes=8 * 1_002_240)
config = interop.vllm.write_config(plan.layout, plan.num_blocks)
backing = torch.zeros(config["kv_cache_tensors"][0]["size"], dtype=torch.int8, device=device)

shared = interop.vllm.adopt(config, backing, copy_on_cpu=True)
modules = {name: types.SimpleNamespace() for name in shared}  # its attention modules
interop.bind(shared, modules)  # once; the views live as long as the memory

page = shared.layout.page(f"{LAYER}.swa_cache")
block_table = jnp.array([[3, 1, 5]], jnp.int32)
one_token = jnp.array([0, 1], jnp.int32)


def step(cache, seq_lens, latent):
    """Writes this token's row, and says which rows it attends to."""
    slots = kernels.slot_mapping(block_table, one_token, seq_lens, block_size=64, num_tokens=1)
    slab = kernels.insert_rows(cache.slab, page, slots, latent)
    return cache.with_slab(slab), kernels.swa_indices(block_table, one_token, seq_lens, block_size=64, num_tokens=1)


step = jax.jit(step, donate_argnums=0)
key = jax.random.key(0)

for number in range(STEPS):
    key, row_key = jax.random.split(key)
    latent = jax.random.normal(row_key, (1, 512), jnp.bfloat16)
    window = shared.step(step, jnp.array([number + 1], jnp.int32), latent)  # imported, donated, written in place
    indices = tuple(interop.int32_tensor("window", part, device=backing.device) for part in window)
    out, _ = reference.attention(shared, LAYER, torch.ones(1, HEADS, 512, device=device), indices)

bound = modules[f"{LAYER}.swa_cache"].kv_cache
assert bound.data_ptr() == backing.data_ptr() + page.offset_bytes
print(f"{STEPS} steps into {backing.dtype} memory on {device}; bound view: {tuple(bound.shape)}, {bound.stride()}")
print(f"bytes written in block 3 of the layer: {int(bound[3].count_nonzero())}")
print(f"attention of the last step: {out[0, 0, :3].tolist()}")
