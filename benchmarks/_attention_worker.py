"""One process of `bench_attention.py`: does the jobs named on its command line, one JSON line before and after each.

Correctness is judged against a float64 reference over rows that numpy decodes; times are of the device: one jitted
program (or, for FlashMLA, one CUDA graph) makes several calls on different queries and lists, and enough of them are in
flight that the host is never waited for.
"""

import argparse
import functools
import json
import math
import sys
import time
import traceback
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _attention_cases import CHECKS, SHAPES, VARIANTS, Check, Lists, Shape
from jax import lax

from dsv4kv_jax import ModelConfig
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.kernels import _compat, attention
from dsv4kv_jax.layout import PackedLayout, PageLayout
from dsv4kv_jax.specs import layer_specs

# Blocks of a small model, so that many of them fit: random rows of the pool are not found in the L2 cache.
MODEL = ModelConfig(name="two layers", num_hidden_layers=2, compress_ratios=(4, 128))
LAYOUT = PackedLayout.from_groups(group_layers(layer_specs(MODEL)))
ROW_WORDS = 144
FP8_WORDS = 112  # of a row; the rest are bfloat16 pairs
PAGES = {"c4a": LAYOUT.page("model.layers.0.attn"), "c128a": LAYOUT.page("model.layers.1.attn")}
WINDOW = {kind: LAYOUT.page(page.name + ".swa_cache") for kind, page in PAGES.items()}


def make_slab(num_blocks: int, kind: str) -> jax.Array:
    """Window pages in even blocks, compressed pages in odd ones, random valid rows; every other byte is 0xFF, a NaN.

    In the null block and in slots 7, 15, 23, ... all bytes are 0xFF too: no list names them (`_slots`).
    """
    rows_per_block = LAYOUT.block_stride_bytes // LAYOUT.alignment

    def build() -> jax.Array:
        shape = (num_blocks, rows_per_block, ROW_WORDS)
        block, row, word = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
        bits = block * jnp.uint32(2654435761) ^ row * jnp.uint32(2246822519) ^ word * jnp.uint32(3266489917)
        for _ in range(2):
            bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
        bits ^= bits >> 13
        fp8 = bits & jnp.uint32(0xBFBFBFBF)
        rope = (bits & jnp.uint32(0x807F807F)) | jnp.uint32(0x3F003F00)  # +-0.5 ... +-1
        scale = (bits & jnp.uint32(0x03030303)) + jnp.uint32(0x7C7C7C7C)  # 2^-3 ... 1
        data = jnp.where(word < FP8_WORDS, fp8, rope)
        slab = jnp.full(shape, 0xFFFFFFFF, jnp.uint32)
        for page, parity in ((WINDOW[kind], 0), (PAGES[kind], 1)):
            size = page.storage_block_size
            at = row - jnp.uint32(page.first_row)  # wraps to large numbers before the page
            mine = (block % 2 == parity) & (block > 0)
            listed = (at < size) & ((block * size + at) % 8 != 7)
            slab = jnp.where(mine & listed, data, slab)
            slab = jnp.where(mine & (at == size) & (word < 2 * size), scale, slab)
        return slab

    return jax.jit(build)()


def _slots(rng: np.random.Generator, page: PageLayout, num_blocks: int, parity: int, shape: tuple[int, ...]) -> Any:
    """Random slots of blocks of one parity that hold a row (`make_slab`)."""
    size = page.storage_block_size
    blocks = 2 * rng.integers(1, num_blocks // 2, shape) + parity
    slots = blocks * size + rng.integers(0, size, shape)
    return np.where(slots % 8 == 7, slots - 1, slots).astype(np.int32)


def decode(slab: np.ndarray, page: PageLayout, slots: np.ndarray) -> np.ndarray:
    """float64 rows `[..., 512]` of slots that exist."""
    size = page.storage_block_size
    block, row = slots // size, slots % size
    words = slab[block, page.first_row + row]
    fp8 = words[..., :FP8_WORDS].copy().view(np.uint8)
    magnitude, exponent, mantissa = fp8 & 127, (fp8 >> 3) & 15, fp8 & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.int32) - 7))
    value = np.where(magnitude == 127, np.nan, value) * np.where(fp8 & 128, -1.0, 1.0)
    scales = slab[block[..., None], page.first_row + size, 2 * row[..., None] + np.arange(2)].copy().view(np.uint8)
    value *= np.repeat(2.0 ** (scales[..., :7].astype(np.int32) - 127), 64, axis=-1)
    rope = words[..., FP8_WORDS:].copy().view(np.uint16).astype(np.uint32) << 16
    return np.concatenate([value, rope.view(np.float32).astype(np.float64)], axis=-1)


