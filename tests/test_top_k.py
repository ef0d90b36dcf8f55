"""The exact top-k in XLA, against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import top_k_support
from hypothesis import given, settings
from hypothesis import strategies as st
from top_k_support import best, edges, in_order, rows

from dsv4kv_jax.kernels import top_k_indices

run = jax.jit(functools.partial(top_k_indices, implementation="xla"), static_argnames="top_k")


@settings(max_examples=100, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(list(top_k_support.KINDS)), min_size=4, max_size=4),
    visible=st.lists(st.integers(0, 90) | st.sampled_from([-1, 15, 16, 17, 91, 2**31 - 1]), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_scores(kinds, visible, seed):
    scores, visible = rows(kinds, 90, visible, seed), np.int32(visible)
    np.testing.assert_array_equal(in_order(run(scores, visible, top_k=16)), best(scores, visible, 16))


@pytest.mark.parametrize("kind", list(top_k_support.KINDS))
@pytest.mark.parametrize(("num_scores", "top_k"), [(90, 16), (33, 32), (33, 33), (5, 40), (1, 1), (7, 0), (0, 3)])
def test_every_number_of_visible_entries(kind, num_scores, top_k):
    visible = edges(num_scores, top_k)
    scores = rows([kind] * len(visible), num_scores, visible)
    with jax.numpy_dtype_promotion("strict"):
        picked = run(scores, visible, top_k=top_k)
    assert picked.dtype == jnp.int32
    np.testing.assert_array_equal(in_order(picked), best(scores, visible, top_k))


def test_all_that_is_visible_comes_in_order():
    scores = rows(["falling", "rising"], 50, [16, 9])
    picked = np.asarray(run(scores, np.int32([16, 9]), top_k=16))
    np.testing.assert_array_equal(picked, [range(16), [*range(9), *[-1] * 7]])


def test_leading_dimensions_and_64_bit_types():
    visible = np.int32([[0, 3, 17], [40, 39, 20]])
    scores = rows(["normal", "ties"] * 3, 40, visible.reshape(-1))
    with jax.enable_x64(True):
        picked = run(jnp.asarray(scores.reshape(2, 3, 40)), visible, top_k=16)
        one = run(jnp.asarray(scores[3]), jnp.int32(40), top_k=16)
    assert picked.dtype == one.dtype == jnp.int32
    np.testing.assert_array_equal(in_order(picked).reshape(6, 16), best(scores, visible.reshape(-1), 16))
    np.testing.assert_array_equal(one, picked[1, 0])
    assert run(jnp.zeros((0, 40)), jnp.zeros(0, jnp.int32), top_k=16).shape == (0, 16)


@pytest.mark.parametrize(
    ("scores", "visible", "top_k", "message"),
    [
        (np.zeros((2, 9)), np.int32([1, 2]), 3, r"scores is float64\[2, 9\]; it must be float32\[\.\.\., n\]"),
        ([[1.0]], np.int32([1]), 3, "scores is list; it must be float32"),
        (np.float32(1), np.int32(1), 3, r"scores is float32\[\]; it must be float32"),
        (np.zeros((2, 9), np.float32), np.int32([1]), 3, r"visible has shape \(1,\); scores of shape .* need \(2,\)"),
        (np.zeros((2, 9), np.float32), np.float32([1, 2]), 3, "visible has dtype float32; pass int32"),
        (np.zeros((2, 9), np.float32), np.int32([1, 2]), -1, "top_k=-1 must be a Python integer of at least 0"),
        (np.zeros((2, 9), np.float32), np.int32([1, 2]), 2.0, "top_k=2.0 must be a Python integer"),
    ],
)  # fmt: skip
def test_bad_arguments(scores, visible, top_k, message):
    with pytest.raises(ValueError, match=message):
        top_k_indices(scores, visible, top_k)


def test_unknown_implementation():
    with pytest.raises(ValueError, match="implementation='sort' is not known; use one of 'xla', 'mosaic_gpu'"):
        top_k_indices(np.zeros((1, 4), np.float32), np.int32([4]), 2, implementation="sort")
