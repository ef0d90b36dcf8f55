"""Copying and zeroing whole blocks: as the XLA versions, chains and swaps included."""

import functools

import jax
import jax.numpy as jnp
import mosaic_support
import numpy as np
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mosaic_support import INT32_MAX, assert_same, mosaic

from dsv4kv_jax import kernels

pytestmark = mosaic_support.pytestmark
BLOCKS = 6


@pytest.fixture(autouse=True)
def _strict():
    with mosaic_support.strict():
        yield


def check_copy(source, target, name="c128a"):
    slab = pages.random_slab(pages.PAGES[name], BLOCKS)[:, :40]
    source, target = jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32)
    want = kernels.copy_blocks(slab, source, target, implementation="xla")
    assert_same(mosaic(kernels.copy_blocks, slab, source, target), want)


@pytest.mark.parametrize(
    ("source", "target"),
    [([1, 2], [4, 5]), ([1, 2, 3], [2, 3, 1]), ([1, 2, 3], [4, 4, 4]), ([1, 1, 2], [1, 2, 2]), ([], [])],
    ids=["plain", "cycle", "one target", "itself", "nothing"],
)
def test_copy(source, target):
    check_copy(source, target)


IDS = st.lists(st.integers(-2, BLOCKS + 1) | st.sampled_from([-(2**31), INT32_MAX]), min_size=4, max_size=4)


@settings(max_examples=mosaic_support.examples(3, 60), deadline=None)
@given(source=IDS, target=IDS)
def test_copy_any(source, target):
    check_copy(source, target)


@pytest.mark.parametrize("name", ["swa", "c128a", "keys_mxfp4", "c4_state", "swa_bf16", None])
def test_zero(name):
    page = pages.PAGES[name] if name else None
    slab = pages.random_slab(pages.PAGES[name or "c128a"], BLOCKS)
    ids = jnp.asarray([3, -1, BLOCKS, 3, 5, INT32_MAX, -(2**31), 0], jnp.int32)
    got = mosaic(functools.partial(kernels.zero_blocks, page=page), slab, ids)
    assert_same(got, kernels.zero_blocks(slab, ids, page, implementation="xla"))


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic_support.ON_GPU, reason="needs a GPU that JAX can use")
def test_zero_more_blocks_than_a_grid_is_high():
    slab = jnp.ones((BLOCKS, 83, 144), jnp.uint32)
    ids = jnp.where(jnp.arange(70_000) % 2 == 0, -1, jnp.arange(70_000) - 69_999 + 4)  # the last are blocks 0, 2 and 4
    assert np.asarray(mosaic(kernels.zero_blocks, slab, ids)).any(axis=(1, 2)).tolist() == [False, True] * 3


@pytest.mark.parametrize(("longest", "first"), [(65_535, "i"), (65_536, "j")])
def test_the_longest_axis_of_a_grid(monkeypatch, longest, first):
    """CUDA launches at most 65,535 programs along all axes but its first, which is Pallas' last."""
    from dsv4kv_jax.kernels import mosaic_lanes

    seen = {}
    monkeypatch.setattr(mosaic_lanes.plgpu, "kernel", lambda body, **options: seen.update(options))
    mosaic_lanes.kernel(lambda: None, name="none", out_type=(), grid=(longest, 88))
    assert dict(zip(seen["grid_names"], seen["grid"], strict=True)) == {"i": longest, "j": 88}
    assert seen["grid_names"][0] == first


@pytest.mark.parametrize("x64", [False, True])
def test_lowers_for_a_gpu(x64):
    slab, ids = jax.ShapeDtypeStruct((4000, 2493, 144), jnp.uint32), jax.ShapeDtypeStruct((64,), jnp.int32)
    options = {"implementation": "mosaic_gpu"}
    with jax.enable_x64(x64):
        mosaic_support.lower(functools.partial(kernels.copy_blocks, **options), slab, ids, ids)
        mosaic_support.lower(functools.partial(kernels.zero_blocks, **options), slab, ids)
        page = pages.PAGES["keys_mxfp4"]
        slab = jax.ShapeDtypeStruct((BLOCKS, page.block_stride_bytes // 576, 144), jnp.uint32)
        mosaic_support.lower(functools.partial(kernels.zero_blocks, page=page, **options), slab, ids)
