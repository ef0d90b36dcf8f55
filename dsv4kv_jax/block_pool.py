"""The block pool: who holds which block, which blocks are free, and in which order they are reused (rules A1-A10)."""

from collections.abc import Mapping, Sequence

import numpy as np

from dsv4kv_jax._integers import as_count, as_ids
from dsv4kv_jax.free_queue import FreeQueue
from dsv4kv_jax.prefix_cache import CacheEvent, PrefixCache

NULL_BLOCK = 0


class BlockPool:
    """Blocks 0..num_blocks-1, shared by all groups. Block 0 is the null block and is never owned.

    Free blocks are taken from the head of a queue. A freed block that holds a cached prefix goes to the end, so that it
    stays findable longest; one that holds nothing goes to the front. Single-threaded.

    Attributes:
      num_blocks: blocks, the null block included.
      enable_caching: whether freed blocks keep their prefixes.
      ref_counts: int32[num_blocks], holders of each block. Read only.
      group_of: int32[num_blocks], the group that took the block last. Read only.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        num_groups: int = 1,
        record_events: bool = False,
        debug: bool = False,
    ) -> None:
        """A pool with all blocks but the null block free.

        Args:
          num_blocks: blocks, the null block included; at least 1.
          enable_caching: keep prefixes findable after their blocks are freed.
          num_groups: groups that share the pool.
          record_events: record what enters and leaves the prefix cache, for `take_events`.
          debug: record blocks whose content nobody may read any more, for `take_canary_block_ids`.

        Raises:
          ValueError: `num_blocks` or `num_groups` below 1.
        """
        num_blocks = as_count("num_blocks", num_blocks, at_least=1)
        self.num_blocks = num_blocks
        self._num_groups = as_count("num_groups", num_groups, at_least=1)
        self.enable_caching = enable_caching
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self.group_of = np.zeros(num_blocks, np.int32)
        self._queue = FreeQueue(num_blocks)
        self._cache = PrefixCache(self.group_of, self._num_groups, record_events=record_events)
        self._canary: list[np.ndarray] | None = [] if debug else None

    @property
    def num_free_blocks(self) -> int:
        return len(self._queue)

    @property
    def usage(self) -> float:
        """Share of the ownable blocks that are held, 0 to 1; the null block does not count."""
        return 1 - len(self._queue) / (self.num_blocks - 1) if self.num_blocks > 1 else 0.0

    @property
    def num_cached_keys(self) -> int:
        """Distinct cached prefixes, over all groups."""
        return self._cache.num_keys

    @property
    def num_evictions(self) -> int:
        """Blocks that lost a cached prefix so far, because they were taken or evicted by hand."""
        return self._cache.num_dropped

    @property
    def covered(self) -> np.ndarray:
        """int32[num_blocks], tokens of the prefix that the block's primary key names; 0 without a key. Read only."""
        return self._cache.covered

    def free_queue(self) -> np.ndarray:
        """int32[num_free_blocks]: the free blocks, next to be taken first."""
        return self._queue.to_array()

    def take(self, count: int, group: int | np.ndarray = 0) -> np.ndarray:
        """Takes `count` blocks from the head of the queue; prefixes cached in them are evicted.

        Args:
          count: blocks.
          group: the group that takes them, or one group per block.

        Returns:
          int32[count] ids, each with one holder.

        Raises:
          ValueError: a count that is none, more blocks than are free, or groups that there are not; nothing is changed.
        """
        count = as_count("count", count)
        if count > len(self._queue):
            raise ValueError(f"cannot take {count} blocks: {len(self._queue)} of {self.num_blocks} blocks are free")
        groups = np.asarray(group)
        if groups.dtype.kind not in "iu" or groups.shape not in ((), (count,)) or not self._are_groups(groups):
            raise ValueError(
                f"cannot take {count} blocks for group={group!r}: give one of the {self._num_groups} groups, which "
                f"count from 0, or one for each block"
            )
        return self.hand_out(count, groups)

    def hand_out(self, count: int, group: int | np.ndarray) -> np.ndarray:
        """`take`, for a caller that knows that `count` blocks are free and which groups there are."""
        ids = self._queue.pop(count)
        self._own(ids, group)
        return ids

    def free(self, block_ids: Sequence[int] | np.ndarray) -> None:
        """Gives up one hold on each of `block_ids`, in order; those that nobody holds any more become free.

        Raises:
          ValueError: the null block, an id outside the pool, or a block freed more often than it is held; nothing is
            changed.
        """
        ids = self._checked(block_ids, "free")
        unique, counts = np.unique(ids, return_counts=True)
        if (over := counts > self.ref_counts[unique]).any():
            block = int(unique[over][0])
            raise ValueError(
                f"double free: block {block} is held {self.ref_counts[block]} times and freed {counts[over][0]} times; "
                f"free a block once per hold"
            )
        self.release(ids)

    def release(self, *lists: np.ndarray) -> None:
        """`free` of one list after another, for ids that the caller knows to hold: int arrays without nulls."""
        ids = lists[0] if len(lists) == 1 else np.concatenate(lists)
        freed, list_of = self._unhold(ids, np.arange(len(lists)).repeat([len(part) for part in lists]))
        cold = self._cold(freed)
        front = freed[cold]
        if len(lists) > 1:  # the last list ends up in front
            front = front[(-list_of[cold]).argsort(kind="stable")]
        self._queue.push_front(front)
        self._queue.push_back(freed[~cold])

    def touch(self, block_ids: Sequence[int] | np.ndarray) -> None:
        """Adds one hold to each of `block_ids`, distinct blocks; free ones leave the queue, wherever they are.

        Raises:
          ValueError: the null block, a repeated id or one outside the pool; nothing is changed.
        """
        ids = self._checked(block_ids, "touch")
        if len(np.unique(ids)) != len(ids):
            raise ValueError(f"touch needs distinct blocks, got {ids.tolist()}")
        self._queue.remove(ids[self.ref_counts[ids] == 0])
        self.ref_counts[ids] += 1

    def release_and_take(
        self, freed: np.ndarray, freed_list: np.ndarray, counts: np.ndarray, take_list: np.ndarray, num_groups: int
    ) -> np.ndarray:
        """A batch of `release` and `take` calls at once, with the ids that calling them in turn would give.

        Turn t first releases one list of blocks per group, in group order, then takes blocks for each group. A list is
        numbered `t * num_groups + group`.

        Args:
          freed: the released blocks of all lists, one list after another.
          freed_list: the number of the list of each, ascending.
          counts: blocks of each take, at least 1.
          take_list: the number of each take, ascending.
          num_groups: groups in a turn.

        Returns:
          int32[counts.sum()]: the taken ids in order. `counts.sum()` must be at most `num_free_blocks` at the start, so
          that no turn can fail and none reaches the blocks that the batch itself puts behind the queue.
        """
        freed, freed_list = self._unhold(freed, freed_list)
        cold = self._cold(freed)
        # What the batch puts before the queue is a stack: the last list in front, each list's first block on top.
        order = np.lexsort((-np.arange(len(freed)), freed_list))
        order = order[cold[order]]
        pushed = freed[order]
        turns = (take_list // num_groups).repeat(counts)
        source, left = _match_stack(freed_list[order] // num_groups, turns)
        ids = np.empty(len(turns), np.int32)
        from_stack = source >= 0
        ids[from_stack] = pushed[source[from_stack]]
        ids[~from_stack] = self._queue.pop(int(np.count_nonzero(~from_stack)))
        self._queue.push_front(pushed[left[::-1]])
        self._queue.push_back(freed[~cold])
        self._own(ids, (take_list % num_groups).repeat(counts))
        return ids

    # Prefix cache

    def cached_blocks(self, group: int) -> Mapping[bytes, int]:
        """Key to the earliest block that holds it, for one group; a live view, not to be changed."""
        return self._cache.blocks(group)

    def cache_full_blocks(
        self, runs: Sequence[tuple[int, int]], blocks: np.ndarray, keys: Sequence[bytes], ends: np.ndarray
    ) -> None:
        """Registers full blocks: block k holds the prefix `keys[k]` of `ends[k]` tokens.

        For distinct blocks that the caller knows to hold, each taken for the group of its run. A block that holds a
        shorter prefix (its own partly filled state) loses that key first.

        Args:
          runs: (group, number of blocks) of consecutive entries.
          blocks, ends: int arrays.
          keys: as many.
        """
        if (partial := blocks[self.covered[blocks] > 0]).size:
            self._cache.drop(partial)
        self._cache.add_full_blocks(runs, blocks, keys, ends)

    def cache_partial_block(self, group: int, block: int, key: bytes, end: int) -> None:
        """Registers a block under a prefix that ends inside it, beside the key of a longer one if it has that.

        The caller knows to hold the block, taken for `group`.
        """
        if key in self._cache.keys_of(block):
            return
        if 0 < self.covered[block] < end:
            self._cache.drop(np.array([block]))
        self._cache.add(group, block, key, end)

    def cache_keys_of(self, block: int) -> list[bytes]:
        """The block's keys, primary first."""
        return self._cache.keys_of(block)

    def evict(self, block_ids: Sequence[int] | np.ndarray) -> None:
        """Forgets what these blocks hold, as seen by later look-ups. No block moves and no hold changes.

        Raises:
          ValueError: the null block or an id outside the pool; nothing is changed.
        """
        ids = np.unique(self._checked(block_ids, "evict"))
        self._forget(ids[self.covered[ids] > 0])

    def reset(self) -> bool:
        """Forgets every cached prefix, if no block is held; returns whether it did. The queue keeps its order."""
        if len(self._queue) != self.num_blocks - 1:
            return False
        if self._canary is not None:
            self._canary.append(np.flatnonzero(self.covered))
        self._cache.clear()
        return True

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, oldest first; empty unless the pool records them."""
        events = self._cache.events
        if events is None:
            return []
        self._cache.events = []
        return events

    def take_canary_block_ids(self) -> np.ndarray:
        """int32 ids of blocks whose content died since the last call; empty unless in debug mode.

        Fill them with a canary before the next step's zeroing, copies and writes: whoever then reads a canary has read
        a block that was not his.
        """
        ids = np.unique(np.concatenate([np.empty(0, np.int32), *(self._canary or ())])).astype(np.int32)
        if self._canary is not None:
            self._canary = []
        return ids

    def _checked(self, block_ids: Sequence[int] | np.ndarray, verb: str) -> np.ndarray:
        ids = as_ids(verb, block_ids)
        if (bad := (ids <= NULL_BLOCK) | (ids >= self.num_blocks)).any():
            raise ValueError(
                f"cannot {verb} block {ids[bad][0]}: ids of owned blocks are 1 to {self.num_blocks - 1}, and block "
                f"{NULL_BLOCK} is the null block, which nobody owns"
            )
        return ids

    def _are_groups(self, groups: np.ndarray) -> bool:
        return not groups.size or (groups.min() >= 0 and groups.max() < self._num_groups)

    def _own(self, ids: np.ndarray, group: int | np.ndarray) -> None:
        if (cached := ids[self.covered[ids] > 0]).size:
            self._forget(cached)
        self.ref_counts[ids] = 1
        self.group_of[ids] = group

    def _forget(self, cached: np.ndarray) -> None:
        self._cache.drop(cached)
        if self._canary is not None:
            self._canary.append(cached[self.ref_counts[cached] == 0])

    def _unhold(self, ids: np.ndarray, *aligned: np.ndarray) -> tuple[np.ndarray, ...]:
        """Drops one hold per entry; returns `ids`, and arrays beside it, where a block became free with the entry."""
        refs = self.ref_counts[ids]
        if (refs == 1).all():  # then no block is listed twice either
            self.ref_counts[ids] = 0
            return ids, *aligned
        gone = np.empty(len(ids), bool)
        for entry, block in enumerate(ids.tolist()):
            left = self.ref_counts[block] - 1
            self.ref_counts[block] = left
            gone[entry] = left == 0
        return ids[gone], *(array[gone] for array in aligned)

    def _cold(self, freed: np.ndarray) -> np.ndarray:
        """bool mask of freed blocks that hold nothing worth keeping; all false (so all go last) without caching."""
        empty = self.covered[freed] == 0
        if self._canary is not None:
            self._canary.append(freed[empty])
        return empty if self.enable_caching else np.zeros(len(freed), bool)


def _match_stack(push_turns: np.ndarray, pop_turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which push each pop of an empty stack gets, if turn by turn all pushes of a turn precede its pops.

    Args:
      push_turns, pop_turns: the turn of each push and each pop, ascending.

    Returns:
      For each pop the number of its push, or -1 where the stack is empty; and the numbers of the pushes that stay,
      bottom first.
    """
    num_pushes = len(push_turns)
    order = np.concatenate([push_turns * 2, pop_turns * 2 + 1]).argsort(kind="stable")
    is_push = order < num_pushes
    height = np.where(is_push, 1, -1).cumsum()
    # Pushes to a level and pops from it alternate, so that a pop belongs to the event before it on its level.
    level = height + ~is_push
    by_level = level.argsort(kind="stable")
    before, after = by_level[:-1], by_level[1:]
    pairs = is_push[before] & ~is_push[after] & (level[before] == level[after])
    pushes, pops = order[before[pairs]], order[after[pairs]]
    source = np.full(len(pop_turns), -1)
    source[pops - num_pushes] = pushes
    left = np.ones(num_pushes, bool)
    left[pushes] = False
    return source, left.nonzero()[0]
