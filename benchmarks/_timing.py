"""Device time of JAX programs and of PyTorch kernels, measured alike.

A call's time is the sum of the durations of all kernels that it launches, by CUPTI (NVIDIA's profiling interface), so
what the host does between launches does not count; the helper kernels that XLA adds do. Reported is the median over
repetitions. The time per call with everything on the host, the wall time, goes along in the note. CUPTI, as JAX reads
it, sees no copies by the copy engine: where a call launches no kernels, the time is that of CUDA events around the
replay of a graph, and the note says so.

A program makes several calls, each on inputs of its own, so that nothing is computed once for all of them. "cold" means
that the inputs and outputs of one program together exceed the L2 cache several times, so that a call finds nothing of
its own there; "warm" means that all calls of a program use the same memory.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

REPETITIONS = 15
PROGRAMS = 4  # in flight in one repetition of the wall time
PROFILED = 7  # repetitions under CUPTI


class Time(NamedTuple):
    """Microseconds of one call, and how they were measured."""

    us: float
    note: str


def jax_time(program: Callable[..., Any], *args: Any, calls: int, donated: bool = False) -> Time:
    """Time of one of `calls` calls that the jitted `program` makes.

    With `donated`, the first argument is donated, and the program returns its successor first.
    """
    state, rest = args[0], args[1:]

    def run() -> None:
        nonlocal state
        result = program(state, *rest)
        if donated:
            state = result[0] if isinstance(result, tuple) else result
        jax.block_until_ready(result)

    wall = _wall_us(program, args, calls, donated)
    state = wall.state
    return _time(profile(run), wall.us, "wall", calls)


def torch_time(call: Callable[[int], Any], *, calls: int) -> Time:
    """Time of `call(i)`, for i from 0 to `calls` - 1."""
    import torch

    def run() -> None:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()

    graph = torch_us(call, calls=calls)
    return _time(profile(run), graph, "CUDA graph with launch gaps", calls)


def jax_us(program: Callable[..., Any], *args: Any, calls: int, donated: bool = False) -> float:
    """Wall time of one call, in microseconds. Arguments as in `jax_time`."""
    return _wall_us(program, args, calls, donated).us


class _Wall(NamedTuple):
    us: float
    state: Any


def _wall_us(program: Callable[..., Any], args: tuple[Any, ...], calls: int, donated: bool) -> _Wall:
    """A number of programs are started without waiting, so that the device never waits for the host."""
    state, rest, result = args[0], args[1:], None
    times = []
    for _ in range(REPETITIONS + 3):
        start = time.perf_counter()
        for _ in range(PROGRAMS):
            result = program(state, *rest)
            if donated:
                state = result[0] if isinstance(result, tuple) else result
        jax.block_until_ready((state, result))
        times.append((time.perf_counter() - start) / PROGRAMS / calls * 1e6)
    return _Wall(statistics.median(times[3:]), state)


def torch_us(call: Callable[[int], Any], *, calls: int) -> float:
    """Microseconds of `call(i)`, for i from 0 to `calls` - 1, replayed from one CUDA graph; launch gaps count."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(calls):
            call(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    times = []
    for _ in range(REPETITIONS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(PROGRAMS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / PROGRAMS / calls * 1e3)
    return statistics.median(times[3:])


def profile(run: Callable[[], None]) -> list[list[tuple[str, float]]] | None:
    """(name, microseconds) of every kernel of each of `PROFILED` runs; None where CUPTI gives nothing.

    `run` waits for its kernels, whoever launches them.
    """
    try:
        # What `jax.experimental.mosaic.gpu.profiler.measure` uses, which takes JAX programs only.
        from jax._src.lib import mosaic_gpu

        cupti: Any = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
        run()
        cupti._cupti_init()
        try:
            for _ in range(PROFILED):
                run()
        finally:
            seen = cupti._cupti_get_timings(True)
    except Exception as error:
        print(f"CUPTI: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    each, rest = divmod(len(seen or ()), PROFILED)
    if not each or rest:
        print(f"CUPTI: {len(seen or ())} kernels in {PROFILED} runs", file=sys.stderr)
        return None
    kernels = [(name, milliseconds * 1e3) for name, milliseconds in seen]
    return [kernels[i * each : (i + 1) * each] for i in range(PROFILED)]


def _time(runs: list[list[tuple[str, float]]] | None, other_us: float, other: str, calls: int) -> Time:
    if runs is None:
        return Time(other_us, f"{other}, no kernels seen by CUPTI")
    us = statistics.median(sum(us for _, us in run) for run in runs) / calls
    totals: defaultdict[str, float] = defaultdict(float)
    for name, one in runs[0]:
        totals[_short(name)] += one / calls
    launches = len(runs[0]) / calls
    most = ", ".join(f"{name} {one:.1f}" for name, one in sorted(totals.items(), key=lambda total: -total[1])[:4])
    return Time(us, f"device time by CUPTI ({launches:g} kernels a call: {most}); {other} {other_us:.1f} us")


def _short(name: str) -> str:
    return name.removeprefix("mosaic_gpu_")[:40]
