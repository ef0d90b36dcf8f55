"""The order of two frameworks' work on a GPU, with stand-ins for its streams: who waits, when, and for whom."""

import types

import jax
import jax.numpy as jnp
import pytest

import dsv4kv_jax
from dsv4kv_jax import KVCache
from dsv4kv_jax.interop import SharedSlab, _compute_stream, _exchange, lend
from dsv4kv_jax.specs import layer_specs

torch = pytest.importorskip("torch")

FLASH = dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash")
PLAN = dsv4kv_jax.plan_from_specs(layer_specs(FLASH, layers=(0, 2)), 4 * 130_000)
DEVICE = jax.devices("cpu")[0]
STREAM = types.SimpleNamespace(cuda_stream=0, device_index=0)


@pytest.fixture
def log(monkeypatch):
    """What a hand-over does, in order, where the CPU passes for a GPU."""
    calls, to_jax = [], _exchange.to_jax

    def imported(tensor, device, stream):
        calls.append("import")
        return to_jax(tensor, device, None)

    monkeypatch.setattr(_exchange, "is_gpu", lambda device: True)
    monkeypatch.setattr(_exchange, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(_exchange, "warn_of_preallocation", lambda: None)
    monkeypatch.setattr(_exchange, "compute_stream", lambda device: calls.append("ask for JAX's stream"))
    monkeypatch.setattr(_exchange, "to_jax", imported)
    monkeypatch.setattr(_exchange, "jax_waits_for", lambda device, stream: calls.append("JAX waits"))
    monkeypatch.setattr(_exchange, "torch_waits_for_array", lambda array, stream: calls.append("PyTorch waits"))
    return calls


@pytest.fixture
def shared(log):
    shared = SharedSlab.allocate(PLAN, device="cpu")
    log.clear()
    return shared


def in_place(cache):
    """As a donating program does on a GPU: the argument is gone, the result lies where it was."""
    memory = torch.from_dlpack(cache.slab)
    cache.slab.delete()
    return KVCache(slabs=(jax.dlpack.from_dlpack(memory),), layout=cache.layout)


def test_the_memory_is_imported_once_and_every_step_is_ordered(shared, log):
    for _ in range(3):
        shared.step(lambda cache: (log.append("program"), in_place(cache))[1])
    step = ["JAX waits", "program", "PyTorch waits"]
    assert log == ["JAX waits", "import", "program", "PyTorch waits", *step, *step]


def test_reading_imports_anew(shared, log):
    """What `read` gets may be copied to the host, which no order of programs covers and JAX remembers."""
    shared.step(in_place)
    log.clear()
    assert shared.read(lambda cache: (log.append("program"), cache.num_blocks)[1]) == PLAN.num_blocks
    assert log == ["JAX waits", "import", "program"]
    log.clear()
    shared.step(in_place)
    assert "import" not in log


def test_a_step_that_fails_leaves_the_memory_usable(shared, log):
    view = shared["model.layers.2.attn"]
    view[1] = 3

    def donated_and_failed(cache):
        in_place(cache)
        raise RuntimeError("out of memory")

    copied = jax.jit(lambda cache: cache.with_slab(cache.slab + 1))
    for step, message in (
        (donated_and_failed, "out of memory"),
        (copied, "wrote a new buffer"),
        (jax.jit(lambda cache: cache.slab[0, 0, 0]), "must return the cache"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            shared.step(step)
        log.clear()
        shared.step(in_place)
        assert log == ["JAX waits", "import", "PyTorch waits"]
        assert bool((view[1] == 3).all())


def test_a_caller_that_keeps_the_cache_and_loses_it(shared, log):
    kept = []
    shared.step(lambda cache: (kept.append(cache), cache)[1])
    kept[0].slab.delete()
    log.clear()
    shared.step(in_place)
    assert log == ["JAX waits", "import", "PyTorch waits"]


def test_closing_lets_go_of_what_jax_holds(shared):
    shared.step(in_place)
    shared.close()
    assert shared._cache is None


def test_lending_waits_both_ways(log):
    """PyTorch for the program whose result is exported, JAX for PyTorch when the block ends."""
    cache = KVCache.allocate(PLAN)
    lease, exports = lend(cache, stream=STREAM, after=jnp.arange(2)), []
    original = _exchange.to_torch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_exchange, "to_torch", lambda a, d, s: (exports.append(s), original(a, d, None))[1])
        with lease as views:
            views["model.layers.2.attn"].zero_()
            assert log == ["ask for JAX's stream", "PyTorch waits"]  # for `after`
    assert exports == [STREAM]
    assert log[2:] == ["JAX waits"]


def test_jax_waits_by_an_event_where_its_stream_is_known(monkeypatch):
    calls = []

    class Event:
        def record(self, stream):
            calls.append(("record", stream))

        def wait(self, stream):
            calls.append(("wait", stream))

    monkeypatch.setattr(_exchange, "_event", lambda handle, index: Event())
    monkeypatch.setattr(_exchange, "compute_stream", lambda device: "JAX's stream")
    _exchange.jax_waits_for(DEVICE, STREAM)
    assert calls == [("record", STREAM), ("wait", "JAX's stream")]
    _exchange.jax_waits_for(DEVICE, None)  # on a CPU PyTorch's work is done when its calls return
    assert len(calls) == 2


def test_jax_waits_by_a_program_where_its_stream_is_not_known(monkeypatch):
    def refused(device):
        raise RuntimeError("UNIMPLEMENTED")

    _exchange.compute_stream.cache_clear()
    monkeypatch.setattr(_exchange, "compute_stream_handle", refused)
    ran = []
    monkeypatch.setattr(_exchange, "_fence", lambda index: "one element")
    monkeypatch.setattr(_exchange, "to_jax", lambda tensor, device, stream: (tensor, stream))
    monkeypatch.setattr(_exchange, "_tiny_program", ran.append)
    _exchange.jax_waits_for(DEVICE, STREAM)
    assert ran == [("one element", STREAM)]
    _exchange.compute_stream.cache_clear()


def test_xla_calls_us_and_a_cpu_has_no_stream():
    assert _compute_stream.compute_stream_handle(DEVICE) is None
    assert _compute_stream._found == [None]  # called once, and told no
    assert jax.jit(lambda: _compute_stream.compute_stream_handle(DEVICE) or 1)() == 1  # also while tracing
