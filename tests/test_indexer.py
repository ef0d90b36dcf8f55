"""The indexer: folded queries, scores over paged keys, and an exact, left-packed top-k for ragged batches."""

import functools

import jax
import jax.numpy as jnp
import layer_runner
import numpy as np
import oracle_model
import pytest

from dsv4kv_jax import indexer
from dsv4kv_jax.config import RopeConfig
from dsv4kv_jax.indexer import fold_query, hadamard, select_top_k
from dsv4kv_jax.rope import rope_table

KEYS = "model.layers.1.attn.indexer.k_cache"
HEADS = 8
FORMATS = {"fp8": "indexer_fp8", "fp8_ue8m0": "indexer_fp8_ue8m0", "mxfp4": "indexer_mxfp4"}
TABLES = np.array([[3, 1, 5], [2, 6, -1], [4, 0, 0]], np.int32)
ROWS = 64


@functools.partial(jax.jit, static_argnames=("top_k", "use_hadamard"))
def select(cache, table, query_start_loc, q, weights, cos_sin, visible, top_k, use_hadamard=False):
    codes, folded = fold_query(q, weights, cos_sin, use_hadamard=use_hadamard)
    top = select_top_k(cache, KEYS, table, query_start_loc, codes, folded, visible, top_k=top_k)
    return codes, folded, top


def filled_cache(kind, use_hadamard=False):
    """A cache whose blocks 1..6 hold random keys, the null block NaNs; and the keys' values by slot."""
    plan = layer_runner.dsv4.plan(layer_runner.CONFIG, 1 << 26, indexer=kind)
    cache = layer_runner.dsv4.KVCache.allocate(plan, num_blocks=7)
    cache = cache.with_slab(cache.slab.at[0].set(jnp.uint32(0xFFFFFFFF)))
    rows = np.random.default_rng(0).standard_normal((6 * ROWS, 128)).astype(np.float32)
    rows = oracle_model.hadamard(rows) if use_hadamard else rows
    cache = cache.insert_rows(KEYS, jnp.arange(ROWS, 7 * ROWS, dtype=jnp.int32), jnp.asarray(rows))
    values = oracle_model.decode(FORMATS[kind], oracle_model.encode(FORMATS[kind], rows), 128)
    return cache, np.concatenate([np.zeros((ROWS, 128), np.float32), values])


def batch(counts, seq_lens):
    """query_start_loc and positions of a ragged batch."""
    positions = np.concatenate([np.arange(n - c, n) for c, n in zip(counts, seq_lens, strict=True)]).astype(int)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), positions


