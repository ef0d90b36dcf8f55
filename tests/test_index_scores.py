"""Scoring of indexer keys: against float64 for all formats and ragged steps, its tiles of tokens, and bad input."""

import functools
import importlib

import index_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax import kernels
from dsv4kv_jax.kernels._tiles import Tiles

PAGE = index_cases.page_of()
TABLE = np.array([[3, 1, 7], [2, -1, 5], [0, 8, 400]], np.int32)
xla = functools.partial(kernels.index_scores, implementation="xla")


@pytest.mark.parametrize("indexer", ["fp8", "fp8_ue8m0", "mxfp4"])
@pytest.mark.parametrize(
    ("counts", "visible"),
    [
        pytest.param((1, 1, 1), (192, 64, 100), id="decode"),
        pytest.param((5, 0, 2), (3, 64, 65, 0, 192, 70, 192, 0), id="chunks and padding"),
        pytest.param((0, 19, 1), (*range(100, 119), 192), id="prefill"),
    ],
)
def test_scores(indexer, counts, visible):
    page = index_cases.page_of(indexer=indexer)
    with jax.numpy_dtype_promotion("strict"):
        args = index_cases.step(page, TABLE, counts, visible)
        index_cases.assert_scores(xla(*args), page, TABLE, counts, visible, args)


def test_with_64_bit_types():
    counts, visible = (4, 0, 2), (192, 64, 100, 1, 0, 192, 0)
    args = index_cases.step(PAGE, TABLE, counts, visible)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        index_cases.assert_scores(xla(*args), PAGE, TABLE, counts, visible, args)


def test_small_workspace(monkeypatch):
    """One tile, of one token, at a time."""
    counts, visible = (4, 3, 2), range(60, 69)
    args = index_cases.step(PAGE, TABLE, counts, visible)
    module = importlib.import_module("dsv4kv_jax.kernels.index_scores")  # as an attribute it is the function
    monkeypatch.setattr(module, "_WORKSPACE_BYTES", 1)
    index_cases.assert_scores(xla(*args), PAGE, TABLE, counts, visible, args)


@pytest.mark.parametrize("empty", ["tokens", "columns", "heads"])
def test_nothing_to_score(empty):
    tokens, columns, heads = (0 if empty == name else 3 for name in ("tokens", "columns", "heads"))
    counts = (tokens, 0, 0)
    args = index_cases.step(PAGE, TABLE[:, :columns], counts, [0] * tokens, heads=heads)
    scores = kernels.index_scores(*args)
    assert scores.shape == (tokens, columns * 64)
    np.testing.assert_array_equal(scores, 0)


def test_no_requests():
    args = index_cases.step(PAGE, TABLE[:0], (), [0, 0])
    np.testing.assert_array_equal(kernels.index_scores(*args), np.zeros((2, 192)))


@functools.partial(jax.jit, static_argnames=("num_tokens", "most"))
def cut(query_start_loc, num_tokens, most):
    tiles = Tiles.cut(query_start_loc, num_tokens, most)
    held = tiles.tokens
    return tiles.request, tiles.stop, held, tiles.by_token(held.reshape(-1, 1))[:, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=4, max_size=4), st.sampled_from([1, 3, 8]))
def test_tiles_hold_every_token_once(counts, most):
    tokens, used = 48, sum(counts)
    query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    request, stop, held, by_token = map(np.asarray, cut(query_start_loc, tokens, most))
    assert sorted(held[held < tokens].tolist()) == list(range(used))
    for owner, end, tile in zip(request, stop, held, strict=True):
        inside = tile[tile < tokens]
        if len(inside):
            assert query_start_loc[owner] <= inside.min() <= inside.max() == end - 1 < query_start_loc[owner + 1]
    np.testing.assert_array_equal(by_token[:used], np.arange(used))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": jnp.zeros((3, 8, 64), jnp.bfloat16)}, r"codes are bfloat16\[3, 8, 64\]; they must be bfloat16\[tok"),
        ({"codes": jnp.zeros((3, 8, 128))}, r"codes are float32\[3, 8, 128\]; they must be bfloat16"),
        ({"weights": jnp.zeros((3, 7))}, r"weights are float32\[3, 7\]; they must be float32\[3, 8\], one value for"),
        ({"weights": jnp.zeros((3, 8), jnp.bfloat16)}, r"weights are bfloat16\[3, 8\]"),
        ({"visible": jnp.zeros(2, jnp.int32)}, "visible has 2 entries; 3 are needed"),
        ({"visible": jnp.zeros(3)}, "visible has dtype float32; pass int32"),
        ({"query_start_loc": jnp.zeros(3, jnp.int32)}, "query_start_loc has 3 entries; 4 are needed"),
        ({"block_table": jnp.zeros(3, jnp.int32)}, r"block_table has shape \(3,\); it must have 2 dimension"),
        ({"slab": jnp.zeros((9, 4, 5), jnp.uint32)}, "slab has shape .* pass the slab of the same plan"),
        ({"implementation": "cuda"}, "implementation='cuda' is not known"),
    ],
)
def test_bad_input(change, message):
    names = ("slab", "page", "block_table", "query_start_loc", "codes", "weights", "visible")
    args = dict(zip(names, index_cases.step(PAGE, TABLE, (1, 1, 1), (5, 5, 5)), strict=True))
    with pytest.raises(ValueError, match=message):
        kernels.index_scores(**args | change)
