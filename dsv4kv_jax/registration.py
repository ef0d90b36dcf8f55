"""Registering a request's blocks in the prefix cache as its tokens are computed (rules A30 to A32)."""

from collections.abc import Sequence

import numpy as np

from dsv4kv_jax.block_pool import BlockPool
from dsv4kv_jax.block_tables import NEVER, BlockTables
from dsv4kv_jax.group_rules import FullRules, GroupRules
from dsv4kv_jax.request import Request


class PrefixRegistrar:
    """Decides which blocks of a request enter the prefix cache, and when there is next something to decide.

    Attributes:
      unwritten: blocks registered since the owner last cleared the set, so that the step that fills them has not run
        yet; None if that is not tracked.
    """

    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        rules: Sequence[GroupRules],
        *,
        unit: int,
        hash_block_size: int,
        track_unwritten: bool = False,
    ) -> None:
        """Args:
        pool: owns the prefix cache.
        tables: of the requests.
        rules: of every group, in order.
        unit: tokens at whose multiples all groups register together; 1 where each registers its blocks as they fill.
        hash_block_size: prefixes end at multiples of this many tokens.
        track_unwritten: keep `unwritten`.
        """
        self._pool = pool
        self._tables = tables
        self._rules = rules
        self._unit = unit
        self._hash_block_size = hash_block_size
        self.unwritten: set[int] | None = set() if track_unwritten else None

    def register(self, row: int, request: Request, num_tokens: int) -> None:
        """Registers what the first `num_tokens` tokens of a request fill, and sets the row's `registers_at`."""
        tables, unit = self._tables, self._unit
        base = num_tokens - num_tokens % unit
        tail = request.num_prompt_tokens - request.num_prompt_tokens % self._hash_block_size
        next_at = base + unit if unit > 1 else NEVER
        runs: list[tuple[int, int]] = []  # (group, blocks)
        columns: list[np.ndarray] = []  # of the row's table
        ends: list[np.ndarray] = []  # prefix lengths
        partial: list[tuple[int, int]] = []  # (group, block)
        cached, first, length = tables.cached[row].tolist(), tables.first[row].tolist(), tables.length[row].tolist()
        for rules in self._rules:
            group, size = rules.index, rules.block_size
            limit = base
            if rules.is_draft and base:  # a draft group also needs the block behind the hit, to look one ahead
                limit = min(num_tokens, base + size)
            start, stop = cached[group], limit // size
            if stop > start:
                cached[group] = stop
                indices = rules.cacheable(max(start, first[group]), stop, request)
                if len(indices):
                    runs.append((group, len(indices)))
                    columns.append(indices + tables.starts[group])
                    ends.append((indices + 1) * size)
            follows = unit == 1 or (rules.is_draft and base > 0 and num_tokens < base + size)
            if follows:  # limit == num_tokens
                next_at = min(next_at, (num_tokens // size + 1) * size)
            if isinstance(rules, FullRules) and tail % size:
                if tail <= limit and tail // size < length[group]:
                    partial.append((group, int(tables.data[row, tables.starts[group] + tail // size])))
                elif follows:
                    next_at = min(next_at, tail)
        tables.cached[row] = cached
        tables.registers_at[row] = next_at
        if not runs and not partial:
            return
        lengths = np.concatenate(ends) if runs else np.empty(0, np.int64)
        keys = request._keys.at(lengths.tolist() + [tail] * bool(partial))
        if runs:
            blocks = tables.data[row, np.concatenate(columns)]
            self._pool.cache_full_blocks(runs, blocks, keys[: len(blocks)], lengths)
            if self.unwritten is not None:
                self.unwritten.update(blocks.tolist())
        for group, block in partial:
            self._pool.cache_partial_block(group, block, keys[-1], tail)
            if self.unwritten is not None:
                self.unwritten.add(block)
