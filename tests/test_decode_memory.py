"""No copy of the slab, ever: steps over all 61 layers of V4-Pro, and the model's loops, update it where it lies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4kv_jax as dsv4
from dsv4kv_jax.decode import _decode, _prefill, allocate_block_tables
from dsv4kv_jax.metadata import StepMetadata
from dsv4kv_jax.model import Model, miniature

STEPS = 100
# The programs are compiled for what they allocate, not for speed.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def pro():
    """(cache, block tables) of V4-Pro for one request of up to 128 + 100 tokens."""
    plan = dsv4.plan(dsv4.ModelConfig.preset("deepseek-v4-pro"), 1 << 30)
    blocks = 1 + sum(-(-(128 + STEPS) // group.block_size) for group in plan.groups)
    cache = dsv4.KVCache.allocate(plan, num_blocks=blocks)
    tables = allocate_block_tables(cache.layout, [128 + STEPS], blocks)
    return cache, tuple(map(jnp.asarray, tables))


def step(tables, state):
    """Every layer writes window and compressed rows made from the layer before, and reads its window back."""
    cache, rows, seq_len = state
    metadata = StepMetadata.build(
        cache.layout, tables, jnp.asarray([0, 1], jnp.int32), seq_len[None], num_tokens=1, max_model_len=256
    )
    for layer in range(61):
        name = f"model.layers.{layer}.attn"
        for cache_name in (f"{name}.swa_cache", name):
            cache = cache.insert_rows(cache_name, metadata.slots(cache_name), rows)
        slots = metadata.window(f"{name}.swa_cache")[0][:, -2:]
        read = cache.gather_rows(f"{name}.swa_cache", slots, dtype=jnp.float32)
        rows = rows + jnp.tanh(jnp.mean(read, axis=1))
    return cache, rows, seq_len + 1


def assert_in_place(compiled, cache):
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes / 20, "a slab-sized temporary"


def test_pro_step_keeps_its_pointer_for_100_steps(pro):
    cache, tables = pro
    state = cache, jax.random.normal(jax.random.key(0), (1, 512), jnp.float32), jnp.int32(129)
    compiled = jax.jit(functools.partial(step, tables), donate_argnums=0).lower(state).compile(FAST_COMPILE)
    assert_in_place(compiled, cache)
    pointer = cache.slab.unsafe_buffer_pointer()
    for _ in range(STEPS):
        state = compiled(state)
        assert state[0].slab.unsafe_buffer_pointer() == pointer
    assert int(state[2]) == 129 + STEPS
    assert np.isfinite(np.asarray(state[1])).all()
    assert np.asarray(state[0].slab).any()


@pytest.fixture(scope="module")
def small():
    """A model with layers of every kind, its cache (256 MiB, so that a copy shows) and tables for two requests."""
    config = miniature(dsv4.ModelConfig.preset("deepseek-v4-flash"), 4, hidden_size=64)
    model = Model.random(config, jax.random.key(0), vocab_size=32, max_positions=256, dtype="float32")
    cache = dsv4.KVCache.allocate(dsv4.plan(model.config, 256 << 20))
    tables = allocate_block_tables(cache.layout, [200, 150], cache.num_blocks)
    return model, cache, tuple(map(jnp.asarray, tables))


def test_decode_scan_needs_no_slab_sized_temporary(small):
    model, cache, tables = small
    tokens, seq_lens = jnp.zeros(2, jnp.int32), jnp.asarray([3, 130], jnp.int32)
    lowered = _decode.lower(model, cache, tokens, seq_lens, tables, steps=64, capture=True)
    assert_in_place(lowered.compile(FAST_COMPILE), cache)


def test_steps_in_a_fori_loop_need_no_slab_sized_temporary(small):
    model, cache, tables = small
    starts = jnp.asarray([0, 1, 2], jnp.int32)

    def body(_, state):
        cache, tokens, seq_lens = state
        cache, logits, _ = _prefill.__wrapped__(model, cache, tokens, starts, seq_lens, tables, capture=False)
        return cache, jnp.argmax(logits, axis=1).astype(jnp.int32), seq_lens + 1

    state = cache, jnp.zeros(2, jnp.int32), jnp.asarray([4, 131], jnp.int32)
    loop = jax.jit(lambda state: jax.lax.fori_loop(0, 8, body, state), donate_argnums=0)
    assert_in_place(loop.lower(state).compile(FAST_COMPILE), cache)
