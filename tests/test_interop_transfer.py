"""Whole blocks: regions, copies to the host and back, and the blocks that a request needs to go on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dsv4kv_jax
from dsv4kv_jax import KVCache, interop
from dsv4kv_jax.interop import SharedSlab, lend
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec, cdiv, layer_specs

torch = pytest.importorskip("torch")

SPECS = layer_specs(dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash"), layers=(0, 2, 3))
STRIDE = dsv4kv_jax.plan_from_specs(SPECS, 1 << 30).layout.block_stride_bytes
PLAN = dsv4kv_jax.plan_from_specs(SPECS, 8 * STRIDE)


def pool_plan():
    spec = MLAAttentionSpec(block_size=64, head_size=512, dtype="uint8", alignment=576, cache_dtype_str="fp8_ds_mla")
    return dsv4kv_jax.plan_from_specs({"layers.0": spec, "layers.1": spec}, 2 * 8 * 37440)


def numbered(plan):
    """A cache whose words count up, so that every byte has a place."""
    slabs = []
    for index, buffer in enumerate(plan.layout.buffers):
        shape = buffer.shape(plan.num_blocks)
        slabs.append(jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(shape) + jnp.uint32(index << 28))
    return KVCache(slabs=tuple(slabs), layout=plan.layout)


def test_overlaid_groups_are_one_region():
    """De-duplicating by base pointer would keep the shorter of two groups at offset 0 (vllm-project/vllm#57661)."""
    small = MLAAttentionSpec(
        block_size=128, head_size=512, dtype="uint8", alignment=576, compress_ratio=4, cache_dtype_str="fp8_ds_mla"
    )
    state = SlidingWindowMLASpec(block_size=4, head_size=2048, dtype="float32", alignment=576, sliding_window=8)
    plan = dsv4kv_jax.plan_from_specs({"layers.0": small, "layers.0.state": state}, 6 * 32_832)
    assert [plan.layout.page(name).offset_bytes for name in plan.layout.pages] == [0, 0]
    assert small.page_size_bytes == 19_008 and plan.layout.block_stride_bytes == 32_832
    cache = numbered(plan)
    with lend(cache) as views:
        (region,) = interop.regions(views)
        assert region == interop.Region(
            address=cache.slab.unsafe_buffer_pointer(), num_blocks=6, block_bytes=plan.layout.block_stride_bytes
        )
        blocks = interop.whole_block_view(views)
        assert (tuple(blocks.shape), blocks.stride(), blocks.dtype) == ((6, 32_832), (32_832, 1), torch.uint8)
        assert blocks.storage_offset() == 0 and blocks.data_ptr() == region.address
        host = interop.blocks_to_host(views, [2])
        for name in views:
            page = views[name][2].contiguous().view(torch.uint8).flatten().clone()
            assert torch.equal(host[0, : plan.layout.page(name).spec.real_page_size_bytes], page)
            del page
        del blocks


@pytest.mark.parametrize("make", [lambda: PLAN, pool_plan], ids=["packed", "two buffers"])
def test_blocks_go_to_the_host_and_back(make):
    plan = make()
    cache = numbered(plan)
    before = [np.array(slab) for slab in cache.slabs]
    ids = [5, 2, 3, 7]
    with lend(cache) as views:
        assert len(interop.regions(views)) == len(plan.layout.buffers)
        host = interop.blocks_to_host(views, ids)
    assert tuple(host.shape) == (4, plan.layout.bytes_per_block)
    wanted = np.concatenate([slab[ids].reshape(4, -1) for slab in before], axis=1).view(np.uint8)
    assert np.array_equal(host.numpy(), wanted)
    fresh = KVCache(slabs=tuple(jnp.zeros_like(slab) for slab in cache.slabs), layout=plan.layout)
    with lend(fresh) as views:
        interop.blocks_from_host(views, [1, 6, 4, 2], host)
        again = interop.blocks_to_host(views, [1, 6, 4, 2], out=torch.empty_like(host), wait=False)
    assert torch.equal(again, host)
    for old, new in zip(before, fresh.slabs, strict=True):
        new = np.asarray(new)
        assert np.array_equal(new[[1, 6, 4, 2]], old[ids])
        assert not new[[0, 3, 5, 7]].any()


def test_bad_block_ids_and_buffers_write_nothing():
    cache = numbered(PLAN)
    with lend(cache) as views:
        host = interop.blocks_to_host(views, [1, 2])
        for ids in ([0, 1], [1, 8], [-1, 1]):
            with pytest.raises(ValueError, match="are not from 1 to 7; block 0 is the null block"):
                interop.blocks_from_host(views, ids, host * 0)
        with pytest.raises(ValueError, match="name a block twice"):
            interop.blocks_from_host(views, [3, 3], host * 0)
        for bad in (host[:1], host.to(torch.int8), host.numpy()):
            with pytest.raises(ValueError, match=r"must be a torch.uint8 tensor of shape \(2, "):
                interop.blocks_from_host(views, [3, 4], bad)
        for ids in ([1.9, 2], [True, True], ["1", "2"], "12", [None, 2], [[1, 2]], None, 1, torch.tensor([1.0, 2.0])):
            for move in (interop.blocks_to_host, lambda *given: interop.blocks_from_host(*given, host * 0)):
                with pytest.raises(ValueError, match="cannot transfer .*: block ids must be a list of integers"):
                    move(views, ids)
        for buffer in (1, -1, True, 0.0, "slab", None):
            for find in (lambda b: interop.whole_block_view(views, b), views.whole_blocks):
                with pytest.raises(ValueError, match=f"buffer={buffer!r} does not exist; the layout has 1"):
                    find(buffer)
        for ids in (np.array([2], np.uint64), torch.tensor([2]), (2,), range(2, 3)):
            assert torch.equal(interop.blocks_to_host(views, ids), host[1:])
        assert interop.blocks_to_host(views, []).shape == (0, STRIDE)
    assert np.array_equal(np.asarray(cache.slab), np.asarray(numbered(PLAN).slab))


def test_a_bare_cache_is_sent_to_lend():
    with pytest.raises(ValueError, match=r"`with lend\(cache\) as views: whole_block_view\(views\)`"):
        interop.whole_block_view(KVCache.allocate(PLAN))


def test_a_shared_slab_moves_blocks_too():
    shared = SharedSlab.allocate(PLAN, device="cpu", copy_on_cpu=True)
    shared.step(jax.jit(lambda c: c.with_slab(c.slab.at[3].set(9)), donate_argnums=0))
    host = interop.blocks_to_host(shared, [3])
    interop.blocks_from_host(shared, [4], host)
    assert torch.equal(shared.whole_blocks()[4], shared.whole_blocks()[3])
    assert interop.regions(shared)[0].address == shared.whole_blocks().data_ptr()


def by_kind(position):
    """{(block size, window): needed columns} of DeepSeek-V4-Flash at a position, with tables that count up."""
    plan = dsv4kv_jax.plan(dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash"), 1 << 30)
    tables = [list(range(1, 5000)) for _ in plan.groups]
    needed = interop.blocks_to_resume(plan.groups, tables, position)
    return {
        (group.block_size, group.sliding_window): [block - 1 for block in blocks]
        for group, blocks in zip(plan.groups, needed, strict=True)
    }


@pytest.mark.parametrize(
    ("position", "full", "window", "c4_state", "c128_state"),
    [
        (0, [], [], [], []),
        (1, [0], [0], [0], [0]),
        (64, [0], [0], [14, 15], list(range(8))),
        (191, [0], [1, 2], [46, 47], list(range(8, 24))),
        (192, [0], [1, 2], [46, 47], list(range(8, 24))),
        (256, [0], [2, 3], [62, 63], list(range(16, 32))),
        (300, [0, 1], [2, 3, 4], [73, 74], list(range(21, 38))),
        (512, [0, 1], [6, 7], [126, 127], list(range(48, 64))),
    ],
)
def test_blocks_to_resume(position, full, window, c4_state, c128_state):
    """256 is where prefix hits end: 2 window blocks, 2 C4 state blocks and 16 C128 state blocks, as vLLM demands."""
    assert by_kind(position) == {(256, None): full, (64, 128): window, (4, 8): c4_state, (8, 128): c128_state}


@given(
    block_size=st.sampled_from([1, 4, 8, 64]),
    window=st.integers(1, 200),
    position=st.integers(0, 700),
)
def test_blocks_to_resume_hold_exactly_the_window(block_size, window, position):
    spec = SlidingWindowMLASpec(block_size=block_size, head_size=8, dtype="float32", alignment=4, sliding_window=window)
    group = dsv4kv_jax.KVCacheGroup(layers=("layers.0",), specs=(spec,), spec=spec)
    count = cdiv(position, block_size)
    (needed,) = interop.blocks_to_resume([group], [range(1, count + 1)], position)
    positions = range(max(position - window + 1, 0), position)
    assert set(needed) == {p // block_size + 1 for p in positions}


def test_a_freed_or_missing_block_cannot_be_resumed_from():
    spec = SlidingWindowMLASpec(block_size=64, head_size=8, dtype="float32", alignment=4, sliding_window=128)
    group = dsv4kv_jax.KVCacheGroup(layers=("layers.0",), specs=(spec,), spec=spec)
    assert interop.blocks_to_resume([group], [[0, 0, 7, 9]], 256) == [[7, 9]]
    with pytest.raises(ValueError, match=r"group 0: the blocks of columns \[2\] were freed"):
        interop.blocks_to_resume([group], [[5, 6, 0, 9]], 256)
    with pytest.raises(ValueError, match="group 0 holds 2 blocks of 64 tokens; position 256 needs 4"):
        interop.blocks_to_resume([group], [[5, 6]], 256)
    with pytest.raises(ValueError, match="0 block tables were given for 1 groups"):
        interop.blocks_to_resume([group], [], 256)
    for position in (-1, 1.5, True, "1", None):
        with pytest.raises(ValueError, match=f"position={position!r}"):
            interop.blocks_to_resume([group], [[1]], position)
    with pytest.raises(ValueError, match="cannot resume from .*: block ids must be a list of integers"):
        interop.blocks_to_resume([group], [[1.5] * 4], 256)
