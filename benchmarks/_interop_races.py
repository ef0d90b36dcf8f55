"""Long programs on one side, then the other side's access to the same words: does anybody see the wrong value?"""

import contextlib

import jax
import jax.numpy as jnp
import torch
from _interop_loop import LAYERS

from dsv4kv_jax import KVCache
from dsv4kv_jax.interop import SharedSlab, _exchange, lend

HAZARDS = ("jax_write_torch_read", "torch_write_jax_read", "jax_read_torch_write", "torch_read_jax_write")


@contextlib.contextmanager
def unordered():
    """The library with every wait between the frameworks removed."""
    names = ("to_torch", "torch_waits_for_array", "jax_waits_for", "_follow")
    saved = {name: getattr(_exchange, name) for name in names}
    idle = torch.cuda.Stream()
    _exchange.to_torch = lambda array, device, stream: saved["to_torch"](array, device, idle)
    _exchange.torch_waits_for_array = lambda array, stream: None
    _exchange.jax_waits_for = lambda device, stream: None
    _exchange._follow = lambda follower, stream: None
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(_exchange, name, function)
        torch.cuda.synchronize()


class Race:
    """One slab, and long programs of both frameworks on it. Every access is to the same words of block 1."""

    SLEEP_CYCLES = 3_000_000  # about 1.7 ms

    def __init__(self, plan):
        self.cache = KVCache.allocate(plan)
        self.shared = SharedSlab.allocate(plan, device="cuda")
        self.name = LAYERS[4]
        row = plan.layout.page(self.name).first_row
        busy = jnp.full((2048, 2048), 1e-3, jnp.float32)

        def long():
            return jax.lax.fori_loop(0, 8, lambda _, x: jnp.tanh(x @ busy), busy)[0, 0]

        def write(cache, value):
            late = (long() * 0).astype(jnp.uint32)
            return cache.with_slab(cache.slab.at[1, row].set(value + late))

        def read(cache, late):
            return cache.slab[1, row, 0] + late

        def read_late(cache):
            row_now = jnp.where(long() > 2, row + 1, row)  # known only after the long program
            return cache.slab[1, row_now, 0]

        self.write = jax.jit(write, donate_argnums=0)
        self.read = jax.jit(lambda cache: read(cache, 0))
        self.read_late = jax.jit(read_late)
        self.shared.step(self.write, jnp.uint32(0))
        self.cache = self.write(self.cache, jnp.uint32(0))
        for function in (self.read, self.read_late):
            jax.block_until_ready((function(self.cache), self.shared.read(function)))

    def words(self, views):
        return views[self.name][1].view(-1)[:4].view(torch.int32)

    def jax_write_torch_read(self, form, value):
        out = torch.empty(1, dtype=torch.int32, device="cuda")
        if form == "lend":
            self.cache = self.write(self.cache, jnp.uint32(value))
            with lend(self.cache) as views:
                out.copy_(self.words(views))
        else:
            self.shared.step(self.write, jnp.uint32(value))
            out.copy_(self.words(self.shared))
        return out, value

    def torch_write_jax_read(self, form, value):
        if form == "lend":
            with lend(self.cache) as views:
                torch.cuda._sleep(self.SLEEP_CYCLES)
                self.words(views).fill_(value)
            return self.read(self.cache), value
        torch.cuda._sleep(self.SLEEP_CYCLES)
        self.words(self.shared).fill_(value)
        return self.shared.read(self.read), value

    def jax_read_torch_write(self, form, value):
        """JAX's slow read must not see what PyTorch writes afterwards."""
        if form == "lend":
            out = self.read_late(self.cache)
            with lend(self.cache, after=out) as views:
                self.words(views).fill_(value)
        else:
            out = self.shared.read(self.read_late)
            self.words(self.shared).fill_(value)
        return out, value - 1

    def torch_read_jax_write(self, form, value):
        """PyTorch's slow read must not see what JAX writes afterwards."""
        out = torch.empty(1, dtype=torch.int32, device="cuda")
        if form == "lend":
            with lend(self.cache) as views:
                torch.cuda._sleep(self.SLEEP_CYCLES)
                out.copy_(self.words(views))
            self.cache = self.quick(self.cache, jnp.uint32(value))
        else:
            torch.cuda._sleep(self.SLEEP_CYCLES)
            out.copy_(self.words(self.shared))
            self.shared.step(self.quick, jnp.uint32(value))
        return out, value - 1

    def quick(self, cache, value):
        return _quick_write(cache, value)

    def run(self, hazard, form, times):
        """How many of `times` accesses saw the wrong value."""
        start = 1000
        self.set(form, start - 1)
        results = [getattr(self, hazard)(form, start + i) for i in range(times)]
        torch.cuda.synchronize()
        wrong = sum(int(seen) & 0xFFFFFFFF != want for seen, want in results)
        return wrong

    def set(self, form, value):
        """All quiet, and the words hold `value`."""
        torch.cuda.synchronize()
        if form == "lend":
            jax.block_until_ready(self.read(self.cache))
            with lend(self.cache) as views:
                self.words(views).fill_(value)
        else:
            jax.block_until_ready(self.shared.read(self.read))
            self.words(self.shared).fill_(value)
        torch.cuda.synchronize()


_quick_write = jax.jit(lambda cache, value: cache.with_slab(cache.slab.at[1].set(value)), donate_argnums=0)


def races(plan, times):
    """Wrong values seen, by hazard, form and stream: with the ordering and, for the control, without."""
    race = Race(plan)
    race.cache = _quick_write(race.cache, jnp.uint32(0))
    race.shared.step(_quick_write, jnp.uint32(0))
    results = []
    side = torch.cuda.Stream()
    for hazard in HAZARDS:
        for form in ("lend", "SharedSlab"):
            for stream in ("default", "side"):
                with torch.cuda.stream(side) if stream == "side" else contextlib.nullcontext():
                    wrong = race.run(hazard, form, times)
                    with unordered():
                        control = race.run(hazard, form, times)
                results.append(
                    {
                        "hazard": hazard,
                        "form": form,
                        "stream": stream,
                        "times": times,
                        "wrong": wrong,
                        "control": control,
                    }
                )
    race.shared.close()
    return results
