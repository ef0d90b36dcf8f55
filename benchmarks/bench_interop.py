"""Sharing a cache with PyTorch on a GPU: what a hand-over costs, and that nobody reads a stale byte.

* `round_trip`: host time of a hand-over to PyTorch and back, beside the plain DLPack calls in the same run.
* `race`: long programs on one side, then the other side's access, with the library's ordering and (the control)
  without.
* `flashmla_loop`: a decode loop in which JAX writes and FlashMLA attends, against a float32 reference.

On a CPU the loop runs with plain PyTorch attention and the other two parts are left out. FlashMLA is the compiled
library `_flashmla_C.abi3.so` of a vLLM wheel (0.26.0 for PyTorch 2.11), given by `--flash-mla`.
"""

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
from _interop_loop import FLASH, LAYERS, STARTS, decode_loop, flash_attention, plain_attention
from _interop_races import races
from _results import Row, report

import dsv4kv_jax
from dsv4kv_jax import KVCache, interop, kernels
from dsv4kv_jax.interop import SharedSlab, _exchange, lend, torch_kernels
from dsv4kv_jax.specs import layer_specs

KINDS = {1: "window-only", 4: "C4A", 128: "C128A"}
MAX_ERROR = 3e-3


def on_gpu():
    return jax.default_backend() == "gpu"


def ownership_checks(plan):
    """Facts about pointers and refusals; raises where one does not hold. Returns their names."""
    name = LAYERS[4]
    offset = plan.layout.page(name).offset_bytes
    write = jax.jit(lambda cache, value: cache.with_slab(cache.slab.at[1].set(value)), donate_argnums=0)
    copying = jax.jit(lambda cache: cache.with_slab(cache.slab + 1))
    row = plan.layout.page(name).first_row
    read = jax.jit(lambda cache: cache.slab[1, row, 0])
    done = []

    def check(what, good):
        if not good:
            raise RuntimeError(f"not so: {what}")
        done.append(what)

    def refused(call):
        try:
            call()
        except Exception as error:
            return str(error)
        return ""

    cache = write(KVCache.allocate(plan), jnp.uint32(0x01010101))
    address = cache.slab.unsafe_buffer_pointer()
    with lend(cache) as views:
        view = views[name]
        check("lend: same pointer", view.data_ptr() == address + offset and view.is_cuda)
        check("lend: torch sees JAX's write", bool((view[1] == 1).all()) and not bool(view[0].any()))
        check("lend: donating the cache is refused", "lent to PyTorch" in refused(lambda: write(cache, jnp.uint32(2))))
        view[1] = 2
    check("lend: JAX sees torch's write", int(read(cache)) == 0x02020202)
    cache = write(cache, jnp.uint32(3))
    check("lend: in place afterwards", cache.slab.unsafe_buffer_pointer() == address)
    check("lend: the view has ended", "ended" in refused(lambda: view + 1))

    for form, shared in (
        ("SharedSlab", SharedSlab.allocate(plan, device="cuda")),
        ("from_cache", SharedSlab.from_cache(cache)),
    ):
        view, pointer = shared[name], shared.whole_blocks().data_ptr()
        for value in range(1, 101):
            shared.step(write, jnp.uint32(value * 0x01010101))
        check(f"{form}: 100 steps in place, seen by torch", bool((view[1] == 100).all()))
        check(f"{form}: same pointer", shared.whole_blocks().data_ptr() == pointer == view.data_ptr() - offset)
        check(f"{form}: a step that copies is refused", "a new buffer" in refused(lambda s=shared: s.step(copying)))
        check(f"{form}: and leaves the bytes", bool((view[1] == 100).all()))
        view[1] = 5
        check(f"{form}: JAX sees torch's write", int(shared.read(read)) == 0x05050505)
        shared.close()
        check(f"{form}: views have ended", "ended" in refused(lambda v=view: v + 1))
    cache = write(cache, jnp.uint32(9))
    check("from_cache: JAX's again after close, in place", cache.slab.unsafe_buffer_pointer() == address)
    tensor = torch.from_dlpack(cache.slab)
    message = refused(lambda: jax.jit(lambda slab: slab.at[1].set(7), donate_argnums=0)(cache.slab))
    done.append(f"what XLA says to a donation beside a live tensor of {tensor.numel()} words: {message[:200]!r}")
    return done


