"""The top-k kernel: exactly the entries that numpy picks, in one round and in several."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import mosaic_support
import numpy as np
import pytest
import top_k_support
from hypothesis import given, settings
from hypothesis import strategies as st
from mosaic_support import mosaic
from top_k_support import best, edges, in_order, rows

from dsv4kv_jax import kernels

pytestmark = mosaic_support.pytestmark
KINDS = list(top_k_support.KINDS)


@pytest.fixture(autouse=True)
def _strict():
    with mosaic_support.strict():
        yield


def tuned(scores, visible, top_k, **tuning):
    """The kernel with other chunks than its own choice."""
    from dsv4kv_jax.kernels import mosaic_lanes, mosaic_top_k

    with contextlib.nullcontext() if mosaic_support.ON_GPU else mosaic_lanes.interpreted():
        return mosaic_top_k.top_k_indices(
            jnp.asarray(scores), jnp.asarray(visible), top_k, tuning=mosaic_top_k.Tuning(**tuning)
        )


def check(picked, scores, visible, top_k):
    """The kernel's entries are in order."""
    np.testing.assert_array_equal(picked, best(scores, visible, top_k))


@pytest.mark.parametrize(
    ("num_scores", "top_k"), [(90, 16), (514, 1), (2048, 1024), (1026, 1025), (700, 3), (5, 4), (2, 1), (9, 9), (7, 0)]
)
def test_every_number_of_visible_entries(num_scores, top_k):
    visible = np.tile(edges(num_scores, top_k), 2)
    scores = rows(KINDS, num_scores, visible)
    check(mosaic(kernels.top_k_indices, scores, visible, top_k), scores, visible, top_k)


@settings(max_examples=mosaic_support.examples(15, 200), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4),
    visible=st.lists(st.integers(0, 777) | st.sampled_from([-1, 39, 40, 41, 778, 2**31 - 1]), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_scores(kinds, visible, seed):
    scores, visible = rows(kinds, 777, visible, seed), np.int32(visible)
    check(mosaic(kernels.top_k_indices, scores, visible, 40), scores, visible, 40)


@settings(max_examples=mosaic_support.examples(8, 200), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4),
    visible=st.lists(
        st.integers(0, 5001) | st.sampled_from([99, 100, 101, 511, 512, 513, 612, 2048]), min_size=4, max_size=4
    ),
    seed=st.integers(0, 1000),
)
def test_three_rounds(kinds, visible, seed):
    """Ten chunks leave 1,000 entries, two chunks of which leave 200. The rows' length is odd, the chunks' are not."""
    scores, visible = rows(kinds, 5001, visible, seed), np.int32(visible)
    check(tuned(scores, visible, 100, chunk=512), scores, visible, 100)


@pytest.mark.parametrize(("num_scores", "top_k", "warpgroups"), [(1600, 37, 1), (3002, 300, 2), (4096, 512, 1)])
def test_two_rounds(num_scores, top_k, warpgroups):
    """Numbers of visible entries around the ends of chunks, too; a chunk is at least twice `top_k`."""
    visible = np.int32([*edges(num_scores, top_k), 511, 512, 513, 512 + top_k, 1023, 1024, 1025])
    scores = rows(KINDS, num_scores, visible, seed=1)
    check(tuned(scores, visible, top_k, chunk=512, warpgroups=warpgroups), scores, visible, top_k)


def test_earlier_of_equal_scores_across_chunks():
    scores = np.zeros((2, 2000), np.float32)
    scores[1, 1500:1510] = 1
    visible = np.int32([2000, 2000])
    picked = tuned(scores, visible, 60, chunk=512)
    np.testing.assert_array_equal(picked[0], np.arange(60))
    np.testing.assert_array_equal(picked[1], [*range(50), *range(1500, 1510)])


def test_all_that_is_visible_comes_in_order():
    scores = rows(["falling", "rising"], 50, [16, 9])
    picked = mosaic(kernels.top_k_indices, scores, np.int32([16, 9]), 16)
    np.testing.assert_array_equal(picked, [range(16), [*range(9), *[-1] * 7]])


