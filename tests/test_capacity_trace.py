"""Replays of traces against an engine that really hands out blocks."""

import brute_pool
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.plan import plan
from dsv4kv_jax.trace import Replay, TraceRequest, as_mix, read_trace, replay

PRO = ModelConfig.preset("deepseek-v4-pro")


def blocks(num_blocks: int):
    return plan(PRO, 1, num_gpu_blocks_override=num_blocks)


def slow_replay(planned, trace, schedule) -> Replay:
    """The same policy over a brute pool, one request at a time."""
    pool = brute_pool.BrutePool(
        [(g.block_size, g.sliding_window) for g in planned.groups],
        planned.num_blocks,
        in_flight=schedule.in_flight_tokens,
    )
    waiting = list(range(len(trace)))
    running: list[int] = []
    known = [request.prompt_tokens for request in trace]
    computed = [0] * len(trace)
    counts, preemptions = [], 0

    def advance(index: int) -> bool:
        new = min(known[index] - computed[index], schedule.chunk_tokens)
        return pool.allocate(str(index), computed[index], new, lookahead=schedule.lookahead_tokens)

    def start_over(index: int) -> None:
        running.remove(index)
        waiting.insert(0, index)
        computed[index] = 0
        if str(index) in pool.tables:
            pool.free(str(index))

    while waiting or running:
        in_prompt = bool(running) and known[running[-1]] - computed[running[-1]] > 1
        if waiting and not in_prompt:
            charge = sum(pool._capped(group, known[waiting[0]]) for group in pool.groups)
            if charge <= pool.num_free:
                running.append(waiting.pop(0))
        position = 0
        while position < len(running):
            if advance(running[position]):
                position += 1
                continue
            preemptions += 1
            start_over(running[-1])
        for index in running:
            computed[index] += min(known[index] - computed[index], schedule.chunk_tokens)
            known[index] += computed[index] == known[index]
        counts.append((len(running), bool(waiting)))
        for index in [i for i in running if known[i] >= sum(trace[i])]:
            running.remove(index)
            pool.free(str(index))
    saturated = [n for n, waited in counts if waited] or [n for n, _ in counts]
    return Replay(
        steps=len(counts),
        mean_running=sum(saturated) / len(saturated),
        most_running=max(n for n, _ in counts),
        preemptions=preemptions,
    )


@settings(max_examples=40, deadline=None)
@given(
    trace=st.lists(st.builds(TraceRequest, st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=8),
    num_blocks=st.integers(220, 600),
    chunk=st.sampled_from([16, 64, 512]),
)
def test_a_replay_equals_the_slow_engine(trace, num_blocks, chunk):
    schedule = Schedule(chunk_tokens=chunk, in_flight_tokens=chunk)
    fast, slow = replay(blocks(num_blocks), trace, schedule), slow_replay(blocks(num_blocks), trace, schedule)
    assert fast == Replay(
        steps=slow.steps,
        mean_running=pytest.approx(slow.mean_running),
        most_running=slow.most_running,
        preemptions=slow.preemptions,
    )


def test_a_pool_that_runs_dry_preempts_the_newest():
    schedule = Schedule(chunk_tokens=64, in_flight_tokens=64)
    trace = [TraceRequest(50, 800)] * 6
    seen = replay(blocks(160), trace, schedule)
    assert seen.preemptions > 0
    assert seen == slow_replay(blocks(160), trace, schedule)


def test_a_request_that_never_fits_is_named():
    trace = [TraceRequest(10, 10), TraceRequest(100_000, 10)]
    with pytest.raises(PlanError, match=r"request 1 of the trace grows to 100010 tokens.*longest that it can"):
        replay(blocks(300), trace)
    with pytest.raises(PlanError, match="holds no request"):
        replay(blocks(300), [])


@pytest.mark.parametrize(
    "text",
    [
        "300 40\n5,6\n",
        "prompt,output\n300,40\n\n# a comment\n5, 6",
        '{"prompt_tokens": 300, "output_tokens": 40}\n{"input_length": 5, "output_length": 6}\n',
    ],
)
def test_traces_are_read(tmp_path, text):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    assert read_trace(str(path)) == [(300, 40), (5, 6)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("300\n", r"trace.txt:1: '300' is not a request"),
        ("300 40\n1 2 3\n", r"trace.txt:2: '1 2 3' is not a request"),
        ("300 0\n", r"output 0 must both be at least 1"),
        ('{"prompt_tokens": 3}\n', r"is not a request"),
        ('{"prompt_tokens": 3, "output_tokens": 1.5}\n', r"is not a request"),
        ("3.5 2\n", r"is not a request"),
    ],
)
def test_bad_traces_are_refused(tmp_path, text, message):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_trace(str(path))


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot read trace"):
        read_trace(str(tmp_path / "none"))


@given(trace=st.lists(st.builds(TraceRequest, st.integers(1, 5000), st.integers(1, 500)), min_size=1, max_size=40))
def test_a_trace_as_a_mix_is_no_shorter(trace):
    mix = as_mix(trace)
    totals = sorted(map(sum, trace))
    assert sum(mix.weights) == len(trace)
    assert max(mix.lengths) == totals[-1]
    assert mix.average(mix.lengths) >= sum(totals) / len(totals)