def reference(q: np.ndarray, parts: list[tuple[np.ndarray, np.ndarray]], sink: np.ndarray | None, scale: float) -> Any:
    """(out, lse) of one token in float64: q `[H, 512]`, parts (rows `[n, 512]`, which of them count)."""
    keys = np.concatenate([rows[counts] for rows, counts in parts])
    if not len(keys):
        return np.zeros(q.shape), np.full(len(q), np.inf)
    scores = q @ keys.T * scale
    top = scores.max(axis=1)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1)
    denominator = total + (0 if sink is None else np.exp(sink - top))
    return weights @ keys / denominator[:, None], top + np.log(total)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want||, infinities compared exactly."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]) or not np.isfinite(got[finite]).all():
        return math.inf
    norm = float(np.linalg.norm(want[finite]))
    return float(np.linalg.norm((got - want)[finite])) / norm if norm else float(np.abs(got[finite]).max(initial=0))


class Worker:
    """Does jobs; keeps the slabs between them."""

    def __init__(self, flash_mla: str | None) -> None:
        self._flash_mla = flash_mla
        self._slab = functools.lru_cache(maxsize=1)(make_slab)
        self._inputs = functools.lru_cache(maxsize=1)(self._make_inputs)

    def run(self, job: str) -> dict[str, Any]:
        kind, name, variant = job.split("/")
        return self._check(CHECKS[name], variant) if kind == "check" else self._time(SHAPES[name], variant)

    def _attend(self, variant: str, kind: str) -> Any:
        """`f(q, slab, lists, sink) -> (out, lse)`."""
        window, page = WINDOW[kind], PAGES[kind]

        def call(q: jax.Array, slab: jax.Array, lists: tuple[jax.Array, ...], sink: jax.Array | None) -> Any:
            compressed = {}
            if len(lists) == 4:
                compressed = dict(
                    zip(("compressed_page", "compressed_indices", "compressed_lens"), (page, *lists[2:]), strict=True)
                )
            if variant == "xla":
                return attention.sparse_attention(
                    q, slab, window, *lists[:2], **compressed, sink=sink, implementation="xla"
                )
            from dsv4kv_jax.kernels import mosaic_attention
            from dsv4kv_jax.kernels.mosaic_attention_kernel import Tuning

            tuning = Tuning(**VARIANTS[variant])
            return mosaic_attention.sparse_attention(
                q, slab, window, *lists[:2], **compressed, sink=sink, tuning=tuning
            )

        return call

    def _check(self, check: Check, variant: str) -> dict[str, Any]:
        rng = np.random.default_rng(zlib.crc32(repr(check).encode()))
        num_blocks = 32
        slab = self._slab(num_blocks, check.kind)
        host = np.asarray(slab)
        q = (rng.standard_normal((check.tokens, check.heads, 512)) * 2).astype(jnp.bfloat16)
        pages, lists = (WINDOW[check.kind], PAGES[check.kind]), []
        for parity, (page, wanted) in enumerate(zip(pages, (check.window, check.compressed), strict=True)):
            if wanted is not None:
                slots = _slots(rng, page, num_blocks, parity, (check.tokens, wanted.width))
                lists += _spoil(rng, slots, wanted, num_blocks * page.storage_block_size)
        sink = None if check.sink is None else np.full(check.heads, check.sink, np.float32)
        if check.sink == 0:
            sink = rng.standard_normal(check.heads).astype(np.float32)
        device = [jnp.asarray(array) for array in lists]
        call = self._attend(variant, check.kind)
        out, lse = jax.jit(call)(jnp.asarray(q), slab, tuple(device), None if sink is None else jnp.asarray(sink))
        out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
        want_out, want_lse = np.empty(out.shape), np.empty(lse.shape)
        for token in range(check.tokens):
            parts = []
            for page, slots, lens in zip(pages, lists[::2], lists[1::2], strict=False):
                slots, columns = slots[token], np.arange(slots.shape[1])
                counts = (columns < lens[token]) & (slots >= 0) & (slots < num_blocks * page.storage_block_size)
                parts.append((decode(host, page, np.where(counts, slots, 0)), counts))
            want_out[token], want_lse[token] = reference(np.asarray(q[token], np.float64), parts, sink, 512**-0.5)
        errors = {"out": relative(out, want_out), "lse": relative(lse, want_lse)}
        unchanged = np.array_equal(np.asarray(slab), host)
        return errors | {
            "slab_unchanged": unchanged,
            "ok": errors["out"] <= 3e-3 and errors["lse"] <= 1e-5 and unchanged,
        }

    def _make_inputs(self, shape: Shape) -> Any:
        rng = np.random.default_rng(0)
        slab = self._slab(shape.num_blocks, shape.kind)
        sets = []
        for index in range(shape.calls):
            q = jax.random.normal(jax.random.key(index), (shape.tokens, shape.heads, 512), jnp.bfloat16) * 2
            lists = []
            for parity, (page, width) in enumerate(
                zip((WINDOW[shape.kind], PAGES[shape.kind]), (128, shape.rows), strict=True)
            ):
                if width:
                    slots = _slots(rng, page, shape.num_blocks, parity, (shape.tokens, width))
                    lists += [jnp.asarray(slots), jnp.full(shape.tokens, width, jnp.int32)]
            sets.append((q.astype(jnp.bfloat16), tuple(lists)))
        return slab, sets, jax.random.normal(jax.random.key(99), (shape.heads,), jnp.float32)

    def _time(self, shape: Shape, variant: str) -> dict[str, Any]:
        slab, sets, sink = jax.block_until_ready(self._inputs(shape))
        if variant == "flash_mla":
            return self._time_flash_mla(shape, slab, sets, sink)
        sets = sets[:2] if variant == "xla" else sets
        call = jax.jit(self._attend(variant, shape.kind))
        program = jax.jit(lambda slab, sets, sink: [call(q, slab, lists, sink) for q, lists in sets])
        start = time.perf_counter()
        compiled = program.lower(slab, sets, sink).compile()
        compile_s = time.perf_counter() - start
        jax.block_until_ready(compiled(slab, sets, sink))
        times = []
        for _ in range(7):
            start = time.perf_counter()
            results = [compiled(slab, sets, sink) for _ in range(3 if variant == "xla" else 6)]
            jax.block_until_ready(results)
            times.append((time.perf_counter() - start) / len(results) / len(sets) * 1e6)
        return {"us": float(np.median(times)), "spread": [min(times), max(times)], "compile_s": compile_s}

    def _time_flash_mla(self, shape: Shape, slab: jax.Array, sets: Any, sink: jax.Array) -> dict[str, Any]:
        import torch

        torch.ops.load_library(self._flash_mla)
        raw = torch.from_dlpack(slab).view(torch.uint8).reshape(-1)

        def view(page: PageLayout) -> Any:
            size = (shape.num_blocks, page.storage_block_size, 1, 584)
            return raw.as_strided(size, (page.block_stride_bytes, 584, 584, 1), page.offset_bytes)

        window, compressed = view(WINDOW[shape.kind]), view(PAGES[shape.kind])
        sinks, sink = sink, torch.from_dlpack(sink)
        inputs = []
        for q, lists in sets:
            tensors = [torch.from_dlpack(array) for array in lists]
            indices, lens = [t[:, None] for t in tensors[::2]], tensors[1::2]
            inputs.append((torch.from_dlpack(q)[:, None], indices, lens))

        def attend(q: Any, indices: Any, lens: Any, schedule: Any) -> Any:
            extra = (compressed, indices[1], lens[1]) if len(indices) == 2 else (None, None, None)
            return torch.ops._flashmla_C.sparse_decode_fwd(
                q, window, indices[0], lens[0], sink, *schedule, *extra, 512, 512**-0.5, None
            )

        out, _, *schedule = attend(*inputs[0], (None, None))
        mine, _ = jax.jit(self._attend("xla", shape.kind))(*sets[0][:1], slab, sets[0][1], sinks)
        agreement = relative(out[:, 0].double().cpu().numpy(), np.asarray(mine, np.float64))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [attend(*one, schedule) for one in inputs]
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(6):
                graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / 6 / len(kept) * 1e6)
        return {"us": float(np.median(times)), "spread": [min(times), max(times)], "agreement_with_xla": agreement}


