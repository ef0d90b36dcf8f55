"""The compressor on its own: boundaries, state rows, toy numbers, missing history, the loop over many groups."""

import functools

import jax
import jax.numpy as jnp
import layer_runner
import numpy as np
import oracle_model
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax import kernels
from dsv4kv_jax.compressor import Boundaries, Compression, compress, max_boundaries
from dsv4kv_jax.kernels import states
from dsv4kv_jax.rope import rope_table, rotate

STATES = {4: "model.layers.1.attn.compressor.state_cache", 128: "model.layers.2.attn.compressor.state_cache"}
KEY_STATES = "model.layers.1.attn.indexer.compressor.state_cache"


@pytest.fixture(scope="module")
def runner():
    return layer_runner.Runner(layer_runner.draw([300, 256]))


@functools.partial(jax.jit, static_argnames=("layer", "ratio"), donate_argnames="cache")
def save_and_compress(cache, layer, ratio, table, slots, positions, kv, score, ape, norm, rope, boundaries):
    cache = cache.insert_rows(layer, slots, kernels.StateRows(kv, score, ape, positions), unique_slots=True)
    found = Boundaries(
        slots=boundaries,
        requests=boundaries * 0,
        positions=boundaries,
        count=jnp.int32(len(boundaries)),
        compress_ratio=ratio,
    )
    (rows,) = compress(cache, [Compression(layer, table, found, norm, rope)])
    return cache, rows