@pytest.mark.parametrize("bits", [0xFFFFFFFF, 0x7FC00000, 0xFFC00000])
def test_visible_nans_still_give_entries(bits):
    """They are not allowed, but what comes out can be read with."""
    scores = rows(["normal"] * 3, 600, [600, 600, 550])
    scores.view(np.uint32)[:, ::2] = bits
    scores.view(np.uint32)[1] = bits
    visible = np.int32([600, 600, 550])
    for picked, seen in zip(np.asarray(mosaic(kernels.top_k_indices, scores, visible, 400)), visible, strict=True):
        assert len(set(picked.tolist())) == 400
        assert 0 <= picked.min() <= picked.max() < seen


def test_as_xla_with_leading_dimensions():
    visible = np.int32([[0, 3, 17], [40, 39, 20]])
    scores = rows(["normal", "ties"] * 3, 40, visible.reshape(-1)).reshape(2, 3, 40)
    picked = mosaic(kernels.top_k_indices, scores, visible, 16)
    np.testing.assert_array_equal(picked, in_order(kernels.top_k_indices(scores, visible, 16, implementation="xla")))
    assert mosaic(kernels.top_k_indices, scores[:0], visible[:0], 16).shape == (0, 3, 16)


def test_with_64_bit_types():
    visible = edges(1500, 100)
    scores = rows(KINDS[:7], 1500, visible)
    with jax.enable_x64(True):
        picked = tuned(scores, visible, 100, chunk=512)
    assert picked.dtype == jnp.int32
    check(picked, scores, visible, 100)


def test_more_than_the_kernel_picks():
    scores, visible = rows(["ties"], 8200, [8200]), np.int32([8200])
    with pytest.raises(ValueError, match="implementation='mosaic_gpu': top_k=8193 is more than the 8192 that"):
        kernels.top_k_indices(scores, visible, 8193, implementation="mosaic_gpu")
    picked = in_order(kernels.top_k_indices(scores, visible, 8193))
    np.testing.assert_array_equal(picked, best(scores, visible, 8193))


@pytest.mark.parametrize(
    ("shape", "top_k", "launches", "x64"),
    [
        ((256, 2048), 1024, 1, False),
        ((16, 262_144), 1024, 3, False),
        ((100_000, 8192), 512, 1, False),
        ((3, 1_000_003), 2048, 5, True),
        ((3, 20_002), 8192, 2, False),
        ((1, 129), 1, 1, True),
    ],
)
def test_lowers_for_a_gpu(shape, top_k, launches, x64):
    scores, visible = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    with jax.enable_x64(x64):
        text = mosaic_support.lower(
            lambda *args: kernels.top_k_indices(*args, top_k, implementation="mosaic_gpu"), scores, visible
        )
    assert text.count("custom_call @mosaic_gpu") == launches


GPU_CASES = {
    "decode at 8k": ((256, 2048), 1024, {}),
    "decode at 1M": ((16, 262_144), 1024, {}),
    "decode at 1M, Flash": ((16, 262_144), 512, {}),
    "prefill": ((300, 32_768), 1024, {}),
    "odd": ((17, 100_003), 2048, {}),
    "many picked": ((3, 40_002), 8192, {}),
    "small chunks": ((5, 30_001), 100, {"chunk": 512}),
    **{f"{n} warpgroups": ((14, 50_000), 700, {"chunk": 4096, "warpgroups": n}) for n in (1, 2, 3, 8)},
}


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic_support.ON_GPU, reason="needs a GPU that JAX can use")
@pytest.mark.parametrize("case", list(GPU_CASES))
@pytest.mark.parametrize("seed", range(3))
def test_on_a_gpu(case, seed):
    (num_rows, num_scores), top_k, tuning = GPU_CASES[case]
    rng = np.random.default_rng(seed)
    visible = rng.integers(0, num_scores + 1, num_rows).astype(np.int32)
    visible[::2] = num_scores
    visible[1::7] = np.resize(edges(num_scores, top_k), len(visible[1::7]))
    scores = rows(np.resize(KINDS, num_rows), num_scores, visible, seed)
    function = functools.partial(tuned, **tuning) if tuning else functools.partial(mosaic, kernels.top_k_indices)
    check(function(scores, visible, top_k), scores, visible, top_k)
