"""The cache kernels at the sizes of DeepSeek-V4-Pro: Mosaic GPU, XLA, Triton kernels in vLLM's style, and plain copies.

Every result is compared with the XLA version first. Times are device times of one call, see `_timing.py`.

    python benchmarks/bench_kernels.py --json --output benchmarks/results/kernels-h200.json
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room, too

import jax
import jax.numpy as jnp
import numpy as np
from _results import Row, report
from _timing import jax_time, torch_time

from dsv4kv_jax import ModelConfig, kernels
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.kernels.step import StepIndex, step_indices
from dsv4kv_jax.layout import PackedLayout, PageLayout
from dsv4kv_jax.specs import layer_specs

LAYOUT = PackedLayout.from_groups(group_layers(layer_specs(ModelConfig.preset("deepseek-v4-pro"))))
SWA = LAYOUT.page("model.layers.30.attn.swa_cache")
GATHERED = 163_840
INSERTED = 8_192
REQUESTS = 256
TOP_K = 1024
DENSE_WIDTH = 1024  # C128A entries of 131,072 tokens
ROW_BYTES = 584 + 1024  # an encoded row and a bf16 one
DEFAULT_WARPS = 4  # of a Triton program
# (requests, warps) of the vLLM-style gather, whose time depends on both: a request has 128 programs, so that few
# requests do not fill the GPU. The first is the reference.
VLLM_GATHERS = ((16, DEFAULT_WARPS), (4, DEFAULT_WARPS), (256, 1))


def make_slab(num_blocks: int) -> jax.Array:
    """Blocks of random bytes: no fp8 code is a NaN, and no scale is 0, which stands for 2**-127 but is 0 to Triton."""

    def build() -> jax.Array:
        shape = LAYOUT.buffers[0].shape(num_blocks)
        block, row, word = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
        bits = block * jnp.uint32(2654435761) ^ row * jnp.uint32(2246822519) ^ word * jnp.uint32(3266489917)
        for _ in range(2):
            bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
        return (bits ^ (bits >> 13)) & jnp.uint32(0xB7B7B7B7) | jnp.uint32(0x01010101)

    return jax.block_until_ready(jax.jit(build)())


def random_slots(rng: np.random.Generator, num_blocks: int, count: int, page: PageLayout = SWA) -> jax.Array:
    """Distinct slots of the page, in random order."""
    rows = page.storage_block_size
    return jnp.asarray(rng.choice((num_blocks - 1) * rows, count, replace=False).astype(np.int32) + rows)


def bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


class Bench:
    """Collects rows, and what went wrong without stopping the rest."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows, self.failed, self.notes = args, [], {}, {}
        self.start = time.monotonic()
        self.rng = np.random.default_rng(0)

    def run(self, name: str, measure: Callable[["Bench"], Iterator[Row]]) -> None:
        if self.args.only and name not in self.args.only:
            return
        try:
            for row in measure(self):
                self.rows.append(row)
                print(f"[{time.monotonic() - self.start:5.0f} s] {row}", file=sys.stderr, flush=True)
        except Exception as error:
            if self.args.debug:
                raise
            self.failed[name] = f"{type(error).__name__}: {error}"[:2000]
            print(f"{name} failed: {self.failed[name]}", file=sys.stderr, flush=True)

    def check(self, name: str, wrong: Any) -> None:
        """Records the number of elements that differ from the XLA version."""
        self.notes[name] = int(wrong)
        if wrong:
            self.failed[name] = f"{int(wrong)} elements differ from the XLA version"
            print(f"{name}: {self.failed[name]}", file=sys.stderr, flush=True)


# --- gather_dequant ---


