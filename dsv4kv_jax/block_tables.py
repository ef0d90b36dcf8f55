"""Block tables of the requests that hold blocks, laid out as the device wants them."""

import functools
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4kv_jax._integers import as_count
from dsv4kv_jax.specs import cdiv

NEVER = np.iinfo(np.int64).max  # a threshold that no token count reaches


class BlockTables:
    """Block tables of all groups in one int32 array, updated in place.

    Row r belongs to one request from its first block to its last; free rows are all zero. A row holds the tables of
    all groups side by side, so that one array carries everything to the device in one transfer, and `split` cuts it by
    group there. An entry is a block id, or 0 (the null block) where the request has no block (yet, or any more).

    Within a group's table, entries `[0, first)` are null, `[first, length)` are owned blocks, and the rest is null.

    Attributes:
      data: int32[max_requests, width]. Read only; hand out copies (`rows`, `device_array`), since JAX may alias numpy
        memory on a CPU and these values change in place.
      first, length, cached: int64[max_requests, groups]; `cached` counts the leading entries that were considered for
        the prefix cache.
      holds: int64[max_requests], tokens for which every group has blocks.
      slides_at: int64[max_requests], settled tokens at which some window next lets go of a block.
      slid_to: int64[max_requests], settled tokens when the row's windows were last looked at.
      registers_at: int64[max_requests], tokens at which the prefix cache next has work.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        windows: Sequence[int | None],
        max_model_len: int,
        max_requests: int,
        *,
        record_updates: bool = False,
    ) -> None:
        """Empty tables.

        Args:
          block_sizes: tokens per block, per group.
          windows: sliding window in tokens, or None, per group.
          max_model_len: tokens that a row must be able to hold.
          max_requests: rows.
          record_updates: record changed entries for `take_updates`.
        """
        self.max_blocks = tuple(cdiv(max_model_len, size) for size in block_sizes)
        self.starts = tuple(int(start) for start in np.cumsum([0, *self.max_blocks]))
        self.data = np.zeros((max_requests, self.starts[-1]), np.int32)
        self.first = np.zeros((max_requests, len(block_sizes)), np.int64)
        self.length = np.zeros_like(self.first)
        self.cached = np.zeros_like(self.first)
        self.holds = np.zeros(max_requests, np.int64)
        self.slides_at = np.full(max_requests, NEVER)
        self.slid_to = np.zeros(max_requests, np.int64)
        self.registers_at = np.zeros(max_requests, np.int64)
        self.block_sizes = np.array(block_sizes, np.int64)
        # A block leaves the window once its last token does: `first` blocks plus this many settled tokens.
        self.slide_margins = np.array(
            [NEVER // 2 if w is None else b + w - 1 for b, w in zip(block_sizes, windows, strict=True)], np.int64
        )
        self.column_starts = np.array(self.starts[:-1], np.int64)
        self._free_rows = list(range(max_requests))
        self._updates: list[np.ndarray] | None = [] if record_updates else None

    @property
    def max_requests(self) -> int:
        return len(self.data)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def open_row(self) -> int:
        """The lowest free row, now in use, so that rows in use stay together."""
        return heapq.heappop(self._free_rows)

    def close_row(self, row: int) -> None:
        """Clears a row and makes it free."""
        for group, start in enumerate(self.starts[:-1]):
            first, length = int(self.first[row, group]), int(self.length[row, group])
            self.data[row, start + first : start + length] = 0
            self._record(row, start + first, start + length)
        self.first[row] = self.length[row] = self.cached[row] = 0
        self.holds[row] = self.slid_to[row] = self.registers_at[row] = 0
        self.slides_at[row] = NEVER
        heapq.heappush(self._free_rows, row)

    def owned(self, row: int, group: int) -> np.ndarray:
        """int32[length - first]: the request's blocks in table order, a view."""
        start = self.starts[group]
        return self.data[row, start + self.first[row, group] : start + self.length[row, group]]

    def table(self, row: int, group: int) -> np.ndarray:
        """int32[length]: the table with its leading nulls, a view."""
        start = self.starts[group]
        return self.data[row, start : start + self.length[row, group]]

    def append(self, row: int, group: int, ids: np.ndarray) -> None:
        """Adds blocks behind the table. Call `refresh_holds` when the row is complete."""
        begin = self.starts[group] + int(self.length[row, group])
        self.data[row, begin : begin + len(ids)] = ids
        self.length[row, group] += len(ids)
        self._record(row, begin, begin + len(ids))

    def replace(self, row: int, group: int, index: int, block: int) -> None:
        """Puts another block at an owned entry."""
        column = self.starts[group] + index
        self.data[row, column] = block
        self._record(row, column, column + 1)

    def skip(self, row: int, group: int, count: int) -> np.ndarray:
        """Nulls the owned entries before entry `count` of the table.

        Returns:
          int32: their blocks, the last entry's first (the order in which rule A23 frees them).
        """
        start, first = self.starts[group], int(self.first[row, group])
        stop = min(count, int(self.length[row, group]))
        if stop <= first:
            return np.empty(0, np.int32)
        entries = self.data[row, start + first : start + stop]
        ids = entries[::-1].copy()
        entries[:] = 0
        self.first[row, group] = stop
        self._record(row, start + first, start + stop)
        return ids

    def refresh_holds(self, rows: Any) -> None:
        """Recomputes `holds` of a row, or of an array of rows, after its tables have grown."""
        self.holds[rows] = functools.reduce(np.minimum, (self.length[rows] * self.block_sizes).T)

    def note_slide(self, rows: Any, settled: Any) -> None:
        """Recomputes `slides_at` of a row, or of an array of rows, after its windows have slid to `settled` tokens."""
        self.slid_to[rows] = settled
        self.slides_at[rows] = functools.reduce(
            np.minimum, (self.first[rows] * self.block_sizes + self.slide_margins).T
        )

    def resumes_at(self, row: int) -> int:
        """Fewest computed tokens from which a request can go on: a query before sees blocks that a window let go of.

        At most `slid_to`.
        """
        first = self.first[row]
        seen_from = first * self.block_sizes + self.slide_margins - self.block_sizes
        return int(seen_from.max(where=first > 0, initial=0))

    # What the device sees

    def rows(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """int32[len(rows), width]: a copy of these rows, for one transfer. A row number of -1 gives an all-null row."""
        index = np.asarray(rows, np.int64)
        picked = self.data[index]
        picked[index < 0] = 0
        return picked

    def split(self, rows: Any, max_tokens: int | None = None) -> tuple[Any, ...]:
        """Per group int32[..., max_blocks]: the columns of each group in `rows`, an array of numpy or JAX.

        Args:
          rows: [..., width], from `rows` or `data`.
          max_tokens: keep only the columns of this many tokens, for short batches; static under jit.

        Raises:
          ValueError: `max_tokens` that is no count.
        """
        tables = []
        for start, size, most in zip(self.starts, self.block_sizes.tolist(), self.max_blocks, strict=False):
            width = most if max_tokens is None else min(most, cdiv(as_count("max_tokens", max_tokens), size))
            tables.append(rows[..., start : start + width])
        return tuple(tables)

    def take_updates(self) -> np.ndarray:
        """int32[n, 3]: (row, column, block id) of every entry of `data` that changed since the last call, each once.

        Applying them (`tables.at[u[:, 0], u[:, 1]].set(u[:, 2])`) keeps a copy on the device current for a few
        kilobytes a step, where whole rows of a long context take megabytes.

        Raises:
          ValueError: the tables do not record updates.
        """
        if self._updates is None:
            raise ValueError("table updates are not recorded: build the manager with record_table_updates=True")
        cells = np.unique(np.concatenate([np.empty(0, np.int64), *self._updates]))
        self._updates = []
        rows, columns = np.divmod(cells, self.data.shape[1])
        return np.stack([rows, columns, self.data[rows, columns]], axis=1).astype(np.int32)

    def _record(self, row: int, begin: int, end: int) -> None:
        if self._updates is not None and end > begin:
            base = row * self.data.shape[1]
            self._updates.append(np.arange(base + begin, base + end))

    def write_cells(self, rows: np.ndarray, columns: np.ndarray, ids: Any) -> None:
        """Writes scattered entries: `data[rows, columns] = ids`."""
        self.data[rows, columns] = ids
        if self._updates is not None:
            self._updates.append(rows * self.data.shape[1] + columns)
