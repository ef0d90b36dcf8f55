"""The cache pytree: allocation, static layout, page views, and saved files."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import dsv4kv_jax
from dsv4kv_jax import KVCache, ModelConfig, PlanError, plan, storage

CONFIG = ModelConfig(name="small", num_hidden_layers=3, compress_ratios=(4, 128, 1))
MODES = ["fp8_ds_mla", "bf16", "fp8"]


def small_plan(blocks=5, **options):
    return plan(CONFIG, 0, num_gpu_blocks_override=blocks, **options)


def filled(cache):
    """The same cache with every word different."""
    slabs = tuple(jnp.arange(s.size, dtype=jnp.uint32).reshape(s.shape) for s in cache.slabs)
    return KVCache(slabs=slabs, layout=cache.layout)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hybrid", [True, False])
def test_allocate(mode, hybrid):
    planned = small_plan(cache_dtype=mode, hybrid=hybrid)
    cache = KVCache.allocate(planned)
    assert cache.num_blocks == 5
    assert cache.nbytes == 5 * planned.layout.bytes_per_block
    for slab, buffer in zip(cache.slabs, planned.layout.buffers, strict=True):
        chex.assert_shape(slab, buffer.shape(5))
        chex.assert_type(slab, jnp.uint32)
        assert not np.asarray(slab).any()
    if hybrid:
        assert cache.slab.shape[2] * 4 == planned.layout.alignment
    else:
        with pytest.raises(PlanError, match=r"this cache has \d+ slabs .*'uniform'"):
            _ = cache.slab


def test_allocate_refusals():
    planned = small_plan()
    for blocks in (-1, 0, 1, 6):
        with pytest.raises(PlanError, match=f"num_blocks={blocks} must be from 2 .* to the planned 5"):
            KVCache.allocate(planned, num_blocks=blocks)
    for worker in (-1, 1):
        with pytest.raises(PlanError, match=f"worker={worker} does not exist; the plan has 1"):
            KVCache.allocate(planned, worker=worker)
    assert KVCache.allocate(planned, num_blocks=3).num_blocks == 3


def test_a_model_without_layers_has_an_empty_cache():
    cache = KVCache.allocate(plan(ModelConfig(name="none", num_hidden_layers=0, compress_ratios=()), 1))
    assert (cache.num_blocks, cache.nbytes, cache.slabs) == (0, 0, ())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hybrid", [True, False])
def test_page_view_shows_the_bytes_at_the_planned_addresses(mode, hybrid):
    """Distinct layers of a group have distinct bytes (ROCm/ATOM#1466: an offset applied twice or not at all)."""
    cache = filled(KVCache.allocate(small_plan(cache_dtype=mode, hybrid=hybrid)))
    flat = [np.asarray(slab).view(np.uint8).reshape(5, -1) for slab in cache.slabs]
    for name, page in cache.layout.pages.items():
        want = flat[page.buffer][:, page.offset_bytes : page.offset_bytes + page.spec.page_size_bytes]
        np.testing.assert_array_equal(np.asarray(cache.page_view(name)), want)
    with pytest.raises(PlanError, match="no layer 'x'"):
        cache.page_view("x")


def test_equal_layouts_trace_once_and_donation_is_in_place():
    traces = []

    def step(cache):
        traces.append(cache)
        return cache.with_slab(cache.slab.at[1, 0, 0].add(jnp.uint32(1)))

    jitted = jax.jit(step, donate_argnums=0)
    first, second = KVCache.allocate(small_plan()), KVCache.allocate(small_plan())
    pointer = first.slab.unsafe_buffer_pointer()
    for _ in range(3):
        first = jitted(first)
    assert first.slab.unsafe_buffer_pointer() == pointer
    assert int(first.slab[1, 0, 0]) == 3
    jitted(second)
    assert len(traces) == 1


def test_with_slab_keeps_shape_and_dtype():
    cache = KVCache.allocate(small_plan())
    with pytest.raises(ValueError, match=r"cannot become float32"):
        cache.with_slab(cache.slab.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"cannot become uint32\[4"):
        cache.with_slab(cache.slab[:4])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hybrid", [True, False])
def test_save_and_load(tmp_path, mode, hybrid):
    planned = small_plan(cache_dtype=mode, hybrid=hybrid)
    cache = filled(KVCache.allocate(planned, num_blocks=4))
    path = tmp_path / "cache.safetensors"
    cache.save(path, planned)
    loaded = KVCache.load(path, planned)
    assert loaded.layout == cache.layout
    chex.assert_trees_all_equal(loaded, cache)
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]


