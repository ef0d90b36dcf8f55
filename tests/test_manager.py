"""The manager's decisions as small examples, and its refusals, which must change nothing."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from manager_support import PRO, add, compute, groups, manager_of

from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.plan import plan, plan_from_specs
from dsv4kv_jax.prefix_cache import BlockRemoved, BlockStored, CacheCleared
from dsv4kv_jax.request import MultiModalItem, Request
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec


def snapshot(manager):
    pool, tables = manager.pool, manager.tables
    return (
        pool.free_queue().tolist(),
        pool.ref_counts.tolist(),
        pool.num_cached_keys,
        tables.data.tobytes(),
        tables.first.tolist(),
        tables.length.tolist(),
        tables.cached.tolist(),
        manager.blocks.loans.tolist(),
        sorted(manager.active),
    )


def lists(blocks):
    return None if blocks is None else [ids.tolist() for ids in blocks]


def running(manager, request_id, num_tokens, **options):
    request = add(manager, request_id, range(num_tokens), **options)
    compute(manager, request)
    return request


# Allocation


def test_a_first_allocation_takes_blocks_group_by_group():
    manager = manager_of()
    request = add(manager, "r", range(336))
    new = manager.allocate_slots(request, 128)
    assert lists(new) == [[1], [2, 3], [4, 5], [*range(6, 22)], [*range(22, 54)]]
    assert list(manager.get_block_ids(request)) == lists(new)
    assert manager.usage == pytest.approx(53 / 399)
    assert manager.take_new_block_ids_to_zero().tolist() == []  # these groups have one precision
    assert manager_of(needs_zeroing=True).needs_zeroing
    manager.check()


def test_new_blocks_of_full_groups_are_zeroed_once():
    manager = manager_of(needs_zeroing=True)
    request = add(manager, "r", range(600))
    manager.allocate_slots(request, 600)
    assert manager.take_new_block_ids_to_zero().tolist() == [1, 2, 3]
    assert manager.take_new_block_ids_to_zero().tolist() == []
    request.num_computed_tokens = 600
    request.append([0] * 200)
    manager.allocate_batch([request], 200)
    assert len(manager.take_new_block_ids_to_zero()) == 1
    manager.free(request)
    manager.reset_prefix_cache()
    (first, *_) = manager.allocate_slots(add(manager, "s", range(10)), 10)
    assert manager.take_new_block_ids_to_zero().tolist() == first.tolist()


def test_a_refusal_changes_nothing_but_slid_windows():
    manager = manager_of(num_blocks=128)
    request = add(manager, "r", range(700))
    manager.allocate_slots(request, 128)
    request.num_computed_tokens = 128
    before = snapshot(manager)
    assert manager.allocate_slots(add(manager, "other", range(400)), 300) is None
    assert manager.allocate_slots(add(manager, "whole", range(700)), 4, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(add(manager, "late", range(8)), 8, reserved_blocks=73) is None
    assert snapshot(manager) == before
    assert manager.allocate_slots(request, 500) is None
    table = manager.get_block_ids(request)[4]
    assert table[:30] == [0] * 30
    assert manager.pool.num_free_blocks == 74 + 30
    manager.check()


def test_the_watermark_holds_back_admission_only():
    manager = manager_of(watermark=0.95)
    waiting, started = add(manager, "waiting", range(64)), add(manager, "started", range(64))
    started.status = "running"
    assert manager.allocate_slots(waiting, 64, has_scheduled_reqs=True) is None
    assert manager.allocate_slots(started, 64, has_scheduled_reqs=True) is not None
    assert manager.allocate_slots(waiting, 64) is not None


def test_blocks_reserved_for_others_are_what_they_still_need():
    manager = manager_of()
    request = add(manager, "r", range(600))
    manager.allocate_slots(request, 100)
    request.num_computed_tokens = 100
    held = [1, 2, 2, 13, 25]
    whole = [3, 7, 7, 49, 67]  # window groups hold at most what is in flight and the window
    assert manager.blocks_to_finish([request]) == sum(whole) - sum(held)


def test_lookahead_is_clipped_at_the_longest_request():
    manager = manager_of(max_model_len=256)
    request = add(manager, "r", range(255))
    manager.allocate_slots(request, 255, num_lookahead_tokens=100)
    assert [len(table) for table in manager.get_block_ids(request)] == [1, 4, 4, 32, 64]


def test_external_tokens_get_blocks_only_where_some_window_sees_them():
    manager = manager_of()
    compute(manager, add(manager, "first", range(300)))
    request = add(manager, "second", range(600))
    hits = manager.get_computed_blocks(request)
    assert hits.num_tokens == 256
    new = manager.allocate_slots(
        request, 0, new_computed_blocks=hits, num_external_computed_tokens=256, delay_cache_blocks=True
    )
    assert lists(new) == [[], [], [], [], []]
    tables = manager.get_block_ids(request)
    assert tables[1][:6] == [0] * 6
    assert len(tables[1]) == 8
    assert tables[0][0] == manager.get_block_ids(manager.active["first"])[0][0]
    assert manager.get_block_ids(request, num_tokens=300)[0] == tables[0][:2]
    manager.check()
    keys = manager.pool.num_cached_keys
    request.num_computed_tokens = 512
    manager.cache_blocks(request, 512)
    assert manager.pool.num_cached_keys > keys
    with pytest.raises(ValueError, match="cannot register 601 tokens of request 'second'"):
        manager.cache_blocks(request, 601)


# Windows


@pytest.mark.parametrize(
    ("block_size", "touched"),
    [
        (64, {127: {0, 1}, 128: {0, 1, 2}, 190: {0, 1, 2}, 191: {1, 2}, 192: {1, 2, 3}}),
        (256, {255: {0}, 256: {0, 1}, 382: {0, 1}, 383: {1}}),
    ],
)
def test_a_window_keeps_exactly_what_pending_queries_touch(block_size, touched):
    """vllm-project/vllm#47728: a window that crosses a block boundary was freed a step too early."""
    for settled in range(400):
        manager = manager_of((block_size, 128), num_blocks=12)
        request = add(manager, "r", range(401))
        manager.allocate_slots(request, 401)
        manager.remove_skipped_blocks(request, settled)
        (table,) = manager.get_block_ids(request)
        kept = {index for index, block in enumerate(table[: settled // block_size + 1]) if block}
        assert kept == {position // block_size for position in range(max(0, settled - 127), settled + 1)}
        if settled in touched:
            assert kept == touched[settled]


def test_a_block_stays_while_a_rejected_token_may_bring_the_query_back():
    """sgl-project/sglang#23982: a block was freed for four tokens in flight of which three were then rejected."""
    manager = manager_of((64, 128), num_blocks=12)
    request = running(manager, "r", 189)
    (block, *_) = manager.get_block_ids(request)[0]
    manager.allocate_slots(request, 4)
    request.num_computed_tokens, request.num_in_flight_tokens = 193, 4
    manager.allocate_slots(request, 4)
    assert manager.get_block_ids(request)[0][0] == block
    request.num_computed_tokens, request.num_in_flight_tokens = 190, 0  # three of four rejected
    request.append([5])
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids(request)[0][0] == block  # the query at 190 reads from position 63
    request.num_computed_tokens = 191
    request.append([6])
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids(request)[0][0] == 0
    assert manager.pool.ref_counts[block] == 0
    manager.free(request)
    assert sorted(manager.pool.free_queue().tolist()) == list(range(1, 12))


# Prefixes


def test_a_hit_serves_its_own_prefix_and_nothing_later():
    """ROCm/ATOM#1417: the second request's window read what the first one had written since."""
    manager = manager_of()
    first = add(manager, "first", range(512))
    rows = {}  # (group, block, row) to the position written there

    def write(request, start, stop):
        for group, (size, _) in enumerate(PRO):
            table = manager.get_block_ids(request)[group]
            for position in range(start, stop):
                if table[position // size]:
                    rows[group, table[position // size], position % size] = position

    for start in range(0, 512, 64):
        manager.allocate_slots(first, 64)
        first.num_computed_tokens += 64
        write(first, start, start + 64)
    second = add(manager, "second", [*range(256), 9, 9, 9])
    hits = manager.get_computed_blocks(second)
    assert hits.num_tokens == 256
    manager.allocate_slots(second, 3, new_computed_blocks=hits)
    for group, (size, window) in enumerate(PRO):
        table = manager.get_block_ids(second)[group]
        for position in range(256 - (window or 257) + 1, 256):
            assert rows[group, table[position // size], position % size] == position


def test_stale_hits_are_refused():
    manager = manager_of(num_blocks=60)
    compute(manager, add(manager, "first", range(260)), chunk=32)
    manager.free(manager.active["first"])
    request = add(manager, "second", range(260))
    hits = manager.get_computed_blocks(request)
    assert hits.num_tokens == 256
    other = add(manager, "other", [7] * 130)
    assert manager.allocate_slots(other, 100) is not None
    before = snapshot(manager)
    with pytest.raises(ValueError, match="'second': new_computed_blocks were evicted since; call get_computed_blocks"):
        manager.allocate_slots(request, 4, new_computed_blocks=hits)
    with pytest.raises(ValueError, match="is the look-up of request 'second'"):
        manager.allocate_slots(add(manager, "third", range(260)), 4, new_computed_blocks=hits)
    assert snapshot(manager) == before


def test_evictions_elsewhere_do_not_make_hits_stale():
    manager = manager_of()
    compute(manager, add(manager, "first", range(300)))
    compute(manager, add(manager, "other", [7] * 300))
    request = add(manager, "second", range(300))
    hits = manager.get_computed_blocks(request)
    manager.evict_blocks(manager.get_block_ids(manager.active["other"])[0][:1])
    assert manager.allocate_slots(request, 4, new_computed_blocks=hits) is not None


def test_two_requests_share_a_common_prefix():
    manager = manager_of()
    first = running(manager, "first", 300)
    assert manager.get_num_common_prefix_blocks(first) == [2, 0, 0, 0, 0]
    second = running(manager, "second", 300)
    assert manager.get_num_common_prefix_blocks(second) == [1, 0, 0, 0, 0]
    assert manager.get_num_common_prefix_blocks(add(manager, "idle", [1])) == [0] * 5
    uncached = manager_of(enable_caching=False)
    assert uncached.get_num_common_prefix_blocks(running(uncached, "r", 300)) == [0] * 5


def test_a_preempted_request_hits_its_own_blocks():
    manager = manager_of()
    request = running(manager, "r", 700)
    manager.preempt(request)
    assert (request.num_computed_tokens, request.status) == (0, "preempted")
    assert compute(manager, request) == 512
    manager.check()


@pytest.mark.parametrize("drafts", [False, True])
def test_drafts_without_a_flagged_group_flag_all(drafts):
    manager = manager_of(use_drafts=drafts)
    assert {rules.is_draft for rules in manager.rules} == {drafts}
    assert [rules.is_draft for rules in manager_of(draft=2, use_drafts=True).rules] == [False, True, True, False, False]


def test_a_request_may_skip_reading_but_leaves_its_prefix():
    manager = manager_of()
    assert compute(manager, add(manager, "first", range(300))) == 0
    assert compute(manager, add(manager, "second", range(300), skip_reading_prefix_cache=True)) == 0
    stats = manager.stats()
    assert (stats.queried_tokens, stats.hit_tokens, stats.hit_rate) == (600, 0, 0.0)


# Copy on write


def partial_manager(**options):
    return manager_of(
        (16, None), num_blocks=16, partial_hits=True, prefix_match_unit=4, hash_secret=b"s" * 16, **options
    )


def test_a_hit_may_end_inside_a_block_which_is_then_copied():
    manager = partial_manager()
    assert (manager.hit_granularity, manager.hash_block_size) == (4, 4)
    first = running(manager, "first", 26)  # one full block and a tail of 8 tokens
    second = add(manager, "second", range(28))
    assert manager.get_computed_blocks(second).num_tokens == 16  # the step that fills the tail has not run yet
    assert manager.take_cow_copies() == []
    hits = manager.get_computed_blocks(second)
    assert (hits.num_tokens, lists(hits.block_ids)) == (24, [[1, 2]])
    assert lists(manager.allocate_slots(second, 4, new_computed_blocks=hits)) == [[3]]
    assert manager.get_block_ids(second) == ([1, 3],)
    assert manager.take_new_block_ids_to_zero().tolist() == [3]
    copies = manager.take_cow_copies()
    assert copies == [(2, 3)]
    assert manager.pool.ref_counts[1:4].tolist() == [2, 2, 2]
    manager.check()
    manager.free(second)
    manager.check()
    assert manager.pool.ref_counts[1:4].tolist() == [1, 2, 1]
    manager.finish_cow_copies(copies)
    assert manager.pool.ref_counts[1:4].tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="double free"):
        manager.finish_cow_copies(copies)
    manager.free(first)
    manager.check()
    assert manager.pool.num_free_blocks == 15


def test_a_copied_block_is_registered_once_full():
    manager = partial_manager()
    running(manager, "first", 26)
    manager.take_cow_copies()
    second = add(manager, "second", [*range(24), *[9] * 9])
    assert compute(manager, second) == 24
    manager.finish_cow_copies(manager.take_cow_copies())
    third = add(manager, "third", [*range(24), *[9] * 9])
    found = manager.get_computed_blocks(third)
    assert (found.num_tokens, lists(found.block_ids)) == (32, [[1, 3]])
    manager.check()


def test_partial_hits_need_groups_that_keep_everything():
    with pytest.raises(ValueError, match="partial_hits=True needs groups that keep every block"):
        manager_of(partial_hits=True)


# Release


def test_a_step_in_flight_keeps_a_finished_requests_blocks():
    manager = manager_of()
    request = running(manager, "r", 300)
    free = manager.pool.num_free_blocks
    tables = manager.get_block_ids(request)
    popped = manager.pop_blocks_for_free(request)
    assert popped.tolist() == [block for table in tables for block in table]
    assert manager.pool.num_free_blocks == free
    assert manager.get_block_ids(request) == ([], [], [], [], [])
    manager.check()
    assert len(manager.pop_blocks_for_free(request)) == 0
    manager.free_popped_blocks(popped)
    assert manager.pool.num_free_blocks == 399
    before = snapshot(manager)
    for wrong in (popped, [5], [-1], [400]):
        with pytest.raises(ValueError, match="double free"):
            manager.free_popped_blocks(wrong)
    assert snapshot(manager) == before


def test_freeing_twice_is_harmless_and_leaves_a_clear_row():
    manager = manager_of()
    request = running(manager, "r", 300)
    row = request._row
    manager.free(request)
    assert not manager.tables.data[row].any()
    before = snapshot(manager)
    manager.free(request)
    assert snapshot(manager) == before


def test_rows_stay_while_requests_run_and_are_reused_lowest_first():
    manager = manager_of(max_requests=3)
    requests = [running(manager, f"r{n}", 20 + n) for n in range(3)]
    assert manager.rows_of(requests).tolist() == [0, 1, 2]
    late = add(manager, "late", range(9))
    assert manager.rows_of([late]).tolist() == [-1]
    with pytest.raises(ValueError, match="'late': all max_requests=3 rows are in use"):
        manager.allocate_slots(late, 9)
    manager.free(requests[0])
    manager.free(requests[1])
    manager.allocate_slots(late, 9)
    assert manager.rows_of([requests[2], late]).tolist() == [2, 0]


# Tables


def test_tables_are_copies_that_show_slid_windows_as_null():
    manager = manager_of()
    request, idle = running(manager, "r", 300), add(manager, "idle", range(5))
    request.append([1])
    manager.allocate_slots(request, 1)
    tables = manager.block_tables([idle, request], max_tokens=320)
    assert [table.shape for table in tables] == [(2, 2), (2, 5), (2, 5), (2, 40), (2, 80)]
    assert all(table.dtype == np.int32 and table.flags.c_contiguous for table in tables)
    for table, expected in zip(tables, manager.get_block_ids(request), strict=True):
        assert not table[0].any()
        assert table[1, : len(expected)].tolist() == expected
        assert not table[1, len(expected) :].any()
    assert tables[4][1, 72] == 0 != tables[4][1, 74]
    saved = [table.copy() for table in tables]
    manager.free(request)
    assert all((a == b).all() for a, b in zip(tables, saved, strict=True))


def test_updates_keep_a_copy_of_the_tables_current():
    manager = manager_of(record_table_updates=True)
    device = np.zeros_like(manager.tables.data)
    requests = [running(manager, f"r{n}", 100 + 7 * n) for n in range(4)]
    for step in range(300):
        for request in requests:
            request.append([step])
        manager.allocate_batch(requests, 1)
        for request in requests:
            request.num_computed_tokens += 1
        updates = manager.take_table_updates()
        assert updates.dtype == np.int32
        assert len(np.unique(updates[:, :2], axis=0)) == len(updates)
        device[updates[:, 0], updates[:, 1]] = updates[:, 2]
        assert (device == manager.tables.data).all()
        assert step == 0 or len(updates) < 40
    manager.free(requests.pop())
    updates = manager.take_table_updates()
    assert not updates[:, 2].any()
    assert len(manager.take_table_updates()) == 0
    with pytest.raises(ValueError, match="record_table_updates=True"):
        manager_of().take_table_updates()


# Batches


def twins(num_blocks=400, **options):
    pair = [manager_of(num_blocks=num_blocks, needs_zeroing=True, **options) for _ in range(2)]
    made = []
    for manager in pair:
        made.append([add(manager, f"r{n}", [n % 3] * (20 + 31 * n)) for n in range(8)])
        for request in made[-1]:
            if manager.pool.num_free_blocks > 45:
                compute(manager, request, chunk=32)
    started = [[r for r in requests if r.num_computed_tokens] for requests in made]
    return pair, started


@pytest.mark.parametrize("num_blocks", [100, 150, 200, 1500])
@pytest.mark.parametrize("draft", [None, 1])
def test_a_batch_equals_its_requests_one_by_one(num_blocks, draft):
    """Up to and past the point where the pool runs dry."""
    (one, many), (singles, batch) = twins(num_blocks, draft=draft)
    refusals = 0
    for step in range(150):
        counts = [1 + (step + n) % 4 for n in range(len(batch))]
        for request in (*singles, *batch):
            request.append([step % 5] * (1 + step % 2))
        for request in (*singles, *batch):
            request.num_in_flight_tokens = min(step % 3, request.num_computed_tokens)
        expected = [one.allocate_slots(r, n, num_lookahead_tokens=1) for r, n in zip(singles, counts, strict=True)]
        result = many.allocate_batch(batch, counts, num_lookahead_tokens=1)
        assert [lists(result.new_blocks(n)) for n in range(len(batch))] == [lists(ids) for ids in expected]
        assert result.refused == tuple(n for n, ids in enumerate(expected) if ids is None)
        assert snapshot(one) == snapshot(many)
        assert one.take_new_block_ids_to_zero().tolist() == many.take_new_block_ids_to_zero().tolist()
        for n, ids in enumerate(expected):
            if ids is not None:
                for request in (singles[n], batch[n]):
                    request.num_computed_tokens = min(request.num_computed_tokens + counts[n], request.num_tokens)
        refusals += len(result.refused)
        many.check()
    assert bool(refusals) == (num_blocks < 1000)


def test_an_empty_batch_is_nothing():
    for counts in (1, [], np.empty(0, np.int64)):
        result = manager_of().allocate_batch([], counts)
        assert result.refused == ()
        assert len(result.block_id) == 0


# Errors

WRONG_ARGUMENTS = [
    ({"num_new_tokens": -1}, "num_new_tokens=-1 must be an integer of at least 0"),
    ({"num_new_tokens": 0}, "num_new_tokens=0 is nothing to do"),
    ({"num_lookahead_tokens": -2}, "num_lookahead_tokens=-2"),
    ({"num_external_computed_tokens": -3}, "num_external_computed_tokens=-3"),
    ({"reserved_blocks": -4}, "reserved_blocks=-4"),
    ({"num_new_tokens": 3797}, "would have 4097 tokens, more than max_model_len=4096"),
    ({"num_external_computed_tokens": 3796}, "would have 4097 tokens"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments_change_nothing(arguments, message):
    manager = manager_of()
    request = running(manager, "r", 300)
    before = snapshot(manager)
    with pytest.raises(ValueError, match=f"request 'r':? .*{message}|{message}"):
        manager.allocate_slots(request, **{"num_new_tokens": 1, **arguments})
    assert snapshot(manager) == before


@pytest.mark.parametrize(
    ("counters", "message"),
    [
        ({"num_computed_tokens": -1}, "num_computed_tokens=-1 must be an integer of at least 0"),
        ({"num_in_flight_tokens": -1}, "num_in_flight_tokens=-1 must be an integer of at least 0"),
        ({"num_computed_tokens": 254}, "num_computed_tokens=254 went back too far: .* before token 255"),
        ({"num_computed_tokens": 305}, "num_computed_tokens=305, but its blocks hold only 300 tokens"),
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_wrong_counters_change_nothing(counters, message, batch):
    manager = manager_of()
    good, request = running(manager, "good", 255), running(manager, "r", 300)
    good.append([1])
    for name, value in counters.items():
        setattr(request, name, value)
    before = snapshot(manager)
    with pytest.raises(ValueError, match=f"'r': {message}"):
        manager.allocate_batch([good, request], 1) if batch else manager.allocate_slots(request, 1)
    assert snapshot(manager) == before


@pytest.mark.parametrize(
    ("counts", "message"),
    [([1, 0], "num_new_tokens=0"), ([1], "one for each of 2 requests"), (1.5, "num_new_tokens=1.5"), ([1, -1], "=-1")],
)
def test_wrong_batches_change_nothing(counts, message):
    manager = manager_of()
    requests = [running(manager, "a", 255), running(manager, "b", 300)]
    before = snapshot(manager)
    with pytest.raises(ValueError, match=message):
        manager.allocate_batch(requests, counts)
    with pytest.raises(ValueError, match="num_lookahead_tokens=-1"):
        manager.allocate_batch(requests, 1, num_lookahead_tokens=-1)
    with pytest.raises(ValueError, match="occurs twice"):
        manager.allocate_batch([*requests, requests[0]], 1)
    with pytest.raises(ValueError, match="'c' holds no blocks yet"):
        manager.allocate_batch([*requests, add(manager, "c", [1])], 1)
    with pytest.raises(ValueError, match="would have 4097 tokens"):
        manager.allocate_batch(requests, [1, 3797])
    assert snapshot(manager) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda manager, request: manager.get_computed_blocks(request),
        lambda manager, request: manager.allocate_slots(request, 1),
        lambda manager, request: manager.allocate_batch([request], 1),
        lambda manager, request: manager.free(request),
        lambda manager, request: manager.pop_blocks_for_free(request),
        lambda manager, request: manager.preempt(request),
        lambda manager, request: manager.remove_skipped_blocks(request, 1),
        lambda manager, request: manager.cache_blocks(request, 1),
        lambda manager, request: manager.get_block_ids(request),
        lambda manager, request: manager.block_tables([request]),
        lambda manager, request: manager.blocks_to_finish([request]),
        lambda manager, request: manager.get_num_common_prefix_blocks(request),
    ],
)
def test_unknown_requests_are_refused(call):
    manager = manager_of()
    running(manager, "known", 100)
    before = snapshot(manager)
    theirs = running(manager_of(), "theirs", 100)
    for unknown, name in ((Request("new", [1]), "'new'"), (theirs, "'theirs'"), ("known", "'known'")):
        with pytest.raises(ValueError, match=f"request {name} is unknown to this manager; call add_request"):
            call(manager, unknown)
    assert snapshot(manager) == before


def test_requests_that_cannot_be_known():
    manager = manager_of(max_model_len=100)
    with pytest.raises(ValueError, match="'long' has 101 tokens, more than max_model_len=100"):
        add(manager, "long", range(101))
    with pytest.raises(ValueError, match="'theirs' belongs to another manager"):
        manager.add_request(add(manager_of(), "theirs", [1]))
    with pytest.raises(ValueError, match="'text' is no Request"):
        manager.add_request("text")
    compute(manager, add(manager, "twin", range(9)))
    with pytest.raises(ValueError, match="another request 'twin' holds blocks"):
        manager.allocate_slots(add(manager, "twin", range(9)), 9)
    with pytest.raises(ValueError, match="'early' holds no blocks, so num_computed_tokens=5 must be 0"):
        early = add(manager, "early", range(9))
        early.num_computed_tokens = 5
        manager.allocate_slots(early, 1)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "no prompt token"),
        ([2**31], {}, "int32"),
        (np.array([2**31]), {}, "int32"),
        (np.array([1.0]), {}, "int32"),
        (np.array([[1]]), {}, "int32"),
        (["a"], {}, "int32"),
        (b"abcd", {}, "int32"),
        (bytearray(8), {}, "int32"),
        (None, {}, "int32"),
        ([1, 2], {"mm_items": [MultiModalItem("a", 1, 2)]}, "lies outside the 2 prompt tokens"),
        ([1, 2], {"mm_items": [("a", 0.5, 1)]}, "no item"),
        ([1, 2], {"mm_items": [("a", -1, 1)]}, "no item"),
        ([1, 2], {"mm_items": [("a", 0, 0)]}, "no item"),
        ([1, 2], {"mm_items": [("a", 0)]}, "no item"),
        ([1, 2], {"mm_items": [5]}, "no item"),
        ([1, 2], {"prompt_embeds": np.zeros((3, 4))}, r"shape \(3, 4\); .* at most 2"),
        ([1, 2], {"prompt_embeds": np.zeros(())}, "prompt_embeds"),
        ([1, 2], {"prompt_embeds": "embeds"}, "prompt_embeds"),
        ([1, 2], {"request_id": 7}, "request_id=7 must be a string"),
        ([1, 2], {"request_id": None}, "request_id=None"),
    ],
)
def test_requests_that_cannot_be(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"request_id": "r", "prompt_token_ids": tokens, **options})


def test_appending_wrong_tokens_adds_none():
    request = Request("r", np.arange(3, dtype=np.uint8))
    with pytest.raises(ValueError, match="int32"):
        request.append([4, 2**40])
    assert request.token_ids.tolist() == [0, 1, 2]
    assert request.num_tokens == 3
    request.append(np.array([-1, 5], np.int64))
    assert request.token_ids.tolist() == [0, 1, 2, -1, 5]


COUNTS_GIVEN = {
    "num_new_tokens": lambda m, r, n: m.allocate_slots(r, n),
    "num_lookahead_tokens": lambda m, r, n: m.allocate_slots(r, 1, num_lookahead_tokens=n),
    "num_external_computed_tokens": lambda m, r, n: m.allocate_slots(r, 1, num_external_computed_tokens=n),
    "reserved_blocks": lambda m, r, n: m.allocate_slots(r, 1, reserved_blocks=n),
    "num_lookahead_tokens of a batch": lambda m, r, n: m.allocate_batch([r], 1, num_lookahead_tokens=n),
    "num_new_tokens of a batch": lambda m, r, n: m.allocate_batch([r], [n]),
    "settled_tokens": lambda m, r, n: m.remove_skipped_blocks(r, n),
    "num_computed_tokens": lambda m, r, n: m.cache_blocks(r, n),
    "num_tokens": lambda m, r, n: m.get_block_ids(r, n),
    "max_tokens": lambda m, r, n: m.block_tables([r], n),
}


@pytest.mark.parametrize("given", COUNTS_GIVEN)
@pytest.mark.parametrize("kind", [-1, 1.0, np.float32(2), float("nan"), True, np.True_, "3", [3]], ids=repr)
def test_what_is_no_count_changes_nothing(given, kind):
    """A count of 1.5 used to be found out when half of the blocks were taken."""
    manager = manager_of()
    request = running(manager, "r", 300)
    before = snapshot(manager)
    with pytest.raises(ValueError, match=given.split()[0]):
        COUNTS_GIVEN[given](manager, request, kind)
    assert snapshot(manager) == before
    manager.check()


@pytest.mark.parametrize("counter", ["num_computed_tokens", "num_in_flight_tokens"])
@pytest.mark.parametrize("kind", [1.0, float("nan"), "3", None, [3], np.array([3])], ids=repr)
def test_counters_that_are_no_counts_change_nothing(counter, kind):
    manager = manager_of()
    requests = [running(manager, "good", 255), running(manager, "r", 300)]
    setattr(requests[1], counter, kind)
    before = snapshot(manager)
    for call in (
        lambda: manager.allocate_slots(requests[1], 1),
        lambda: manager.allocate_batch(requests, 1),
        lambda: manager.blocks_to_finish(requests[1:]),
    ):
        with pytest.raises(ValueError, match=f"'r': {counter}=.* must be an integer"):
            call()
    assert snapshot(manager) == before


@pytest.mark.parametrize("integer", [np.uint8, np.int8, np.int16, np.uint32, np.int64, np.uint64])
def test_integers_of_any_type_mean_the_same(integer):
    """numpy's narrow integers wrap: 100 + np.uint8(200) is 44, and np.uint32(5) - 8 is 4294967293."""
    plain, typed = manager_of(), manager_of()
    requests = [running(plain, "r", 100), running(typed, "r", 100)]
    requests[1].num_computed_tokens, requests[1].num_in_flight_tokens = integer(100), integer(3)
    requests[0].num_in_flight_tokens = 3
    for verb, count, lookahead in (("allocate_slots", 120, 100), ("allocate_batch", 127, 90)):
        for manager, request, as_type in zip((plain, typed), requests, (int, integer), strict=True):
            new = as_type(count)
            given = (request, new) if verb == "allocate_slots" else ([request], np.array([new]))
            getattr(manager, verb)(*given, num_lookahead_tokens=as_type(lookahead))
        assert snapshot(plain) == snapshot(typed)
    assert lists(plain.block_tables(requests[:1], 127)) == lists(typed.block_tables(requests[1:], integer(127)))
    assert typed.fits(integer(100))


def test_counts_that_wrap_are_refused():
    manager = manager_of()
    requests = [running(manager, "a", 255), running(manager, "b", 300)]
    before = snapshot(manager)
    for counts in (2**63 - 1, [1, 2**63 - 1], np.array([1, 2**64 - 1], np.uint64), np.array([1, 3797], np.uint64)):
        with pytest.raises(ValueError, match="more than max_model_len=4096"):
            manager.allocate_batch(requests, counts)
    assert snapshot(manager) == before


@pytest.mark.parametrize("batch", [lambda r: dict.fromkeys(r, 1), lambda r: (q for q in r), set, tuple, iter])
def test_a_batch_may_be_any_iterable(batch):
    manager = manager_of()
    requests = [running(manager, "a", 255), running(manager, "b", 511)]
    for request in requests:
        request.append([1] * 2)
    result = manager.allocate_batch(batch(requests), 2)
    assert len(result.block_id) == 10
    manager.check()


@pytest.mark.parametrize("block_size", [8, 64])
def test_a_request_goes_back_only_as_far_as_its_windows_reach(block_size):
    """Before that, a query would silently read the null block in place of what was let go of."""
    manager = manager_of((256, None), (block_size, 128))
    request = running(manager, "r", 300)
    request.append([1] * 9)
    manager.remove_skipped_blocks(request, 300)
    first = (300 - 127) // block_size  # the oldest block still held
    least = first * block_size + 127
    for computed in (299, least):
        request.num_computed_tokens = computed
        manager.allocate_slots(request, 1)
        manager.allocate_batch([request], 1)
    request.num_computed_tokens = least - 1
    before = snapshot(manager)
    for allocate in (lambda: manager.allocate_slots(request, 1), lambda: manager.allocate_batch([request], 1)):
        with pytest.raises(ValueError, match=f"before token {least} .* preempt the request"):
            allocate()
    assert snapshot(manager) == before
    manager.preempt(request)
    assert compute(manager, request) == 256
    manager.check()


def test_a_request_keeps_its_identity():
    manager = manager_of()
    request = running(manager, "r", 300)
    before = snapshot(manager)
    with pytest.raises(AttributeError):
        request.request_id = "other"
    with pytest.raises(TypeError, match="request 'r' cannot be copied"):
        copy.copy(request)
    for stranger in (copy.deepcopy(request), pickle.loads(pickle.dumps(request))):
        with pytest.raises(ValueError, match="'r' is unknown to this manager"):
            manager.free(stranger)
    assert snapshot(manager) == before


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda manager: pickle.loads(pickle.dumps(manager))])
def test_a_copied_manager_stands_alone(duplicate):
    manager = manager_of(record_events=True, record_table_updates=True, debug=True)
    running(manager, "r", 300)
    before, twin = snapshot(manager), duplicate(manager)
    assert snapshot(twin) == before
    twin.free(twin.active["r"])
    assert compute(twin, add(twin, "again", range(300))) == 256
    twin.check()
    manager.check()
    assert snapshot(manager) == before


@pytest.mark.parametrize("ids", [[1.5], [True], [[1, 2]], [[1], [1, 2]], "abc", None, [10**30], [-1], [400], {1: 2}])
def test_what_is_no_block_id_changes_nothing(ids):
    manager = manager_of()
    popped = manager.pop_blocks_for_free(running(manager, "r", 300))
    before = snapshot(manager)
    for verb in (manager.free_popped_blocks, manager.finish_cow_copies, manager.evict_blocks, manager.pool.free):
        with pytest.raises(ValueError, match="block|inhomogeneous"):
            verb(ids)
    with pytest.raises(ValueError, match="block ids must be a list of integers"):
        manager.free_popped_blocks(popped + 0.25)
    assert snapshot(manager) == before
    manager.free_popped_blocks(popped)
    manager.check()


@pytest.mark.parametrize("hits", [(), (1, 2), 0, "all"])
def test_hits_are_what_a_look_up_returned(hits):
    manager = manager_of()
    with pytest.raises(ValueError, match=r"new_computed_blocks=.* must be what get_computed_blocks returned"):
        manager.allocate_slots(add(manager, "r", [1]), 1, new_computed_blocks=hits)
    manager.check()


@pytest.mark.parametrize(("settled", "known"), [(305, True), (1, False)])
def test_windows_slide_only_over_tokens_that_there_are(settled, known):
    manager = manager_of()
    request = running(manager, "r", 300) if known else add(manager, "r", range(300))
    before = snapshot(manager)
    if known:
        with pytest.raises(ValueError, match=f"settled_tokens={settled} of request 'r' must lie between 0 and 300"):
            manager.remove_skipped_blocks(request, settled)
    else:
        manager.remove_skipped_blocks(request, 0)
    assert snapshot(manager) == before


def test_hits_are_only_for_the_first_allocation():
    manager = manager_of()
    running(manager, "first", 300)
    request = add(manager, "r", range(300))
    hits = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 4)
    with pytest.raises(ValueError, match="'r' holds blocks already; pass new_computed_blocks only"):
        manager.allocate_slots(request, 4, new_computed_blocks=hits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": ()}, "give a plan, or groups"),
        ({"num_blocks": None}, "give a plan, or groups"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"max_model_len": 0}, "max_model_len=0 must be an integer of at least 1"),
        ({"max_requests": True}, "max_requests=True"),
        ({"max_in_flight_tokens": -1}, "max_in_flight_tokens=-1"),
        ({"watermark": 1.0}, "watermark=1.0"),
        ({"watermark": -0.1}, "watermark=-0.1"),
        ({"max_model_len": 1.5}, "max_model_len=1.5"),
        ({"max_model_len": 2**31}, "max_model_len=2147483648 .* at most 2147483647"),
        ({"max_in_flight_tokens": 0}, "max_in_flight_tokens=0"),
        ({"max_requests": "many"}, "max_requests='many'"),
        ({"watermark": "low"}, "watermark='low'"),
        ({"watermark": float("nan")}, "watermark=nan"),
        ({"hash_secret": b"short"}, "hash_secret has 5 bytes; give 16 to 64"),
        ({"hash_secret": "x" * 32}, "hash_secret is 'x.*; give 16 to 64 bytes"),
        ({"retention_interval": 256.0}, "retention_interval=256.0"),
        ({"retention_interval": True}, "retention_interval=True"),
        ({"prefix_match_unit": 0}, "prefix_match_unit=0"),
        ({"prefix_match_unit": 2.0}, "prefix_match_unit=2.0"),
        ({"prefix_match_unit": 0, "groups": groups((256, None)), "partial_hits": True}, "prefix_match_unit=0"),
        ({"prefix_match_unit": 3, "groups": groups((256, None)), "partial_hits": True}, "3 must divide .* of 256"),
        ({"prefix_match_unit": 512, "groups": groups((256, None))}, "prefix_match_unit=512 must divide"),
        ({"plan": groups((256, None))}, "plan is a tuple; pass a KVCachePlan, or groups by name"),
        ({"retention_interval": 100}, "retention_interval=100 must be 0 or a multiple of 256"),
        ({"retention_interval": -256}, "retention_interval=-256"),
        ({"retention_interval": 256, "groups": groups((256, None))}, "needs a sliding group"),
        ({"prefix_match_unit": 3}, "prefix_match_unit=3 must divide"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        KVCacheManager(**{"groups": groups(*PRO), "num_blocks": 16, **options})


# Plans, statistics, events, debugging


def test_a_plan_gives_everything():
    made = plan(ModelConfig.preset("deepseek-v4-pro"), 2 * 2**30, draft="mtp", max_in_flight_tokens=512)
    manager = KVCacheManager(made, max_requests=2)
    assert manager.pool.num_blocks == made.num_blocks
    assert (manager.hit_granularity, manager.hash_block_size) == (made.scheduler_block_size, made.hash_block_size)
    assert manager.needs_zeroing == made.needs_zeroing
    assert [rules.is_draft for rules in manager.rules] == [False, True, True, False, False]
    assert manager.fits(manager.max_model_len)
    assert not manager.fits(manager.max_model_len + 1)
    request = running(manager, "r", 1000)
    assert [len(table) for table in manager.get_block_ids(request)] == [4, 16, 16, 125, 250]
    shorter = dataclasses.replace(made, max_model_len=1000)
    assert KVCacheManager(shorter).max_model_len == 1000
    assert KVCacheManager(shorter, max_model_len=900).max_model_len == 900


def tiny_specs():
    common = {"head_size": 512, "dtype": "bfloat16", "alignment": 512}
    return {
        "full": MLAAttentionSpec(block_size=16, **common),
        "state": SlidingWindowMLASpec(block_size=1, sliding_window=8, **common),
    }


def test_a_request_that_is_admitted_can_finish():
    """vllm-project/tpu-inference#3081: state blocks of one token starved a pool of 156 blocks; requests hung."""
    memory = 156 * 16 * 1024
    longest = KVCacheManager(plan_from_specs(tiny_specs(), memory, max_in_flight_tokens=2048)).max_model_len
    with pytest.raises(PlanError, match="too little memory"):
        plan_from_specs(tiny_specs(), memory, max_in_flight_tokens=2048, max_model_len=longest + 1)
    made = plan_from_specs(tiny_specs(), memory, max_in_flight_tokens=2048, max_model_len=longest)
    for length in (1, 17, longest - 1, longest):
        manager = KVCacheManager(made)
        assert manager.fits(length)
        request = add(manager, "r", range(length))
        assert manager.allocate_slots(request, length, full_sequence_must_fit=True) is not None
        manager.free(request)
        assert manager.pool.num_free_blocks == made.num_blocks - 1
    with pytest.raises(ValueError, match="more than max_model_len"):
        add(KVCacheManager(made), "r", range(longest + 1))
    small_steps = plan_from_specs(tiny_specs(), memory, max_in_flight_tokens=16)
    manager = KVCacheManager(small_steps)
    assert manager.max_model_len > 10 * longest
    compute(manager, add(manager, "r", [1] * manager.max_model_len), chunk=16)


def test_statistics():
    manager = manager_of()
    first = running(manager, "first", 300)
    running(manager, "second", 300)
    stats = manager.stats()
    assert (stats.num_requests, stats.num_blocks, stats.queried_tokens, stats.hit_tokens) == (2, 400, 600, 256)
    assert stats.hit_rate == pytest.approx(256 / 600)
    assert sum(stats.blocks_per_group) + stats.num_free_blocks == 399
    assert sum(stats.usage_per_group) == pytest.approx(stats.usage)
    assert stats.blocks_per_group[0] == 3  # one shared block, two tails
    assert stats.evictions == 0
    manager.evict_blocks(manager.get_block_ids(first)[0][:1])
    assert manager.stats().evictions == 1


def test_events_follow_the_prefix_cache():
    manager = manager_of(record_events=True)
    request = running(manager, "r", 300)
    stored = manager.take_events()
    assert {type(event) for event in stored} == {BlockStored}
    assert len(stored) == manager.pool.num_cached_keys
    assert {event.num_tokens for event in stored if event.group == 0} == {256}
    manager.evict_blocks([stored[0].block_id])
    assert manager.take_events() == [BlockRemoved(stored[0].group, stored[0].block_id, stored[0].key)]
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [CacheCleared()]
    assert not manager.reset_prefix_cache() or manager.take_events() == [CacheCleared()]


def test_a_canary_covers_what_nobody_may_read():
    manager = manager_of(debug=True)
    request = running(manager, "r", 300)
    assert len(manager.take_canary_block_ids())
    owned = {block for table in manager.get_block_ids(request) for block in table if block}
    cached = {block for block in range(400) if manager.pool.covered[block]}
    manager.free(request)
    assert set(manager.take_canary_block_ids().tolist()) == owned - cached
    assert manager_of().take_canary_block_ids().tolist() == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m, r: m.pool.ref_counts.__setitem__(300, 1), "reference counts"),
        (lambda m, r: m.tables.data.__setitem__((r._row, 0), 0), "null entry"),
        (lambda m, r: m.tables.data.__setitem__((7, 3), 5), "not cleared"),
        (lambda m, r: m.pool.group_of.__setitem__(m.get_block_ids(r)[0][0], 3), "group"),
        (lambda m, r: m.tables.data.__setitem__((r._row, 1), 9), "not null"),
        (lambda m, r: m.pool.covered.__setitem__(m.get_block_ids(r)[0][0], 0), "disagree"),
        (lambda m, r: m.tables.length.__setitem__((r._row, 0), 99), "length 99"),
        (lambda m, r: m.pool._queue.pop(1), "free"),
    ],
)
def test_check_finds_damage(damage, message):
    manager = manager_of(max_model_len=600)
    request = running(manager, "r", 256)
    manager.check()
    damage(manager, request)
    with pytest.raises(AssertionError, match=message):
        manager.check()
