"""The block pool: the queue's exact order, holds, eviction, and refusals that change nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax.block_pool import BlockPool
from dsv4kv_jax.free_queue import FreeQueue
from dsv4kv_jax.prefix_cache import BlockRemoved, BlockStored, CacheCleared


def snapshot(pool):
    cached = {group: dict(pool.cached_blocks(group)) for group in range(2)}
    return pool.free_queue().tolist(), pool.ref_counts.tolist(), pool.covered.tolist(), cached


def cache(pool, blocks, keys, ends, group=0):
    pool.cache_full_blocks([(group, len(blocks))], np.array(blocks), keys, np.array(ends))


@pytest.fixture
def pool():
    return BlockPool(8, num_groups=2)


def test_blocks_are_taken_from_the_head(pool):
    assert pool.num_free_blocks == 7
    assert pool.take(3).tolist() == [1, 2, 3]
    assert pool.ref_counts.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    assert pool.free_queue().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("enable_caching", "queue"), [(True, [3, 4, 5, 6, 7, 2, 1]), (False, [4, 5, 6, 7, 3, 2, 1])])
def test_freed_blocks_without_a_prefix_come_first(enable_caching, queue):
    pool = BlockPool(8, enable_caching=enable_caching)
    taken = pool.take(3)
    if enable_caching:
        cache(pool, taken[:2], [b"a", b"b"], [64, 128])
    pool.free([3, 2, 1])
    assert pool.free_queue().tolist() == queue


def test_touch_unlinks_a_free_block(pool):
    pool.take(3)
    pool.free([2])
    assert pool.free_queue().tolist() == [2, 4, 5, 6, 7]
    pool.touch([5, 3])
    assert pool.free_queue().tolist() == [2, 4, 6, 7]
    assert pool.ref_counts.tolist() == [0, 1, 0, 2, 0, 1, 0, 0]


def test_usage_ignores_the_null_block():
    pool = BlockPool(400)
    pool.take(53)
    assert pool.usage == pytest.approx(53 / 399)
    assert BlockPool(1).usage == 0.0


def test_a_key_finds_its_earliest_block():
    pool = BlockPool(16)
    taken = pool.take(9)
    for block in (5, 9):
        cache(pool, [block], [b"k"], [64])
    assert pool.cached_blocks(0)[b"k"] == 5
    assert pool.num_cached_keys == 1
    pool.free(taken)
    assert pool.free_queue().tolist()[-2:] == [5, 9]
    pool.take(14)  # all but the last in the queue, which is block 9
    assert pool.cached_blocks(0)[b"k"] == 9
    pool.take(1)
    assert pool.num_cached_keys == 0
    assert pool.num_evictions == 2


def test_equal_keys_of_two_groups_are_two_entries(pool):
    one, two = pool.take(2, np.array([0, 1]))
    cache(pool, [one], [b"k"], [64], group=0)
    cache(pool, [two], [b"k"], [64], group=1)
    assert (pool.cached_blocks(0)[b"k"], pool.cached_blocks(1)[b"k"], pool.num_cached_keys) == (one, two, 2)


def test_a_partial_key_gives_way_to_a_full_one_and_then_stands_beside_it(pool):
    (block,) = pool.take(1)
    pool.cache_partial_block(0, block, b"tail", 40)
    pool.cache_partial_block(0, block, b"tail", 40)
    assert pool.cache_keys_of(block) == [b"tail"]
    cache(pool, [block], [b"full"], [64])
    assert pool.cache_keys_of(block) == [b"full"]
    pool.cache_partial_block(0, block, b"tail", 40)
    assert pool.cache_keys_of(block) == [b"full", b"tail"]
    assert pool.covered[block] == 64
    pool.evict([block, block])
    assert pool.num_cached_keys == pool.covered[block] == 0
    assert pool.ref_counts[block] == 1


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([5, 5], "double free: block 5 is held 1 times and freed 2 times"),
        ([6], "double free: block 6 is held 0 times"),
        ([0], "block 0.*null block"),
        ([5, 0], "block 0.*null block"),
        ([-1], "block -1.*1 to 7"),
        ([8], "block 8.*1 to 7"),
        ([1.5], "integers"),
        ([[5]], "integers"),
        ([[5], [5, 6]], "integers"),
        ([True], "integers"),
        ("5", "integers"),
        (5, "integers"),
        (None, "integers"),
        ([2**70], "integers"),
    ],
)
def test_a_wrong_free_is_refused_whole(pool, blocks, message):
    cache(pool, pool.take(5), [bytes([n]) for n in range(5)], [64] * 5)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=message):
        pool.free(blocks)
    assert snapshot(pool) == before
    assert sorted(pool.take(2).tolist()) == [6, 7]


def test_a_block_is_freed_once(pool):
    pool.take(5)
    pool.free([5])
    with pytest.raises(ValueError, match="double free"):
        pool.free([5])
    assert sorted(pool.take(3).tolist()) == [5, 6, 7]


def test_a_block_may_be_freed_as_often_as_it_is_held(pool):
    pool.take(3)
    pool.touch([2])
    pool.free([2, 3, 2])
    assert pool.free_queue().tolist() == [3, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("count", [-1, 8, True, 1.0, "3", None])
def test_too_many_blocks_are_refused(pool, count):
    before = snapshot(pool)
    with pytest.raises(ValueError, match="cannot take 8 blocks: 7 of 8" if count == 8 else f"count={count!r} must be"):
        pool.take(count)
    assert snapshot(pool) == before


@pytest.mark.parametrize(("verb", "blocks"), [("touch", [2, 2]), ("touch", [0]), ("evict", [0]), ("evict", [8])])
def test_wrong_blocks_are_refused(pool, verb, blocks):
    pool.take(3)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=verb):
        getattr(pool, verb)(blocks)
    assert snapshot(pool) == before


@pytest.mark.parametrize("group", [2, -1, 1.5, "a", None, [0], [0, 2], [[0, 1]], [0, 1, 1]])
def test_blocks_are_taken_for_groups_that_there_are(pool, group):
    before = snapshot(pool)
    with pytest.raises(ValueError, match="cannot take 2 blocks for group=.* one of the 2 groups"):
        pool.take(2, group)
    assert snapshot(pool) == before


@pytest.mark.parametrize("count", [0, -3, 2.0, True, 2**31])
def test_a_pool_needs_a_block(count):
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(count)


def test_reset_needs_an_idle_pool(pool):
    taken = pool.take(2)
    cache(pool, taken, [b"a", b"b"], [64, 128])
    assert not pool.reset()
    assert pool.num_cached_keys == 2
    pool.free(taken)
    queue = pool.free_queue().tolist()
    assert pool.reset()
    assert pool.num_cached_keys == 0
    assert pool.free_queue().tolist() == queue


def test_events_tell_what_is_findable():
    pool = BlockPool(4, record_events=True)
    taken = pool.take(3)
    cache(pool, taken[:2], [b"a", b"a"], [64, 64])
    pool.cache_partial_block(0, 1, b"t", 40)
    assert pool.take_events() == [BlockStored(0, 1, b"a", 64), BlockStored(0, 2, b"a", 64), BlockStored(0, 1, b"t", 40)]
    pool.evict([1])
    assert pool.take_events() == [BlockRemoved(0, 1, b"a"), BlockRemoved(0, 1, b"t")]
    pool.free([3, 2, 1])
    assert pool.reset()
    assert pool.take_events() == [CacheCleared()]
    assert pool.take_events() == BlockPool(4).take_events() == []


def test_the_canary_marks_blocks_whose_content_died():
    pool = BlockPool(8, debug=True)
    taken = pool.take(3)
    cache(pool, taken[:2], [b"a", b"b"], [64, 128])
    pool.free([3, 2])  # 2 stays findable
    assert pool.take_canary_block_ids().tolist() == [3]
    pool.evict([1, 2])  # 1 is still held
    assert pool.take_canary_block_ids().tolist() == [2]
    pool.free([1])
    assert pool.take_canary_block_ids().tolist() == [1]
    assert pool.take_canary_block_ids().tolist() == []
    taken = pool.take(7)
    cache(pool, taken[:1], [b"c"], [64])
    pool.free(taken[:1])
    pool.take(1)
    assert pool.take_canary_block_ids().tolist() == [taken[0]]


QUEUE_STEPS = st.lists(
    st.tuples(st.sampled_from(["pop", "front", "back", "remove", "peek"]), st.integers(0, 12), st.randoms()),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(num_blocks=st.integers(1, 40), steps=QUEUE_STEPS)
def test_the_queue_is_a_list(num_blocks, steps):
    queue, model = FreeQueue(num_blocks), list(range(1, num_blocks))
    outside = []
    for verb, count, random in steps:
        if verb in ("pop", "peek"):
            count = min(count, len(model))
            taken = getattr(queue, verb)(count).tolist()
            assert taken == model[:count]
            if verb == "pop":
                outside += taken
                del model[:count]
        elif verb == "remove":
            some = random.sample(model, min(count, len(model)))
            queue.remove(np.array(some, np.int32))
            model = [block for block in model if block not in some]
            outside += some
        else:
            random.shuffle(outside)
            some, outside = outside[:count], outside[count:]
            getattr(queue, f"push_{verb}")(np.array(some, np.int32))
            model = some + model if verb == "front" else model + some
        assert queue.to_array().tolist() == model
        assert len(queue) == len(model)
        assert all((block in queue) == (block in model) for block in range(1, num_blocks))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), enable_caching=st.booleans())
def test_a_batch_of_turns_equals_its_turns(data, enable_caching):
    """`release_and_take` against the same `release` and `take` calls one after another, shared blocks included."""
    num_groups, num_turns = 3, data.draw(st.integers(1, 6))
    pools = [BlockPool(60, enable_caching=enable_caching, num_groups=num_groups) for _ in range(2)]
    held = {}
    for turn in range(num_turns):
        for group in range(num_groups):
            count = data.draw(st.integers(0, 3))
            (blocks, _) = (pool.take(count, group) for pool in pools)
            held[turn, group] = blocks
    shared = data.draw(st.lists(st.tuples(st.integers(0, num_turns - 1), st.integers(0, num_groups - 1)), max_size=2))
    for key in set(shared):  # the next turn's request holds them too
        other = ((key[0] + 1) % num_turns, key[1])
        if other[0] != key[0] and len(held[key]) and not set(held[key]) & set(held[other]):
            for pool in pools:
                pool.touch(held[key])
            held[other] = np.concatenate([held[other], held[key]])
    if enable_caching:
        registered = data.draw(st.sets(st.integers(1, 59)))
        for pool in pools:
            for block in registered & set(np.flatnonzero(pool.ref_counts).tolist()):
                cache(pool, [block], [b"%d" % block], [64], group=int(pool.group_of[block]))
    takes = {key: data.draw(st.integers(0, 3)) for key in held}
    if sum(takes.values()) > pools[0].num_free_blocks:
        return
    expected = []
    for turn in range(num_turns):
        for group in range(num_groups):
            pools[0].release(held[turn, group])
        for group in range(num_groups):
            expected += pools[0].take(takes[turn, group], group).tolist()
    keys = [(turn, group) for turn in range(num_turns) for group in range(num_groups)]
    numbers = np.arange(len(keys))
    wanted = np.array([takes[key] for key in keys])
    taken = pools[1].release_and_take(
        np.concatenate([held[key] for key in keys]),
        numbers.repeat([len(held[key]) for key in keys]),
        wanted[wanted > 0],
        numbers[wanted > 0],
        num_groups,
    )
    assert taken.tolist() == expected
    assert pools[0].free_queue().tolist() == pools[1].free_queue().tolist()
    assert pools[0].ref_counts.tolist() == pools[1].ref_counts.tolist()
    assert (pools[0].group_of[taken] == pools[1].group_of[taken]).all()
    assert [dict(pools[0].cached_blocks(g)) for g in range(3)] == [dict(pools[1].cached_blocks(g)) for g in range(3)]
