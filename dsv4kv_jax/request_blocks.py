"""Moving blocks between the pool and the tables of requests: the mechanical half of the manager."""

import types
from collections.abc import Mapping, Sequence

import numpy as np

from dsv4kv_jax.block_pool import NULL_BLOCK, BlockPool
from dsv4kv_jax.block_tables import BlockTables
from dsv4kv_jax.group_rules import FullRules, GroupRules
from dsv4kv_jax.prefix_lookup import ComputedBlocks
from dsv4kv_jax.request import NO_ROW
from dsv4kv_jax.specs import cdiv


class RequestBlocks:
    """The pool and the tables, kept in agreement. Callers have checked what they ask for.

    Attributes:
      loans: int32[num_blocks], holds of steps in flight, outside every table.
    """

    def __init__(
        self, pool: BlockPool, tables: BlockTables, rules: Sequence[GroupRules], *, needs_zeroing: bool
    ) -> None:
        self.loans = np.zeros(pool.num_blocks, np.int32)
        self._pool = pool
        self._tables = tables
        self._rules = rules
        self._needs_zeroing = needs_zeroing
        self._full_groups = [rule.index for rule in rules if isinstance(rule, FullRules)]
        self._to_zero: list[list[np.ndarray]] = [[] for _ in rules]
        self._copies: list[tuple[int, int]] = []

    def demand(self, row: int, target: int, total: int, hits: ComputedBlocks | None, *, capped: bool = False) -> int:
        """Free blocks that a request needs to hold `target` tokens (rule A21).

        Args:
          row: the request's row, or NO_ROW before its first allocation.
          target: tokens to hold.
          total: tokens computed by then, hits and external ones included.
          hits: what it would take over.
          capped: count for sliding groups only what can be held at once.
        """
        demand = 0
        for group, rules in enumerate(self._rules):
            size = rules.block_size
            blocks = rules.admission_blocks(target) if capped else cdiv(target, size)
            if row != NO_ROW:
                demand += max(blocks - int(self._tables.length[row, group]), 0)
                continue
            found = hits.block_ids[group] if hits else ()
            skipped = rules.num_skipped(total) // size
            demand += max(blocks - max(skipped, len(found)), 0)
            if hits is not None and len(found):
                kept = found[skipped:]
                demand += int(np.count_nonzero((self._pool.ref_counts[kept] == 0) & (kept != NULL_BLOCK)))
                demand += hits.num_tokens % size != 0  # the copy of a block that the hit ends inside
        return demand

    def slide(self, row: int, settled: int) -> None:
        """Lets go of blocks that nothing after `settled` tokens can see (rule A23)."""
        if settled < self._tables.slides_at[row]:
            return
        skipped = [rules.num_skipped(settled) // rules.block_size for rules in self._rules]
        lists = [self._tables.skip(row, group, count) for group, count in enumerate(skipped) if count]
        self._tables.note_slide(row, settled)
        if lists:
            self._pool.release(*lists)

    def open_row(self, hits: ComputedBlocks | None, total: int) -> int:
        """Starts a row with a request's hits, as far as `total` computed tokens still need them (rule A24)."""
        tables = self._tables
        row = tables.open_row()
        for group, rules in enumerate(self._rules):
            skipped = rules.num_skipped(total) // rules.block_size
            tables.first[row, group] = tables.length[row, group] = tables.cached[row, group] = skipped
            if hits is not None:
                kept = hits.block_ids[group][skipped:]
                self._pool.touch(kept)
                tables.append(row, group, kept)
                # A block that the hit ends inside is copied, and registered anew once full.
                tables.cached[row, group] = max(skipped, hits.num_tokens // rules.block_size)
        tables.note_slide(row, total)
        return row

    def take_external(self, row: int, total: int, external: int) -> None:
        """Takes blocks for tokens that come from elsewhere, as far as some window still sees them (rule A24)."""
        seen = [min(total - rules.num_skipped(total), external) > 0 for rules in self._rules]
        self._take(row, [n if s else 0 for n, s in zip(self._missing(row, total), seen, strict=True)])

    def take_new(self, row: int, target: int, hits: ComputedBlocks | None = None) -> tuple[np.ndarray, ...]:
        """Takes what each group lacks to hold `target` tokens; per group int32, the new blocks.

        A block that `hits` (just taken over) end inside is replaced by a copy, the group's first new block (rule A52).
        """
        partial: dict[int, int] = {}  # group to the table entry that the hit ends inside
        if hits is not None:
            entries = {r.index: divmod(hits.num_tokens, r.block_size) for r in self._rules}
            partial = {group: entry for group, (entry, rest) in entries.items() if rest}
        return self._take(row, self._missing(row, target), partial)

    def release_row(self, row: int) -> None:
        """Frees a row and its blocks, each group's last block first (rule A40)."""
        owned = [self._tables.owned(row, group)[::-1].copy() for group in range(len(self._rules))]
        self._tables.close_row(row)
        self._pool.release(*owned)

    def lend_row(self, row: int) -> np.ndarray:
        """Frees a row but keeps its blocks held; int32, its tables one after another, nulls included (rule A41)."""
        ids = np.concatenate([self._tables.table(row, group) for group in range(len(self._rules))])
        np.add.at(self.loans, ids[ids != NULL_BLOCK], 1)
        self._tables.close_row(row)
        return ids

    def return_loans(self, ids: np.ndarray) -> None:
        """Gives up holds of steps in flight, in order; an integer array, whose nulls are skipped.

        Raises:
          ValueError: more holds than there are; nothing is changed.
        """
        ids = ids[ids != NULL_BLOCK]
        unique, counts = np.unique(ids, return_counts=True)
        outside = len(ids) and (unique[0] < 0 or unique[-1] >= len(self.loans))
        if outside or (counts > self.loans[unique]).any():
            raise ValueError(
                f"double free: no step in flight holds all of blocks {ids.tolist()}; hand back once what was popped or "
                f"taken for a copy"
            )
        self.loans[unique] -= counts.astype(np.int32)
        self._pool.release(ids)

    def note_new(self, groups: np.ndarray, ids: np.ndarray) -> None:
        """Records new blocks, each with its group, for zeroing where that is needed (rule A44)."""
        if self._needs_zeroing:
            for full in self._full_groups:
                if len(mine := ids[groups == full]):
                    self._to_zero[full].append(mine)

    def drain_to_zero(self) -> np.ndarray:
        ids = [part for parts in self._to_zero for part in parts]
        self._to_zero = [[] for _ in self._rules]
        return np.concatenate([np.empty(0, np.int32), *ids])

    def drain_copies(self) -> list[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    def _missing(self, row: int, target: int) -> list[int]:
        lengths = self._tables.length[row].tolist()
        return [max(cdiv(target, r.block_size) - n, 0) for r, n in zip(self._rules, lengths, strict=True)]

    def _take(
        self, row: int, counts: list[int], partial: Mapping[int, int] = types.MappingProxyType({})
    ) -> tuple[np.ndarray, ...]:
        for group in partial:
            counts[group] += 1
        groups = np.arange(len(counts)).repeat(counts)
        ids = self._pool.hand_out(len(groups), groups)
        self.note_new(groups, ids)
        parts, start = [], 0
        for group, count in enumerate(counts):
            part = ids[start : start + count]
            start += count
            parts.append(part)
            if group in partial:
                self._copy_on_write(row, group, partial[group], part[:1])
                part = part[1:]
            if len(part):
                self._tables.append(row, group, part)
        self._tables.refresh_holds(row)
        return tuple(parts)

    def _copy_on_write(self, row: int, group: int, index: int, copy: np.ndarray) -> None:
        source = int(self._tables.table(row, group)[index])
        self._tables.replace(row, group, index, int(copy[0]))
        # The copy job holds both blocks until it is done; the source's hold is the one it was touched with.
        self._pool.touch(copy)
        self.loans[[source, int(copy[0])]] += 1
        self._copies.append((source, int(copy[0])))
        if not self._needs_zeroing:
            self._to_zero[group].append(copy)