def host_us(function, repeats=400, warmup=40):
    """Median host time of a call in us; the device is idle at the start and never waited for."""
    for _ in range(warmup):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def round_trip_rows(plan):
    name, page = LAYERS[4], plan.layout.page(LAYERS[4])
    cache = KVCache.allocate(plan)
    shape, strides = page.view_shape(plan.num_blocks), page.view_strides

    def naive():
        tensor = torch.from_dlpack(cache.slab)
        torch.as_strided(tensor.view(torch.uint8).view(-1), shape, strides, page.offset_bytes)
        jax.dlpack.from_dlpack(tensor)

    def lease():
        with lend(cache) as views:
            views[name]

    keep = []

    def lease_all():
        with lend(cache) as views:
            keep.append(len([views[layer] for layer in views]))

    shared = SharedSlab.allocate(plan, device="cuda")
    same = lambda cache: cache  # noqa: E731
    rows = []
    reference = host_us(naive)
    side = torch.cuda.Stream()
    cases = [
        ("SharedSlab, default stream", "SharedSlab", lambda: shared.step(same)),
        ("lend, one view, default stream", "lend", lease),
        (f"lend, all {len(plan.layout.layers)} views", "lend", lease_all),
    ]
    for case, implementation, function in cases:
        rows.append(_trip(case, implementation, host_us(function), reference))
    with torch.cuda.stream(side):
        rows.append(_trip("SharedSlab, side stream", "SharedSlab", host_us(lambda: shared.step(same)), reference))
        rows.append(_trip("lend, one view, side stream", "lend", host_us(lease), reference))
    shared.close()
    shared = SharedSlab.from_cache(cache)
    rows.append(_trip("SharedSlab.from_cache", "SharedSlab", host_us(lambda: shared.step(same)), reference))
    shared.close()
    return rows


def breakdown_rows(plan):
    """Host time of the calls that a hand-over consists of, each alone."""
    device, name = jax.devices()[0], LAYERS[4]
    index = device.local_hardware_id
    cache, shared = KVCache.allocate(plan), SharedSlab.allocate(plan, device="cuda")
    tiny_tensor, tiny_array = torch.zeros(1, dtype=torch.int32, device="cuda"), jnp.zeros(1, jnp.int32)
    stream, handle = torch.cuda.current_stream(), device.get_stream_for_external_ready_events()
    external, event = torch.cuda.ExternalStream(handle), torch.cuda.Event()
    event.record(stream)
    found = _exchange.compute_stream(device)
    write = jax.jit(lambda cache: cache.with_slab(cache.slab.at[0, 0, 0].set(1)), donate_argnums=0)
    holder = [KVCache.allocate(plan)]

    def write_alone():
        holder[0] = write(holder[0])

    def enter():
        lend(cache).__enter__().finish()

    calls = {
        "torch.cuda.current_stream": lambda: torch.cuda.current_stream(index),
        "event.record": lambda: event.record(stream),
        "event.wait": lambda: event.wait(external),
        "get_stream_for_external_ready_events": device.get_stream_for_external_ready_events,
        "to_dlpack": lambda: torch.utils.dlpack.to_dlpack(tiny_tensor),
        "import and drop, one element": lambda: _exchange.to_jax(tiny_tensor, device, stream),
        "import and drop, slab": lambda: _exchange.to_jax(shared._slabs[0], device, stream),
        "export and drop, one element": lambda: _exchange.torch_waits_for_array(tiny_array, stream),
        "export and drop, slab": lambda: _exchange.torch_waits_for_array(cache.slab, stream),
        "__dlpack__ and drop, slab": lambda: cache.slab.__dlpack__(stream=1),
        "export to a tensor and drop, slab": lambda: _exchange.to_torch(cache.slab, device, stream),
        "unsafe_buffer_pointer": lambda: cache.slab.unsafe_buffer_pointer(),
        "one-element program": lambda: _exchange._tiny_program(tiny_array),
        "jax_waits_for": lambda: _exchange.jax_waits_for(device, stream),
        "only_device": lambda: _exchange.only_device(cache.slab, "slab"),
        "flatten a cache": lambda: jax.tree.leaves(cache),
        "KVCache": lambda: KVCache(slabs=cache.slabs, layout=cache.layout),
        "jitted write, donated": write_alone,
        "SharedSlab.step, jitted write": lambda: shared.step(write),
        "SharedSlab.step, nothing jitted": lambda: shared.step(lambda cache: cache),
        "SharedSlab.read, nothing": lambda: shared.read(lambda cache: None),
        "lend, no view": enter,
        "one view of a SharedSlab": lambda: shared[name],
    }
    note = "the stream of JAX's programs is " + ("not known" if found is None else "known")
    rows = [
        Row(name="breakdown", case=case, implementation="host", us=host_us(call), note=note)
        for case, call in calls.items()
    ]
    shared.close()
    return rows


