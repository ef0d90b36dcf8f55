"""What one request holds, block for block, at any step of its life (rules A15, A22 and A23 of vLLM's manager).

The closed forms of what `KVCacheManager` does: a table reaches to the last slot that a step reserves, and a window
gives back the blocks that no token after the settled ones can see.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dsv4kv_jax.config import MAX_INT32, check_int
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.specs import cdiv

if TYPE_CHECKING:
    from dsv4kv_jax.plan import KVCachePlan


class Blocked(Protocol):
    """What the arithmetic needs of a group: tokens per block, and the window in tokens or None where all is kept."""

    @property
    def block_size(self) -> int: ...

    @property
    def sliding_window(self) -> int | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How steps are scheduled, which decides what a request holds beyond its context.

    Attributes:
      chunk_tokens: most prompt tokens of one step.
      in_flight_tokens: most tokens of all steps that are scheduled but not settled; admission reserves for as many.
      steps_in_flight: steps whose tokens are not settled when the newest of them is allocated, itself included: 1, or 2
        where a step is prepared while the one before it still runs.
      lookahead_tokens: slots reserved past the newest token: drafts being verified and drafts being proposed.
      max_model_len: tokens past which nothing is reserved; None for no limit.
      reserve_full_sequence: whether a request is admitted only if its whole prompt fits (vLLM's default).

    Raises:
      PlanError: a count below its least value, or a chunk that is larger than what may be in flight.
    """

    chunk_tokens: int
    in_flight_tokens: int
    steps_in_flight: int = 1
    lookahead_tokens: int = 0
    max_model_len: int | None = None
    reserve_full_sequence: bool = True

    def __post_init__(self) -> None:
        check_int("chunk_tokens", self.chunk_tokens, at_least=1, at_most=MAX_INT32)
        check_int("in_flight_tokens", self.in_flight_tokens, at_least=1, at_most=MAX_INT32)
        check_int("steps_in_flight", self.steps_in_flight, at_least=1, at_most=MAX_INT32)
        check_int("lookahead_tokens", self.lookahead_tokens, at_least=0, at_most=MAX_INT32)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, at_least=1, at_most=MAX_INT32)
        if self.chunk_tokens * self.steps_in_flight > self.in_flight_tokens:
            raise PlanError(
                f"chunk_tokens={self.chunk_tokens} in each of steps_in_flight={self.steps_in_flight} are more than "
                f"in_flight_tokens={self.in_flight_tokens}: lower the chunk or allow more tokens in flight"
            )

    @classmethod
    def of(
        cls,
        plan: "KVCachePlan",
        *,
        chunk_tokens: int | None = None,
        steps_in_flight: int = 1,
        lookahead_tokens: int = 0,
        reserve_full_sequence: bool = True,
    ) -> "Schedule":
        """The schedule that a plan was made for: chunks as large as its `max_in_flight_tokens` allow, unless given."""
        in_flight = plan.max_in_flight_tokens
        return cls(
            chunk_tokens=max(in_flight // max(steps_in_flight, 1), 1) if chunk_tokens is None else chunk_tokens,
            in_flight_tokens=in_flight,
            steps_in_flight=steps_in_flight,
            lookahead_tokens=lookahead_tokens,
            max_model_len=plan.max_model_len,
            reserve_full_sequence=reserve_full_sequence,
        )

    @property
    def unsettled_chunk_tokens(self) -> int:
        """Prompt tokens of earlier steps that may be unsettled when a chunk is allocated."""
        return (self.steps_in_flight - 1) * self.chunk_tokens

    @property
    def unsettled_decode_tokens(self) -> int:
        """The same when a decode step is allocated: each earlier step in flight has its token and its drafts."""
        return (self.steps_in_flight - 1) * (1 + self.lookahead_tokens)


def held_blocks(
    group: Blocked, computed: np.ndarray, new: np.ndarray, unsettled: np.ndarray, schedule: Schedule
) -> np.ndarray:
    """Blocks of `group` that a request owns after a step was allocated (rules A22 and A23 of vLLM's manager).

    The step computes `new` tokens after `computed` ones, of which the last `unsettled` may still be taken back. Arrays
    of one shape. The table reaches to the last reserved slot; a window's blocks are given back up to what a query
    after the settled tokens can still see.
    """
    reserved = computed + new + schedule.lookahead_tokens
    if schedule.max_model_len is not None:
        reserved = np.minimum(reserved, schedule.max_model_len)
    allocated = cdiv(reserved, group.block_size)
    if group.sliding_window is None:
        return allocated
    skipped = np.maximum(computed - unsettled - group.sliding_window + 1, 0)
    return allocated - skipped // group.block_size


def decoding_blocks(groups: Sequence[Blocked], num_tokens: int, schedule: Schedule) -> tuple[int, ...]:
    """Blocks of each group at the fullest decode step on the way to `num_tokens` tokens.

    What a request holds repeats with the least common multiple of the block sizes, except that full groups grow, so the
    fullest step is among the last ones.
    """
    return exact_blocks(groups, fullest_length(groups, num_tokens, schedule), schedule)


def fullest_length(groups: Sequence[Blocked], num_tokens: int, schedule: Schedule) -> int:
    """The length, on the way to `num_tokens` tokens, at which a decoding request holds most blocks."""
    period = math.lcm(*(group.block_size for group in groups)) + schedule.lookahead_tokens
    lengths = np.arange(max(1, num_tokens - period + 1), num_tokens + 1)
    return int(lengths[np.argmax(np.sum(decode_steps(groups, lengths, schedule), axis=0))])


def exact_blocks(groups: Sequence[Blocked], num_tokens: int, schedule: Schedule) -> tuple[int, ...]:
    """Blocks of each group right after the decode step that makes the request `num_tokens` tokens long."""
    return _fullest(decode_steps(groups, np.array([num_tokens]), schedule))


def prefilling_blocks(groups: Sequence[Blocked], num_tokens: int, schedule: Schedule) -> tuple[int, ...]:
    """Blocks of each group at the fullest step while a prompt of `num_tokens` tokens is computed in chunks."""
    computed = np.arange(0, num_tokens, schedule.chunk_tokens)
    new = np.minimum(schedule.chunk_tokens, num_tokens - computed)
    unsettled = np.minimum(schedule.unsettled_chunk_tokens, computed)
    return _fullest([held_blocks(group, computed, new, unsettled, schedule) for group in groups])


def reserved_blocks(groups: Sequence[Blocked], num_tokens: int, schedule: Schedule) -> tuple[int, ...]:
    """Free blocks that admission asks for before a prompt of `num_tokens` tokens starts (rules A15 and A22 step 3).

    A sliding group is charged its blocks up to a cap, which follows from the longest request that the engine serves.
    """

    def charge(group: Blocked) -> int:
        blocks = cdiv(num_tokens, group.block_size)
        if group.sliding_window is None:
            return blocks
        span = group.sliding_window - 1 + schedule.in_flight_tokens
        if schedule.max_model_len is not None:
            span = min(span, schedule.max_model_len)
        return min(blocks, cdiv(span, group.block_size) + 1)

    return tuple(map(charge, groups))


def peak_blocks(groups: Sequence[Blocked], num_tokens: int, schedule: Schedule) -> int:
    """Blocks that a request needs at its fullest step of any kind, on the way to `num_tokens` tokens."""
    peak = max(sum(stage(groups, num_tokens, schedule)) for stage in (decoding_blocks, prefilling_blocks))
    return max(peak, sum(reserved_blocks(groups, num_tokens, schedule))) if schedule.reserve_full_sequence else peak


def decode_steps(groups: Sequence[Blocked], lengths: np.ndarray, schedule: Schedule) -> list[np.ndarray]:
    """For each group, the blocks right after the decode steps that make the request `lengths` tokens long."""
    computed = lengths - 1
    unsettled = np.minimum(schedule.unsettled_decode_tokens, computed)
    return [held_blocks(group, computed, np.ones_like(computed), unsettled, schedule) for group in groups]


def _fullest(steps: list[np.ndarray]) -> tuple[int, ...]:
    """The groups' blocks at the step where their sum is largest."""
    held = np.stack(steps)
    return tuple(int(count) for count in held[:, np.argmax(held.sum(axis=0))])
