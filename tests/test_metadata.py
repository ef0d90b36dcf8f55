"""Step metadata: each layer gets what the oracle says, nothing is computed that no layer needs."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.kernels.step import StepIndex, step_indices
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.metadata import StepMetadata
from dsv4kv_jax.rope import RopeTables
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec, layer_specs
from dsv4kv_jax.step import Step

REQUESTS, TOKENS, MAX_LEN = 3, 12, 1024
LAYOUT = pages.layout_of()


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def tables_for(layout, seed=0, max_len=MAX_LEN):
    """Random tables with some null and negative entries, wide enough for `max_len` tokens."""
    rng = np.random.default_rng(seed)
    tables = []
    for group in layout.groups:
        table = rng.integers(1, 50, (REQUESTS, -(-max_len // group.block_size)))
        table[rng.random(table.shape) < 0.2] = 0
        table[rng.random(table.shape) < 0.1] = -1
        tables.append(np.int32(table))
    return tables


@jax.jit
def build(tables, starts, lens):
    return StepMetadata.build(LAYOUT, tables, starts, lens, num_tokens=TOKENS, max_model_len=MAX_LEN)


@given(
    queries=st.lists(st.integers(0, 4), min_size=REQUESTS, max_size=REQUESTS),
    prefixes=st.lists(st.integers(0, MAX_LEN - 4), min_size=REQUESTS, max_size=REQUESTS),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_every_layer(queries, prefixes, seed):
    tables = tables_for(LAYOUT, seed)
    starts, lens = np.int32(np.cumsum([0, *queries])), np.int32(queries) + np.int32(prefixes)
    meta = build(tables, starts, lens)
    step = oracle.tokens(starts, lens, TOKENS)
    assert meta.positions.tolist() == [-1 if token is None else token[1] for token in step]
    assert meta.token_to_req.tolist() == [0 if token is None else token[0] for token in step]
    assert meta.valid.tolist() == [token is not None for token in step]
    for name, page in LAYOUT.pages.items():
        args = (tables[page.group], starts, lens)
        size, ratio = page.spec.block_size, page.spec.compress_ratio
        np.testing.assert_array_equal(meta.block_table(name), args[0])
        if ratio > 1:
            wanted = oracle.compressed_slot_mapping(*args, size, ratio, TOKENS)
        else:
            wanted = oracle.slot_mapping(*args, size, TOKENS)
        np.testing.assert_array_equal(meta.slots(page), wanted)
        np.testing.assert_array_equal(meta.slots(name), wanted)
        if ratio == 128:
            for found, want in zip(meta.dense(page), oracle.c128a_indices(*args, TOKENS, 128), strict=True):
                np.testing.assert_array_equal(found, want)
        if name.endswith(".swa_cache"):
            for found, want in zip(meta.window(page), oracle.swa_indices(*args, size, TOKENS), strict=True):
                np.testing.assert_array_equal(found, want)
    topk = np.random.default_rng(seed).integers(-1, 200, (TOKENS, 7)).astype(np.int32)
    page = LAYOUT.page(pages.C4A)
    wanted = oracle.topk_to_slots(topk, meta.token_to_req, tables[page.group], 64, meta.valid)
    for found, want in zip(meta.picked(page, topk), wanted, strict=True):
        np.testing.assert_array_equal(found, want)


def kinds(layout):
    return [(want.kind, want.group, want.compress_ratio) for want in _build(layout).wanted]


def test_only_what_is_needed():
    pro = PackedLayout.from_groups(group_layers(layer_specs(ModelConfig.preset("deepseek-v4-pro"))))
    assert kinds(pro) == [
        ("compressed_slots", 0, 128),
        ("dense", 0, 128),
        ("compressed_slots", 0, 4),
        ("slots", 1, 1),
        ("window", 1, 1),
        ("slots", 2, 1),
        ("window", 2, 1),
        ("slots", 3, 1),
        ("slots", 4, 1),
    ]
    window_only = ModelConfig(name="w", num_hidden_layers=2, compress_ratios=(1, 1))
    assert kinds(PackedLayout.from_groups(group_layers(layer_specs(window_only)))) == [
        ("slots", 0, 1),
        ("window", 0, 1),
    ]
    assert kinds(PackedLayout.from_groups(())) == []


def _build(layout, tables=None, **options):
    tables = tables_for(layout) if tables is None else tables
    options = {"num_tokens": TOKENS, "max_model_len": MAX_LEN} | options
    return StepMetadata.build(layout, tables, np.int32([0, 1, 2, 3]), np.int32([9, 700, 3]), **options)


def test_group_without_layers_here():
    """A pipeline stage keeps groups that it holds no layer of; their tables may be missing."""
    groups = [group.on_stage({pages.SWA, pages.STATES[0]}) for group in LAYOUT.groups]
    layout = PackedLayout.from_groups(groups)
    tables = [table if group.layers else None for table, group in zip(tables_for(layout), groups, strict=True)]
    meta = _build(layout, tables)
    assert {want.group for want in meta.wanted} == {index for index, group in enumerate(groups) if group.layers}
    np.testing.assert_array_equal(meta.slots(pages.SWA), _build(LAYOUT, tables_for(LAYOUT)).slots(pages.SWA))
    with pytest.raises(ValueError, match="has no 'compressed_slots' indices"):
        meta.slots(LAYOUT.page(pages.C4A))
    for page in (LAYOUT.page(pages.C4A), *(dataclasses.replace(LAYOUT.page(pages.SWA), group=g) for g in (-1, 99))):
        with pytest.raises(ValueError, match=f"is in group {page.group}, of which no layer is in this cache"):
            meta.block_table(page)


def test_one_group_without_hybrid():
    """Window layers inside the group that keeps every block see `window` tokens of it."""
    layout = PackedLayout.from_groups(group_layers(layer_specs(pages.CONFIG), hybrid=False))
    meta = _build(layout, window=16)
    args = (tables_for(layout)[0], [0, 1, 2, 3], [9, 700, 3])
    rows, lens = meta.window(pages.SWA)
    for found, want in zip((rows, lens), oracle.swa_indices(*args, 256, TOKENS, window=16), strict=True):
        np.testing.assert_array_equal(found, want)


def test_narrower_dense_rows():
    meta = _build(LAYOUT, dense_width=5)
    rows, _ = meta.dense(pages.C128A)
    assert rows.shape == (TOKENS, 5)
    assert _build(LAYOUT, max_model_len=1_000_000).dense(pages.C128A)[0].shape == (TOKENS, 7936)


NUMBERS = {"num_tokens": 0, "max_model_len": 1, "window": 1, "dense_width": 1}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, 1.0, True, "3", np.float32(3)], ids=repr)
def test_sizes_that_cannot_be(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* must be an? (Python )?integer of at least {NUMBERS[name]}"):
        _build(LAYOUT, **{name: value})


def test_a_dense_width_of_0_is_not_the_default():
    with pytest.raises(ValueError, match="dense_width=0"):
        _build(LAYOUT, dense_width=0)


@pytest.mark.parametrize(
    ("starts", "lengths", "rows"),
    [
        ([0], [], 0),
        ([0, 0, 0], [5, 0], 2),  # requests without tokens in this step
        ([0, 1, 1], [0, 0], 2),  # more tokens than the request has
        ([0, 1, 2], [100_000, 1], 2),  # past the tables
        ([0, 1, 2], [-5, 1], 2),
        ([0, 1, 2**31 - 1], [2**31 - 1, 1], 2),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("where", [np.asarray, jnp.asarray])
def test_steps_without_work_or_past_their_tables_write_nothing(starts, lengths, rows, num_tokens, where):
    tables = [where(np.full((rows, 2), 7, np.int32)) for _ in LAYOUT.groups]
    step = StepMetadata.build(
        LAYOUT, tables, where(np.int32(starts)), where(np.int32(lengths)), num_tokens=num_tokens, max_model_len=MAX_LEN
    )
    for name, page in LAYOUT.pages.items():
        slots = np.asarray(step.slots(name))
        last = 8 * page.storage_block_size
        assert slots.shape == (num_tokens,) and ((slots == -1) | (slots >= last - page.storage_block_size)).all()
        assert (slots < last).all()
        written = np.flatnonzero(slots >= 0)
        assert len(written) == 0 or (len(lengths) == 2 and lengths[1] == 1 and written.tolist() == [1])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (lambda ts: ts + ts[:1], r"\d block tables for \d groups; give one per group, in order"),
        (lambda ts: [], "0 block tables"),
        (lambda ts: np.asarray(ts[0]), "3 block tables"),
        (lambda ts: [t.astype(np.float32) for t in ts], "block_table has dtype float32"),
        (lambda ts: [t > 0 for t in ts], "block_table has dtype bool"),
        (lambda ts: [jnp.asarray(t, jnp.int16) for t in ts], "block_table has dtype int16; pass int32"),
        (lambda ts: [t.astype(np.int64) + 2**31 for t in ts], "do not fit in int32"),
        (lambda ts: [t[0] for t in ts], r"block_table has shape \(\d+,\); it must have 2 dimension"),
        (lambda ts: [np.concatenate([t, t]) for t in ts], "block_table has 6 rows for 3 requests"),
    ],
)
def test_tables_that_cannot_be(tables, message):
    with pytest.raises(ValueError, match=message):
        _build(LAYOUT, tables([np.asarray(table) for table in tables_for(LAYOUT)]))
    with pytest.raises(ValueError, match=message):
        rope = RopeTables.make(ModelConfig.preset("deepseek-v4-flash").rope, MAX_LEN)
        given = tables([np.asarray(table) for table in tables_for(LAYOUT)])
        Step.build(LAYOUT, rope, given, np.int32([0, 1, 2, 3]), np.int32([9, 700, 3]), num_tokens=TOKENS)


def test_tables_may_be_any_iterable():
    tables = tables_for(LAYOUT)
    chex.assert_trees_all_equal(_build(LAYOUT, iter(tables)), _build(LAYOUT, tables))


def test_a_pytree_that_traces_once():
    traces = []

    @jax.jit
    def total(meta):
        traces.append(1)
        return jnp.sum(meta.slots(pages.SWA)) + jnp.sum(meta.window(pages.SWA)[1])

    first, second = _build(LAYOUT), _build(pages.layout_of(), tables_for(LAYOUT, seed=1))
    assert total(first) != total(second)
    assert len(traces) == 1
    leaves, tree = jax.tree.flatten(first)
    assert all(leaf.dtype in (jnp.int32, jnp.bool_) for leaf in leaves)
    assert jax.tree.unflatten(tree, leaves).layout == LAYOUT


def test_draft_layers_and_invented_layers():
    kind = {"head_size": 512, "dtype": "uint8", "alignment": 576, "cache_dtype_str": "fp8_ds_mla"}
    specs = {
        "full": MLAAttentionSpec(block_size=128, **kind),
        "near": SlidingWindowMLASpec(block_size=32, sliding_window=40, **kind),
    }
    layout = PackedLayout.from_groups(group_layers(specs))
    meta = _build(layout, window=77)
    assert meta.window("full")[0].shape == (TOKENS, 77)
    assert meta.window("near")[0].shape == (TOKENS, 40)


def test_refusals():
    with pytest.raises(ValueError, match=r"1 block tables for \d groups; give one per group, in order"):
        _build(LAYOUT, tables_for(LAYOUT)[:1])
    with pytest.raises(ValueError, match="group 0 has no block table"):
        _build(LAYOUT, [None, *tables_for(LAYOUT)[1:]])
    with pytest.raises(ValueError, match="block_table has 2 rows for 3 requests"):
        _build(LAYOUT, [table[:2] for table in tables_for(LAYOUT)])
    with pytest.raises(ValueError, match="max_model_len=0 must be a Python integer of at least 1"):
        _build(LAYOUT, max_model_len=0)
    with pytest.raises(ValueError, match="no layer 'nope' here"):
        _build(LAYOUT).slots("nope")
    for layer, ratio in ((pages.SWA, 1), (pages.STATES[0], 1), (pages.C128A, 128)):
        with pytest.raises(ValueError, match=f"layer '{layer}' has no indexer that picks rows: .* is {ratio}"):
            _build(LAYOUT).picked(layer, jnp.zeros((TOKENS, 4), jnp.int32))
    for ask in ("window", "dense"):
        with pytest.raises(ValueError, match=f"layer '{pages.C4A}' has no '{ask}' indices: its compress ratio is 4"):
            getattr(_build(LAYOUT), ask)(pages.C4A)
    with pytest.raises(ValueError, match="implementation='fast' is not known"):
        _build(LAYOUT, implementation="fast")
    want = StepIndex(kind="slots", group=2, block_size=4)
    with pytest.raises(ValueError, match="group 2 has no block table; 1 were given"):
        step_indices([want], [np.ones((1, 1), np.int32)], np.int32([0, 1]), np.int32([1]), num_tokens=1)
