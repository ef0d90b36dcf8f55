"""Prefix look-up over all groups: the longest prefix that every group can serve (rules A12, A17, A20)."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dsv4kv_jax.block_pool import BlockPool
from dsv4kv_jax.group_rules import FullRules, GroupRules, Hit
from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.hashing import PrefixKeys
from dsv4kv_jax.request import Request
from dsv4kv_jax.specs import KVCacheSpec, cdiv


@dataclasses.dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """What a look-up found for a request; `KVCacheManager.allocate_slots` takes it over.

    Attributes:
      request: whose look-up it was.
      num_tokens: tokens of the common prefix, a multiple of the manager's `hit_granularity`.
      block_ids: per group int32[blocks of that prefix], 0 where the window no longer needs a block.
      shared_prefix_boundary: tokens that some group found beyond the common prefix, or 0.
      evictions: the pool's eviction count at the look-up; tells whether the blocks may have changed hands since.
    """

    request: Request
    num_tokens: int
    block_ids: tuple[np.ndarray, ...]
    shared_prefix_boundary: int
    evictions: int


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSet:
    """Groups with equal specs, looked up jointly: a position counts if every one of them holds it."""

    rules: GroupRules  # those of its first group; all members have the same
    members: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        return isinstance(self.rules, FullRules)


def build_sets(groups: Sequence[KVCacheGroup], rules: Sequence[GroupRules]) -> tuple[GroupSet, ...]:
    """Sets of groups with equal specs: full ones first, then by first appearance (rule A12)."""
    members: dict[KVCacheSpec, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group.spec, []).append(index)
    sets = [GroupSet(rules[indices[0]], tuple(indices)) for indices in members.values()]
    return tuple(sorted(sets, key=lambda group_set: not group_set.is_full))


def find_prefix(
    sets: Sequence[GroupSet], num_groups: int, pool: BlockPool, keys: PrefixKeys, limit: int
) -> tuple[int, list[np.ndarray], int]:
    """Narrows the prefix down until all sets agree (rule A20).

    Args:
      sets: full-attention sets first.
      num_groups: groups over all sets.
      pool: holds the cached blocks.
      keys: the request's prefix keys.
      limit: most tokens to find.

    Returns:
      (tokens of the common prefix, blocks per group as in `ComputedBlocks`, the shared prefix boundary).
    """
    tables = [[pool.cached_blocks(group) for group in group_set.members] for group_set in sets]
    hits: dict[int, Hit] = {}
    verified: set[int] = set()  # draft sets that gave up their block for the current length
    length, longest = limit, 0
    # One pass settles these: a second set only shortens what a full one has.
    once = num_groups == 1 or (len(sets) == 2 and sets[0].is_full)
    while True:
        current = length
        for number, group_set in enumerate(sets):
            if group_set.is_full and number in hits:  # any shorter prefix of it is there as well
                current = min(current, hits[number].num_tokens)
                continue
            rules = group_set.rules
            drop = rules.is_draft and number not in verified
            margin = min(rules.block_size, rules.hit_unit)
            bound = min(current + margin, limit) if drop else current
            hit = rules.find(tables[number], keys, bound, drop)
            if drop:
                verified.add(number)
            elif hit.num_tokens < current:
                verified.clear()
            hits[number] = hit
            current = hit.num_tokens
            longest = max(longest, current)
        done = current >= length
        length = min(length, current)
        if done or once:
            break
    blocks = [np.empty(0, np.int32)] * num_groups
    for number, group_set in enumerate(sets):
        for member, found in zip(group_set.members, hits[number].blocks, strict=True):
            blocks[member] = found[: cdiv(length, group_set.rules.block_size)]
    return length, blocks, longest if longest > length else 0