def _spoil(rng: np.random.Generator, slots: np.ndarray, wanted: Lists, num_slots: int) -> list[np.ndarray]:
    """[slots, lens] with the hostile entries that `wanted` asks for."""
    tokens, width = slots.shape
    lens = {
        "full": np.full(tokens, width),
        "random": rng.integers(0, width + 1, tokens),
        "zero": np.zeros(tokens),
        "one": np.ones(tokens),
        "past": np.full(tokens, width + 1000),
        "negative": np.full(tokens, -5),
    }[wanted.lens].astype(np.int32)
    holes = rng.random(slots.shape) < wanted.holes
    hostile = rng.choice([-1, -1, -2, -(2**31), num_slots, 2**31 - 1], slots.shape)
    slots = np.where(holes, hostile, slots)
    beyond = np.arange(width) >= lens[:, None]
    return [np.where(beyond, 2**31 - 1 if wanted.holes else -1, slots).astype(np.int32), lens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="+")
    parser.add_argument("--flash-mla")
    args = parser.parse_args()
    print(json.dumps({"versions": {"jax": jax.__version__}, "card": jax.devices()[0].device_kind}), flush=True)
    assert _compat.why_no_mosaic() is None or all(job.endswith("/xla") for job in args.jobs)
    worker = Worker(args.flash_mla)
    for job in args.jobs:
        print(json.dumps({"start": job}), flush=True)
        try:
            result = worker.run(job)
        except Exception as error:
            traceback.print_exc(limit=-3, file=sys.stderr)
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"job": job} | result), flush=True)


if __name__ == "__main__":
    main()
