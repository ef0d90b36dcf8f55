"""The whole path once: plan, allocate, prefill, decode in one jitted loop, and a second opinion from PyTorch.

A small model with DeepSeek-V4's real attention dimensions runs over the packed cache. Block tables come from the
manager. At the end the slab is lent to PyTorch, which recomputes the last step's attention on the strided views.
"""

import dataclasses
import re
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dsv4kv_jax import decode
from dsv4kv_jax.attention import Captured
from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.model import Model, miniature
from dsv4kv_jax.plan import KVCachePlan, plan
from dsv4kv_jax.request import Request
from dsv4kv_jax.specs import CacheDtype, Indexer

# Largest relative difference from PyTorch's float32: another order of sums, and in bfloat16 the rounding of
# probabilities and outputs. FlashMLA's own kernel differs by 2.3e-3.
BOUNDS = types.MappingProxyType({"float32": 1e-4, "bfloat16": 5e-3})
VOCAB_SIZE = 256
# Prompt lengths in turn: either side of a window, of a compressed block, and lengths nothing divides.
_LENGTHS = (5, 131, 300, 64, 517, 128, 77, 260)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """One layer of the last step: how far PyTorch's attention is from JAX's, as ||a-b|| / ||b||."""

    layer: str
    compress_ratio: int
    window_rows: int
    compressed_rows: int
    rel_diff: float
    lse_diff: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What the demo saw; `to_dict` is the command line's JSON."""

    plan: KVCachePlan
    slab_bytes: int
    steps: int
    prompt_lens: tuple[int, ...]
    dtype: str
    layers: tuple[LayerCheck, ...]
    slab_copies: int
    same_pointer: bool
    seconds: dict[str, float]
    device: str

    @property
    def max_rel_diff(self) -> float:
        return max(max(check.rel_diff, check.lse_diff) for check in self.layers)

    @property
    def bound(self) -> float:
        return BOUNDS[self.dtype]

    @property
    def passed(self) -> bool:
        return self.max_rel_diff <= self.bound and self.slab_copies == 0 and self.same_pointer

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_blocks": self.plan.num_blocks,
            "block_stride_bytes": self.plan.block_stride_bytes,
            "slab_bytes": self.slab_bytes,
            "steps": self.steps,
            "prompt_lens": list(self.prompt_lens),
            "max_rel_diff": self.max_rel_diff,
            "bound": self.bound,
            "slab_copies": self.slab_copies,
            "same_pointer": self.same_pointer,
            "passed": self.passed,
            "device": self.device,
            "dtype": self.dtype,
            "layers": [dataclasses.asdict(check) for check in self.layers],
            "seconds": self.seconds,
        }


def prompt_lengths(num_requests: int) -> tuple[int, ...]:
    """Different lengths for up to eight requests, then the same again."""
    return tuple(_LENGTHS[index % len(_LENGTHS)] for index in range(num_requests))


