"""The decode step of a whole batch at once: the ids that `allocate_slots` would give one by one, in array operations.

A running request that computes one token usually needs no block, sometimes takes one in a group or two, and at other
steps lets one go. Thresholds per request say who has work, so the rest costs a comparison.
"""

import dataclasses
import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from dsv4kv_jax.request import Request
from dsv4kv_jax.specs import cdiv

if TYPE_CHECKING:
    from dsv4kv_jax.manager import KVCacheManager

_FIELDS = tuple(map(attrgetter, ("_row", "num_computed_tokens", "num_in_flight_tokens")))


@dataclasses.dataclass(frozen=True, slots=True)
class BatchAllocation:
    """New blocks of a batch of requests.

    Attributes:
      num_groups: groups of the manager.
      refused: positions (in the batch) of requests for which too few blocks were free; nothing was allocated for them.
      request_index, group, block_id: int[n] each, the new blocks in the order in which they were taken.
    """

    num_groups: int
    refused: tuple[int, ...]
    request_index: np.ndarray
    group: np.ndarray
    block_id: np.ndarray

    def new_blocks(self, index: int) -> tuple[np.ndarray, ...] | None:
        """What `allocate_slots` would have returned for the request at position `index` of the batch."""
        if index in self.refused:
            return None
        mine = self.request_index == index
        return tuple(self.block_id[mine & (self.group == group)] for group in range(self.num_groups))


def from_single(results: Sequence[tuple[np.ndarray, ...] | None], num_groups: int) -> BatchAllocation:
    """The batch form of results of `allocate_slots`."""
    empty = np.empty(0, np.int32)
    parts = [
        (index, group, ids)
        for index, ids_of in enumerate(results)
        for group, ids in enumerate(ids_of or ())
        if len(ids)
    ]
    lengths = np.array([len(ids) for _, _, ids in parts], np.int64)
    return BatchAllocation(
        num_groups=num_groups,
        refused=tuple(index for index, ids_of in enumerate(results) if ids_of is None),
        request_index=np.repeat(np.array([index for index, _, _ in parts], np.int32), lengths),
        group=np.repeat(np.array([group for _, group, _ in parts], np.int32), lengths),
        block_id=np.concatenate([empty, *(ids for _, _, ids in parts)]),
    )


def allocate(
    manager: "KVCacheManager", requests: Sequence[Request], num_new_tokens: np.ndarray, num_lookahead_tokens: int
) -> BatchAllocation | None:
    """Allocates for a batch, or returns None, with nothing changed, where it must be done one by one.

    That is so if the pool might run dry on the way, or if an argument is wrong.
    """
    pool, tables, num_groups = manager.pool, manager.tables, len(manager.rules)
    sizes = tables.block_sizes
    int64s = struct.Struct(f"{len(requests)}q")
    try:  # numpy would take a counter of 1.5 for 1
        fields = [np.frombuffer(int64s.pack(*map(get, requests)), np.int64) for get in _FIELDS]
    except (struct.error, TypeError):
        return None
    rows, computed, in_flight = fields
    if not num_new_tokens.ndim:
        new = fewest = most = int(num_new_tokens)
    else:
        new, fewest, most = num_new_tokens.astype(np.int64), num_new_tokens.min(), num_new_tokens.max()
    if (
        fewest < 1
        or most > manager.max_model_len
        or rows.min() < 0
        or in_flight.min() < 0
        or (computed > tables.holds[rows]).any()
        or (computed < tables.slid_to[rows]).any()  # which is 0 or more
        or np.bincount(rows).max() > 1
    ):
        return None
    ends = computed + new
    if ends.max() > manager.max_model_len:
        return None

    # Windows: which (request, group) lets blocks go, from the oldest entry up to entry `stop`.
    settled = np.maximum(computed - in_flight, 0)
    sliding = (settled >= tables.slides_at[rows]).nonzero()[0]
    first = tables.first[rows[sliding]]
    turn, slide_group = (settled[sliding, None] >= first * sizes + tables.slide_margins).nonzero()
    old_first = first[turn, slide_group]
    turn = sliding[turn]
    slide_row = rows[turn]
    size = sizes[slide_group]
    stop = (settled[turn] - tables.slide_margins[slide_group] + size) // size
    stop = np.minimum(stop, tables.length[slide_row, slide_group])
    counts = stop - old_first
    slid = counts.cumsum()
    # Within a list the last entry is freed first (rule A23).
    position = (stop + slid - counts).repeat(counts) - np.arange(1, (slid[-1] if len(slid) else 0) + 1)
    freed_row = slide_row.repeat(counts)
    freed_column = tables.column_starts[slide_group].repeat(counts) + position
    freed_list = (turn * num_groups + slide_group).repeat(counts)

    # New blocks: which (request, group) needs how many.
    target = np.minimum(ends + num_lookahead_tokens, manager.max_model_len)
    growing = (target > tables.holds[rows]).nonzero()[0]
    length = tables.length[rows[growing]]
    needed = cdiv(target[growing, None], sizes) - length
    turn, take_group = (needed > 0).nonzero()
    counts = needed[turn, take_group]
    old_length = length[turn, take_group]
    turn = growing[turn]
    take_row = rows[turn]
    grown = counts.cumsum()
    total = int(grown[-1]) if len(grown) else 0
    if total > pool.num_free_blocks:
        return None

    freed = tables.data[freed_row, freed_column]
    tables.write_cells(freed_row, freed_column, 0)
    tables.first[slide_row, slide_group] = stop
    taken = pool.release_and_take(freed, freed_list, counts, turn * num_groups + take_group, num_groups)
    index = turn.repeat(counts)
    group = take_group.repeat(counts)
    position = np.arange(total) - (grown - counts - old_length).repeat(counts)
    tables.write_cells(rows[index], tables.column_starts[group] + position, taken)
    tables.length[take_row, take_group] = old_length + counts
    tables.note_slide(rows[sliding], settled[sliding])
    tables.refresh_holds(rows[growing])
    manager.blocks.note_new(group, taken)
    if manager.enable_caching:
        registers_at = tables.registers_at[rows]
        for turn in (ends >= registers_at).nonzero()[0].tolist():
            known = min(int(ends[turn]), requests[turn].num_tokens)  # drafts are not registered
            if known >= registers_at[turn]:
                manager.registrar.register(int(rows[turn]), requests[turn], known)
    return BatchAllocation(num_groups, (), index, group, taken)
