"""A block pool without any arithmetic: blocks have ids, tables are lists, windows are looked at token by token.

The second, independent answer to "how many requests fit", beside the closed forms of `dsv4kv_jax.capacity`.
"""

import collections
from collections.abc import Sequence


class BrutePool:
    """Blocks of one pool and the tables of its requests; `groups` are (tokens per block, window or None) pairs."""

    def __init__(
        self,
        groups: Sequence[tuple[int, int | None]],
        num_blocks: int,
        *,
        in_flight: int,
        max_model_len: int | None = None,
    ) -> None:
        self.groups = list(groups)
        self.never_used = iter(range(1, num_blocks))  # block 0 is the null block
        self.given_back: list[int] = []
        self.num_free = num_blocks - 1
        self.in_flight = in_flight
        self.max_model_len = max_model_len
        self.tables: dict[str, list[collections.deque[tuple[int, int]]]] = {}
        self.covered: dict[str, list[int]] = {}

    def held(self, request: str) -> list[int]:
        """Blocks that the request owns, per group."""
        return [len(table) for table in self.tables[request]]

    def allocate(
        self,
        request: str,
        computed: int,
        new: int,
        *,
        lookahead: int = 0,
        unsettled: int = 0,
        whole: int | None = None,
    ) -> bool:
        """One step: slides windows, then takes blocks for every slot of the step, or none of them.

        `whole` is the length of a prompt that must fit as a whole before it may start.
        """
        if whole is not None and sum(map(self._capped, self.groups, [whole] * len(self.groups))) > self.num_free:
            return False
        self.tables.setdefault(request, [collections.deque() for _ in self.groups])
        self.covered.setdefault(request, [0] * len(self.groups))
        next_query = computed - unsettled  # the earliest position that may still be asked about
        last = computed + new + lookahead
        if self.max_model_len is not None:
            last = min(last, self.max_model_len)
        wanted = []
        for index, (block, window) in enumerate(self.groups):
            table = self.tables[request][index]
            while window is not None and table and self._is_dead(table[0][0], block, window, next_query):
                self._give_back(table.popleft()[1])
            missing = 0
            while (self.covered[request][index] + missing) * block < last:
                missing += 1
            wanted.append(missing)
        if sum(wanted) > self.num_free:
            return False
        for index, missing in enumerate(wanted):
            for _ in range(missing):
                self.tables[request][index].append((self.covered[request][index], self._take()))
                self.covered[request][index] += 1
        return True

    def free(self, request: str) -> None:
        for table in self.tables.pop(request):
            for _, block in table:
                self._give_back(block)
        del self.covered[request]

    def _take(self) -> int:
        self.num_free -= 1
        return self.given_back.pop() if self.given_back else next(self.never_used)

    def _give_back(self, block: int) -> None:
        self.num_free += 1
        self.given_back.append(block)

    @staticmethod
    def _is_dead(position: int, block: int, window: int, next_query: int) -> bool:
        newest_token = position * block + block - 1
        oldest_visible = next_query - (window - 1)
        return newest_token < oldest_visible

    def _capped(self, group: tuple[int, int | None], num_tokens: int) -> int:
        block, window = group
        blocks = len(range(0, num_tokens, block))
        if window is None:
            return blocks
        span = window - 1 + self.in_flight
        if self.max_model_len is not None:
            span = min(span, self.max_model_len)
        return min(blocks, len(range(0, span, block)) + 1)


def prefill(pool, request: str, num_tokens: int, schedule) -> tuple[bool, int]:
    """Computes a prompt in chunks; (whether every step was admitted, most blocks held)."""
    most = 0
    for computed in range(0, num_tokens, schedule.chunk_tokens):
        new = min(schedule.chunk_tokens, num_tokens - computed)
        whole = num_tokens if computed == 0 and schedule.reserve_full_sequence else None
        unsettled = min(computed, (schedule.steps_in_flight - 1) * schedule.chunk_tokens)
        if not pool.allocate(
            request, computed, new, lookahead=schedule.lookahead_tokens, unsettled=unsettled, whole=whole
        ):
            return False, most
        most = max(most, sum(pool.held(request)))
    return True, most


def decode(pool, request: str, num_tokens: int, schedule) -> bool:
    """The step that makes the request `num_tokens` tokens long."""
    unsettled = min(num_tokens - 1, (schedule.steps_in_flight - 1) * (1 + schedule.lookahead_tokens))
    return pool.allocate(request, num_tokens - 1, 1, lookahead=schedule.lookahead_tokens, unsettled=unsettled)


def grow(pool, request: str, num_tokens: int, schedule) -> bool:
    """A prompt one token shorter, then the decode step that reaches `num_tokens`."""
    if num_tokens > 1 and not prefill(pool, request, num_tokens - 1, schedule)[0]:
        return False
    return decode(pool, request, num_tokens, schedule)


def fullest_length(make_pool, num_tokens: int, schedule, period: int = 1100) -> tuple[int, int]:
    """(length, blocks) of the decode step, among the last `period` up to `num_tokens`, that holds most blocks."""
    pool = make_pool(10**7)
    start = max(1, num_tokens - period)
    assert grow(pool, "probe", start, schedule)
    best = (sum(pool.held("probe")), start)
    for length in range(start + 1, num_tokens + 1):
        assert decode(pool, "probe", length, schedule)
        best = max(best, (sum(pool.held("probe")), length))
    return best[1], best[0]


def admitted(pool, num_tokens: int, parked_at: int, schedule, limit: int = 10**6) -> int:
    """Requests that a pool admits one after another, those before standing at the length where they hold most."""
    for count in range(limit):
        name = f"request{count}"
        ok, _ = prefill(pool, name, num_tokens, schedule)
        if name in pool.tables:
            pool.free(name)
        if not ok or not grow(pool, name, parked_at, schedule):
            return count
    return limit
