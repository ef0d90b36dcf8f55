"""The optimizer: legal geometries, never fewer requests, and counts that a brute pool confirms."""

import brute_pool
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax import geometry
from dsv4kv_jax.capacity import capacity
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.optimize import Optimized, optimize
from dsv4kv_jax.plan import KVCachePlan, plan
from dsv4kv_jax.roles import role_of, state_ratio
from dsv4kv_jax.specs import layer_specs

GIB = 2**30
PRO = ModelConfig.preset("deepseek-v4-pro")
FLASH = ModelConfig.preset("deepseek-v4-flash")
CONSTRAINTS = ("vllm", "flashmla", "free")


def admitted_by_brute_force(pools: tuple[KVCachePlan, ...], num_tokens: int, schedule: Schedule) -> int:
    """Requests that brute pools admit when each request needs all of them."""
    counts = []
    for pool in pools:
        shapes = [(g.block_size, g.sliding_window) for g in pool.groups]

        def make(num_blocks: int, shapes=shapes) -> brute_pool.BrutePool:
            return brute_pool.BrutePool(shapes, num_blocks, in_flight=schedule.in_flight_tokens)

        parked_at, _ = brute_pool.fullest_length(make, num_tokens, schedule)
        counts.append(brute_pool.admitted(make(pool.num_blocks), num_tokens, parked_at, schedule))
    return min(counts)


def check_legal(found: Optimized, memory: int, model: ModelConfig = PRO) -> None:
    assert sum(pool.num_blocks * pool.layout.bytes_per_block for pool in found.pools) <= memory
    stored = {
        name: spec for pool in found.pools for g in pool.groups for name, spec in zip(g.layers, g.specs, strict=True)
    }
    original = layer_specs(model)
    assert sum(len(pool.layout.pages) for pool in found.pools) == len(original)
    assert stored.keys() == original.keys()
    for name, spec in original.items():
        new = stored[name]
        assert new.format == spec.format
        assert (new.window, new.compress_ratio, new.alignment) == (spec.window, spec.compress_ratio, spec.alignment)
        if found.compatible == "vllm":
            assert new == spec
        if found.compatible == "flashmla" and role_of(spec) == "indexer":
            assert new.storage_block_size == 64
    for pool in found.pools:
        for page in pool.layout.pages.values():
            assert page.block_stride_bytes % 576 == 0
            assert page.offset_bytes % 576 == 0
            assert page.offset_bytes + page.spec.page_size_bytes <= page.block_stride_bytes
        if pool.layout.form == "packed":
            assert pool.block_stride_bytes == max(group.page_size_bytes for group in pool.groups)


@pytest.mark.parametrize("memory_gib", [40, 80, 141])
def test_pro_admits_a_fifth_more_2k_requests_on_pages_that_flashmla_reads(memory_gib):
    found = optimize(PRO, memory_gib * GIB, 2048)
    check_legal(found, memory_gib * GIB)
    assert found.gain >= 1.2
    assert found.plan.layout.form == "packed"
    assert found.hit_granularity == 256


@pytest.mark.parametrize("several_pools", [False, True])
@pytest.mark.parametrize("compatible", CONSTRAINTS)
@pytest.mark.parametrize("num_tokens", [1500, 2048])
def test_the_count_is_what_a_brute_pool_admits(compatible, several_pools, num_tokens):
    memory = 4 * GIB
    schedule = Schedule(chunk_tokens=512, in_flight_tokens=8192)
    found = optimize(PRO, memory, num_tokens, compatible=compatible, several_pools=several_pools, chunk_tokens=512)
    check_legal(found, memory)
    assert admitted_by_brute_force((found.default,), num_tokens, schedule) == found.default_requests
    assert admitted_by_brute_force(found.pools, num_tokens, schedule) == found.num_requests
    assert found.num_requests >= found.default_requests


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1024, 1_048_576),
    memory_mib=st.integers(2048, 200 * 1024),
    compatible=st.sampled_from(CONSTRAINTS),
    several_pools=st.booleans(),
    model=st.sampled_from([PRO, FLASH]),
)
def test_never_fewer_requests_than_the_default_at_any_length(length, memory_mib, compatible, several_pools, model):
    memory = memory_mib * 2**20
    found = optimize(model, memory, length, compatible=compatible, several_pools=several_pools)
    check_legal(found, memory, model)
    assert found.default_requests == capacity(plan(model, memory), length).num_requests
    assert found.num_requests >= found.default_requests
    if found.num_requests == found.default_requests:
        assert found.pools == (found.default,)


