"""Counts requests the slow way: a real manager is asked until it refuses. What capacity figures are held against."""

from collections.abc import Sequence

import numpy as np

from dsv4kv_jax import capacity, holdings
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.plan import KVCachePlan
from dsv4kv_jax.request import Request


def count_admitted(
    pools: Sequence[KVCachePlan], num_tokens: int, schedule: Schedule, *, limit: int | None = None
) -> int:
    """Requests of `num_tokens` tokens that managers over these pools admit one after another, none of them preempted.

    Each request computes its prompt in chunks, beside the ones before it, which decode and stand at the length at which
    they hold most blocks. Several pools must all admit a request.

    Args:
      pools: the plans.
      num_tokens: length of every request.
      schedule: chunk size, tokens in flight, lookahead.
      limit: stop here; by default one more than `capacity` promises.
    """
    if limit is None:
        limit = 1 + max(capacity.capacity(pool, num_tokens, schedule).num_requests for pool in pools)
    return min(_count(pool, num_tokens, schedule, limit) for pool in pools)


def _count(plan: KVCachePlan, num_tokens: int, schedule: Schedule, limit: int) -> int:
    manager = KVCacheManager(
        plan,
        max_model_len=schedule.max_model_len or num_tokens + schedule.lookahead_tokens,
        max_in_flight_tokens=schedule.in_flight_tokens,
        max_requests=limit + 1,
        enable_caching=False,
    )
    parked = holdings.fullest_length(plan.groups, num_tokens, schedule)
    for index in range(limit):
        if not _grow(manager, f"prompt {index}", num_tokens, 0, schedule):
            return index
        if not _grow(manager, f"decode {index}", parked - 1, 1, schedule):
            return index
    return limit


def _grow(manager: KVCacheManager, name: str, prompt: int, decoded: int, schedule: Schedule) -> bool:
    """Computes a prompt in chunks and `decoded` tokens after it; frees the request if it only tried out a prompt."""
    request = Request(name, np.zeros(prompt + decoded, np.int32))
    manager.add_request(request)
    while request.num_computed_tokens < request.num_tokens:
        computed = request.num_computed_tokens
        in_prompt = computed < prompt
        new = min(schedule.chunk_tokens, prompt - computed) if in_prompt else 1
        unsettled = schedule.unsettled_chunk_tokens if in_prompt else schedule.unsettled_decode_tokens
        request.num_in_flight_tokens = min(unsettled, computed)
        blocks = manager.allocate_slots(
            request,
            new,
            num_lookahead_tokens=schedule.lookahead_tokens,
            full_sequence_must_fit=schedule.reserve_full_sequence and in_prompt and not computed,
        )
        if blocks is None:
            manager.free(request)
            return False
        request.status = "running"
        request.num_computed_tokens += new
    if not decoded:
        manager.free(request)
    return True
