"""Where a request's bytes go, and which bytes a decode step reads."""

import collections
import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dsv4kv_jax import capacity, holdings
from dsv4kv_jax.config import PRESETS
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.roles import role_of, state_ratio
from dsv4kv_jax.specs import KVCacheSpec, round_up

if TYPE_CHECKING:
    from dsv4kv_jax.plan import KVCachePlan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupBytes:
    """The bytes of the blocks that one request holds of one group, by what they are for. They add up to `total`.

    Attributes:
      live: rows that a later token can still read.
      padding: bytes that round pages up to the alignment.
      slack: the rest of the blocks, which this group's pages leave empty under the common stride.
      tails: rows not written yet, in the last block.
      beyond_window: window rows that no later token sees, in blocks that still hold one that is seen.
      stale_states: compressor state rows that no later compression reads, although the manager keeps them.
    """

    live: int
    padding: int
    slack: int
    tails: int
    beyond_window: int
    stale_states: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


WASTE = ("padding", "slack", "tails", "beyond_window", "stale_states")


def bytes_by_cause(
    plan: "KVCachePlan", num_tokens: int, schedule: Schedule | None = None, *, worker: int = 0
) -> tuple[GroupBytes, ...]:
    """Splits the bytes of a request that just decoded its `num_tokens`-th token, for each group of one worker.

    Raises:
      PlanError: see `capacity.capacity`.
    """
    schedule = schedule or Schedule.of(plan)
    capacity.check_length(plan, num_tokens, schedule)
    groups = _bytes_at(plan, np.array([num_tokens]), schedule, worker)
    return tuple(GroupBytes(**{cause: int(sizes[0]) for cause, sizes in group.items()}) for group in groups)


def mean_bytes_by_cause(
    plan: "KVCachePlan", num_tokens: int, schedule: Schedule | None = None, *, worker: int = 0
) -> dict[str, float]:
    """The bytes of a request by cause, over all groups, on average while it decodes its last tokens up to `num_tokens`.

    At a single length the figures jump: right after 128 tokens were compressed all their states are stale, one token
    before none is. So this is the mean over one period of the block sizes.

    Raises:
      PlanError: see `capacity.capacity`.
    """
    schedule = schedule or Schedule.of(plan)
    capacity.check_length(plan, num_tokens, schedule)
    period = math.lcm(128, *(group.block_size for group in plan.groups))
    lengths = np.arange(max(1, num_tokens - period + 1), num_tokens + 1)
    groups = _bytes_at(plan, lengths, schedule, worker)
    return {cause: float(sum(group[cause].mean() for group in groups)) for cause in ("live", *WASTE)}


def _bytes_at(plan: "KVCachePlan", lengths: np.ndarray, schedule: Schedule, worker: int) -> list[dict[str, np.ndarray]]:
    """For each group, the bytes by cause at each of the lengths."""
    layout = plan.workers[worker].layout
    held = holdings.decode_steps(plan.groups, lengths, schedule)
    return [
        _group_bytes(group, blocks, layout.bytes_per_block, lengths, schedule)
        for group, blocks in zip(layout.groups, held, strict=True)
    ]


def _group_bytes(
    group: KVCacheGroup, blocks: np.ndarray, block_bytes: int, lengths: np.ndarray, schedule: Schedule
) -> dict[str, np.ndarray]:
    reserved = lengths + schedule.lookahead_tokens
    if schedule.max_model_len is not None:
        reserved = np.minimum(reserved, schedule.max_model_len)
    end = round_up(reserved, group.block_size)
    start = end - blocks * group.block_size
    sums = {
        "live": np.zeros_like(lengths),
        "padding": blocks * (group.page_size_bytes - group.real_page_size_bytes),
        "slack": blocks * (block_bytes - group.page_size_bytes),
        "tails": np.zeros_like(lengths),
        "beyond_window": np.zeros_like(lengths),
        "stale_states": np.zeros_like(lengths),
    }
    for spec, number in collections.Counter(group.specs).items():
        written = lengths // spec.compress_ratio
        first_read = np.maximum(_first_read(spec, lengths), start) // spec.compress_ratio
        live = np.maximum(written - first_read, 0)
        tails = end // spec.compress_ratio - written
        old = "stale_states" if role_of(spec) == "state" else "beyond_window"
        for cause, rows in (("live", live), ("tails", tails), (old, blocks * spec.storage_block_size - live - tails)):
            sums[cause] = sums[cause] + rows * (number * spec.format.row_bytes)
    return sums


def _first_read(spec: KVCacheSpec, lengths: np.ndarray) -> np.ndarray:
    """The first position that the token at position `lengths`, or one after it, reads of a cache."""
    if spec.window is None:
        return np.zeros_like(lengths)
    ratio = state_ratio(spec)
    # A state is read when the token that completes a compressed row is computed; a window by every token.
    reader = lengths if ratio is None else round_up(lengths + 1, ratio) - 1
    return np.clip(reader - spec.window + 1, 0, lengths)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadBytes:
    """Bytes of the cache that decoding one token reads, over all layers of a worker.

    Attributes:
      window: latents of the window, in every layer.
      compressed: compressed latents: the picked ones of C4A layers, all of C128A layers.
      indexer: every indexer key, in C4A layers.
      state: compressor states, on average: compression happens once per 4 or 128 tokens, and reads each row once
        (C4 rows twice, half of it each time).
    """

    window: int
    compressed: int
    indexer: int
    state: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def bytes_read(plan: "KVCachePlan", num_tokens: int, *, index_topk: int | None = None, worker: int = 0) -> ReadBytes:
    """Bytes that decoding a token reads when the request is `num_tokens` tokens long, the new one included.

    Args:
      plan: the plan.
      num_tokens: length of the request.
      index_topk: compressed rows that the indexer picks; a preset's own unless given.
      worker: which worker's layers are counted.

    Raises:
      PlanError: no positive length; or `index_topk` is needed, because the plan's model is no preset.
    """
    if num_tokens < 1:
        raise PlanError(f"num_tokens={num_tokens} must be at least 1")
    sums = {"window": 0, "compressed": 0, "indexer": 0, "state": 0}
    for page in plan.workers[worker].layout.pages.values():
        spec, role = page.spec, role_of(page.spec)
        rows = num_tokens // spec.compress_ratio
        if role == "window":
            rows = min(num_tokens, spec.window or num_tokens)
        elif role == "state":
            rows = 1
        elif role == "compressed" and 1 < spec.compress_ratio < 128:
            rows = min(rows, index_topk if index_topk is not None else _preset_topk(plan))
        sums[role] += rows * spec.format.row_bytes
    return ReadBytes(**sums)


def _preset_topk(plan: "KVCachePlan") -> int:
    try:
        return PRESETS[plan.model].index_topk
    except KeyError:
        raise PlanError(
            f"model {plan.model!r} is no preset, so index_topk is not known: give index_topk, as in its config"
        ) from None
