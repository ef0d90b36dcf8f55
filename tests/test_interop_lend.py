"""`lend`: what PyTorch sees of a cache that JAX owns, and what is refused meanwhile."""

import copy
import pickle
import subprocess
import sys
import textwrap
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4kv_jax
from dsv4kv_jax import KVCache, interop, kernels, leases
from dsv4kv_jax.interop import LeaseError, lend
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec, layer_specs

torch = pytest.importorskip("torch")

FLASH = dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash")
LAYERS = (0, 2, 3)  # window-only, C4A, C128A


def small_plan(cache_dtype="fp8_ds_mla", num_blocks=6, **options):
    specs = layer_specs(FLASH, cache_dtype, layers=LAYERS, **options)
    stride = dsv4kv_jax.plan_from_specs(specs, 1 << 30).layout.block_stride_bytes
    return dsv4kv_jax.plan_from_specs(specs, stride * num_blocks)


@pytest.fixture
def cache():
    return KVCache.allocate(small_plan())


write = jax.jit(lambda cache, value: cache.with_slab(cache.slab.at[1].set(value)), donate_argnums=0)


def address(cache):
    return cache.slab.unsafe_buffer_pointer()


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "bf16", "fp8"])
@pytest.mark.parametrize("indexer", ["fp8", "mxfp4"])
def test_every_layer_has_the_tensor_that_vllm_binds(cache_dtype, indexer):
    plan = small_plan(cache_dtype, indexer=indexer)
    cache = KVCache.allocate(plan)
    stride = plan.layout.block_stride_bytes
    row = {"fp8_ds_mla": (584, torch.uint8), "bf16": (512, torch.bfloat16), "fp8": (512, torch.float8_e4m3fn)}
    key = {"fp8": 132, "mxfp4": 68}[indexer]
    latent, float32 = row[cache_dtype], torch.float32
    expected = {
        "model.layers.0.attn.swa_cache": (64, *latent),
        "model.layers.2.attn": (64, *latent),
        "model.layers.3.attn": (2, *latent),
        "model.layers.2.attn.indexer.k_cache": (64, key, torch.uint8),
        "model.layers.2.attn.compressor.state_cache": (4, 2048, float32),
        "model.layers.2.attn.indexer.compressor.state_cache": (4, 512, float32),
        "model.layers.3.attn.compressor.state_cache": (8, 1024, float32),
    }
    with lend(cache) as views:
        assert set(views) == set(plan.layout.layers)
        for name, (rows, width, dtype) in expected.items():
            view, item = views[name], torch.empty(0, dtype=dtype).element_size()
            assert (view.dtype, tuple(view.shape)) == (dtype, (6, rows, width))
            assert view.stride() == (stride // item, width, 1)
            assert view.storage_offset() == plan.layout.page(name).offset_bytes // item
            assert view.data_ptr() == address(cache) + plan.layout.page(name).offset_bytes


def test_bytes_written_by_jax_are_torchs_and_back(cache):
    name = "model.layers.2.attn"
    page = cache.page(name)
    rows = jax.random.normal(jax.random.key(0), (3, 512), jnp.bfloat16)
    slots = jnp.array([64, 70, 191], jnp.int32)
    cache = cache.with_slab(kernels.insert_rows(cache.slab, page, slots, rows))
    wanted = np.asarray(kernels.gather_rows(cache.slab, page, slots, dtype=jnp.float32))
    from interop_reference import rows_of

    with lend(cache) as views:
        seen = rows_of(views[name], torch.tensor([64, 70, 191])).numpy()
        views[name][2] = views[name][1]  # block 2 becomes a copy of block 1
    assert np.array_equal(seen, wanted)
    copied = kernels.gather_rows(cache.slab, page, slots[:2] + 64, dtype=jnp.float32)
    assert np.array_equal(np.asarray(copied), wanted[:2])


def test_each_layer_has_its_own_bytes(cache):
    """as_strided counts from the storage's start: layers must not all land on the first (ROCm/ATOM#1466, #1775)."""
    group = cache.layout.groups[0].layers
    with lend(cache) as views:
        for value, name in enumerate(group, start=1):
            views[name].view(torch.uint8).fill_(value)
        assert len({views[name].data_ptr() for name in group}) == len(group)
        for value, name in enumerate(group, start=1):
            assert bool((views[name].view(torch.uint8) == value).all())
    for value, name in enumerate(group, start=1):
        real = cache.page(name).spec.real_page_size_bytes
        pages = np.asarray(cache.page_view(name))
        assert (pages[:, :real] == value).all() and not pages[:, real:].any()


def test_donating_a_lent_cache_is_refused_before_the_call_and_in_place_after(cache):
    """XLA refuses this on a GPU and copies in silence on a CPU (jax-ml/jax#4636)."""
    cache = write(cache, 1)
    before = address(cache)
    with lend(cache) as views:
        view = views["model.layers.2.attn"]
        with pytest.raises(LeaseError, match="lent to PyTorch"):
            write(cache, 2)
        assert bool((view[1] == torch.tensor([1, 0, 0, 0], dtype=torch.uint8).repeat(146)).all())
        assert not cache.slab.is_deleted()
        assert view.data_ptr() == before + cache.page("model.layers.2.attn").offset_bytes
    after = write(cache, 3)
    assert address(after) == before and cache.slab.is_deleted()
    assert int(after.slab[1, 0, 0]) == 3


@pytest.mark.parametrize("take", [lambda c: jax.jit(lambda c: c.slab.sum())(c), jax.tree.leaves, jax.device_put])
def test_no_way_into_jax_while_lent(cache, take):
    with lend(cache) as views:
        assert len(views)
        with pytest.raises(LeaseError, match="leave the `with lend"):
            take(cache)
    take(cache)


def test_a_bare_slab_has_its_own_check(cache):
    with lend(cache):
        assert int(cache.slab.sum()) == 0  # reading it stays possible
        for tree in (cache.slab, [cache.slab, 1]):
            with pytest.raises(LeaseError, match="lent to PyTorch"):
                interop.check_donatable(tree)
    interop.check_donatable(cache.slab)
    write(cache, 1)
    with pytest.raises(LeaseError, match="donated already"):
        interop.check_donatable(cache.slabs)


def test_using_a_view_after_the_lease_raises(cache):
    with lend(cache) as views:
        view, blocks = views["model.layers.2.attn"], views.whole_blocks()
    uses = [
        lambda: view + 1,
        lambda: view[0],
        lambda: view.shape,
        lambda: view.data_ptr(),
        lambda: torch.sum(view),
        lambda: blocks.numpy(),
        lambda: views["model.layers.2.attn"],
        lambda: views.whole_blocks(),
        lambda: views.buffers,
        lambda: list(views),
    ]
    for use in uses:
        with pytest.raises(LeaseError, match="ended with its lease"):
            use()
    with pytest.raises(LeaseError, match="entered once"), views:
        pass


def test_while_a_tensor_made_from_a_view_lives_the_cache_stays_lent(cache):
    with lend(cache) as views:
        kept = views["model.layers.2.attn"][2:]
    with pytest.raises(LeaseError, match="a tensor made from one of its views outlives the lease"):
        write(cache, 1)
    with pytest.raises(LeaseError, match="cannot be lent, because a tensor made from"), lend(cache):
        pass
    assert not kept.any()  # the memory is still there, and nobody else's
    del kept
    before = address(cache)
    assert address(write(cache, 1)) == before


def test_a_forgotten_view_does_not_keep_the_slab():
    """Neither the register nor the lease keeps a cache that everybody else has dropped."""
    plan = small_plan()
    cache = KVCache.allocate(plan)
    slab = weakref.ref(cache.slab)
    with lend(cache) as views:
        kept = views["model.layers.2.attn"][1:]
    del cache
    assert slab() is None and not kept.any()  # the tensor alone keeps the memory
    del kept
    with lend(KVCache.allocate(plan)):
        assert len(leases._borrowers) == 1
    assert not leases._borrowers


def test_a_cache_deleted_meanwhile_is_reported(cache):
    with pytest.raises(LeaseError, match="deleted while it was lent"), lend(cache):
        cache.slab.delete()


def test_an_error_inside_the_block_is_not_hidden(cache):
    def use(views):
        local = views["model.layers.2.attn"][1:]
        raise RuntimeError(f"from {local.shape[0]} blocks")

    with pytest.raises(RuntimeError, match="from 5 blocks"), lend(cache) as views:
        use(views)
    write(cache, 1)


def test_lending_twice_is_refused(cache):
    with lend(cache), pytest.raises(LeaseError, match="cannot be lent, because it is lent"), lend(cache):
        pass
    with lend(cache):
        pass


def test_views_need_an_entered_lease(cache):
    with pytest.raises(LeaseError, match="with lend"):
        lend(cache)["model.layers.2.attn"]
    for layer in ("model.layers.9.attn", None, 0):
        with lend(cache) as views, pytest.raises(KeyError, match=r"no layer .* here; this cache holds \d+, such as"):
            views[layer]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_views_cannot_be_copied(cache, copied):
    """A deep copy used to give PyTorch's references to the memory up twice, which corrupted the heap."""
    with lend(cache) as views, pytest.raises(TypeError, match="a Lease .* cannot be copied or pickled"):
        copied(views)
    write(cache, 1)


@pytest.mark.parametrize(
    "slabs",
    [
        lambda slab: (),
        lambda slab: (slab, slab),
        lambda slab: (np.asarray(slab),),
        lambda slab: (slab.astype(jnp.float32),),
        lambda slab: (slab[:, :-1],),
        lambda slab: (slab[0],),
    ],
)
def test_slabs_that_are_not_the_layouts_are_not_lent(cache, slabs):
    """Views on them would name the bytes of other layers, or lie past the end."""
    wrong = KVCache(slabs=slabs(cache.slab), layout=cache.layout)
    with pytest.raises(ValueError, match="the cache has slabs .* its layout makes them JAX arrays"), lend(wrong):
        pass
    write(cache, 1)


def test_what_cannot_be_waited_for(cache):
    read = jax.jit(lambda cache: cache.slab[1])(cache)
    read.delete()
    with pytest.raises(ValueError, match="donated or deleted; pass what the donating function returned"):
        lend(cache, after=(read,)).__enter__()
    with pytest.raises(ValueError, match="stream=5 must be a torch.cuda.Stream, or None on a CPU"):
        lend(cache, stream=5).__enter__()
    write(cache, 1)


def test_donated_traced_and_foreign_caches_are_refused(cache):
    write(cache, 1)
    with pytest.raises(ValueError, match="donated or deleted"), lend(cache):
        pass
    with pytest.raises(ValueError, match="takes a KVCache, not ndarray"):
        lend(np.zeros(3))

    def traced(cache):
        with lend(cache):
            return cache

    with pytest.raises(ValueError, match="being traced"):
        jax.jit(traced)(KVCache.allocate(small_plan()))


def test_sharded_caches_are_refused():
    """In a process with two CPU devices."""
    code = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    import dsv4kv_jax
    from dsv4kv_jax import interop
    plan = dsv4kv_jax.plan(dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash"), 4 * 1002240)
    mesh = Mesh(np.array(jax.devices()), "x")
    for spec in (PartitionSpec("x"), PartitionSpec()):
        cache = dsv4kv_jax.KVCache.allocate(plan, device=NamedSharding(mesh, spec))
        try:
            with interop.lend(cache):
                raise SystemExit("lent a sharded cache")
        except ValueError as error:
            assert "2 devices" in str(error) and "one cache a device" in str(error), error
    cache = dsv4kv_jax.KVCache.allocate(plan, device=jax.devices()[1])
    with interop.lend(cache) as views:
        assert views["model.layers.2.attn"].shape[0] == 4
    print("refused")
    """
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "refused"), run.stderr


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("rows", [1, 64])
def test_dimensions_of_size_one(num_blocks, rows):
    """Strides of a size-1 dimension are anything; they must still be the canonical ones (vllm-project/vllm#40737)."""
    spec = MLAAttentionSpec(block_size=rows, head_size=512, dtype="uint8", alignment=576, cache_dtype_str="fp8_ds_mla")
    window = SlidingWindowMLASpec(block_size=4, head_size=16, dtype="float32", alignment=576, sliding_window=8)
    plan = dsv4kv_jax.plan_from_specs({"layers.0": spec, "layers.1": window}, 1 << 22)
    buffer = plan.layout.buffers[0]
    cache = KVCache(slabs=(jnp.zeros(buffer.shape(num_blocks), jnp.uint32),), layout=plan.layout)
    with lend(cache) as views:
        assert views["layers.0"].stride() == (buffer.block_stride_bytes, 584, 1)
        assert views["layers.1"].stride() == (buffer.block_stride_bytes // 4, 16, 1)
        views["layers.1"].fill_(2.0)
    assert float(jax.lax.bitcast_convert_type(cache.slab[num_blocks - 1, 0, 0], jnp.float32)) == 2.0
    backing = torch.zeros(num_blocks * buffer.block_stride_bytes, dtype=torch.int8)
    odd = backing.view(num_blocks, 1, -1).as_strided(
        (num_blocks, 1, buffer.block_stride_bytes), (buffer.block_stride_bytes, 7, 1)
    )
    shared = interop.SharedSlab(odd, plan.layout, copy_on_cpu=True)
    shared.step(write if num_blocks > 1 else (lambda c: c.with_slab(c.slab + 1)), *([5] if num_blocks > 1 else []))
    assert int(backing.count_nonzero()) > 0


def test_other_allocation_forms():
    spec = MLAAttentionSpec(block_size=64, head_size=512, dtype="uint8", alignment=576, cache_dtype_str="fp8_ds_mla")
    window = SlidingWindowMLASpec(
        block_size=64, head_size=512, dtype="uint8", alignment=576, cache_dtype_str="fp8_ds_mla", sliding_window=128
    )
    uniform = dsv4kv_jax.plan_from_specs({f"layers.{i}.full": spec for i in range(3)}, 3 * 4 * 37440)
    pools = dsv4kv_jax.plan_from_specs(
        {"full.0": spec, "full.1": spec, "sw.0": window, "sw.1": window, "sw.2": window},
        2 * 4 * 37440,
        groups=[["full.0", "full.1"], ["sw.0", "sw.2"], ["sw.1"]],
    )
    for plan, buffers in ((uniform, 3), (pools, 2)):
        cache = KVCache.allocate(plan)
        assert len(cache.slabs) == buffers
        with lend(cache) as views:
            for name, page in plan.layout.pages.items():
                assert views[name].data_ptr() == cache.slabs[page.buffer].unsafe_buffer_pointer()
                assert views[name].stride() == (37440, 584, 1)
            assert views.whole_blocks(1).shape == (4, 37440)


def test_layers_that_share_a_cache_have_one_view():
    spec = MLAAttentionSpec(block_size=64, head_size=512, dtype="uint8", alignment=576, cache_dtype_str="fp8_ds_mla")
    state = SlidingWindowMLASpec(block_size=8, head_size=16, dtype="float32", alignment=576, sliding_window=8)
    plan = dsv4kv_jax.plan_from_specs(
        {"layers.0": spec, "layers.0.state": state}, 1 << 22, shares_with={"layers.1": "layers.0"}
    )
    with lend(KVCache.allocate(plan)) as views:
        assert views["layers.1"] is views["layers.0"]
        assert set(views) == {"layers.0", "layers.0.state", "layers.1"}


def test_checked_step_finds_a_copy(cache):
    checked = interop.checked_step(write)
    cache = checked(cache, 1)
    before = address(cache)
    cache = checked(cache, 2)
    assert address(cache) == before
    copying = interop.checked_step(jax.jit(lambda c: c.with_slab(c.slab + 1)))
    with pytest.raises(LeaseError, match="copied the cache"):
        copying(cache)
    with lend(cache), pytest.raises(LeaseError, match="lent to PyTorch"):
        checked(cache, 3)
    pair = interop.checked_step(jax.jit(lambda c: (c.with_slab(c.slab.at[0].set(1)), 7), donate_argnums=0))
    assert pair(cache)[1] == 7


def test_an_empty_cache_can_be_lent():
    plan = dsv4kv_jax.plan_from_specs({}, 1 << 20)
    with lend(KVCache.allocate(plan)) as views:
        assert dict(views) == {}


@pytest.mark.parametrize(
    "after", [(), None, "array", "scalar", "tuple", "tree"], ids=lambda after: str(after) or "nothing"
)
def test_programs_that_only_read_are_waited_for(cache, after):
    """`after` is any pytree: a bare array of several elements has no truth value and is no exception."""
    read = jax.jit(lambda cache: cache.slab[1])(cache)
    given = {"array": read, "scalar": read[0, 0], "tuple": (read, read + 1), "tree": {"a": [read], "b": None}}
    with lend(cache, after=given.get(after, after)) as views:
        views["model.layers.2.attn"].fill_(7)
    assert not np.asarray(read).any()
    write(cache, 1)