def test_saved_cache_of_one_worker_among_several(tmp_path):
    planned = plan(CONFIG, 0, num_gpu_blocks_override=4, pipeline_stages=2)
    cache = filled(KVCache.allocate(planned, worker=1))
    path = tmp_path / "cache"
    cache.save(path, planned, worker=1)
    chex.assert_trees_all_equal(KVCache.load(path, planned, worker=1), cache)
    with pytest.raises(PlanError, match="not worker 0 of the given plan"):
        cache.save(path, planned, worker=0)
    with pytest.raises(PlanError, match="saved from another plan: .* worker 1; asked for .* worker 0"):
        KVCache.load(path, planned)


def test_load_refusals(tmp_path):
    planned = small_plan()
    path = tmp_path / "cache"
    filled(KVCache.allocate(planned)).save(path, planned)
    with pytest.raises(PlanError, match="saved from another plan: small fp8_ds_mla with 5 blocks.* bf16 with 5"):
        KVCache.load(path, small_plan(cache_dtype="bf16"))
    with pytest.raises(PlanError, match="saved from another plan"):
        KVCache.load(path, small_plan(blocks=6))
    with pytest.raises(FileNotFoundError, match="no saved cache at"):
        KVCache.load(tmp_path / "other", planned)

    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    with pytest.raises(PlanError, match="is damaged"):
        KVCache.load(tmp_path / "flipped", planned)
    (tmp_path / "short").write_bytes(data[:-5])
    with pytest.raises(PlanError, match="is not a saved cache"):
        KVCache.load(tmp_path / "short", planned)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(PlanError, match="is not a saved cache"):
        KVCache.load(tmp_path / "text", planned)


def test_load_refuses_other_versions_and_shapes(tmp_path):
    planned = small_plan()
    slabs = tuple(np.asarray(s) for s in KVCache.allocate(planned).slabs)
    path = tmp_path / "cache"
    storage.save(path, (slabs[0][:, :-1],), planned, 0)
    with pytest.raises(PlanError, match="which its plan does not describe"):
        KVCache.load(path, planned)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header["__metadata__"]["dsv4kv_jax"] = "99"
    text = json.dumps(header).encode()
    (tmp_path / "new").write_bytes(
        len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :]
    )
    with pytest.raises(PlanError, match="schema version '99'"):
        KVCache.load(tmp_path / "new", planned)


@pytest.mark.parametrize("key", ["plan", "worker", "checksum"])
@pytest.mark.parametrize("value", [None, "", "-1", "99", "x", "{}"])
def test_load_refuses_broken_metadata(tmp_path, key, value):
    planned = small_plan()
    path = tmp_path / "cache"
    KVCache.allocate(planned).save(path, planned)
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = {name: text for name, text in (file.metadata() | {key: value}).items() if text is not None}
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(tensors, path, metadata=metadata)
    with pytest.raises(PlanError):
        KVCache.load(path, planned)


def test_save_and_load_refuse_wrong_places(tmp_path):
    planned = small_plan()
    cache = KVCache.allocate(planned)
    with pytest.raises(OSError, match="cannot write"):
        cache.save(tmp_path / "missing" / "cache", planned)
    with pytest.raises(PlanError, match="is not a saved cache"):
        KVCache.load(tmp_path, planned)
    with pytest.raises(PlanError, match="save it with the plan that allocated it"):
        cache.save(tmp_path / "cache", small_plan(blocks=4))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [True, 2.0, "2", [2]])
def test_allocate_refuses_what_is_no_integer(value):
    with pytest.raises(PlanError, match="num_blocks=.* must be an integer"):
        KVCache.allocate(small_plan(), num_blocks=value)
    with pytest.raises(PlanError, match="worker=.* does not exist"):
        KVCache.allocate(small_plan(), worker=value)


def test_public_names():
    assert dsv4kv_jax.KVCache is KVCache
