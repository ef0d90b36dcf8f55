"""What the two kinds of groups keep, cache and look up (rules A11, A15, A18, A19, A31, A32)."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.hashing import PrefixKeys
from dsv4kv_jax.request import Request
from dsv4kv_jax.specs import cdiv

Tables = Sequence[Mapping[bytes, int]]  # key to block, one mapping per group of a set


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """A prefix of `num_tokens` tokens found in a set of groups: per group int32[blocks], 0 where no block is needed."""

    num_tokens: int
    blocks: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRules(abc.ABC):
    """One group's rules. Abstract; the two kinds below are final.

    Attributes:
      index: the group's id.
      block_size: tokens of a block.
      is_draft: the group (or its set) belongs to a draft model, which needs one block before the hit to be recomputed.
      hash_block_size: prefixes are hashed in steps of this many tokens.
      hit_unit: hits end at multiples of this many tokens.
      segment: the scheduler block size, tokens.
      retention_interval: tokens between cached spots of sliding groups, 0 for none but the ends of prompts, or None to
        cache every segment.
    """

    index: int
    block_size: int
    is_draft: bool
    hash_block_size: int
    hit_unit: int
    segment: int
    retention_interval: int | None = None

    def num_skipped(self, num_computed: int) -> int:
        """Leading tokens that no query needs once `num_computed` tokens are computed."""
        return 0

    def admission_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` can hold at once, as far as admission must foresee."""
        return cdiv(num_tokens, self.block_size)

    @abc.abstractmethod
    def cacheable(self, start: int, stop: int, request: Request) -> np.ndarray:
        """Ascending indices, among start..stop-1, of the blocks worth registering."""

    @abc.abstractmethod
    def find(self, tables: Tables, keys: PrefixKeys, limit: int, drop: bool) -> Hit:
        """The longest usable prefix of at most `limit` tokens that every group of the set holds.

        Args:
          tables: the cached blocks of each group of the set.
          keys: the request's prefix keys.
          limit: tokens.
          drop: give up the last block, which a draft model recomputes.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullRules(GroupRules):
    """A group that keeps every block."""

    def cacheable(self, start: int, stop: int, request: Request) -> np.ndarray:
        return np.arange(start, stop)

    def find(self, tables: Tables, keys: PrefixKeys, limit: int, drop: bool) -> Hit:
        size = self.block_size
        found: list[list[int]] = [[] for _ in tables]
        most = limit // size
        # Hash no further than the cache reaches: a miss in the first blocks must not cost the whole prompt.
        done, step, count = 0, 16, 0
        while done < most and count == done:
            stop = min(done + step, most)
            wanted = keys.at(range((done + 1) * size, stop * size + 1, size))
            count = stop
            for table, blocks in zip(tables, found, strict=True):
                new = list(map(table.get, wanted[: count - done]))
                if None in new:
                    count = done + new.index(None)
                blocks += new  # type: ignore[arg-type]
            done, step = stop, step * 4
        num_tokens = count * size
        unit = self.hit_unit
        if unit < size:
            num_tokens = self._extend(tables, keys, found, count, limit)
        if drop and num_tokens:
            num_tokens -= min(unit, size)
        num_tokens -= num_tokens % unit
        kept = cdiv(num_tokens, size)
        return Hit(num_tokens, tuple(np.array(blocks[:kept], np.int32) for blocks in found))

    def _extend(self, tables: Tables, keys: PrefixKeys, found: list[list[int]], count: int, limit: int) -> int:
        """Adds the longest cached prefix that ends inside block `count`, if any; the tokens found (rule A51)."""
        size, step = self.block_size, self.hash_block_size
        for blocks in found:
            del blocks[count:]
        full = count * size
        for end in range(min(full + size - step, limit - limit % step), full, -step):
            (key,) = keys.at([end])
            last = [table.get(key) for table in tables]
            if None not in last:
                for blocks, block in zip(found, last, strict=True):
                    blocks.append(block)  # type: ignore[arg-type]
                return end
        return full


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingRules(GroupRules):
    """A group that keeps the blocks of its window.

    Attributes:
      window: tokens a query sees, itself included.
      max_in_flight_tokens: most tokens scheduled but not settled.
    """

    window: int
    max_in_flight_tokens: int

    @property
    def needed(self) -> int:
        """Consecutive cached blocks before a hit's end that make it usable (rule A15)."""
        return cdiv(self.window - 1, self.block_size)

    def num_skipped(self, num_computed: int) -> int:
        return max(0, num_computed - self.window + 1)

    def admission_blocks(self, num_tokens: int) -> int:
        live = cdiv(self.window - 1 + self.max_in_flight_tokens, self.block_size) + 1
        return min(super().admission_blocks(num_tokens), live)

    def cacheable(self, start: int, stop: int, request: Request) -> np.ndarray:
        shift = int(self.is_draft)
        needed = self.needed + shift
        interval = self.segment if self.retention_interval is None else self.retention_interval
        period = interval // self.block_size
        if interval and needed >= period:
            return np.arange(start, stop)
        regular = np.empty(0, np.int64)
        if interval and max(start, shift) < stop:
            begin = max(start, shift)
            regular = begin + _last_of_period((begin - shift) % period, stop - begin, period, needed)
        if self.retention_interval is None:
            return regular
        shared = request.shared_prefix_boundary
        ends = [
            boundary // self.segment * self.segment // self.block_size + shift
            for boundary in (request.num_prompt_tokens - 1, *([shared] if shared else ()))
        ]
        spots = [np.arange(max(end - needed, start), min(end, stop)) for end in ends]
        return np.unique(np.concatenate([regular, *spots]))

    def find(self, tables: Tables, keys: PrefixKeys, limit: int, drop: bool) -> Hit:
        size, unit = self.block_size, self.hit_unit
        shift = 0 if drop else 1
        needed = self.needed + drop
        found: dict[int, list[int]] = {}
        run = 0  # consecutive blocks found, the last of them at index + 1
        length = None  # blocks of the hit
        index = limit // size - 1
        while index >= 0:
            if not run and size != unit:  # a run may only start where the hit would end on a multiple of `unit`
                index -= (index + shift) * size % unit // size
                if index < 0:
                    break
            (key,) = keys.at(((index + 1) * size,))
            blocks = [table.get(key) for table in tables]
            if None in blocks:
                run = 0
            else:
                found[index] = blocks  # type: ignore[assignment]
                run += 1
                if run >= needed:
                    length = index + run
                    break
            index -= 1
        if length is None:  # a run that reaches position 0 is complete, however short
            length = self._floor(run)
        if drop and length:
            length = self._floor(length - 1)
        hits = [np.zeros(length, np.int32) for _ in tables]
        for index, blocks in found.items():
            if index < length:
                for hit, block in zip(hits, blocks, strict=True):
                    hit[index] = block
        return Hit(length * size, tuple(hits))

    def _floor(self, length: int) -> int:
        """`length` blocks, shortened to a multiple of the hit unit's tokens."""
        return length * self.block_size // self.hit_unit * self.hit_unit // self.block_size


