"""Looking at a manager: statistics for dashboards, and the invariants that its debug mode and the tests check."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dsv4kv_jax.group_rules import FullRules

if TYPE_CHECKING:
    from dsv4kv_jax.manager import KVCacheManager


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ManagerStats:
    """A snapshot; counters run from the manager's construction.

    Attributes:
      num_requests: requests that hold blocks.
      num_blocks, num_free_blocks: of the pool, the null block included in the first only.
      usage: share of the ownable blocks that are held, 0 to 1.
      blocks_per_group: distinct blocks held for each group.
      usage_per_group: the same as shares of the ownable blocks.
      cached_keys: distinct prefixes in the prefix cache.
      evictions: blocks that lost a cached prefix.
      queried_tokens, hit_tokens: tokens of admitted requests, and how many of them were found in the prefix cache.
    """

    num_requests: int
    num_blocks: int
    num_free_blocks: int
    usage: float
    blocks_per_group: tuple[int, ...]
    cached_keys: int
    evictions: int
    queried_tokens: int
    hit_tokens: int

    @property
    def usage_per_group(self) -> tuple[float, ...]:
        ownable = max(self.num_blocks - 1, 1)
        return tuple(blocks / ownable for blocks in self.blocks_per_group)

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were found, 0 before the first query."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def collect_stats(manager: "KVCacheManager") -> ManagerStats:
    pool = manager.pool
    held = pool.group_of[pool.ref_counts > 0]
    return ManagerStats(
        num_requests=manager.num_requests,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free_blocks,
        usage=pool.usage,
        blocks_per_group=tuple(np.bincount(held, minlength=len(manager.rules)).tolist()),
        cached_keys=pool.num_cached_keys,
        evictions=pool.num_evictions,
        queried_tokens=manager.queried_tokens,
        hit_tokens=manager.hit_tokens,
    )


def check(manager: "KVCacheManager") -> None:
    """Verifies every invariant of the manager; O(blocks + table entries).

    Raises:
      AssertionError: the first one that does not hold, with the blocks or the request concerned.
    """
    pool, tables = manager.pool, manager.tables
    holds = manager.blocks.loans.copy()
    seen: dict[int, int] = {}  # block to group
    rows_in_use = set()
    for row, request in manager.requests_by_row():
        rows_in_use.add(row)
        _ensure(request._row == row, f"{request} believes to have row {request._row}, the manager gave it row {row}")
        for rules in manager.rules:
            first, length = int(tables.first[row, rules.index]), int(tables.length[row, rules.index])
            where = f"group {rules.index} of {request}"
            column = tables.starts[rules.index]
            whole = tables.data[row, column : tables.starts[rules.index + 1]]
            owned = tables.owned(row, rules.index)
            _ensure(0 <= first <= length <= len(whole), f"{where}: first {first}, length {length}, width {len(whole)}")
            _ensure(not first or not isinstance(rules, FullRules), f"{where}: a full group has let blocks go")
            _ensure((owned > 0).all(), f"{where}: a null entry between owned blocks: {owned.tolist()}")
            _ensure(
                np.count_nonzero(whole) == length - first, f"{where}: entries outside [{first}, {length}) are not null"
            )
            _ensure(tables.cached[row, rules.index] <= length, f"{where}: more blocks registered than allocated")
            np.add.at(holds, owned, 1)
            for block in owned.tolist():
                other = seen.setdefault(block, rules.index)
                _ensure(other == rules.index, f"block {block} is in group {other} and in {where}")
            _ensure(
                (pool.group_of[owned] == rules.index).all(), f"{where}: the pool assigns its blocks to another group"
            )
        needed = (tables.length[row] * tables.block_sizes).min()
        _ensure(tables.holds[row] == needed, f"{request}: holds {tables.holds[row]} tokens, its tables {needed}")
    idle = [row for row in range(tables.max_requests) if row not in rows_in_use]
    _ensure(not tables.data[idle].any(), "the row of a finished request is not cleared")
    _ensure(len(idle) == tables.num_free_rows, f"{len(idle)} rows are unused, {tables.num_free_rows} are free")
    wrong = np.flatnonzero(holds != pool.ref_counts)
    _ensure(not len(wrong), f"blocks {wrong.tolist()} have reference counts that differ from their holders")
    queue = pool.free_queue()
    _ensure(len(queue) == pool.num_free_blocks == len(np.unique(queue)), "the free queue repeats a block")
    _ensure(0 not in queue, "the null block is free")
    _ensure((pool.ref_counts[queue] == 0).all(), "a held block is in the free queue")
    used = np.count_nonzero(pool.ref_counts)
    _ensure(
        len(queue) + used + 1 == pool.num_blocks, f"{len(queue)} free + {used} used + 1 != {pool.num_blocks} blocks"
    )
    _check_cache(manager)


def _check_cache(manager: "KVCacheManager") -> None:
    pool = manager.pool
    keyed = 0
    for block in range(pool.num_blocks):
        keys = pool.cache_keys_of(block)
        _ensure(bool(keys) == bool(pool.covered[block]), f"block {block}: keys and covered tokens disagree")
        _ensure(len(set(keys)) == len(keys), f"block {block} has a key twice")
        for key in keys:
            first = pool.cached_blocks(int(pool.group_of[block])).get(key)
            _ensure(first is not None, f"block {block} has a key that no look-up finds")
            keyed += first == block
    _ensure(keyed == pool.num_cached_keys, f"{pool.num_cached_keys} keys are cached, blocks hold {keyed}")
    _ensure(manager.enable_caching or not keyed, "caching is off, but there are cached keys")


def _ensure(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)
