"""JAX owns the cache; PyTorch attends on lent views after every step.

Runs on a CPU and on a GPU: `python examples/interop_jax_owned.py`.
"""

import jax
import jax.numpy as jnp
import torch

import dsv4kv_jax as dsv4
from dsv4kv_jax import interop, kernels
from dsv4kv_jax.interop import reference

LAYER = "model.layers.0.attn"  # a window-only layer of DeepSeek-V4-Flash
STEPS, HEADS = 100, 4

plan = dsv4.plan(dsv4.ModelConfig.preset("deepseek-v4-flash"), memory_bytes=8 * 1_002_240)
page = plan.layout.page(f"{LAYER}.swa_cache")
cache = dsv4.KVCache.allocate(plan)

block_table = jnp.array([[3, 1, 5]], jnp.int32)  # one request's blocks, from a KVCacheManager in real use
one_token = jnp.array([0, 1], jnp.int32)


def step(cache, seq_lens, latent):
    """Writes this token's row, and says which rows it attends to."""
    slots = kernels.slot_mapping(block_table, one_token, seq_lens, block_size=64, num_tokens=1)
    slab = kernels.insert_rows(cache.slab, page, slots, latent)
    return cache.with_slab(slab), kernels.swa_indices(block_table, one_token, seq_lens, block_size=64, num_tokens=1)


step = jax.jit(step, donate_argnums=0)  # in place: the slab is never copied
pointer = cache.slab.unsafe_buffer_pointer()
key = jax.random.key(0)

for number in range(STEPS):
    key, row_key = jax.random.split(key)
    latent = jax.random.normal(row_key, (1, 512), jnp.bfloat16)
    cache, window = step(cache, jnp.array([number + 1], jnp.int32), latent)

    with interop.lend(cache) as views:  # the cache is PyTorch's until the block ends
        view = views[f"{LAYER}.swa_cache"]  # uint8 [num_blocks, 64, 584], as vLLM binds it
        indices = [interop.int32_tensor("window", part, device=view.device) for part in window]
        q = torch.ones(1, HEADS, 512, device=view.device)
        out, _ = reference.attention(views, LAYER, q, tuple(indices))
        try:
            step(cache, jnp.array([1], jnp.int32), latent)
            raise SystemExit("a lent cache was donated")
        except interop.LeaseError as error:
            refusal = str(error)

    try:
        view.sum()  # a view does not outlive its lease
        raise SystemExit("a view outlived its lease")
    except interop.LeaseError:
        pass

assert cache.slab.unsafe_buffer_pointer() == pointer
print(f"{STEPS} steps at one address; attention of the last: {out[0, 0, :3].tolist()}")
print(f"donating a lent cache: {refusal}")
