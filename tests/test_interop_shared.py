"""`SharedSlab`: memory of PyTorch's that JAX writes, and the inputs that cannot be shared."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4kv_jax
from dsv4kv_jax import KVCache, interop
from dsv4kv_jax.interop import LeaseError, SharedSlab, _exchange
from dsv4kv_jax.specs import MLAAttentionSpec, layer_specs

torch = pytest.importorskip("torch")

FLASH = dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash")
PLAN = dsv4kv_jax.plan_from_specs(layer_specs(FLASH, layers=(0, 2, 3)), 6 * 130_000)
LAYOUT = PLAN.layout
STRIDE = LAYOUT.block_stride_bytes
NAME = "model.layers.2.attn"

write = jax.jit(lambda cache, value: (cache.with_slab(cache.slab.at[1].set(value)), value + 1), donate_argnums=0)


@pytest.fixture
def shared():
    return SharedSlab.allocate(PLAN, device="cpu", copy_on_cpu=True)


def test_a_torch_owned_slab_is_refused_on_a_cpu():
    """XLA would write into a copy and PyTorch would go on reading the old bytes."""
    with pytest.raises(ValueError, match=r"silently works on a copy.*`lend`.*copy_on_cpu=True"):
        SharedSlab.allocate(PLAN, device="cpu")
    with pytest.raises(ValueError, match="silently works on a copy"):
        SharedSlab(torch.zeros(2 * STRIDE, dtype=torch.int8), LAYOUT)


def test_the_copy_is_what_jax_does_without_us():
    """The fault that the refusal is for: donated, and PyTorch's bytes unchanged."""
    tensor = torch.zeros(2, 3, 4, dtype=torch.uint32)
    array = jax.dlpack.from_dlpack(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    result = jax.jit(lambda x: x.at[0].set(7), donate_argnums=0)(array)
    assert result.unsafe_buffer_pointer() != tensor.data_ptr()
    assert int(tensor.view(torch.int32).count_nonzero()) == 0


def test_copied_openly(shared):
    view = shared[NAME]
    assert shared.step(write, jnp.uint32(0x01010101)) == 0x01010102
    assert bool((view[1] == 1).all()) and not bool(view[0].any())
    view[2] = 5
    row = LAYOUT.page(NAME).first_row
    assert int(shared.read(jax.jit(lambda cache: cache.slab[2, row, 0]))) == 0x05050505
    assert shared[NAME] is view and len(shared) == len(LAYOUT.layers)
    assert shared.num_blocks == PLAN.num_blocks and shared.device.platform == "cpu"


def test_several_results_and_none(shared):
    assert shared.step(jax.jit(lambda c: c, donate_argnums=0)) is None
    assert shared.step(jax.jit(lambda c, x: (c, x, x + 1), donate_argnums=0), 3) == (3, 4)


def test_a_step_must_return_its_cache(shared):
    with pytest.raises(ValueError, match="must return the cache"):
        shared.step(jax.jit(lambda cache: cache.slab.sum()))
    other = KVCache.allocate(dsv4kv_jax.plan(FLASH, 3 * 1_002_240))
    for wrong in (other, (), [other], None):
        with pytest.raises(ValueError, match="must return the cache"):
            shared.step(lambda cache, wrong=wrong: wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda slab: (slab[:1],),  # one block would be copied over all of them
        lambda slab: (slab.astype(jnp.float32),),
        lambda slab: (np.asarray(slab),),
        lambda slab: (),
    ],
)
def test_a_step_that_returns_other_slabs_changes_nothing(shared, make):
    shared.buffers[0].fill_(7)
    with pytest.raises(ValueError, match=r"the cache has slabs .* its layout makes them JAX arrays \['uint32\["):
        shared.step(lambda cache: KVCache(slabs=make(cache.slab), layout=LAYOUT))
    assert bool((shared.buffers[0] == 7).all())


def test_a_step_may_not_close_its_slab(shared):
    with pytest.raises(LeaseError, match="closed"):
        shared.step(lambda cache: (shared.close(), cache)[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker": 1}, "worker=1 does not exist; the plan has 1"),
        ({"worker": -1}, "worker=-1"),
        ({"worker": True}, "worker=True"),
        ({"worker": 0.0}, "worker=0.0"),
        ({"num_blocks": 1}, "num_blocks=1 must be from 2"),
        ({"num_blocks": -1}, "num_blocks=-1"),
        ({"num_blocks": 2.0}, "num_blocks=2.0 must be an integer"),
        ({"num_blocks": True}, "num_blocks=True"),
        ({"num_blocks": PLAN.num_blocks + 1}, "plan with more memory for more"),
    ],
)
def test_a_shared_slab_is_allocated_as_a_cache_is(options, message):
    for allocate in (SharedSlab.allocate, KVCache.allocate):
        own = {"device": "cpu", "copy_on_cpu": True} if allocate == SharedSlab.allocate else {}
        with pytest.raises(dsv4kv_jax.PlanError, match=message):
            allocate(PLAN, **own, **options)


