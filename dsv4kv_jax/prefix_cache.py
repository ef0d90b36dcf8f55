"""The prefix cache: which block holds which cached prefix of which group (rule A9)."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored:
    """Block `block_id` of `group` now holds the last block of the `num_tokens`-token prefix that `key` names."""

    group: int
    block_id: int
    key: bytes
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Block `block_id` of `group` no longer holds the prefix `key`."""

    group: int
    block_id: int
    key: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class CacheCleared:
    """No block holds any prefix any more."""


CacheEvent = BlockStored | BlockRemoved | CacheCleared


class PrefixCache:
    """Keys of cached prefixes, each with the blocks that hold it, earliest first.

    A block has at most one *primary* key and any number of *secondary* ones (the tail of a prompt that ends inside the
    block). A key belongs to a group: equal prefixes of two groups are two entries.

    Attributes:
      covered: int32[num_blocks], tokens of the prefix that the block's primary key names; 0 where it has no key.
      num_dropped: blocks that lost their keys so far.
      events: what was stored and removed since the owner last emptied the list; None if events are not recorded.
    """

    def __init__(self, group_of: np.ndarray, num_groups: int, *, record_events: bool = False) -> None:
        """An empty cache over the blocks whose groups `group_of` (kept by the pool, read here) names."""
        self._group_of = group_of
        self._first: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._later: list[dict[bytes, list[int]]] = [{} for _ in range(num_groups)]
        self._primary = np.full(len(group_of), None, object)  # the key, or None
        self._secondary: dict[int, list[bytes]] = {}
        self.covered = np.zeros(len(group_of), np.int32)
        self.num_dropped = 0
        self.events: list[CacheEvent] | None = [] if record_events else None

    @property
    def num_keys(self) -> int:
        """Distinct keys over all groups."""
        return sum(map(len, self._first))

    def blocks(self, group: int) -> Mapping[bytes, int]:
        """Key to the earliest block that holds it, for one group; a live view, not to be changed."""
        return self._first[group]

    def keys_of(self, block: int) -> list[bytes]:
        """The block's keys, primary first."""
        primary = self._primary[block]
        return [] if primary is None else [primary, *self._secondary.get(block, ())]

    def add_full_blocks(
        self, runs: Sequence[tuple[int, int]], blocks: np.ndarray, keys: Sequence[bytes], ends: np.ndarray
    ) -> None:
        """Gives blocks without keys their primary keys: block k holds the prefix `keys[k]` of `ends[k]` tokens.

        `runs` says whose they are: (group, number of blocks) of consecutive entries.
        """
        ids = blocks.tolist()
        start = 0
        for group, count in runs:
            stop = start + count
            run_keys, run_ids = keys[start:stop], ids[start:stop]
            holders = list(map(self._first[group].setdefault, run_keys, run_ids))
            if holders != run_ids:  # some of these prefixes are cached already, in other blocks
                later = self._later[group]
                for key, block, holder in zip(run_keys, run_ids, holders, strict=True):
                    if holder != block:
                        later.setdefault(key, []).append(block)
            if self.events is not None:
                stored = zip(run_ids, run_keys, ends[start:stop].tolist(), strict=True)
                self.events += [BlockStored(group, block, key, end) for block, key, end in stored]
            start = stop
        self._primary[blocks] = np.array(keys, object)
        self.covered[blocks] = ends

    def add(self, group: int, block: int, key: bytes, end: int) -> None:
        """Gives one block a key: primary if it has none, else secondary; nothing if it has this key already."""
        if key in self.keys_of(block):
            return
        if self._primary[block] is None:
            self.add_full_blocks([(group, 1)], np.array([block]), [key], np.array([end]))
            return
        if self._first[group].setdefault(key, block) != block:
            self._later[group].setdefault(key, []).append(block)
        self._secondary.setdefault(block, []).append(key)
        if self.events is not None:
            self.events.append(BlockStored(group, block, key, end))

    def drop(self, blocks: np.ndarray) -> None:
        """Removes every key of these distinct blocks, each of which has one."""
        groups, keys = self._group_of[blocks].tolist(), self._primary[blocks].tolist()
        if any(self._later) or self._secondary or self.events is not None:
            for block, group, key in zip(blocks.tolist(), groups, keys, strict=True):
                self._unlink(group, key, block)
                for other in self._secondary.pop(block, ()):
                    self._unlink(group, other, block)
        else:  # every key names one block
            first = self._first
            for group, key in zip(groups, keys, strict=True):
                del first[group][key]
        self._primary[blocks] = None
        self.covered[blocks] = 0
        self.num_dropped += len(blocks)

    def clear(self) -> None:
        """Forgets every key."""
        for mapping in (*self._first, *self._later, self._secondary):
            mapping.clear()
        self.num_dropped += int(np.count_nonzero(self.covered))
        self._primary.fill(None)
        self.covered.fill(0)
        if self.events is not None:
            self.events.append(CacheCleared())

    def _unlink(self, group: int, key: bytes, block: int) -> None:
        first, later = self._first[group], self._later[group]
        others = later.get(key)
        if others is None:
            del first[key]
        else:
            if first[key] == block:
                first[key] = others.pop(0)
            else:
                others.remove(block)
            if not others:
                del later[key]
        if self.events is not None:
            self.events.append(BlockRemoved(group, block, key))
