"""Caches of indexer keys with steps that score them, and the scores in float64."""

import functools

import jax.numpy as jnp
import numpy as np
import pages

from dsv4kv_jax import ModelConfig, kernels
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.specs import layer_specs

CONFIG = ModelConfig(name="two indexers", num_hidden_layers=3, compress_ratios=(4, 4, 1))
BLOCKS = 9
DIM = 128


@functools.cache
def page_of(rows=64, indexer="fp8", cache_dtype="fp8_ds_mla"):
    """The key page of a layer, of `rows` rows."""
    specs = layer_specs(CONFIG, cache_dtype, indexer=indexer, block_size=4 * rows)
    return PackedLayout.from_groups(group_layers(specs)).page("model.layers.1.attn.indexer.k_cache")


@functools.cache
def cache(page):
    """(slab, keys by slot): random keys in blocks 1 to 8; all other bytes, the null block's too, are NaNs."""
    rows = page.storage_block_size
    rng = np.random.default_rng(0)
    keys = rng.standard_normal(((BLOCKS - 1) * rows, DIM)) * np.exp2(rng.integers(-3, 4, ((BLOCKS - 1) * rows, 1)))
    keys = keys.astype(np.float32)
    slab = pages.as_slab(np.full((BLOCKS, page.block_stride_bytes), 0xFF, np.uint8), page)
    slots = jnp.arange(rows, BLOCKS * rows, dtype=jnp.int32)
    slab = kernels.insert_rows(slab, page, slots, jnp.asarray(keys), implementation="xla")
    values = kernels.gather_rows(slab, page, slots, dtype=jnp.float32, implementation="xla")
    return slab, np.concatenate([np.zeros((rows, DIM)), np.asarray(values)])


def step(page, table, counts, visible, *, heads=8, seed=0):
    """The arguments of `index_scores` for `counts` tokens of each request, and padding where `visible` is longer."""
    rng = np.random.default_rng(seed)
    tokens = len(visible)
    codes = np.clip(rng.standard_normal((tokens, heads, DIM)) * 100, -448, 448)  # larger ones would be NaNs
    codes = jnp.asarray(codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((tokens, heads)), jnp.float32)
    loc = np.concatenate([[0], np.cumsum(counts)])
    ints = (jnp.asarray(array, jnp.int32) for array in (table, loc))
    return cache(page)[0], page, *ints, codes, weights, jnp.asarray(visible, jnp.int32)


def assert_scores(scores, page, table, counts, visible, args):
    """That visible scores are the right ones, up to rounding of float32 sums."""
    _, values = cache(page)
    rows = page.storage_block_size
    codes, weights = (np.asarray(array, np.float64) for array in args[4:6])
    scores = np.asarray(scores)
    table = np.asarray(table)
    assert scores.dtype == np.float32
    assert scores.shape == (len(visible), table.shape[1] * rows)
    for token, request in enumerate(np.repeat(np.arange(len(counts)), counts)):
        entries = np.arange(min(visible[token], scores.shape[1]))
        block = table[request][entries // rows]
        exists = (block > 0) & (block < BLOCKS)
        keys = values[np.where(exists, block * rows + entries % rows, 0)]
        want = np.maximum(codes[token] @ keys.T, 0).T @ weights[token]
        size = (np.abs(codes[token]) @ np.abs(keys.T)).T @ np.abs(weights[token])
        got = scores[token, : len(entries)]
        assert np.isfinite(got).all()
        assert (np.abs(got - want) <= 1e-5 * size).all()
