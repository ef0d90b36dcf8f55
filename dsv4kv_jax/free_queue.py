"""The queue of free blocks: an exact doubly-linked-list order, kept in one array."""

import numpy as np


class FreeQueue:
    """Ids of free blocks, next to be taken first.

    The ids lie in a window `[head, tail)` of an array three pools long. A block that is removed from the middle leaves
    a hole (0, the null block's id, is never queued); when the window reaches an end of the array it is moved back to
    the middle without its holes, which costs O(blocks) once per at least as many insertions. So every operation is
    O(blocks moved), a run of blocks is one slice, and the order is that of a linked list.

    Callers pass only valid ids: blocks 1..num_blocks-1, not queued on insertion, queued on removal.
    """

    def __init__(self, num_blocks: int) -> None:
        """A queue of blocks 1, 2, ..., num_blocks - 1."""
        self._middle = num_blocks
        self._slots = np.zeros(3 * num_blocks, np.int32)
        self._place = np.full(num_blocks, -1, np.int32)  # index into _slots; -1: not queued
        self._head = self._tail = self._middle
        self._size = 0
        self.push_back(np.arange(1, num_blocks, dtype=np.int32))

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return bool(self._place[block] >= 0)

    def to_array(self) -> np.ndarray:
        """int32[len(self)]: a copy of the queue, head first."""
        window = self._slots[self._head : self._tail]
        return window[window != 0]

    def peek(self, count: int) -> np.ndarray:
        """int32[count]: a copy of the first `count` <= len(self) ids."""
        return self._front(count)[0]

    def pop(self, count: int) -> np.ndarray:
        """Takes the first `count` <= len(self) ids: int32[count]."""
        ids, end = self._front(count)
        self._place[ids] = -1
        self._head = end
        self._size -= count
        return ids

    def push_front(self, ids: np.ndarray) -> None:
        """Puts `ids` before the queue, so that ids[0] is taken next."""
        if not len(ids):
            return
        if len(ids) > self._head:
            self._recentre()
        start = self._head - len(ids)
        self._write(start, ids)
        self._head = start

    def push_back(self, ids: np.ndarray) -> None:
        """Puts `ids` behind the queue, in order."""
        if not len(ids):
            return
        if self._tail + len(ids) > len(self._slots):
            self._recentre()
        self._write(self._tail, ids)
        self._tail += len(ids)

    def remove(self, ids: np.ndarray) -> None:
        """Takes `ids` out of the queue, wherever they are."""
        self._slots[self._place[ids]] = 0
        self._place[ids] = -1
        self._size -= len(ids)

    def _write(self, start: int, ids: np.ndarray) -> None:
        stop = start + len(ids)
        self._slots[start:stop] = ids
        self._place[ids] = np.arange(start, stop, dtype=np.int32)
        self._size += len(ids)

    def _front(self, count: int) -> tuple[np.ndarray, int]:
        """The first `count` ids and the index behind the last of them."""
        head, tail = self._head, self._tail
        if tail - head == self._size:  # no holes
            return self._slots[head : head + count].copy(), head + count
        if not count:
            return np.empty(0, np.int32), head
        width = count
        while True:
            window = self._slots[head : min(head + width, tail)]
            live = np.flatnonzero(window)[:count]
            if len(live) == count:
                return window[live], head + int(live[-1]) + 1
            width *= 2

    def _recentre(self) -> None:
        ids = self.to_array()
        self._head = self._tail = self._middle
        self._size = 0
        self.push_back(ids)
