"""Whole blocks: copies and zeros, and that nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax import kernels
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import SlidingWindowMLASpec

BLOCKS, COUNT = 6, 5
INT32_MAX = 2**31 - 1
block_ids = st.integers(0, BLOCKS - 1) | st.sampled_from([-1, -BLOCKS, BLOCKS, BLOCKS + 1, INT32_MAX, -(2**31)])
some_ids = st.lists(block_ids, min_size=COUNT, max_size=COUNT)
copy = jax.jit(kernels.copy_blocks)


@functools.cache
def zero(name):
    page = pages.PAGES[name] if name else None
    return jax.jit(lambda slab, ids: kernels.zero_blocks(slab, ids, page))


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@given(src=some_ids, dst=some_ids)
@settings(max_examples=40, deadline=None)
def test_copy(src, dst):
    slab = pages.random_slab(pages.PAGES["swa"], BLOCKS)
    expected = np.array(slab)
    for source, target in zip(src, dst, strict=True):
        if 0 <= source < BLOCKS and 0 < target < BLOCKS:
            expected[target] = np.array(slab)[source]
    np.testing.assert_array_equal(copy(slab, np.int32(src), np.int32(dst)), expected)


def test_copies_read_before_they_write():
    slab = pages.random_slab(pages.PAGES["swa"], BLOCKS)
    found = np.asarray(copy(slab, np.int32([1, 2, 3, 9, 1]), np.int32([2, 1, 4, 4, 0])))
    np.testing.assert_array_equal(found[[2, 1, 4, 0]], np.asarray(slab)[[1, 2, 3, 0]])


@pytest.mark.parametrize("name", [None, "swa", "c4a", "c128a", "keys_mxfp4", "c4_state", "swa_fp8"])
@given(ids=some_ids)
@settings(max_examples=15, deadline=None)
def test_zero(name, ids):
    page = pages.PAGES[name or "swa"]
    slab = pages.random_slab(page, BLOCKS)
    expected = pages.as_bytes(slab)
    for block in ids:
        if 0 <= block < BLOCKS and name is None:
            expected[block] = 0
        elif 0 <= block < BLOCKS:
            expected[block, page.offset_bytes : page.offset_bytes + page.spec.real_page_size_bytes] = 0
    np.testing.assert_array_equal(pages.as_bytes(zero(name)(slab, np.int32(ids))), expected)


def test_zeroing_a_layer_leaves_its_neighbours():
    """vllm-project/vllm#50276: 100 blocks of four layers, 37,376 of 37,440 bytes each; two layers are zeroed."""
    spec = SlidingWindowMLASpec(
        block_size=64, head_size=512, dtype="uint8", alignment=576, cache_dtype_str="fp8_ds_mla", sliding_window=128
    )
    views = [
        PageLayout(name=f"view{i}", spec=spec, group=0, buffer=0, offset_bytes=37440 * i, block_stride_bytes=149760)
        for i in range(4)
    ]
    slab = jnp.full((100, 260, 144), 0xCCCCCCCC, jnp.uint32)
    slab = kernels.zero_blocks(slab, np.int32([0, 99]), views[1])
    slab = kernels.zero_blocks(slab, np.int32([99]), views[3])
    expected = np.full((100, 149760), 0xCC, np.uint8)
    expected[[0, 99], 37440 : 37440 + 37376] = 0
    expected[99, 112320 : 112320 + 37376] = 0
    np.testing.assert_array_equal(pages.as_bytes(slab), expected)


def test_nothing_to_do():
    slab = pages.random_slab(pages.PAGES["swa"], BLOCKS)
    none = np.zeros(0, np.int32)
    np.testing.assert_array_equal(copy(slab, none, none), slab)
    for name in (None, "swa"):
        np.testing.assert_array_equal(zero(name)(slab, none), slab)


@pytest.mark.parametrize("name", [None, "c4a", "swa_bf16"])
def test_in_place(name):
    page = pages.PAGES[name or "swa"]
    shape = (256 * 2**20 // page.block_stride_bytes, page.block_stride_bytes // page.spec.alignment, page.words_per_row)
    slab, ids = jax.ShapeDtypeStruct(shape, jnp.uint32), jax.ShapeDtypeStruct((4,), jnp.int32)

    def zeroing(slab, ids):
        return kernels.zero_blocks(slab, ids, page if name else None)

    for function, args in ((kernels.copy_blocks, (ids, ids)), (zeroing, (ids,))):
        memory = jax.jit(function, donate_argnums=0).lower(slab, *args).compile().memory_analysis()
        size = np.prod(shape) * 4
        assert memory.alias_size_in_bytes == size
        # What is copied is held a second time; the slab is not.
        assert memory.temp_size_in_bytes <= 2 * 4 * page.block_stride_bytes + 4096


def test_refusals():
    slab = pages.random_slab(pages.PAGES["swa"], 2)
    with pytest.raises(ValueError, match="src has 1 block ids and dst 2; they are pairs"):
        kernels.copy_blocks(slab, np.int32([1]), np.int32([1, 1]))
    with pytest.raises(ValueError, match="block_ids has dtype float64; pass int32"):
        kernels.zero_blocks(slab, np.zeros(2))
    with pytest.raises(ValueError, match="dst holds values from 1 to 4294967297, which do not fit"):
        kernels.copy_blocks(slab, [1, 1], [1, 2**32 + 1])
    with pytest.raises(ValueError, match=r"slab is float32\[2, 3, 4\]"):
        kernels.zero_blocks(jnp.zeros((2, 3, 4), jnp.float32), [1])
    with pytest.raises(ValueError, match="pass the slab of the same plan"):
        kernels.zero_blocks(slab, [1], pages.PAGES["swa_bf16"])
    for operation, args in ((kernels.copy_blocks, ([1], [1])), (kernels.zero_blocks, ([1],))):
        with pytest.raises(ValueError, match="implementation='cuda' is not known"):
            operation(slab, *args, implementation="cuda")