@pytest.mark.parametrize("use_hadamard", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("kind", list(FORMATS))
def test_selects_what_the_oracle_selects(kind, use_hadamard):
    cache, values = filled_cache(kind, use_hadamard)
    counts, seq_lens = (5, 21, 1), (700, 511, 200)
    query_start_loc, positions = batch(counts, seq_lens)
    padding = 3
    tokens = len(positions) + padding
    rng = np.random.default_rng(1)
    q = oracle_model.bf16(rng.standard_normal((tokens, HEADS, 128)))
    weights = rng.standard_normal((tokens, HEADS)).astype(np.float32)
    angles = oracle_model.rope_angles(700, 4)
    table = rope_table(RopeConfig(), 4, 700)
    cos_sin = table[np.append(positions, [0] * padding)]
    visible = np.append((positions + 1) // 4, [0] * padding).astype(np.int32)
    arrays = map(jnp.asarray, (TABLES, query_start_loc, q, weights, cos_sin, visible))
    _, _, top = select(cache, *arrays, top_k=40, use_hadamard=use_hadamard)
    top = np.asarray(top)
    requests = np.repeat(np.arange(3), counts)
    for token, (request, p) in enumerate(zip(requests, positions, strict=True)):
        seen = visible[token]
        entries = np.arange(seen)
        blocks = TABLES[request][entries // ROWS]
        keys = values[np.where(blocks > 0, blocks * ROWS + entries % ROWS, 0)]
        scores = oracle_model.index_scores(q[token], weights[token], keys, angles[p], use_hadamard)
        picked = top[token]
        if seen <= 40:
            assert picked.tolist() == [*range(seen), *[-1] * (40 - seen)]
            continue
        assert len(set(picked.tolist())) == 40
        assert 0 <= picked.min() <= picked.max() < seen
        expected = np.argsort(-scores, kind="stable")[:40]
        # Scores that differ by no more than float32 sums may be ordered either way.
        np.testing.assert_allclose(np.sort(scores[picked]), np.sort(scores[expected]), rtol=1e-5, atol=1e-5)
        assert len(set(picked) ^ set(expected)) <= 2
    assert (top[len(positions) :] == -1).all()


def test_folded_query_is_the_quantised_query():
    cache, _ = filled_cache("fp8")
    rng = np.random.default_rng(2)
    q = oracle_model.bf16(rng.standard_normal((4, HEADS, 128)) * 10.0 ** rng.integers(-3, 3, (4, HEADS, 1)))
    weights = rng.standard_normal((4, HEADS)).astype(np.float32)
    table = rope_table(RopeConfig(), 4, 16)
    loc, visible = jnp.asarray([0, 4, 4, 4], jnp.int32), jnp.zeros(4, jnp.int32)
    arrays = map(jnp.asarray, (q, weights, table[[0, 3, 9, 15]]))
    codes, folded, _ = select(cache, jnp.asarray(TABLES), loc, *arrays, visible, top_k=40)
    rotated = oracle_model.bf16(oracle_model.rotate(q, oracle_model.rope_angles(16, 4)[[0, 3, 9, 15]][:, None]))
    raw = oracle_model.encode("indexer_fp8", rotated.reshape(-1, 128))
    scale = np.ascontiguousarray(raw[:, 128:]).view(np.float32).reshape(4, HEADS)
    np.testing.assert_array_equal(
        np.asarray(codes, np.float32), oracle_model.e4m3_value(raw[:, :128]).reshape(4, HEADS, 128)
    )
    np.testing.assert_allclose(folded, weights * scale * 128**-0.5 * HEADS**-0.5, rtol=1e-6)


def test_hadamard_keeps_products_and_is_its_own_inverse():
    x = np.random.default_rng(3).standard_normal((2, 5, 128)).astype(np.float32)
    turned = np.asarray(hadamard(jnp.asarray(x)))
    np.testing.assert_allclose(turned, oracle_model.hadamard(x), atol=1e-5)
    np.testing.assert_allclose(turned[0] @ turned[1].T, x[0] @ x[1].T, atol=1e-4)
    np.testing.assert_allclose(hadamard(jnp.asarray(turned)), x, atol=1e-5)


def test_nothing_is_scored_where_everything_fits():
    cache, _ = filled_cache("fp8")
    cache = cache.with_slab(jnp.full_like(cache.slab, jnp.uint32(0xFFFFFFFF)))  # NaN keys would show
    visible = jnp.asarray([0, 3, 192], jnp.int32)
    zeros = jnp.zeros((3, HEADS, 128), jnp.bfloat16), jnp.zeros((3, HEADS)), jnp.zeros((3, 64))
    loc = jnp.asarray([0, 1, 2, 3], jnp.int32)
    _, _, top = select(cache, jnp.asarray(TABLES), loc, *zeros, visible, top_k=192)
    assert [(row >= 0).sum() for row in np.asarray(top)] == [0, 3, 192]
    np.testing.assert_array_equal(top[2], np.arange(192))


def test_equal_scores_keep_the_earlier_entries():
    cache, _ = filled_cache("fp8")
    zeros = jnp.zeros((3, HEADS, 128), jnp.bfloat16), jnp.zeros((3, HEADS)), jnp.zeros((3, 64))
    loc, visible = jnp.asarray([0, 1, 2, 3], jnp.int32), jnp.full(3, 150, jnp.int32)
    _, _, top = select(cache, jnp.asarray(TABLES), loc, *zeros, visible, top_k=40)
    np.testing.assert_array_equal(top[0], np.arange(40))


@pytest.mark.parametrize("chunk", [4, 1])
def test_small_workspace_gives_the_same_picks(monkeypatch, chunk):
    """In parts, which begin and end in the middle of requests."""
    cache, _ = filled_cache("fp8")
    counts, seq_lens = (5, 21, 1), (700, 511, 200)
    query_start_loc, positions = batch(counts, seq_lens)
    rng = np.random.default_rng(4)
    q, weights = rng.standard_normal((27, HEADS, 128)), rng.standard_normal((27, HEADS))
    visible = ((positions + 1) // 4).astype(np.int32)
    table = rope_table(RopeConfig(), 4, 700)[positions]
    arrays = (jnp.asarray(a, jnp.float32) for a in (q, weights, table))
    fixed = (cache, jnp.asarray(TABLES), jnp.asarray(query_start_loc), *arrays, jnp.asarray(visible))
    _, _, want = select(*fixed, top_k=40)
    monkeypatch.setattr(indexer, "_WORKSPACE_BYTES", chunk * 192 * 4)
    jax.clear_caches()
    _, _, top = select(*fixed, top_k=40)
    np.testing.assert_array_equal(np.sort(top), np.sort(want))