@settings(max_examples=15, deadline=None)
@given(
    mix=st.dictionaries(st.integers(100, 1_048_576), st.integers(1, 20), min_size=2, max_size=4),
    compatible=st.sampled_from(CONSTRAINTS),
    several_pools=st.booleans(),
)
def test_never_fewer_requests_than_the_default_at_any_mix(mix, compatible, several_pools):
    found = optimize(PRO, 80 * GIB, mix, compatible=compatible, several_pools=several_pools)
    check_legal(found, 80 * GIB)
    assert found.num_requests >= found.default_requests


def test_one_slab_tuned_for_short_requests_is_not_below_the_default_at_long_ones():
    found = optimize(PRO, 80 * GIB, 2048)
    for length in (1024, 4096, 8192, 32_768, 131_072, 1_048_576):
        assert capacity(found.plan, length).num_requests >= capacity(found.default, length).num_requests


def test_pools_of_their_own_stride_have_no_slack():
    found = optimize(PRO, 80 * GIB, 2048, compatible="vllm", several_pools=True)
    assert len(found.pools) == 4
    needed = sum(capacity(pool, 2048).decoding_bytes for pool in found.pools)
    assert needed == 39_374_208  # of the 48,822,912 that the default spends
    with pytest.raises(PlanError, match="has 4 pools"):
        _ = found.plan


def test_other_models_and_formats_are_searched_too():
    window_only = ModelConfig(name="w", num_hidden_layers=3, compress_ratios=(1, 1, 1))
    assert optimize(window_only, 10**9, 4096).gain >= 1
    drafted = optimize(FLASH, 40 * GIB, 2048, draft="mtp")
    assert drafted.gain > 1.15
    assert any(group.is_draft for group in drafted.plan.groups)
    assert optimize(PRO, 40 * GIB, 2048, cache_dtype="bf16", compatible="free").gain > 1.1


@settings(max_examples=200, deadline=None)
@given(
    pages=st.dictionaries(st.integers(1, 40), st.integers(1, 30), min_size=1, max_size=4), stride=st.integers(40, 200)
)
def test_groups_are_counted_as_first_fit_decreasing_packs_them(pages, stride):
    ordered = tuple(sorted(pages.items(), reverse=True))
    room: list[int] = []
    for size, count in ordered:
        for _ in range(count):
            for index, free in enumerate(room):
                if free >= size:
                    room[index] -= size
                    break
            else:
                room.append(stride - size)
    assert geometry.num_groups(ordered, stride) == len(room)
    assert geometry.num_groups(ordered, max(pages) - 1) is None


def test_packing_keeps_every_cache_and_fits_the_stride():
    specs = layer_specs(PRO)
    for part in geometry.choices(specs, "flashmla"):
        for choice in part:
            chosen = dict(choice.specs)
            for bucket in choice.buckets:
                for stride in (361_152, 722_304, 1_435_968):
                    groups = geometry.pack(bucket, chosen, stride)
                    assert sorted(name for group in groups for name in group) == sorted(bucket.names)
                    assert all(sum(chosen[name].page_size_bytes for name in group) <= stride for group in groups)
                    assert len(groups) == geometry.num_groups(bucket.pages, stride)


def test_roles():
    counts = {}
    for spec in layer_specs(PRO).values():
        key = (role_of(spec), spec.compress_ratio, state_ratio(spec))
        counts[key] = counts.get(key, 0) + 1
    assert counts == {
        ("indexer", 4, None): 30,
        ("compressed", 4, None): 30,
        ("compressed", 128, None): 31,
        ("window", 1, None): 61,
        ("state", 1, 4): 60,
        ("state", 1, 128): 31,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compatible": "flashinfer"}, r"compatible='flashinfer' is not supported; use one of vllm, flashmla, free"),
        ({"cache_dtype": "bf16"}, r"needs latents stored as fp8_ds_mla.*compatible='vllm' or 'free'"),
        ({"workload": 0}, r"lengths=0"),
        ({"memory_bytes": 10}, r"too little memory"),
    ],
)
def test_bad_input_is_refused(options, message):
    arguments = {"memory_bytes": GIB, "workload": 2048} | options
    with pytest.raises(PlanError, match=message):
        optimize(PRO, **arguments)


@pytest.mark.parametrize("compatible", ["flashmla", "free"])
def test_latent_pages_are_no_longer_than_the_fused_kernel_reads(compatible):
    specs = layer_specs(PRO)
    for most, sizes in ((64, {64, 128, 256}), (256, {64, 128, 256, 512, 1024})):
        chosen = {
            spec.block_size
            for part in geometry.choices(specs, compatible, most)
            for choice in part
            for name, spec in choice.specs
            if role_of(spec) == "compressed" and spec.compress_ratio == 4
        }
        assert chosen == sizes