def _trip(case, implementation, us, reference):
    return Row(
        name="round_trip",
        case=case,
        implementation=implementation,
        us=us,
        reference="torch.from_dlpack + jax.dlpack.from_dlpack",
        reference_us=reference,
        note="host time to PyTorch and back, without the programs between; goal 20 us",
    )


def block_copy_rows(plan):
    shared = SharedSlab.allocate(plan, device="cuda")
    blocks = list(range(1, min(plan.num_blocks, 129)))
    size = len(blocks) * plan.layout.bytes_per_block
    host = interop.blocks_to_host(shared, blocks)
    rows = []
    for case, function in (
        ("to the host, pinned", lambda: interop.blocks_to_host(shared, blocks, out=host)),
        ("from the host, pinned", lambda: interop.blocks_from_host(shared, blocks, host)),
    ):
        us = host_us(function, repeats=10, warmup=2)
        note = f"{size / us / 1e3:.1f} GB/s"
        rows.append(Row(name="block_copy", case=case, implementation="torch", us=us, bytes=size, note=note))
    shared.close()
    return rows


def torch_kernel_rows(plan):
    """Our Mosaic kernels launched by PyTorch: bytes equal to JAX's, and device time beside JAX's program."""
    page, name, count = plan.layout.page(LAYERS[4]), LAYERS[4], 8192
    rng = np.random.default_rng(0)
    slots = rng.permutation(np.arange(64, plan.num_blocks * 64))[:count].astype(np.int32)
    slots[::17] = -1
    values = jnp.asarray(rng.standard_normal((count, 512), np.float32)).astype(jnp.bfloat16)
    insert = jax.jit(lambda slab, s, v: kernels.insert_rows(slab, page, s, v, implementation="mosaic_gpu"))
    gather = jax.jit(lambda slab, s: kernels.gather_rows(slab, page, s, implementation="mosaic_gpu"))
    zeros = KVCache.allocate(plan).slab
    wanted = insert(zeros, jnp.asarray(slots), values)
    shared = SharedSlab.allocate(plan, device="cuda")
    torch_slots, torch_values = torch.from_numpy(slots).cuda(), torch.from_dlpack(values).clone()
    torch_kernels.insert_rows(shared, name, torch_slots, torch_values)
    same = bool(jax.jit(lambda a, b: (a == b).all())(wanted, shared.read(lambda cache: cache.slab)))
    read = torch_kernels.gather_rows(shared, name, torch_slots)
    expected = torch.from_dlpack(gather(wanted, jnp.asarray(slots)))
    same_read = bool((read.view(torch.int16) == expected.view(torch.int16)).all())
    if not (same and same_read):
        raise RuntimeError(f"torch_kernels: the slabs are equal: {same}; the rows read are equal: {same_read}")
    rows = []
    for case, function, size in (
        ("insert", lambda: torch_kernels.insert_rows(shared, name, torch_slots, torch_values), count * (1024 + 584)),
        ("gather", lambda: torch_kernels.gather_rows(shared, name, torch_slots), count * (1024 + 584)),
    ):
        rows.append(
            Row(
                name="torch_kernel",
                case=f"{case}, {count} rows, launched by torch",
                implementation="mosaic_gpu",
                us=device_us(function),
                bytes=size,
                note="bytes equal to JAX's kernel; device time a call, host included",
            )
        )
    shared.close()
    return rows


