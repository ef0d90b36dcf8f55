"""The small model: checked weights, one code path for prefill and decode, and what a decode loop returns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle_model
import pytest

import dsv4kv_jax as dsv4
from dsv4kv_jax import kernels
from dsv4kv_jax.decode import allocate_block_tables, decode, prefill
from dsv4kv_jax.model import Model, miniature
from dsv4kv_jax.rope import rotate
from dsv4kv_jax.weights import check_weights, init_weights, weight_shapes

FLASH, PRO = (dsv4.ModelConfig.preset(f"deepseek-v4-{name}") for name in ("flash", "pro"))
CONFIG = dataclasses.replace(
    miniature(FLASH, 4, hidden_size=64), index_topk=16, compress_ratios=(4, 128, 1), num_hidden_layers=3
)
VOCAB = 48
PROMPTS = [131, 5, 40]
STEPS = 6
TOKENS = sum(PROMPTS) + STEPS * len(PROMPTS)  # every prefill is padded to this, so that it compiles once


@pytest.fixture(scope="module")
def model():
    return Model.random(CONFIG, jax.random.key(1), vocab_size=VOCAB, max_positions=256, dtype="float32")


@pytest.fixture(scope="module")
def setting(model):
    """(allocate, block tables, prompts): a fresh cache on demand."""
    plan = dsv4.plan(CONFIG, 64 << 20)
    tables = allocate_block_tables(
        plan.layout, [n + STEPS for n in PROMPTS], plan.num_blocks, rng=np.random.default_rng(0)
    )
    prompts = [np.random.default_rng(i).integers(0, VOCAB, n).astype(np.int32) for i, n in enumerate(PROMPTS)]
    return lambda: dsv4.KVCache.allocate(plan), tables, prompts


def padded(parts):
    """(tokens, query_start_loc, seq_lens) of whole prompts; the padding tokens are no token ids."""
    tokens = np.full(TOKENS, -1, np.int32)
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    tokens[: starts[-1]] = np.concatenate(parts)
    return tokens, starts, [len(part) for part in parts]


@pytest.fixture(scope="module")
def decoded(model, setting):
    """(logits after the prompts, tokens [STEPS + 1, R], captures of the last step, the cache)."""
    allocate, tables, prompts = setting
    cache, logits, _ = prefill(model, allocate(), *padded(prompts), tables)
    first = np.argmax(logits, axis=1)
    cache, tokens, captured = decode(model, cache, first, PROMPTS, tables, steps=STEPS, capture=True)
    return np.asarray(logits), np.concatenate([first[None], tokens]), captured, cache


def test_decode_continues_prefill(model, setting, decoded):
    """One prefill over prompts and decoded tokens picks the token that the decode loop picked last."""
    allocate, tables, prompts = setting
    _, tokens, _, _ = decoded
    whole = [np.append(prompt, tokens[:STEPS, r]) for r, prompt in enumerate(prompts)]
    _, logits, _ = prefill(model, allocate(), *padded(whole), tables)
    np.testing.assert_array_equal(np.argmax(logits, axis=1), tokens[STEPS])


def test_captures_are_the_last_steps_attention(setting, decoded):
    """Recomputed in float64 from the captured queries and lists and the cache's rows."""
    _, _, captured, cache = decoded
    gather = jax.jit(kernels.gather_rows, static_argnums=1, static_argnames="dtype")

    def read(name, slots):
        return gather(cache.slab, cache.page(name), slots, dtype=jnp.float32)

    for index, (layer, ratio) in enumerate(zip(captured, CONFIG.compress_ratios, strict=True)):
        name = f"model.layers.{index}.attn"
        for request, length in enumerate(PROMPTS):
            visible = (length + STEPS) // ratio if ratio > 1 else 0
            rows = [read(f"{name}.swa_cache", layer.window.indices[request])]
            assert int(layer.window.lens[request]) == min(length + STEPS, 128)
            counts = [int(layer.window.lens[request])]
            if ratio > 1:
                rows.append(read(name, layer.compressed.indices[request]))
                counts.append(int(layer.compressed.lens[request]))
                assert counts[1] == (min(visible, 16) if ratio == 4 else visible)
            keys = np.concatenate([np.asarray(part)[:n] for part, n in zip(rows, counts, strict=True)])
            out, lse = oracle_model.attention(np.asarray(layer.q[request]), keys, np.asarray(layer.sink))
            np.testing.assert_allclose(layer.out[request], out, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(layer.lse[request], lse, rtol=1e-5, atol=1e-5)
        turned = rotate(layer.q, layer.cos_sin[:, None], inverse=True)
        norms = jnp.mean(jnp.square(turned), axis=-1)
        np.testing.assert_allclose(norms, 1, rtol=1e-3)  # heads are normalised before the rotation, which keeps norms


def test_bfloat16_model():
    config = dataclasses.replace(miniature(FLASH, 1, hidden_size=64), compress_ratios=(4,))
    plan = dsv4.plan(config, 16 << 20)
    model = Model.random(config, jax.random.key(1), vocab_size=VOCAB, max_positions=64)
    tables = allocate_block_tables(plan.layout, [9], plan.num_blocks)
    cache = dsv4.KVCache.allocate(plan)
    cache, logits, captured = prefill(model, cache, np.arange(9), [0, 9], [9], tables, capture=True)
    assert logits.dtype == jnp.float32
    assert np.isfinite(np.asarray(logits)).all()
    assert captured is not None
    assert captured[0].q.dtype == captured[0].out.dtype == jnp.bfloat16
    assert captured[0].compressed.lens.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_strict_promotion_and_x64_change_nothing():
    config = dataclasses.replace(miniature(FLASH, 1, hidden_size=64), index_topk=1, compress_ratios=(4,))
    plan = dsv4.plan(config, 64 << 20)
    tables = allocate_block_tables(plan.layout, [260], plan.num_blocks)
    model = Model.random(config, jax.random.key(0), vocab_size=VOCAB, max_positions=260, dtype="float32")
    results = []
    for x64 in (False, True):
        with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
            cache = dsv4.KVCache.allocate(plan)
            cache, logits, _ = prefill(model, cache, np.arange(12) % VOCAB, [0, 12], [12], tables)
            results.append((np.asarray(cache.slab), np.asarray(logits)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_lengths_past_the_tables_are_refused(model, setting):
    allocate, tables, _ = setting
    cache = allocate()
    with pytest.raises(
        ValueError, match="a request reaches 1131 tokens, but .* end at .*; make them longer, or decode"
    ):
        decode(model, cache, [0, 0, 0], PROMPTS, tables, steps=1000)
    with pytest.raises(ValueError, match="steps=0 must be an integer of at least 1"):
        decode(model, cache, [0, 0, 0], PROMPTS, tables, steps=0)
    assert not cache.slab.is_deleted()  # nothing was donated


def test_block_tables_give_every_request_its_own_blocks():
    layout = dsv4.plan(CONFIG, 64 << 20).layout
    tables = allocate_block_tables(layout, [300, 0, 64], 200, rng=np.random.default_rng(0))
    used = np.concatenate([table[table >= 0] for table in tables])
    assert len(set(used.tolist())) == len(used)
    assert used.min() >= 1
    for table, group in zip(tables, layout.groups, strict=True):
        assert [(row >= 0).sum() for row in table] == [-(-n // group.block_size) for n in (300, 0, 64)]
    with pytest.raises(dsv4.PlanError, match=r"2 requests of \[300, 64\] tokens need \d+ blocks; the cache has 10"):
        allocate_block_tables(layout, [300, 64], 10)


def test_miniature_covers_most_kinds():
    assert miniature(FLASH, 4).compress_ratios == (1, 1, 4, 128)
    assert miniature(PRO, 3).compress_ratios == (128, 128, 4)
    assert miniature(FLASH, 1).compress_ratios == (1,)
    small = miniature(PRO, 4)
    assert (small.head_dim, small.index_n_heads, small.index_topk, small.sliding_window) == (512, 64, 1024, 128)
    with pytest.raises(dsv4.PlanError, match="num_layers=62 must be from 1 to the model's 61"):
        miniature(PRO, 62)


def test_weights_have_the_models_real_shapes():
    shapes = weight_shapes(PRO, vocab_size=129280).layers
    assert [layer.compressor.ape.shape for layer in shapes[:3]] == [(128, 512), (128, 512), (4, 1024)]
    assert shapes[2].indexer.compressor.wkv.shape == (7168, 256)
    assert shapes[2].wq_b.shape == (1536, 128 * 512)
    assert shapes[2].wo_a.shape == (16, 8 * 512, 1024)
    assert shapes[0].indexer is None


def changed(weights, layer, **fields):
    layers = list(weights.layers)
    layers[layer] = dataclasses.replace(layers[layer], **fields)
    return dataclasses.replace(weights, layers=tuple(layers))


def bad_weights(weights):
    c4 = weights.layers[0]
    yield (
        changed(weights, 1, wkv=jnp.zeros((64, 576))),
        r"layers\[1\].wkv is float32\[64, 576\], needs float32\[64, 512\]",
    )
    yield (
        changed(weights, 2, norm=weights.layers[2].norm.astype(jnp.bfloat16)),
        r"layers\[2\].norm is bfloat16\[64\], needs float32\[64\]",
    )
    yield (
        changed(weights, 0, compressor=dataclasses.replace(c4.compressor, ape=jnp.zeros((128, 512)))),
        r"layers\[0\] has compress_ratio=4 .* \(compressor.ape \[128, 512\]\)",
    )
    yield (
        changed(weights, 0, indexer=None),
        r"layers\[0\] has compress_ratio=4 .* needs a compressor of that ratio and an indexer",
    )
    yield changed(weights, 1, compressor=c4.compressor), r"layers\[1\] has compress_ratio=128 .* a compressor of that"
    yield changed(weights, 2, compressor=c4.compressor), r"layers\[2\] has compress_ratio=1 .* needs neither"
    yield dataclasses.replace(weights, layers=weights.layers[:2]), r"2 layers.* num_hidden_layers=3"
    yield dataclasses.replace(weights, embed=weights.embed[:, :-1]), r"embed is float32\[48, 63\]"


def test_wrong_weights_are_named_at_build_time(model):
    for weights, message in bad_weights(model.weights):
        with pytest.raises(ValueError, match=message):
            Model.build(CONFIG, weights, vocab_size=VOCAB, max_positions=8)
    check_weights(CONFIG, model.weights, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="dtype='float16' is not supported; use one of float32, bfloat16"):
        init_weights(CONFIG, jax.random.key(0), vocab_size=VOCAB, dtype="float16")
    with pytest.raises(ValueError, match="num_attention_heads=4 is not a multiple of o_groups=3"):
        weight_shapes(dataclasses.replace(CONFIG, o_groups=3), vocab_size=VOCAB)