def run(runner, layer, ratio, inputs, boundaries, table=None):
    """Saves the states of request 0 and compresses the groups completed at these positions."""
    cache = runner.allocate()
    page = cache.page(layer)
    table = runner.tables[page.group][:1] if table is None else table
    size, positions = page.spec.block_size, np.arange(len(inputs.kv), dtype=np.int32)
    slots = (table[0][positions // size] * size + positions % size).astype(np.int32)
    arrays = map(jnp.asarray, (table, slots, positions, inputs.kv, inputs.score, inputs.ape, inputs.norm))
    table, slots, *rest = arrays
    rope = jnp.asarray(rope_table(layer_runner.CONFIG.rope, ratio, 300))
    return save_and_compress(cache, layer, ratio, table, slots, *rest, rope, jnp.asarray(boundaries, jnp.int32))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([4, 128]),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 400)), min_size=1, max_size=6),
)
def test_boundaries_never_exceed_their_bound(ratio, requests):
    """(prefix, new tokens) of each request; the bound is also reached by the worst prefix."""
    completed = sum((prefix + new) // ratio - prefix // ratio for prefix, new in requests)
    tokens = sum(new for _, new in requests)
    assert completed <= max_boundaries(tokens, len(requests), ratio)
    assert max_boundaries(tokens, 1, ratio) == -(-tokens // ratio)


def test_boundaries_are_packed_in_order():
    slots = jnp.asarray([-1, 7, -1, -1, 9, -1, -1, -1], jnp.int32)
    requests = jnp.asarray([0, 0, 0, 1, 1, 1, 0, 0], jnp.int32)
    positions = jnp.asarray([2, 3, 4, 6, 7, 8, -1, -1], jnp.int32)
    found = Boundaries.find(slots, requests, positions, compress_ratio=4, num_requests=2)
    assert found.slots.tolist() == [7, 9, -1]
    assert found.requests.tolist() == [0, 1, -1]
    assert found.positions.tolist() == [3, 7, -1]
    assert int(found.count) == 2


@pytest.mark.parametrize(("ratio", "layer", "part"), [(4, 1, "compressor"), (4, 1, "index"), (128, 2, "compressor")])
def test_rows_equal_the_oracle(runner, ratio, layer, part):
    inputs = getattr(runner.sequences[layer][0], part)
    name = KEY_STATES if part == "index" else STATES[ratio]
    boundaries = np.arange(ratio - 1, 300, ratio)
    cache, rows = run(runner, name, ratio, inputs, boundaries)
    angles = oracle_model.rope_angles(300, ratio)
    want = oracle_model.compress(inputs.kv, inputs.score, inputs.ape, inputs.norm, angles, ratio)
    np.testing.assert_allclose(rows, want, rtol=2e-5, atol=2e-6)
    # The state rows themselves: values, then scores with the bias of the position within the group.
    stored = runner.rows(cache, name, 0, 300).view(np.float32)
    np.testing.assert_array_equal(stored[:, : inputs.kv.shape[1]], inputs.kv)
    np.testing.assert_array_equal(stored[:, inputs.kv.shape[1] :], inputs.score + inputs.ape[np.arange(300) % ratio])


def test_toy_numbers(runner):
    """kv 1, scores, bias 0 and norm 1: y is 1, so the rotated pair shows the group's first position, 0 and 4."""
    ones, zeros = np.ones((8, 1024), np.float32), np.zeros((8, 1024), np.float32)
    toy = oracle_model.CompressorInputs(ones, zeros, np.zeros((4, 1024), np.float32), np.ones(512, np.float32))
    _, rows = run(runner, STATES[4], 4, toy, [3, 7])
    np.testing.assert_allclose(rows[:, :448], 1, rtol=1e-6)
    np.testing.assert_allclose(rows[:, 448:450], [[1, 1], [0.10315889, -1.4104462]], rtol=1e-5)


def test_first_group_ignores_the_other_half_and_its_absent_predecessors(runner):
    """p = 3 reads positions 0..3 only, and only their own half: the rest may hold anything."""
    inputs = runner.sequences[1][0].compressor
    first = oracle_model.CompressorInputs(inputs.kv[:4].copy(), inputs.score[:4].copy(), inputs.ape, inputs.norm)
    _, want = run(runner, STATES[4], 4, first, [3])
    first.kv[:, :512], first.score[:, :512] = np.nan, np.nan
    _, rows = run(runner, STATES[4], 4, first, [3])
    np.testing.assert_array_equal(rows, want)
    assert np.isfinite(np.asarray(rows)).all()


def test_history_without_a_block_has_no_weight(runner):
    """A table entry of 0 (a freed block) in the window: its positions count as absent, and nothing becomes NaN."""
    inputs = runner.sequences[1][0].compressor
    page = runner.layout.page(STATES[4])
    table = runner.tables[page.group][:1].copy()
    table[0, 0] = 0
    part = oracle_model.CompressorInputs(inputs.kv[:8], inputs.score[:8], inputs.ape, inputs.norm)
    _, rows = run(runner, STATES[4], 4, part, [7, -1], table)
    own = oracle_model.CompressorInputs(inputs.kv[4:8].copy(), inputs.score[4:8].copy(), inputs.ape, inputs.norm)
    angles = oracle_model.rope_angles(8, 4)
    want = oracle_model.compress(own.kv, own.score, own.ape, own.norm, angles * 0, 4)
    np.testing.assert_allclose(rows[0], oracle_model.rotate(want[0], angles[4]), rtol=2e-5, atol=2e-6)
    assert np.isfinite(np.asarray(rows)).all()


def test_many_groups_in_a_loop_give_the_same_rows(runner, monkeypatch):
    inputs = runner.sequences[1][0].compressor
    boundaries = np.append(np.arange(3, 300, 4), [-1] * 9)
    _, want = run(runner, STATES[4], 4, inputs, boundaries)
    monkeypatch.setattr(states, "_AT_ONCE", {8: 11})
    jax.clear_caches()
    _, rows = run(runner, STATES[4], 4, inputs, boundaries)
    np.testing.assert_array_equal(rows[:75], want[:75])


def test_rope_tables_and_rotation():
    """Known frequencies and the cosine and sine of position 4; rotating back returns what was there."""
    plain, compressed = (rope_table(layer_runner.CONFIG.rope, ratio, 8) for ratio in (1, 4))
    np.testing.assert_allclose(np.arcsin(plain[1, [32, 33, 63]]), [1, 0.7498942, 0.00013335], rtol=1e-4)
    np.testing.assert_allclose(
        np.arcsin(compressed[1, [32, 33, 47, 48, 49]]), [1, 0.68765604, 0.00363554, 0.00226562, 0.0013968], rtol=1e-5
    )
    np.testing.assert_allclose(compressed[4, [0, 32]], [-0.6536436, -0.7568025], rtol=1e-6)
    x = np.random.default_rng(0).standard_normal((8, 2, 512)).astype(np.float32)
    turned = rotate(jnp.asarray(x), jnp.asarray(compressed)[:, None])
    np.testing.assert_array_equal(turned[..., :448], x[..., :448])
    np.testing.assert_allclose(rotate(turned, jnp.asarray(compressed)[:, None], inverse=True), x, atol=1e-6)
    np.testing.assert_allclose(turned, oracle_model.rotate(x, oracle_model.rope_angles(8, 4)[:, None]), atol=1e-6)
