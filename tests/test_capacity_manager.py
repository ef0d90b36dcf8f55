"""Capacity figures against the real manager, at lengths up to 1,048,576 and around every block boundary."""

import random

import brute_pool
import numpy as np
import pytest

from dsv4kv_jax import holdings
from dsv4kv_jax.capacity import capacity
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.optimize import optimize
from dsv4kv_jax.plan import KVCachePlan, plan
from dsv4kv_jax.request import Request
from dsv4kv_jax.trace import TraceRequest, replay

PRO = ModelConfig.preset("deepseek-v4-pro")
PLAIN = Schedule(chunk_tokens=8192, in_flight_tokens=8192)
DRAFTS = Schedule(chunk_tokens=512, in_flight_tokens=1024, steps_in_flight=2, lookahead_tokens=3)


class ManagerPool:
    """The real manager behind the interface of `brute_pool.BrutePool`."""

    def __init__(self, planned: KVCachePlan, schedule: Schedule, longest: int, max_requests: int = 64) -> None:
        self.manager = KVCacheManager(
            planned,
            max_model_len=schedule.max_model_len or longest + schedule.lookahead_tokens,
            max_in_flight_tokens=schedule.in_flight_tokens,
            max_requests=max_requests,
            enable_caching=False,
        )
        self.tables: dict[str, Request] = {}

    def held(self, request: str) -> list[int]:
        return [int(np.count_nonzero(ids)) for ids in self.manager.get_block_ids(self.tables[request])]

    def allocate(self, request, computed, new, *, lookahead=0, unsettled=0, whole=None) -> bool:
        if request not in self.tables:
            self.tables[request] = Request(request, np.zeros(whole or computed + new, np.int32))
            self.manager.add_request(self.tables[request])
        known = self.tables[request]
        if (missing := computed + new - known.num_tokens) > 0:
            known.append(np.zeros(missing, np.int32))
        known.num_computed_tokens, known.num_in_flight_tokens = computed, unsettled
        result = self.manager.allocate_slots(
            known, new, num_lookahead_tokens=lookahead, full_sequence_must_fit=whole is not None
        )
        known.status = "running"
        return result is not None

    def free(self, request: str) -> None:
        self.manager.free(self.tables.pop(request))


def blocks(num_blocks: int) -> KVCachePlan:
    return plan(PRO, 1, num_gpu_blocks_override=num_blocks)


@pytest.mark.parametrize("schedule", [PLAIN, DRAFTS], ids=["plain", "drafts"])
def test_the_manager_holds_what_capacity_says(schedule):
    rng = random.Random(8)
    boundaries = [m * b + d for b in (4, 8, 64, 128, 256) for m in (1, 2, 5, 33) for d in (-1, 0, 1)]
    planned = blocks(60_000)
    pool = ManagerPool(planned, schedule, 70_000)
    for length in [1, 2, *boundaries, *(rng.randrange(1, 60_000) for _ in range(6))]:
        ok, most = brute_pool.prefill(pool, "a", length, schedule)
        assert ok
        assert most == sum(holdings.prefilling_blocks(planned.groups, length, schedule))
        pool.free("a")
        assert brute_pool.grow(pool, "b", length, schedule)
        assert tuple(pool.held("b")) == holdings.exact_blocks(planned.groups, length, schedule)
        pool.free("b")


def test_a_million_tokens_need_7450_blocks():
    for num_blocks, fits in ((7451, True), (7450, False)):
        pool = ManagerPool(blocks(num_blocks), PLAIN, 1_048_576, max_requests=2)
        ok, most = brute_pool.prefill(pool, "a", 1_048_576, PLAIN)
        assert ok is fits
        assert capacity(blocks(num_blocks), 1_048_576, PLAIN).num_requests == int(fits)
        assert most == (7446 if fits else 0)  # what the chunks really touch; admission reserves 7,450


@pytest.mark.parametrize("schedule", [PLAIN, DRAFTS], ids=["plain", "drafts"])
def test_the_manager_admits_what_capacity_says(schedule):
    rng = random.Random(88)
    for length in (1, 63, 64, 65, 2047, 2048, 2049, 8191, 8193, rng.randrange(1, 5000), rng.randrange(5000, 60_000)):
        parked_at = _parked_at(length, schedule)
        each = capacity(blocks(2), length, schedule)
        for want in (1, 3, 7):
            for num_blocks in (1 + each.extra_blocks + want * each.decoding_blocks - off for off in (0, 1)):
                if num_blocks < 2:
                    continue
                planned = blocks(num_blocks)
                pool = ManagerPool(planned, schedule, length)
                assert (
                    brute_pool.admitted(pool, length, parked_at, schedule)
                    == capacity(planned, length, schedule).num_requests
                )


@pytest.mark.parametrize("compatible", ["vllm", "flashmla", "free"])
@pytest.mark.parametrize("several_pools", [False, True])
def test_the_manager_admits_what_the_optimizer_promises(compatible, several_pools):
    schedule = Schedule(chunk_tokens=1024, in_flight_tokens=8192)
    found = optimize(PRO, 3 * 2**30, 2048, compatible=compatible, several_pools=several_pools, chunk_tokens=1024)
    counts = []
    for planned in found.pools:
        parked_at = _parked_at(2048, schedule, planned)
        pool = ManagerPool(planned, schedule, 2048, max_requests=512)
        counts.append(brute_pool.admitted(pool, 2048, parked_at, schedule))
    assert min(counts) == found.num_requests >= found.default_requests


def test_a_replay_takes_the_blocks_that_the_manager_takes():
    """The replay's running set, step by step, over a real manager: no refusal where the replay saw room."""
    schedule = Schedule(chunk_tokens=256, in_flight_tokens=256)
    planned = blocks(400)
    trace = [TraceRequest(300, 40)] * 6
    pool = ManagerPool(planned, schedule, 1024)
    result = replay(planned, trace, schedule)
    assert result.preemptions == 0
    for index, request in enumerate(trace[: result.most_running]):
        assert brute_pool.grow(pool, str(index), sum(request), schedule)


def _parked_at(length: int, schedule: Schedule, planned: KVCachePlan | None = None) -> int:
    shapes = [(g.block_size, g.sliding_window) for g in (planned or blocks(2)).groups]
    return brute_pool.fullest_length(
        lambda n: brute_pool.BrutePool(shapes, n, in_flight=schedule.in_flight_tokens), length, schedule
    )[0]