def run(
    config: ModelConfig,
    *,
    num_layers: int,
    memory_bytes: int,
    steps: int,
    num_requests: int,
    cache_dtype: CacheDtype = "fp8_ds_mla",
    indexer: Indexer = "fp8",
    dtype: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> DemoResult:
    """Runs the demo.

    Args:
      config: the model whose attention is taken; heads, widths and the number of layers are made small.
      num_layers: consecutive layers that cover as many kinds as possible.
      memory_bytes: for the cache.
      steps: tokens to decode per request.
      num_requests: prompts, of different lengths.
      cache_dtype, indexer: formats of the cache.
      dtype: of the model, `"float32"` or `"bfloat16"`; by default bfloat16 on a GPU, as models run there, else float32.
      progress: called with the name of each stage as it begins.

    Raises:
      PlanError: sizes that do not fit; names the figures and the remedy.
      ImportError: PyTorch is not installed.
    """
    from dsv4kv_jax import interop
    from dsv4kv_jax.interop import reference

    for name, value in (("steps", steps), ("requests", num_requests), ("layers", num_layers)):
        if value < 1:
            raise PlanError(f"{name}={value} must be at least 1")
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if dtype not in BOUNDS:
        raise PlanError(f"dtype={dtype!r} is not supported; use one of {', '.join(BOUNDS)}")
    clock = _Clock(progress)
    clock.start("plan")
    small = miniature(config, num_layers)
    lengths = prompt_lengths(num_requests)
    longest = max(lengths) + steps
    planned = plan(small, memory_bytes, cache_dtype=cache_dtype, indexer=indexer, max_in_flight_tokens=longest)
    manager = KVCacheManager(planned, max_model_len=longest, max_requests=num_requests)
    rng = np.random.default_rng(0)
    requests = [Request(f"request {i}", rng.integers(0, VOCAB_SIZE, n)) for i, n in enumerate(lengths)]
    tables = _allocate_tables(manager, requests, steps)

    clock.start("allocate")
    cache = KVCache.allocate(planned)
    model = Model.random(small, jax.random.key(0), vocab_size=VOCAB_SIZE, max_positions=longest, dtype=dtype)

    clock.start("prefill")
    tokens = np.concatenate([np.asarray(request.token_ids, np.int32) for request in requests])
    starts = np.cumsum([0, *lengths])
    cache, logits, _ = decode.prefill(model, cache, tokens, starts, np.array(lengths), tables)
    newest = np.asarray(logits).argmax(axis=1)

    clock.start("compile the decode loop")
    arguments = (model, cache, newest.astype(np.int32), np.array(lengths, np.int32), tables)
    program = decode.lower_decode(*arguments, steps=steps, capture=True).compile()
    slab_copies = count_slab_copies(program.as_text() or "", cache)

    clock.start("decode")
    pointers = [slab.unsafe_buffer_pointer() for slab in cache.slabs]
    cache, _, captured = program(*arguments)
    same_pointer = [slab.unsafe_buffer_pointer() for slab in jax.block_until_ready(cache).slabs] == pointers
    assert captured is not None

    clock.start("check with PyTorch")
    with interop.lend(cache) as views:
        checks = []
        for layer, kept in zip(model.layers, captured, strict=True):
            out, lse = reference.attention(views, layer.name, **_torch_arguments(kept))
            checks.append(_compare(layer.name, layer.compress_ratio, kept, out, lse))
    clock.stop()
    return DemoResult(
        plan=planned,
        slab_bytes=cache.nbytes,
        steps=steps,
        prompt_lens=lengths,
        dtype=dtype,
        layers=tuple(checks),
        slab_copies=slab_copies,
        same_pointer=same_pointer,
        seconds=clock.seconds,
        device=jax.devices()[0].device_kind,
    )


def count_slab_copies(hlo: str, cache: KVCache) -> int:
    """Copies of a whole slab in the text of a compiled program."""
    shapes = {",".join(map(str, slab.shape)) for slab in cache.slabs}
    copied = re.findall(r"= u32\[([\d,]+)\]\S* copy(?:-start)?\(", hlo)
    return sum(shape in shapes for shape in copied)


def _allocate_tables(manager: KVCacheManager, requests: Sequence[Request], steps: int) -> tuple[np.ndarray, ...]:
    """Block tables for whole runs: the prompts and every token that the loop will decode."""
    for request in requests:
        manager.add_request(request)
        if manager.allocate_slots(request, request.num_prompt_tokens, num_lookahead_tokens=steps) is None:
            raise PlanError(
                f"{len(requests)} requests do not fit: {request.request_id!r} of {request.num_prompt_tokens} + {steps} "
                f"tokens finds {manager.pool.num_free_blocks} free blocks; give more memory, or fewer requests or steps"
            )
    return manager.block_tables(requests)


def _torch_arguments(kept: Captured) -> dict[str, Any]:
    host = jax.tree.map(lambda leaf: np.array(leaf), kept)
    return {
        "q": host.q.astype(np.float32),  # PyTorch takes no bfloat16 from numpy
        "window": (host.window.indices, host.window.lens),
        "compressed": None if host.compressed is None else (host.compressed.indices, host.compressed.lens),
        "sink": host.sink,
    }


def _compare(name: str, ratio: int, kept: Captured, out: Any, lse: Any) -> LayerCheck:
    return LayerCheck(
        layer=name,
        compress_ratio=ratio,
        window_rows=int(np.asarray(kept.window.lens).sum()),
        compressed_rows=0 if kept.compressed is None else int(np.asarray(kept.compressed.lens).sum()),
        rel_diff=_relative(out.cpu().numpy(), np.asarray(kept.out)),
        lse_diff=_relative(lse.cpu().numpy(), np.asarray(kept.lse)),
    )


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a64 - b64) / np.linalg.norm(b64))


class _Clock:
    """Seconds of each stage, and the announcement of the next."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._announce = announce
        self._stage = ""
        self._began = 0.0

    def start(self, stage: str) -> None:
        self.stop()
        self._announce(stage)
        self._stage, self._began = stage, time.perf_counter()

    def stop(self) -> None:
        if self._stage:
            self.seconds[self._stage] = round(time.perf_counter() - self._began, 3)
        self._stage = ""
