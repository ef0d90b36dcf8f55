"""Optimised geometries are run, not only counted: by the manager with its prefix cache, and by the model."""

import dataclasses

import jax
import numpy as np

from dsv4kv_jax import KVCache, ModelConfig, decode
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.model import Model, miniature
from dsv4kv_jax.optimize import optimize
from dsv4kv_jax.plan import KVCachePlan
from dsv4kv_jax.request import Request

PRO = ModelConfig.preset("deepseek-v4-pro")
SMALL = dataclasses.replace(miniature(ModelConfig.preset("deepseek-v4-flash"), 1), compress_ratios=(4,), index_topk=8)
PROMPTS = (5, 150)  # the second needs two blocks of every group, and its indexer has to choose


def test_prefixes_are_shared_over_an_optimised_plan():
    found = optimize(PRO, 40 * 2**30, 2048)
    assert len(found.plan.groups) > len(found.default.groups)
    manager = KVCacheManager(found.plan, max_model_len=4096, max_requests=4)
    assert manager.hit_granularity == found.hit_granularity == 256
    tokens = np.arange(1025, dtype=np.int32)
    first = Request("first", tokens)
    manager.add_request(first)
    assert manager.get_computed_blocks(first).num_tokens == 0
    for computed in range(0, 1025, 256):
        first.num_computed_tokens = computed
        assert manager.allocate_slots(first, min(256, 1025 - computed)) is not None
    manager.free(first)
    again = Request("again", tokens)
    manager.add_request(again)
    hits = manager.get_computed_blocks(again)
    assert hits.num_tokens == 1024
    assert manager.allocate_slots(again, 1, new_computed_blocks=hits) is not None
    manager.check()


def logits_over(planned: KVCachePlan) -> np.ndarray:
    """Logits after prompts that were computed in one step, over a cache of this plan."""
    model = Model.random(SMALL, jax.random.key(3), max_positions=512, dtype="float32")
    cache = KVCache.allocate(planned, num_blocks=min(planned.num_blocks, 400))
    tables = decode.allocate_block_tables(cache.layout, PROMPTS, cache.num_blocks, rng=np.random.default_rng(1))
    tokens = np.random.default_rng(0).integers(0, 256, sum(PROMPTS)).astype(np.int32)
    starts = np.cumsum((0, *PROMPTS)).astype(np.int32)
    _, logits, _ = decode.prefill(model, cache, tokens, starts, np.array(PROMPTS, np.int32), tables)
    return np.asarray(logits)


def test_the_model_computes_the_same_over_an_optimised_plan():
    found = optimize(SMALL, 256 * 2**20, 600, compatible="flashmla")
    pages = found.plan.layout.pages
    latent, key = pages["model.layers.0.attn"], pages["model.layers.0.attn.indexer.k_cache"]
    assert latent.group != key.group, "the search should put latents and their keys in different groups here"
    assert {g.block_size for g in found.plan.groups} != {g.block_size for g in found.default.groups}
    np.testing.assert_allclose(logits_over(found.plan), logits_over(found.default), rtol=1e-5, atol=1e-5)
