"""The KV-cache manager: which request owns which block of which group.

The decisions, id for id, are those of vLLM 0.27.1's manager (`vllm/v1/core/kv_cache_manager.py` and around it).
"""

import operator
import secrets
from collections.abc import Iterator, Sequence

import numpy as np

from dsv4kv_jax import batch_allocation, capacity, manager_arguments, manager_inspection
from dsv4kv_jax._integers import as_count, as_ids
from dsv4kv_jax.batch_allocation import BatchAllocation
from dsv4kv_jax.block_pool import BlockPool
from dsv4kv_jax.block_tables import BlockTables
from dsv4kv_jax.group_rules import FullRules, GroupRules, build_rules
from dsv4kv_jax.groups import KVCacheGroup, group_block_sizes
from dsv4kv_jax.hashing import SECRET_BYTES, PrefixKeys
from dsv4kv_jax.manager_inspection import ManagerStats
from dsv4kv_jax.plan import DEFAULT_IN_FLIGHT_TOKENS, KVCachePlan
from dsv4kv_jax.prefix_cache import CacheEvent
from dsv4kv_jax.prefix_lookup import ComputedBlocks, build_sets, find_prefix
from dsv4kv_jax.registration import PrefixRegistrar
from dsv4kv_jax.request import NO_ROW, Request
from dsv4kv_jax.request_blocks import RequestBlocks
from dsv4kv_jax.specs import cdiv

_MANAGER = operator.attrgetter("_manager")


