"""What requests cost, in blocks: the arithmetic that admission, capacity reports and error messages share.

Three figures describe one request on its way to `num_tokens` tokens; they answer different questions:

* *decoding*: the most blocks it holds while it decodes and everything before is settled. Full groups keep one block per
  `block_size` tokens (the slope); window and state groups hold a fixed number however long the context is.
* *prefilling*: the most blocks it holds at once while its prompt is computed in chunks: window and state groups keep
  the whole chunk until it is settled. Only requests in this phase pay it, so a pool that prefills one at a time pays
  once.
* *worst case*: what no schedule with at most that many tokens in flight exceeds (rule P22 of vLLM's planner), the
  figure that admission reserves.

Blocks are counted, never bytes of pages: whatever group takes it, a block costs the whole stride.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dsv4kv_jax.config import MAX_INT32, check_int
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.holdings import (
    Blocked,
    Schedule,
    decoding_blocks,
    exact_blocks,
    peak_blocks,
    prefilling_blocks,
)
from dsv4kv_jax.specs import cdiv

if TYPE_CHECKING:
    from dsv4kv_jax.plan import KVCachePlan


LONGEST_CONTEXT = 1_048_576  # tokens; DeepSeek-V4's own limit, for searches where a plan names none


def blocks_per_request(groups: Sequence[Blocked], num_tokens: int, max_in_flight_tokens: int) -> tuple[int, ...]:
    """Blocks of each group that a request of `num_tokens` tokens may hold at once (rule P22 of vLLM's planner).

    A full group keeps every block. A sliding group keeps its window and what is scheduled but not settled, and one
    block more because neither end needs to fall on a block boundary.

    Args:
      groups: the groups; their block sizes and windows count.
      num_tokens: length of the request in tokens.
      max_in_flight_tokens: most tokens that are scheduled but not yet known to be kept.
    """
    return tuple(_blocks(group, num_tokens, max_in_flight_tokens) for group in groups)


def _blocks(group: Blocked, num_tokens: int, in_flight: int) -> int:
    if group.sliding_window is None:
        return cdiv(num_tokens, group.block_size)
    return cdiv(min(group.sliding_window - 1 + in_flight, num_tokens), group.block_size) + 1


def longest_request(groups: Sequence[Blocked], num_blocks: int, max_in_flight_tokens: int, limit: int) -> int:
    """Tokens of the longest request, at most `limit`, that a pool of `num_blocks` admits; 0 if none.

    One block of the pool is the null block, which no request can own.
    """

    def fits(num_tokens: int) -> bool:
        return sum(blocks_per_request(groups, num_tokens, max_in_flight_tokens)) + 1 <= num_blocks

    return _largest(fits, limit)


def concurrency(num_blocks: int, blocks_each: float, blocks_once: float = 0) -> float:
    """How many requests of `blocks_each` blocks a pool holds, beside `blocks_once` blocks that are needed only once.

    The null block is never theirs. Not rounded, as engines report it; at least 0.
    """
    return max((num_blocks - 1 - blocks_once) / blocks_each, 0.0)


def whole_requests(value: float) -> int:
    """`concurrency` rounded down, forgiving the last bits of a mean over a mix."""
    return math.floor(value + 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Requests of several lengths: `weights[i]` parts of them grow to `lengths[i]` tokens.

    Raises:
      PlanError: no lengths, not one positive weight for each, or a length below 1.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.weights):
            raise PlanError(
                f"a mix needs one weight per length; it has {len(self.lengths)} lengths and {len(self.weights)} weights"
            )
        for length in self.lengths:
            check_int("lengths", length, at_least=1, at_most=MAX_INT32)
        if any(not (math.isfinite(weight) and weight > 0) for weight in self.weights):
            raise PlanError(
                f"weights={list(self.weights)} must all be positive numbers; leave out lengths that do not occur"
            )

    @classmethod
    def of(cls, workload: "int | Mapping[int, float] | Mix") -> "Mix":
        """A mix from one length, or from a mapping of lengths to weights."""
        if isinstance(workload, Mix):
            return workload
        if isinstance(workload, Mapping):
            return cls(lengths=tuple(workload), weights=tuple(workload.values()))
        return cls(lengths=(workload,), weights=(1,))

    def average(self, values: Sequence[float]) -> float:
        """The weighted mean of one value per length."""
        total = math.fsum(self.weights)
        return math.fsum(value * weight for value, weight in zip(values, self.weights, strict=True)) / total


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What requests of one length cost, and how many of them a pool holds. Block counts are per group, in group order.

    Attributes:
      num_tokens: tokens that each request grows to.
      num_blocks: blocks of the pool, the null block included.
      block_bytes: bytes of one block, on the worker where it is largest.
      tokens_per_block: block size of each group that keeps everything; None for window and state groups.
      decoding, prefilling, worst_case: see the module's description.
      exact: blocks right after the decode step that makes the request exactly `num_tokens` long; at most `decoding`.
      peak_blocks: most blocks the newest request needs while its prompt is computed, and admission's reservation.
    """

    num_tokens: int
    num_blocks: int
    block_bytes: int
    tokens_per_block: tuple[int | None, ...]
    decoding: tuple[int, ...]
    exact: tuple[int, ...]
    prefilling: tuple[int, ...]
    worst_case: tuple[int, ...]
    peak_blocks: int

    @property
    def decoding_blocks(self) -> int:
        return sum(self.decoding)

    @property
    def decoding_bytes(self) -> int:
        return self.decoding_blocks * self.block_bytes

    @property
    def fixed_blocks(self) -> int:
        """The part of `decoding_blocks` that does not grow: window and state blocks."""
        return sum(n for n, tokens in zip(self.decoding, self.tokens_per_block, strict=True) if tokens is None)

    @property
    def bytes_per_token(self) -> float:
        """The slope: bytes that each further token costs in the long run."""
        return sum(self.block_bytes / tokens for tokens in self.tokens_per_block if tokens is not None)

    @property
    def extra_blocks(self) -> int:
        """What prefilling needs beyond `decoding_blocks`; the pool pays it once, for the request being prefilled."""
        return self.peak_blocks - self.decoding_blocks

    @property
    def concurrency(self) -> float:
        """Requests that can be admitted one after another and decode together, not rounded."""
        return concurrency(self.num_blocks, self.decoding_blocks, self.extra_blocks)

    @property
    def num_requests(self) -> int:
        """How many such requests the manager admits, one being prefilled at a time, and never has to preempt."""
        return max(self.num_blocks - 1 - self.extra_blocks, 0) // self.decoding_blocks

    @property
    def worst_case_concurrency(self) -> float:
        """Requests that fit if every one of them were prefilling at once: what vLLM reports, null block aside."""
        return concurrency(self.num_blocks, sum(self.worst_case))


def capacity(plan: "KVCachePlan", num_tokens: int, schedule: Schedule | None = None) -> Capacity:
    """What a request that grows to `num_tokens` tokens costs, and how many of them fit.

    Args:
      plan: the plan.
      num_tokens: tokens in the cache when the request ends, prompt and output.
      schedule: chunk size, tokens in flight, lookahead; by default `Schedule.of(plan)`.

    Raises:
      PlanError: a plan without caches, or a length that is no positive integer or longer than `plan.max_model_len`.
    """
    schedule = schedule or Schedule.of(plan)
    check_length(plan, num_tokens, schedule)
    return Capacity(
        num_tokens=num_tokens,
        num_blocks=plan.num_blocks,
        block_bytes=max(worker.layout.bytes_per_block for worker in plan.workers),
        tokens_per_block=tuple(g.block_size if g.sliding_window is None else None for g in plan.groups),
        decoding=decoding_blocks(plan.groups, num_tokens, schedule),
        exact=exact_blocks(plan.groups, num_tokens, schedule),
        prefilling=prefilling_blocks(plan.groups, num_tokens, schedule),
        worst_case=blocks_per_request(plan.groups, num_tokens, schedule.in_flight_tokens),
        peak_blocks=peak_blocks(plan.groups, num_tokens, schedule),
    )


def check_length(plan: "KVCachePlan", num_tokens: int, schedule: Schedule) -> None:
    """Refuses lengths that no request of the plan can have; see `capacity`."""
    check_int("num_tokens", num_tokens, at_least=1, at_most=MAX_INT32)
    if not plan.groups:
        raise PlanError(
            f"the plan of {plan.model!r} has no caches, so requests cost nothing; there is no capacity to report"
        )
    if schedule.max_model_len is not None and num_tokens > schedule.max_model_len:
        raise PlanError(
            f"num_tokens={num_tokens} is more than max_model_len={schedule.max_model_len}; ask for less or plan anew"
        )


def mixed_concurrency(
    plan: "KVCachePlan", workload: int | Mapping[int, float] | Mix, schedule: Schedule | None = None
) -> float:
    """Requests of a mix that decode together while one more is prefilled, not rounded.

    Args:
      plan: the plan.
      workload: a length, a mapping from lengths to weights, or a `Mix`.
      schedule: see `capacity`.

    Raises:
      PlanError: see `capacity` and `Mix`.
    """
    mix = Mix.of(workload)
    each = [capacity(plan, length, schedule) for length in mix.lengths]
    extra = max(one.extra_blocks for one in each)
    return concurrency(plan.num_blocks, mix.average([one.decoding_blocks for one in each]), extra)


def longest_context(plan: "KVCachePlan", num_requests: int, schedule: Schedule | None = None) -> int:
    """Tokens to which `num_requests` requests can grow together; 0 if not even to one token.

    At most `plan.max_model_len`, or DeepSeek-V4's own limit where the plan has none.

    Raises:
      PlanError: see `capacity`; or `num_requests` is no positive integer.
    """
    check_int("num_requests", num_requests, at_least=1, at_most=MAX_INT32)
    limit = plan.max_model_len or LONGEST_CONTEXT
    return _largest(lambda n: capacity(plan, n, schedule).num_requests >= num_requests, limit)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest length from 0 to `limit` for which `fits` holds, if it holds up to some length and not beyond."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