def test_buffers_of_their_own():
    """Two buffers in one memory: what one layer writes, another reads."""
    spec = MLAAttentionSpec(block_size=64, head_size=512, dtype="bfloat16", alignment=512)
    layout = dsv4kv_jax.plan_from_specs({"layers.0": spec, "layers.1": spec}, 1 << 20).layout
    memory = torch.zeros(4 * spec.page_size_bytes, dtype=torch.uint8)
    half = len(memory) // 2
    assert SharedSlab([memory[:half], memory[half:]], layout, copy_on_cpu=True).num_blocks == 2
    for pair in ([memory, memory], [memory[:half], memory[half // 2 : half // 2 + half]]):
        with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] overlap in memory"):
            SharedSlab(pair, layout, copy_on_cpu=True)


@pytest.mark.parametrize("layout", [PLAN, "packed", None])
def test_a_layout_says_where_pages_lie(layout):
    with pytest.raises(ValueError, match="pass a PackedLayout, such as plan.layout"):
        SharedSlab(torch.zeros(STRIDE, dtype=torch.uint8), layout, copy_on_cpu=True)


def test_views_end_with_close():
    with SharedSlab.allocate(PLAN, device="cpu", copy_on_cpu=True) as shared:
        view = shared[NAME]
        shared.step(write, jnp.uint32(3))
    for use in (lambda: view.sum(), lambda: view[0]):
        with pytest.raises(LeaseError, match="ended"):
            use()
    shared.close()
    uses = (lambda: shared[NAME], lambda: shared.step(write, 1), lambda: shared.read(len), shared.whole_blocks)
    for use in (*uses, shared.__enter__, lambda: shared.buffers, lambda: interop.bind(shared, {})):
        with pytest.raises(LeaseError, match="closed"):
            use()


def test_it_adopts_the_memory_it_is_given():
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.uint32):
        size = 3 * STRIDE // torch.empty(0, dtype=dtype).element_size()
        backing = torch.zeros(size, dtype=dtype)
        shared = SharedSlab(backing, LAYOUT, copy_on_cpu=True)
        assert shared[NAME].data_ptr() == backing.data_ptr() + LAYOUT.page(NAME).offset_bytes
        shared.step(write, jnp.uint32(9))
        assert int(backing.view(torch.int8).count_nonzero()) == STRIDE // 4


def unaligned():
    return torch.zeros(3 * STRIDE + 64, dtype=torch.int8)[4 : 3 * STRIDE + 4]


def sub_word():
    return torch.zeros(3 * STRIDE + 64, dtype=torch.int8)[1 : 3 * STRIDE + 1]


def read_only():
    array = np.zeros(3 * STRIDE, np.int8)
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # A slice of a wider slab (jax-ml/jax#8082): JAX only says that striding must be compact.
        (
            lambda: torch.zeros(64, 600, dtype=torch.uint8)[:, :584],
            "JAX takes compact memory only: pass the whole slab",
        ),
        (lambda: torch.zeros(STRIDE, 2, dtype=torch.uint8).t(), "compact memory only"),
        (lambda: torch.zeros(1, STRIDE, dtype=torch.uint8).expand(2, STRIDE), "compact memory only"),
        (lambda: np.zeros(2 * STRIDE, np.int8), r"numpy array; pass a torch tensor: torch.from_numpy$"),
        (read_only, r"read-only"),
        (lambda: jnp.zeros(2 * STRIDE, jnp.uint8), "use `lend` for a while, or `SharedSlab.from_cache`"),
        (lambda: "slab", "pass the torch tensor that backs the whole cache"),
        (lambda: torch.zeros(STRIDE // 2, dtype=torch.float32), r"dtype float32.*tensor.view\(torch.uint8\)"),
        (lambda: torch.zeros(STRIDE, dtype=torch.int16), "dtype int16"),
        (lambda: torch.zeros(2 * STRIDE, dtype=torch.bool), "dtype bool"),
        (lambda: torch.zeros(2 * STRIDE - 1, dtype=torch.int8), f"no whole number of blocks of {STRIDE} B"),
        (lambda: torch.zeros(2 * STRIDE + 4, dtype=torch.int8), "no whole number of blocks"),
        (lambda: torch.zeros(0, dtype=torch.int8), "no whole number of blocks"),
        (sub_word, "not a multiple of 64"),
        (unaligned, "not a multiple of 64"),
        (lambda: torch.zeros(2 * STRIDE, dtype=torch.int8, device="meta"), "device meta cannot be shared"),
        (lambda: [torch.zeros(2 * STRIDE, dtype=torch.int8)] * 2, "2 tensors were given, and the layout has 1 buffers"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        SharedSlab(make(), LAYOUT, copy_on_cpu=True)


def test_a_cuda_tensor_needs_a_jax_with_cuda():
    from dsv4kv_jax.interop.shared import jax_device

    with pytest.raises(ValueError, match=r"needs a JAX with CUDA: pip install 'dsv4kv_jax\[cuda13\]'"):
        jax_device(torch.device("cuda", 0))


def test_jax_memory_cannot_be_shared_for_good_on_a_cpu():
    cache = KVCache.allocate(PLAN)
    with pytest.raises(ValueError, match="silently works on a copy"):
        SharedSlab.from_cache(cache)
    write(cache, jnp.uint32(1))  # the refused attempt left nothing lent


def test_int32_tables_are_shared_and_wider_ones_converted_openly():
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    array = interop.int32_array("block_table", table)
    assert array.dtype == jnp.int32 and array.unsafe_buffer_pointer() == table.data_ptr()
    back = interop.int32_tensor("block_table", array)
    assert back.dtype == torch.int32 and back.data_ptr() == table.data_ptr()
    wide = torch.tensor([[1, -1, 2**31 - 1]])
    assert interop.int32_array("slots", wide).tolist() == wide.tolist()
    assert interop.int32_tensor("slots", wide).dtype == torch.int32
    assert interop.int32_tensor("slots", np.array([3, -1])).tolist() == [3, -1]
    assert interop.int32_tensor("slots", [[1], [2]], device="cpu").tolist() == [[1], [2]]
    assert interop.int32_array("slots", torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
    assert interop.int32_array("slots", table.t()).tolist() == table.t().tolist()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([2**31]), r"slots holds values from 2147483648 to 2147483648, which do not fit in int32"),
        (torch.tensor([-(2**31) - 1, 0]), "do not fit in int32"),
        (torch.tensor([1.0]), "slots has dtype torch.float32"),
        (torch.tensor([True]), "slots has dtype torch.bool"),
    ],
)
def test_bad_tables_are_refused(value, message):
    for convert in (interop.int32_array, interop.int32_tensor):
        with pytest.raises(ValueError, match=message):
            convert("slots", value)
    with pytest.raises(ValueError, match="pass a dense tensor"):
        interop.int32_array("slots", torch.ones(2, dtype=torch.int32).to_sparse())


@pytest.mark.parametrize("value", [None, "abc", 1.5, [1.5], [True], [None], [[1], [1, 2]], {1: 2}, [2**70], [2**31]])
def test_host_values_that_are_no_integers(value):
    with pytest.raises(ValueError, match="slots (has dtype .* int32 integers|holds values .* do not fit in int32)"):
        interop.int32_tensor("slots", value)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64, np.uint64, ">i4"])