class KVCacheManager:
    """Owns the block pool, the prefix cache and the block tables. Single-threaded.

    A step of a scheduler: look a waiting request up (`get_computed_blocks`), allocate for it (`allocate_slots`) and for
    the running ones (`allocate_batch`), put the tables on the device (`block_tables` or `take_table_updates`), drain
    `take_new_block_ids_to_zero` (and `take_cow_copies`), run the step, advance the requests' counters, `free` what has
    finished. A method that refuses or raises changes nothing, except that `allocate_slots` may already have let go of
    blocks that had left their window, which is safe.

    Attributes (read only):
      pool: the blocks.
      tables: the block tables.
      blocks: moves blocks between the two.
      rules: what each group keeps and caches, in group order.
      max_model_len: most tokens of a request.
      enable_caching: whether prefixes are shared.
      hit_granularity: prefix hits end at multiples of this many tokens.
      hash_block_size: prefixes are hashed in steps of this many tokens.
      needs_zeroing: whether new blocks of full groups are reported for zeroing.
      active: the requests that hold blocks, by id.
      queried_tokens, hit_tokens: see `ManagerStats`.
    """

    def __init__(
        self,
        plan: KVCachePlan | None = None,
        *,
        groups: Sequence[KVCacheGroup] | None = None,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_in_flight_tokens: int | None = None,
        max_requests: int = 256,
        enable_caching: bool = True,
        use_drafts: bool = False,
        watermark: float = 0.0,
        retention_interval: int | None = None,
        prefix_match_unit: int | None = None,
        partial_hits: bool = False,
        needs_zeroing: bool | None = None,
        hash_secret: bytes | None = None,
        record_events: bool = False,
        record_table_updates: bool = False,
        debug: bool = False,
    ) -> None:
        """A manager with every block free.

        Args:
          plan: gives groups, blocks and lengths; what is also given by hand overrides it.
          groups: the model-wide groups.
          num_blocks: blocks of the pool, the null block included.
          max_model_len: most tokens of a request; by default the plan's, or the longest request that the pool admits.
          max_in_flight_tokens: most tokens of a request scheduled but not settled, for admission; by default the
            plan's, or `max_model_len`.
          max_requests: rows of the block tables: most requests that hold blocks at once.
          enable_caching: share prefixes.
          use_drafts: a draft model is used; if no group is flagged as its, all are treated so.
          watermark: share of the pool kept free when a request is admitted beside running ones, 0 to 1.
          retention_interval: see `GroupRules`.
          prefix_match_unit: tokens per prefix hash, a divisor of all block sizes; by default their gcd.
          partial_hits: let hits end inside a block, at multiples of the hash block size, and copy that block on write.
            Only without sliding groups.
          needs_zeroing: report new blocks for zeroing; by default where groups of different precisions share blocks.
          hash_secret: 16 to 64 bytes that key the prefix hashes; random by default. Equal secrets give equal keys,
            which an external cache shared by several managers needs.
          record_events: record cache events for `take_events`.
          record_table_updates: record changed table entries for `take_table_updates`.
          debug: record dead blocks for `take_canary_block_ids`.

        Raises:
          ValueError: an argument that is missing or impossible; names it, its value and the remedy.
        """
        if plan is not None and not isinstance(plan, KVCachePlan):
            raise ValueError(f"plan is a {type(plan).__name__}; pass a KVCachePlan, or groups by name")
        if plan is not None:
            groups = groups if groups is not None else plan.groups
            num_blocks = num_blocks if num_blocks is not None else plan.num_blocks
            max_model_len = max_model_len if max_model_len is not None else plan.max_model_len
            max_in_flight_tokens = (
                max_in_flight_tokens if max_in_flight_tokens is not None else plan.max_in_flight_tokens
            )
        groups = tuple(groups or ())
        if not groups or num_blocks is None:
            raise ValueError("give a plan, or groups (at least one) and num_blocks")
        if max_model_len is not None:
            max_model_len = as_count("max_model_len", max_model_len, at_least=1)
        if max_in_flight_tokens is None:
            max_in_flight_tokens = DEFAULT_IN_FLIGHT_TOKENS if max_model_len is None else max_model_len
        max_in_flight_tokens = as_count("max_in_flight_tokens", max_in_flight_tokens, at_least=1)
        num_blocks = as_count("num_blocks", num_blocks, at_least=1)
        if max_model_len is None:
            longest = capacity.longest_request(groups, num_blocks, max_in_flight_tokens, capacity.LONGEST_CONTEXT)
            max_model_len = max(longest, 1)
        max_requests = as_count("max_requests", max_requests, at_least=1)
        manager_arguments.check_options(
            groups,
            watermark=watermark,
            retention_interval=retention_interval,
            prefix_match_unit=prefix_match_unit,
            hash_secret=hash_secret,
        )
        segment, self.hash_block_size = group_block_sizes(
            groups, enable_caching=enable_caching, prefix_match_unit=prefix_match_unit
        )
        if partial_hits and len(groups) == 1 and prefix_match_unit is not None:
            self.hash_block_size = prefix_match_unit
        self.hit_granularity = self.hash_block_size if partial_hits else segment
        self.rules: tuple[GroupRules, ...] = build_rules(
            groups,
            segment=segment,
            hit_unit=self.hit_granularity,
            hash_block_size=self.hash_block_size,
            use_drafts=use_drafts,
            retention_interval=retention_interval,
            max_in_flight_tokens=max_in_flight_tokens,
        )
        self.max_model_len = max_model_len
        self.max_in_flight_tokens = max_in_flight_tokens
        self.enable_caching = enable_caching
        if needs_zeroing is None:
            needs_zeroing = len({(group.spec.dtype, group.spec.is_quantized) for group in groups}) > 1
        self.needs_zeroing = needs_zeroing
        self.pool = BlockPool(
            num_blocks,
            enable_caching=enable_caching,
            num_groups=len(groups),
            record_events=record_events,
            debug=debug,
        )
        self.tables = BlockTables(
            [group.block_size for group in groups],
            [group.sliding_window for group in groups],
            max_model_len,
            max_requests,
            record_updates=record_table_updates,
        )
        self.registrar = PrefixRegistrar(
            self.pool,
            self.tables,
            self.rules,
            unit=1 if partial_hits or len(groups) == 1 else segment,
            hash_block_size=self.hash_block_size,
            track_unwritten=partial_hits,
        )
        self.blocks = RequestBlocks(self.pool, self.tables, self.rules, needs_zeroing=needs_zeroing)
        self.queried_tokens = self.hit_tokens = 0
        self._groups = groups
        self._sets = build_sets(groups, self.rules)
        self._segment = segment
        self._secret = hash_secret if hash_secret is not None else secrets.token_bytes(SECRET_BYTES)
        self._watermark_blocks = int(watermark * num_blocks)
        self.active: dict[str, Request] = {}
        self._requests: list[Request | None] = [None] * max_requests
        self._no_blocks = tuple(np.empty(0, np.int32) for _ in groups)

    # Requests

    def add_request(self, request: Request) -> None:
        """Makes a request known; every other method needs that. It holds nothing yet.

        Raises:
          ValueError: no request, a prompt longer than `max_model_len`, or a request that another manager knows.
        """
        if not isinstance(request, Request):
            raise ValueError(f"{request!r} is no Request")
        if request._manager not in (None, self):
            raise ValueError(f"request {request.request_id!r} belongs to another manager")
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, more than "
                f"max_model_len={self.max_model_len}"
            )
        if request._manager is None:
            request._manager = self
            request._keys = PrefixKeys(
                request, segment=self._segment, hash_block_size=self.hash_block_size, secret=self._secret
            )

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens, alone in the pool, can be computed to its end."""
        num_tokens = as_count("num_tokens", num_tokens)
        blocks = sum(capacity.blocks_per_request(self._groups, num_tokens, self.max_in_flight_tokens))
        return num_tokens <= self.max_model_len and blocks <= self.pool.num_blocks - 1

    # Allocation

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Looks up the longest cached prefix of a request that holds no blocks, leaving at least one token to compute.

        Sets the request's `shared_prefix_boundary`. No block is held or moved; hand the result to `allocate_slots`
        before allocating for others.

        Raises:
          ValueError: an unknown request.
        """
        self._row_of(request)
        num_tokens, boundary = 0, 0
        blocks = [np.empty(0, np.int32)] * len(self.rules)
        if self.enable_caching and not request.skip_reading_prefix_cache:
            num_tokens, blocks, boundary = self.find_prefix(request, request.num_tokens - 1)
        request.shared_prefix_boundary = boundary
        return ComputedBlocks(request, num_tokens, tuple(blocks), boundary, self.pool.num_evictions)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        new_computed_blocks: ComputedBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = False,
    ) -> tuple[np.ndarray, ...] | None:
        """Gives a request the blocks for its next tokens, if enough are free.

        Lets go of blocks that have left their window by the settled tokens (`num_computed_tokens` less
        `num_in_flight_tokens`), takes over hits, and registers what the new tokens will fill.

        Args:
          request: a known request; its counters are read, not changed.
          num_new_tokens: tokens to compute in this step, drafts included.
          new_computed_blocks: the request's look-up, on its first allocation.
          num_lookahead_tokens: slots beyond the new tokens, for drafts.
          num_external_computed_tokens: tokens whose cache comes from elsewhere, behind the hits.
          delay_cache_blocks: do not register yet (the external tokens have not arrived); see `cache_blocks`.
          full_sequence_must_fit: refuse unless the whole request could be held.
          reserved_blocks: free blocks that must remain for others; see `blocks_to_finish`.
          has_scheduled_reqs: other requests run in this step, so admission keeps the watermark free.

        Returns:
          Per group int32 ids of the new blocks (hits and external blocks show only in the tables), or None if refused.

        Raises:
          ValueError: an unknown request, a wrong count, more tokens than `max_model_len`, or hits that are stale or not
            this request's; nothing is changed.
        """
        row = self._row_of(request)
        counts = manager_arguments.plain_counts(
            request, num_new_tokens, num_lookahead_tokens, num_external_computed_tokens, reserved_blocks
        )
        hits = manager_arguments.check_allocation(self, request, counts, new_computed_blocks)
        num_new_tokens, num_lookahead_tokens, external, reserved_blocks, computed, in_flight = counts
        total = computed + (hits.num_tokens if hits else 0) + external
        target = min(total + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        watermark = self._watermark_blocks if has_scheduled_reqs and request.status != "running" else 0
        settled = max(0, total - in_flight)
        known = min(total + num_new_tokens, request.num_tokens)
        if (
            row != NO_ROW
            and not (watermark or reserved_blocks or full_sequence_must_fit)
            and (
                target <= self.tables.holds[row]
                and settled < self.tables.slides_at[row]
                and (known < self.tables.registers_at[row] or not self.enable_caching)
            )
        ):
            return self._no_blocks  # most decode steps
        if full_sequence_must_fit:
            whole = min(request.num_tokens, self.max_model_len)
            if self.blocks.demand(row, whole, total, hits, capped=True) + watermark > self.pool.num_free_blocks:
                return None
        if row != NO_ROW:
            self.blocks.slide(row, settled)
        if self.blocks.demand(row, target, total, hits) + watermark > self.pool.num_free_blocks - reserved_blocks:
            return None
        if row == NO_ROW:
            row = self._open(request, hits, total)
            if external:
                self.blocks.take_external(row, total, external)
            new = self.blocks.take_new(row, target, hits)
        else:
            new = self.blocks.take_new(row, target)
        if self.enable_caching and not delay_cache_blocks and known >= self.tables.registers_at[row]:
            self.registrar.register(row, request, known)
        return new

    def allocate_batch(
        self,
        requests: Sequence[Request],
        num_new_tokens: int | Sequence[int] | np.ndarray,
        *,
        num_lookahead_tokens: int = 0,
    ) -> BatchAllocation:
        """`allocate_slots` for many running requests: the same ids, refusals and tables as calling it in turn.

        Args:
          requests: distinct requests that hold blocks.
          num_new_tokens: tokens of each, or one number for all.
          num_lookahead_tokens: as in `allocate_slots`.

        Raises:
          ValueError: as `allocate_slots`, for any request, or one without blocks or listed twice; nothing is changed.
        """
        requests = tuple(requests)
        num_lookahead_tokens = as_count("num_lookahead_tokens", num_lookahead_tokens)
        counts = np.asarray(num_new_tokens)
        if not counts.size:
            counts = counts.astype(np.int64)  # numpy takes an empty list for one of floats
        if counts.dtype.kind not in "iu" or counts.shape not in ((), (len(requests),)):
            raise ValueError(
                f"num_new_tokens={num_new_tokens!r} must be one integer, or one for each of {len(requests)} requests"
            )
        if len(requests) and self._knows_all(requests):
            result = batch_allocation.allocate(self, requests, counts, num_lookahead_tokens)
            if result is not None:
                return result
        pairs = list(zip(requests, np.broadcast_to(counts, (len(requests),)).tolist(), strict=True))
        for request, count in pairs:
            if self._row_of(request) == NO_ROW:
                raise ValueError(f"request {request.request_id!r} holds no blocks yet; start it with allocate_slots")
            counts = manager_arguments.plain_counts(request, count, num_lookahead_tokens, 0, 0)
            manager_arguments.check_allocation(self, request, counts)
        if len(set(requests)) < len(requests):
            raise ValueError("a request occurs twice in the batch; list each once")
        single = [self.allocate_slots(r, n, num_lookahead_tokens=num_lookahead_tokens) for r, n in pairs]
        return batch_allocation.from_single(single, len(self.rules))

    def blocks_to_finish(self, requests: Sequence[Request]) -> int:
        """Blocks that these requests still need for their known tokens, to pass on as `reserved_blocks`."""
        total = 0
        for request in requests:
            row, whole = self._row_of(request), min(request.num_tokens, self.max_model_len)
            computed, _ = manager_arguments.plain_counts(request)
            total += self.blocks.demand(row, whole, computed, None, capped=True)
        return total

    def remove_skipped_blocks(self, request: Request, settled_tokens: int) -> None:
        """Lets go of blocks that no query at position `settled_tokens` or later can see.

        Args:
          request: nothing happens if it holds no blocks.
          settled_tokens: tokens known to be kept; a step in flight and a rejected token must not count.

        Raises:
          ValueError: an unknown request, or more settled tokens than it has blocks for; nothing is changed.
        """
        row = self._row_of(request)
        settled_tokens = as_count("settled_tokens", settled_tokens)
        if row != NO_ROW and settled_tokens > (most := self.tables.holds[row]):
            raise ValueError(
                f"settled_tokens={settled_tokens} of request {request.request_id!r} must lie between 0 and {most}, the "
                f"tokens it has blocks for"
            )
        if row != NO_ROW:
            self.blocks.slide(row, settled_tokens)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Registers the blocks that the first `num_computed_tokens` tokens fill, after a delayed load has arrived.

        Raises:
          ValueError: an unknown request, one without blocks, or more tokens than it has or holds; nothing is changed.
        """
        row = self._row_of(request)
        num_computed_tokens = as_count("num_computed_tokens", num_computed_tokens)
        most = min(request.num_tokens, int(self.tables.holds[row])) if row != NO_ROW else 0
        if num_computed_tokens > most or row == NO_ROW:
            raise ValueError(
                f"cannot register {num_computed_tokens} tokens of request {request.request_id!r}, which holds blocks "
                f"for {most} of its {request.num_tokens} tokens"
            )
        if self.enable_caching:
            self.registrar.register(row, request, num_computed_tokens)

    # Release

    def free(self, request: Request) -> None:
        """Releases a request's blocks and its row; nothing if it holds none. Cached prefixes stay findable.

        No step in flight may still write the blocks; else see `pop_blocks_for_free`.
        """
        row = self._row_of(request)
        if row == NO_ROW:
            return
        self._close(request)
        self.blocks.release_row(row)

    def pop_blocks_for_free(self, request: Request) -> np.ndarray:
        """Takes a request's row away but keeps its blocks held, for a step in flight that may still write them.

        Returns:
          int32: its tables, group after group, nulls included; hand it to `free_popped_blocks` once the step is done.
        """
        row = self._row_of(request)
        if row == NO_ROW:
            return np.empty(0, np.int32)
        self._close(request)
        return self.blocks.lend_row(row)

    def free_popped_blocks(self, block_ids: np.ndarray) -> None:
        """Releases what `pop_blocks_for_free` returned.

        Raises:
          ValueError: blocks that were not popped, or were released already; nothing is changed.
        """
        self.blocks.return_loans(as_ids("free", block_ids)[::-1])

    def preempt(self, request: Request) -> None:
        """Releases a running request and sets its counters back: it starts over later, and may hit its own blocks."""
        self.free(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.status = "preempted"

    # Once per step

    def take_new_block_ids_to_zero(self) -> np.ndarray:
        """int32 ids of new blocks of full groups since the last call, to be zeroed before the step's writes."""
        return self.blocks.drain_to_zero()

    def take_cow_copies(self) -> list[tuple[int, int]]:
        """(source, destination) blocks to copy on the device after zeroing and before the step's writes.

        Hand them to `finish_cow_copies` once that step is done. With `partial_hits`, call this every step: a hit ends
        inside a block only if the block was filled before the last call.
        """
        if self.registrar.unwritten:
            self.registrar.unwritten.clear()
        return self.blocks.drain_copies()

    def finish_cow_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        """Releases the holds that pending copies have on their blocks.

        Raises:
          ValueError: copies that were not pending; nothing is changed.
        """
        self.blocks.return_loans(as_ids("finish copies of", np.reshape(copies, -1)))

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call, oldest first; empty unless `record_events`."""
        return self.pool.take_events()

    def take_canary_block_ids(self) -> np.ndarray:
        """See `BlockPool.take_canary_block_ids`."""
        return self.pool.take_canary_block_ids()

    def take_table_updates(self) -> np.ndarray:
        """See `BlockTables.take_updates`."""
        return self.tables.take_updates()

    # Prefix cache

    def evict_blocks(self, block_ids: Sequence[int] | np.ndarray) -> None:
        """Makes what these blocks hold unfindable. Holders keep them.

        Raises:
          ValueError: the null block or an id outside the pool; nothing is changed.
        """
        self.pool.evict(block_ids)
        self.tables.registers_at[:] = 0

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache, if no block is held; returns whether it did."""
        return self.pool.reset()

    # Queries

    @property
    def usage(self) -> float:
        """Share of the ownable blocks that are held, 0 to 1."""
        return self.pool.usage

    @property
    def num_requests(self) -> int:
        """Requests that hold blocks."""
        return len(self.active)

    def requests_by_row(self) -> Iterator[tuple[int, Request]]:
        """(row, request) of every request that holds blocks."""
        return ((row, request) for row, request in enumerate(self._requests) if request is not None)

    def get_block_ids(self, request: Request, num_tokens: int | None = None) -> tuple[list[int], ...]:
        """The request's tables, one list per group, 0 where it has let go; empty lists if it holds none.

        Args:
          request: a known request.
          num_tokens: clip each table to the blocks of this many tokens, as a connector needs.
        """
        row = self._row_of(request)
        if row == NO_ROW:
            return tuple([] for _ in self.rules)
        tables = [self.tables.table(row, group) for group in range(len(self.rules))]
        if num_tokens is not None:
            num_tokens = as_count("num_tokens", num_tokens)
            tables = [t[: cdiv(num_tokens, rules.block_size)] for t, rules in zip(tables, self.rules, strict=True)]
        return tuple(table.tolist() for table in tables)

    def block_tables(self, requests: Sequence[Request], max_tokens: int | None = None) -> tuple[np.ndarray, ...]:
        """Per group int32[len(requests), max_blocks]: the requests' tables in this order, as copies.

        For one transfer, put `tables.rows(rows_of(requests))` on the device and cut it there with `tables.split`.
        """
        rows = self.tables.rows(self.rows_of(requests))
        return tuple(np.ascontiguousarray(part) for part in self.tables.split(rows, max_tokens))

    def rows_of(self, requests: Sequence[Request]) -> np.ndarray:
        """int32[len(requests)]: their rows in `tables.data`, -1 for a request without blocks."""
        return np.array([self._row_of(request) for request in requests], np.int32)

    def get_num_common_prefix_blocks(self, request: Request) -> list[int]:
        """Per group, leading blocks of the request's table that all requests share; 0 for sliding groups."""
        row = self._row_of(request)
        counts = [0] * len(self.rules)
        if row != NO_ROW and self.enable_caching:
            for group in (rules.index for rules in self.rules if isinstance(rules, FullRules)):
                shared = self.pool.ref_counts[self.tables.table(row, group)] == self.num_requests
                counts[group] = len(shared) if shared.all() else int(shared.argmin())
        return counts

    def stats(self) -> ManagerStats:
        """A snapshot of usage and prefix-cache counters; O(blocks)."""
        return manager_inspection.collect_stats(self)

    def check(self) -> None:
        """Verifies every invariant; for tests and debugging. Raises AssertionError."""
        manager_inspection.check(self)

    # Internals

    def _row_of(self, request: Request) -> int:
        if not isinstance(request, Request) or request._manager is not self:
            name = repr(request.request_id) if isinstance(request, Request) else repr(request)
            raise ValueError(f"request {name} is unknown to this manager; call add_request first")
        return request._row

    def find_prefix(self, request: Request, limit: int) -> tuple[int, list[np.ndarray], int]:
        """Tokens, blocks and boundary of the longest cached prefix of at most `limit` tokens."""
        while True:
            num_tokens, blocks, boundary = find_prefix(self._sets, len(self.rules), self.pool, request._keys, limit)
            # A block that the hit ends inside is copied before the step's writes: an earlier step must have filled it.
            unwritten = self.registrar.unwritten or ()
            for rules, found in zip(self.rules, blocks, strict=True):
                if num_tokens % rules.block_size and int(found[-1]) in unwritten:
                    limit = num_tokens - num_tokens % rules.block_size
                    break
            else:
                return num_tokens, blocks, boundary

    def _knows_all(self, requests: Sequence[Request]) -> bool:
        try:
            return set(map(_MANAGER, requests)) == {self}
        except AttributeError:  # not all of them are requests
            return False

    def _open(self, request: Request, hits: ComputedBlocks | None, total: int) -> int:
        row = request._row = self.blocks.open_row(hits, total)
        self._requests[row] = request
        self.active[request.request_id] = request
        self.queried_tokens += request.num_tokens
        self.hit_tokens += hits.num_tokens if hits is not None else 0
        return row

    def _close(self, request: Request) -> None:
        self._requests[request._row] = None
        del self.active[request.request_id]
        request._row = NO_ROW