def gather_dequant(bench: Bench) -> Iterator[Row]:
    num_blocks, sets = 4000, 8
    slab = make_slab(num_blocks)
    many = [random_slots(bench.rng, num_blocks, GATHERED) for _ in range(sets)]
    case, total = f"{GATHERED} random rows, cold", GATHERED * ROW_BYTES

    def program(implementation: str) -> Callable[..., Any]:
        def gather(slab: jax.Array, many: Any) -> list[jax.Array]:
            return [kernels.gather_rows(slab, SWA, slots, implementation=implementation) for slots in many]

        return jax.jit(gather)

    want, got = (bits(program(i)(slab, many[:1])[0]) for i in ("xla", "mosaic_gpu"))
    bench.check("gather_dequant", (got != want).sum())
    del got, want
    copy = torch_copy(total, sets)
    case_of_copy = "device to device, the bytes of gather_dequant"
    yield Row(name="copy", case=case_of_copy, implementation="torch", us=copy.us, bytes=total, note=copy.note)
    styles = []
    for requests, warps, style in vllm_gather(bench, slab, num_blocks, sets):
        styles.append(style.us)
        name, each = f"triton, vLLM-style, {warps} warps", f"{GATHERED} rows of {requests} requests, cold"
        yield Row(name="gather_dequant", case=each, implementation=name, us=style.us, bytes=total, note=style.note)
    compare = {"reference": "vLLM-style, {} requests, {} warps".format(*VLLM_GATHERS[0]), "reference_us": styles[0]}
    row = {"name": "gather_dequant", "implementation": "mosaic_gpu"}
    us, note = jax_time(program("mosaic_gpu"), slab, many, calls=sets)
    yield Row(case=case, us=us, bytes=total, note=note, reference="copy", reference_us=copy.us, **row)
    yield Row(case=case, us=us, bytes=total, note=note, **row, **compare)
    holes = [jnp.where(jnp.arange(GATHERED) % 10 == 3, -1, slots) for slots in many]
    us, note = jax_time(program("mosaic_gpu"), slab, holes, calls=sets)
    yield Row(case=f"{case}, a tenth -1", us=us, note=note, **row, **compare)
    us, note = jax_time(program("xla"), slab, many, calls=sets)
    row["implementation"] = "xla"
    yield Row(case=case, us=us, bytes=total, note=note, **row, **compare)