def test_host_integers_of_any_type_are_converted(dtype):
    tensor = interop.int32_tensor("slots", np.array([[7, 0]], dtype))
    assert tensor.dtype == torch.int32 and tensor.tolist() == [[7, 0]]
    assert interop.int32_tensor("slots", []).dtype == torch.int32


def test_tables_of_the_wrong_framework_or_device():
    with pytest.raises(ValueError, match="pass a torch tensor"):
        interop.int32_array("slots", np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="JAX array of float32"):
        interop.int32_tensor("slots", jnp.zeros(3))
    with pytest.raises(ValueError, match=r"slots is on cpu and is needed on meta: slots.to\('meta'\)"):
        interop.int32_tensor("slots", torch.zeros(3, dtype=torch.int32), device="meta")


def test_the_public_dlpack_path_is_the_same(monkeypatch):
    """Where JAX's inner call is not to be had, `jax.dlpack` does the same, slower."""
    tensor = torch.arange(12, dtype=torch.int32)
    device = jax.devices("cpu")[0]
    fast = _exchange.to_jax(tensor, device, None)
    monkeypatch.setattr(_exchange, "_capsule_to_array", None)
    slow = _exchange.to_jax(tensor, device, None)
    assert fast.unsafe_buffer_pointer() == slow.unsafe_buffer_pointer() == tensor.data_ptr()
    assert (fast.dtype, fast.shape) == (slow.dtype, slow.shape)


@pytest.mark.parametrize(
    ("environ", "warns"),
    [
        ({}, True),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, True),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, False),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "0"}, False),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, False),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, False),
    ],
)
def test_preallocation_is_warned_of_where_it_happens(environ, warns):
    message = _exchange.preallocation_message(environ)
    assert (message is not None) == warns
    assert not warns or "XLA_PYTHON_CLIENT_PREALLOCATE=false" in message


def test_the_warning_comes_once_and_only_on_a_gpu(monkeypatch):
    _exchange.warn_of_preallocation.cache_clear()
    for name in [name for name in os.environ if name.startswith("XLA_")]:
        monkeypatch.delenv(name)
    with interop.lend(KVCache.allocate(PLAN)):
        pass  # a CPU has nothing to preallocate; a warning would be an error here
    with pytest.warns(UserWarning, match="preallocated 75%"):
        _exchange.warn_of_preallocation()
    _exchange.warn_of_preallocation()
    _exchange.warn_of_preallocation.cache_clear()