@functools.lru_cache(maxsize=1024)
def _last_of_period(phase: int, count: int, period: int, needed: int) -> np.ndarray:
    """Offsets below `count` that fall on the last `needed` places of a period, where offset 0 is at place `phase`."""
    offsets = np.arange(count)
    offsets = offsets[(offsets + phase) % period >= period - needed]
    offsets.flags.writeable = False
    return offsets


def build_rules(
    groups: Sequence[KVCacheGroup],
    *,
    segment: int,
    hit_unit: int,
    hash_block_size: int,
    use_drafts: bool,
    retention_interval: int | None,
    max_in_flight_tokens: int,
) -> tuple[GroupRules, ...]:
    """The rules of every group, in order.

    Raises:
      ValueError: a retention interval that does not fit the groups, or hits inside blocks of a sliding group.
    """
    sliding = [group for group in groups if group.sliding_window is not None]
    if retention_interval is not None:
        if not sliding:
            raise ValueError(f"retention_interval={retention_interval} needs a sliding group; leave it out")
        if retention_interval < 0 or retention_interval % segment:
            raise ValueError(f"retention_interval={retention_interval} must be 0 or a multiple of {segment} tokens")
    if hit_unit < segment and sliding:
        raise ValueError("partial_hits=True needs groups that keep every block; sliding groups cannot copy on write")
    flagged = {group.spec for group in groups if group.is_draft}
    all_drafts = use_drafts and not flagged
    rules = []
    for index, group in enumerate(groups):
        common: dict[str, Any] = {
            "index": index,
            "block_size": group.block_size,
            "is_draft": all_drafts or group.spec in flagged,
            "hash_block_size": hash_block_size,
            "hit_unit": hit_unit,
            "segment": segment,
            "retention_interval": retention_interval,
        }
        if group.sliding_window is None:
            rules.append(FullRules(**common))
        else:
            rules.append(SlidingRules(**common, window=group.sliding_window, max_in_flight_tokens=max_in_flight_tokens))
    return tuple(rules)