def vllm_gather(bench: Bench, slab: jax.Array, num_blocks: int, sets: int) -> Iterator[tuple[int, int, Any]]:
    """(requests, warps, time) of the vLLM-style gather for several numbers of requests of the same rows."""
    import _triton_reference as reference
    import torch

    raw = reference.as_torch(slab).view(torch.uint8).reshape(num_blocks, -1)
    count = GATHERED // 64
    blocks = [1 + bench.rng.choice(num_blocks - 1, count, replace=False).astype(np.int32) for _ in range(sets)]
    outs = [torch.empty(GATHERED, 512, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    slots = jnp.asarray((blocks[0][:, None] * 64 + np.arange(64)).reshape(-1), jnp.int32)
    want = torch.from_dlpack(bits(kernels.gather_rows(slab, SWA, slots, implementation="xla")).astype(jnp.int16))
    for requests, warps in VLLM_GATHERS:
        length = GATHERED // requests
        tables = [torch.as_tensor(ids.reshape(requests, -1), device="cuda") for ids in blocks]
        lens = torch.full((requests,), length, device="cuda", dtype=torch.int32)
        shaped = [out.view(requests, length, 512) for out in outs]

        def call(i: int, tables: Any = tables, lens: Any = lens, shaped: Any = shaped, warps: int = warps) -> None:
            reference.gather(raw, tables[i], lens, shaped[i], offset=SWA.offset_bytes, warps=warps)

        outs[0].zero_()
        call(0)
        wrong = int((want != outs[0].view(torch.int16)).sum())
        bench.check(f"vLLM-style gather, {requests} requests, {warps} warps", wrong)
        yield requests, warps, torch_time(call, calls=sets)


def torch_copy(total_bytes: int, sets: int) -> Any:
    import torch

    half = total_bytes // 2
    sources = [torch.randint(0, 255, (half,), device="cuda", dtype=torch.uint8) for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]
    return torch_time(lambda i: targets[i].copy_(sources[i]), calls=sets)


# --- insert ---


def insert(bench: Bench) -> Iterator[Row]:
    import _triton_reference as reference
    import torch

    num_blocks, sets = 1000, 16
    many = [random_slots(bench.rng, num_blocks, INSERTED) for _ in range(sets)]
    rows = [jnp.asarray(bench.rng.standard_normal((INSERTED, 512)), jnp.bfloat16) for _ in range(sets)]
    total = INSERTED * ROW_BYTES

    def program(implementation: str, **options: Any) -> Callable[..., Any]:
        def chain(slab: jax.Array, many: Any, rows: Any) -> jax.Array:
            for slots, row in zip(many, rows, strict=True):
                slab = kernels.insert_rows(slab, SWA, slots, row, implementation=implementation, **options)
            return slab

        return jax.jit(chain, donate_argnums=0)

    want = program("xla")(make_slab(num_blocks), many[:1], rows[:1])
    for unique in (True, False):
        got = program("mosaic_gpu", unique_slots=unique)(make_slab(num_blocks), many[:1], rows[:1])
        bench.check(f"insert, unique_slots={unique}", (got != want).sum())
    del want
    raw = reference.as_torch(jax.block_until_ready(make_slab(num_blocks))).view(torch.uint8).reshape(num_blocks, -1)
    torch_slots, torch_rows = [list(map(reference.as_torch, arrays)) for arrays in (many, rows)]
    reference.insert(raw, torch_slots[0], torch_rows[0], offset=SWA.offset_bytes)
    torch.cuda.synchronize()
    mine = reference.as_torch(got).view(torch.uint8).reshape(num_blocks, -1)
    bench.notes["vLLM-style insert"] = int((mine != raw).sum())
    del got, mine
    for count in (INSERTED, REQUESTS):
        case, total = f"{count} rows, cold", count * ROW_BYTES
        compare = {"case": case, "bytes": total, "name": "insert"}
        for warps in (1, DEFAULT_WARPS):

            def call(i: int, warps: int = warps, count: int = count) -> None:
                slots, row = torch_slots[i][:count], torch_rows[i][:count]
                reference.insert(raw, slots, row, offset=SWA.offset_bytes, warps=warps)

            style = torch_time(call, calls=sets)
            name = f"triton, vLLM-style, {warps} warps"
            yield Row(implementation=name, us=style.us, note=style.note, **compare)
        compare |= {"reference": f"vLLM-style, {DEFAULT_WARPS} warps", "reference_us": style.us}
        arguments = [slots[:count] for slots in many], [row[:count] for row in rows]
        for implementation, unique in (("mosaic_gpu", True), ("mosaic_gpu", False), ("xla", False)):
            chain = program(implementation, unique_slots=unique)
            us, note = jax_time(chain, make_slab(num_blocks), *arguments, calls=sets, donated=True)
            name = f"{implementation}, {'unique' if unique else 'any'} slots"
            yield Row(implementation=name, us=us, note=note, **compare)


# --- step_indices ---


def step_arguments(bench: Bench, index: int) -> tuple[Any, ...]:
    """Block tables of all groups, query starts and lengths of 256 decoding requests.

    The blocks that hold the newest tokens are all different, as in a cache: pages of different groups overlap.
    """
    rng, max_len = bench.rng, 131_072
    lens = rng.integers(max_len // 2, max_len, REQUESTS).astype(np.int32) + index
    newest = rng.permutation(np.arange(1, 4000, dtype=np.int32))[: len(LAYOUT.groups) * REQUESTS]
    tables = []
    for group, blocks in zip(LAYOUT.groups, newest.reshape(-1, REQUESTS), strict=True):
        table = rng.integers(1, 4000, (REQUESTS, max_len // group.block_size + 1)).astype(np.int32)
        table[np.arange(REQUESTS), (lens - 1) // group.block_size] = blocks
        tables.append(jnp.asarray(table))
    return tables, jnp.arange(REQUESTS + 1, dtype=jnp.int32), jnp.asarray(lens)


def wanted() -> tuple[StepIndex, ...]:
    from dsv4kv_jax import metadata

    return metadata._wanted(LAYOUT, 128, DENSE_WIDTH)


def all_indices(arguments: Any, implementation: str) -> Any:
    tables, starts, lens = arguments
    return step_indices(wanted(), tables, starts, lens, num_tokens=REQUESTS, implementation=implementation)


def step_index_rows(bench: Bench) -> Iterator[Row]:
    import _triton_reference as reference
    import torch

    calls = 16
    tables, starts, lens = step_arguments(bench, 0)
    swa_group = SWA.group
    topk = jnp.asarray(bench.rng.integers(0, 30_000, (REQUESTS, TOP_K)).astype(np.int32))
    requests = jnp.arange(REQUESTS, dtype=jnp.int32)
    sets = [(tables, starts, lens + i) for i in range(calls)]
    want, got = (jax.jit(lambda a, i=i: all_indices(a, i))(sets[0]) for i in ("xla", "mosaic_gpu"))
    same = jax.tree.map(lambda a, b: (a != b).sum(), got, want)
    bench.check("step_indices", sum(jax.tree.leaves(same)))
    table, c4_table = reference.as_torch(tables[swa_group]), reference.as_torch(tables[0])
    t_starts, t_lens, t_requests, t_topk = map(reference.as_torch, (starts, lens, requests, topk))
    out, out_lens = torch.empty(REQUESTS, 128, device="cuda", dtype=torch.int32), torch.empty_like(t_lens)
    picked = torch.empty_like(t_topk)
    swa = torch_time(lambda i: reference.swa_indices(table, t_starts, t_lens, t_requests, out, out_lens), calls=calls)
    top = torch_time(lambda i: reference.topk_to_slots(t_topk, t_requests, c4_table, picked, out_lens), calls=calls)
    style: Any = {"implementation": "triton, vLLM-style"}
    yield Row(name="swa_indices", case=f"{REQUESTS} requests, warm", us=swa.us, note=swa.note, **style)
    yield Row(name="topk_to_slots", case=f"{REQUESTS} x {TOP_K}, warm", us=top.us, note=top.note, **style)
    compare = {"reference": "vLLM-style SWA + top-k launches", "reference_us": swa.us + top.us}
    for implementation in ("mosaic_gpu", "xla"):
        program = jax.jit(lambda sets, i=implementation: [all_indices(arguments, i) for arguments in sets])
        us, note = jax_time(program, sets, calls=calls)
        case = f"all groups, {REQUESTS} requests, width {DENSE_WIDTH}, warm"
        yield Row(name="step_indices", case=case, implementation=implementation, us=us, note=note, **compare)
    many = [topk + i for i in range(calls)]
    for implementation in ("mosaic_gpu", "xla"):
        options = {"storage_block_size": 64, "implementation": implementation}
        program = jax.jit(lambda many, o=options: [kernels.topk_to_slots(x, requests, tables[0], **o) for x in many])
        us, note = jax_time(program, many, calls=calls)
        case = f"{REQUESTS} x {TOP_K}, warm"
        compare = {"reference": "vLLM-style Triton", "reference_us": top.us}
        yield Row(name="topk_to_slots", case=case, implementation=implementation, us=us, note=note, **compare)


# --- step_all_layers ---


def step_all_layers(bench: Bench) -> Iterator[Row]:
    num_blocks = 4000
    layers = list(LAYOUT.pages.values())
    windows = [page for page in layers if page.name.endswith("swa_cache")]
    states = [page for page in layers if "state_cache" in page.name]
    entries = [page for page in layers if page not in windows and page not in states]
    arguments = step_arguments(bench, 0)
    row = jnp.asarray(bench.rng.standard_normal((REQUESTS, 512)), jnp.bfloat16)

    def program(implementation: str, together: bool) -> Any:
        def step(slab: jax.Array, arguments: Any, row: jax.Array) -> Any:
            wants = wanted()
            tokens, made = all_indices(arguments, implementation)
            found = {
                (want.kind, want.group, want.compress_ratio): value for want, value in zip(wants, made, strict=True)
            }
            writes: dict[str, list[kernels.RowWrite]] = {}
            for page in (*windows, *entries):
                ratio = page.spec.compress_ratio
                slots = found["slots" if ratio == 1 else "compressed_slots", page.group, ratio]
                write = kernels.RowWrite(page, slots, row[:, : page.format.num_values])
                writes.setdefault(page.name.split(".")[2] if together else page.name, []).append(write)
            for layer in writes.values():
                slab = kernels.insert_many(slab, layer, unique_slots=True, implementation=implementation)
            return slab, tokens, made

        return jax.jit(step, donate_argnums=0)

    case = f"indices, {len(windows)} window and {len(entries)} boundary inserts, {REQUESTS} requests"
    want = None
    for implementation, together in (("xla", False), ("mosaic_gpu", True), ("mosaic_gpu", False)):
        slab = make_slab(num_blocks)
        compiled = program(implementation, together).lower(slab, arguments, row).compile()
        temp = compiled.memory_analysis().temp_size_in_bytes
        if temp > slab.nbytes // 20:
            bench.failed[f"step_all_layers, {implementation}"] = f"{temp} temporary bytes"
        size = slab.nbytes
        slab = compiled(slab, arguments, row)[0]
        written = jax.block_until_ready(slab_digest(slab))
        want = written if want is None else want
        bench.check(f"step_all_layers, {implementation}, together={together}", (written != want).sum())
        us, how = jax_time(compiled, slab, arguments, row, calls=1, donated=True)
        del slab
        name = f"{implementation}, a launch a {'layer' if together else 'page'}"
        note = f"{temp} temporary bytes, slab {size}; {how}"
        goal = {"reference": "61 x 2.5 us", "reference_us": 61 * 2.5}
        yield Row(name="step_all_layers", case=case, implementation=name, us=us, note=note, **goal)


@jax.jit
def slab_digest(slab: jax.Array) -> jax.Array:
    """A sum of every block's words, each times an odd number of its own."""
    row, word = (jax.lax.broadcasted_iota(jnp.uint32, slab.shape[1:], axis) for axis in range(2))
    factor = (row * jnp.uint32(2654435761) ^ word * jnp.uint32(2246822519)) | jnp.uint32(1)
    return (slab * factor).sum(axis=(1, 2), dtype=jnp.uint32)


# --- Whole blocks ---


def whole_blocks(bench: Bench) -> Iterator[Row]:
    num_blocks, count = 1000, 64
    source = jnp.asarray(bench.rng.choice(np.arange(1, 500), count, replace=False).astype(np.int32))
    target = jnp.asarray(bench.rng.choice(np.arange(500, 1000), count, replace=False).astype(np.int32))
    total = 2 * count * LAYOUT.block_stride_bytes
    copy = torch_copy(total, 4)
    case = f"device to device, the bytes of {count} blocks"
    yield Row(name="copy", case=case, implementation="torch", us=copy.us, bytes=total, note=copy.note)
    compare = {"bytes": total, "reference": "copy", "reference_us": copy.us}
    want, got = (
        jax.jit(functools.partial(kernels.copy_blocks, implementation=i), donate_argnums=0)(
            make_slab(num_blocks), source, target
        )
        for i in ("xla", "mosaic_gpu")
    )
    bench.check("copy_blocks", (want != got).sum())
    del want, got
    case = f"{count} blocks"
    for implementation in ("mosaic_gpu", "xla"):
        row = {"case": case, "implementation": implementation}
        program = jax.jit(functools.partial(kernels.copy_blocks, implementation=implementation), donate_argnums=0)
        us, note = jax_time(program, make_slab(num_blocks), source, target, calls=1, donated=True)
        yield Row(name="copy_blocks", us=us, note=note, **row, **compare)
        program = jax.jit(functools.partial(kernels.zero_blocks, implementation=implementation), donate_argnums=0)
        us, note = jax_time(program, make_slab(num_blocks), target, calls=1, donated=True)
        half = {"bytes": total // 2, "reference": "half of the copy", "reference_us": copy.us / 2}
        yield Row(name="zero_blocks", us=us, note=note, **row, **half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", help="write the JSON to this file")
    parser.add_argument(
        "--only", nargs="+", help="only these: gather_dequant insert step_indices step_all_layers blocks"
    )
    parser.add_argument("--debug", action="store_true", help="stop at the first error")
    bench = Bench(parser.parse_args())
    bench.run("gather_dequant", gather_dequant)
    bench.run("step_indices", step_index_rows)
    bench.run("insert", insert)
    bench.run("step_all_layers", step_all_layers)
    bench.run("blocks", whole_blocks)
    report(
        bench.rows, as_json=bench.args.json, output=bench.args.output, notes=bench.notes, failed=bench.failed,
        seconds=round(time.monotonic() - bench.start),
    )  # fmt: skip
    if bench.failed:
        sys.exit(f"failed: {bench.failed}")


if __name__ == "__main__":
    main()