def device_us(function, repeats=50):
    """Mean device time of a call in a run of calls, in us."""
    function()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats


def checked_races(plan, options, extra):
    """Rows of the races, and what they show to be wrong."""
    extra["races"] = results = races(plan, options.races)
    failed = [f"stale bytes: {race}" for race in results if race["wrong"]]
    for hazard in {race["hazard"] for race in results}:
        if not any(race["control"] for race in results if race["hazard"] == hazard):
            failed.append(f"the control of {hazard} never failed: the test shows nothing")
    rows = [
        Row(
            name="race",
            case=f"{race['hazard']}, {race['form']}, {race['stream']} stream",
            implementation="ordered",
            us=0.0,
            note=f"{race['wrong']} of {race['times']} wrong; without ordering {race['control']}",
        )
        for race in results
    ]
    return rows, failed


def checked_ownership(plan, options, extra):
    extra["checks"] = ownership_checks(plan)
    return [], []


# What runs on a GPU only: function(plan, options, extra results) -> (rows, what failed).
GPU_PARTS = {
    "checks": checked_ownership,
    "round_trip": lambda plan, options, extra: (round_trip_rows(plan), []),
    "breakdown": lambda plan, options, extra: (breakdown_rows(plan), []),
    "block_copy": lambda plan, options, extra: (block_copy_rows(plan), []),
    "torch_kernel": lambda plan, options, extra: (torch_kernel_rows(plan), []),
    "races": checked_races,
}
PARTS = (*GPU_PARTS, "flashmla_loop")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flash-mla", help="path of _flashmla_C.abi3.so; plain PyTorch attention without")
    parser.add_argument("--steps", type=int, default=200 if on_gpu() else 20)
    parser.add_argument("--races", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; all by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    options = parser.parse_args()
    rows, extra, failed, only = [], {}, [], options.only
    if on_gpu():
        # A full DeepSeek-V4-Flash slab of 2,800 blocks, 2.8 GB: block offsets past 2^31 are in use.
        plan = dsv4kv_jax.plan(FLASH, 2_800 * 1_002_240)
        for part, function in GPU_PARTS.items():
            if part not in only:
                continue
            try:
                more, wrong = function(plan, options, extra)
            except Exception as error:
                more, wrong = [], [f"{part}: {type(error).__name__}: {error}"]
            rows += more
            failed += wrong
        forms = ("lend", "SharedSlab", "SharedSlab.from_cache")
    else:
        specs = layer_specs(FLASH, layers=(0, 2, 3))
        stride = dsv4kv_jax.plan_from_specs(specs, 1 << 30).layout.block_stride_bytes
        plan = dsv4kv_jax.plan_from_specs(specs, 1_200 * stride)
        forms = ("lend", "SharedSlab")
    attention, implementation = plain_attention, "plain torch"
    if options.flash_mla:
        torch.ops.load_library(options.flash_mla)
        attention, implementation = flash_attention, "FlashMLA"
    for ratio, kind in KINDS.items() if "flashmla_loop" in only else ():
        for form in forms:
            error, us = decode_loop(plan, ratio, form, attention, options.steps)
            if not error <= MAX_ERROR:
                failed.append(f"flashmla_loop {kind} {form}: relative error {error:.2e} > {MAX_ERROR}")
            rows.append(
                Row(
                    name="flashmla_loop",
                    case=f"{kind}, {form}, {options.steps} steps of {len(STARTS)}",
                    implementation=implementation,
                    us=us,
                    note=f"largest relative error {error:.2e}; host time of write and attention",
                )
            )
    report(rows, as_json=options.json, output=options.output, **extra, failed=failed)
    if not options.json:
        print(*(f"{row.name} {row.case}: {row.note}" for row in rows if row.note), sep="\n")
    for line in failed:
        print(line, file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
