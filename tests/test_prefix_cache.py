"""Prefix identity, what enters the cache, and look-ups, against direct transcriptions of the rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_support import PRO, add, compute, groups, manager_of

from dsv4kv_jax.group_rules import build_rules
from dsv4kv_jax.hashing import PrefixKeys
from dsv4kv_jax.request import MultiModalItem, Request

SECRET = bytes(32)


def keys_of(request, segment=16, hash_block_size=4, secret=SECRET):
    return PrefixKeys(request, segment=segment, hash_block_size=hash_block_size, secret=secret)


def identity(request, end, hash_block_size=4):
    """What a key of the first `end` tokens must tell apart: tokens, and the extra keys of each hash block (rule A8)."""
    extras = []
    for start in range(0, end, hash_block_size):
        stop = start + hash_block_size
        extra = [request.lora_name]
        extra += [
            (item.item_id, item.start - start)
            for item in request.mm_items
            if item.start < stop and start < item.start + item.length
        ]
        extra.append(request.cache_salt if start == 0 else None)
        embeds = request.prompt_embeds
        extra.append(None if embeds is None else embeds[start:stop].tobytes())
        extras.append(tuple(extra))
    return tuple(request.token_ids[:end]), tuple(extras)


@st.composite
def similar_requests(draw):
    length = draw(st.integers(4, 60))
    tokens = [0] * length
    for position in draw(st.lists(st.integers(0, length - 1), max_size=2)):
        tokens[position] = 1
    items = []
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, length - 1))
        items.append(MultiModalItem(draw(st.sampled_from("ab")), start, draw(st.integers(1, length - start))))
    embeds = None
    if draw(st.booleans()):
        embeds = np.zeros((draw(st.integers(1, length)), 2), np.float32)
        embeds[draw(st.integers(0, len(embeds) - 1)), 0] = draw(st.integers(0, 1))
    return Request(
        "r",
        tokens,
        lora_name=draw(st.sampled_from([None, None, "a"])),
        cache_salt=draw(st.sampled_from([None, None, "s", "t"])),
        mm_items=items,
        prompt_embeds=embeds,
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(similar_requests(), min_size=2, max_size=5), st.sampled_from([4, 8, 16]))
def test_keys_are_equal_if_and_only_if_the_contents_are(requests, segment):
    names = {}
    for request in requests:
        ends = range(4, request.num_tokens + 1, 4)
        for end, key in zip(ends, keys_of(request, segment).at(ends), strict=True):
            assert len(key) == 16
            assert names.setdefault(key, identity(request, end)) == identity(request, end)
    assert len(set(names.values())) == len(names)


@settings(max_examples=50, deadline=None)
@given(similar_requests(), st.randoms())
def test_the_order_of_asking_does_not_matter(request_, random):
    ends = list(range(4, request_.num_tokens + 1, 4))
    expected = dict(zip(ends, keys_of(request_).at(ends), strict=True))
    random.shuffle(ends)
    one_by_one = keys_of(request_)
    assert {end: one_by_one.at([end])[0] for end in ends} == expected


def test_appended_tokens_extend_the_chain():
    request = Request("r", range(10))
    keys = keys_of(request)
    before = keys.at([4, 8])
    request.append(range(10, 40))
    assert keys.at([4, 8, 40]) == keys_of(Request("s", range(40))).at([4, 8, 40])
    assert keys.at([4, 8]) == before


def test_another_secret_gives_other_keys():
    request = Request("r", range(16))
    assert not set(keys_of(request).at([4, 8, 16])) & set(keys_of(request, secret=bytes(31) + b"1").at([4, 8, 16]))


def rules_of(*shapes, draft=None, retention=None, segment=256, hash_block_size=4, unit=None):
    return build_rules(
        groups(*shapes, draft=draft),
        segment=segment,
        hit_unit=unit or segment,
        hash_block_size=hash_block_size,
        use_drafts=False,
        retention_interval=retention,
        max_in_flight_tokens=256,
    )


class Ends:
    """Prefix keys that are the prefix lengths themselves."""

    def at(self, ends):
        return list(ends)


def find(rules, tables, limit, drop):
    hit = rules.find(tables, Ends(), limit, drop)
    return hit.num_tokens, [blocks.tolist() for blocks in hit.blocks]


def sliding_model(tables, size, window, segment, limit, drop):
    """Rule A19, word by word."""
    count, needed = limit // size, -(-(window - 1) // size) + drop
    result = [[0] * count for _ in tables]
    run, found = 0, False
    for i in range(count - 1, -1, -1):
        if all((i + 1) * size in table for table in tables):
            if run == 0 and size != segment and (i if drop else i + 1) * size % segment:
                continue
            for row, table in zip(result, tables, strict=True):
                row[i] = table[(i + 1) * size]
            run += 1
            if run == needed:
                count, found = i + needed, True
                break
        else:
            run = 0
    if not found:
        count = run * size // segment * segment // size
    if drop and count:
        count = (count - 1) * size // segment * segment // size
    return count * size, [row[:count] for row in result]


@pytest.mark.parametrize(
    ("present", "drop", "tokens"),
    [
        ({2, 3}, False, 256),
        ({3}, False, 0),
        ({6, 7}, False, 512),
        ({0, 1, 2}, False, 0),
        ({0, 1, 2, 3}, False, 256),
        ({2, 3, 4}, True, 256),
        ({2, 3}, True, 0),
    ],
)
def test_a_window_needs_its_last_blocks(present, drop, tokens):
    (rules,) = rules_of((64, 128))
    table = {(i + 1) * 64: i + 10 for i in present}
    found, (blocks,) = find(rules, [table], 512, drop)
    assert found == tokens
    assert len(blocks) * 64 == tokens
    if tokens == 512:
        assert blocks == [0, 0, 0, 0, 0, 0, 16, 17]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_sliding_look_up(data):
    size, window, segment = data.draw(
        st.sampled_from([(64, 128, 256), (8, 128, 256), (4, 8, 16), (64, 128, 64), (2, 3, 8), (4, 40, 16), (4, 1, 8)])
    )
    (rules,) = rules_of((size, window), segment=segment)
    positions = 3 * segment // size + 2
    dense = data.draw(st.sets(st.integers(0, positions - 1)))
    holes = data.draw(st.sets(st.integers(0, positions - 1), max_size=3))
    tables = [
        {(i + 1) * size: 100 * t + i + 1 for i in range(positions) if (i in dense if mode else i not in holes)}
        for t, mode in enumerate(data.draw(st.lists(st.booleans(), min_size=1, max_size=2)))
    ]
    limit, drop = data.draw(st.integers(0, positions * size)), data.draw(st.booleans())
    if rules.needed + drop:
        assert find(rules, tables, limit, drop) == sliding_model(tables, size, window, segment, limit, drop)


def full_model(tables, size, unit, hash_size, limit, drop):
    """Rules A18 and A51, word by word."""
    count = 0
    while (count + 1) * size <= limit and all((count + 1) * size in table for table in tables):
        count += 1
    hit = count * size
    blocks = [[table[(i + 1) * size] for i in range(count)] for table in tables]
    if unit < size:
        end = min(hit + size - hash_size, limit // hash_size * hash_size)
        while end > count * size:
            if all(end in table for table in tables):
                hit = end
                for row, table in zip(blocks, tables, strict=True):
                    row.append(table[end])
                break
            end -= hash_size
    if drop and hit:
        hit -= min(unit, size)
    hit = hit // unit * unit
    return hit, [row[: -(-hit // size)] for row in blocks]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_full_look_up(data):
    size, unit, hash_size = data.draw(
        st.sampled_from([(256, 256, 4), (64, 256, 4), (16, 4, 4), (32, 16, 16), (4, 4, 4)])
    )
    (rules,) = rules_of((size, None), segment=max(size, unit), unit=unit, hash_block_size=hash_size)
    last = data.draw(st.integers(0, 40))
    partial = data.draw(st.sets(st.integers(1, 40 * size // hash_size), max_size=8))
    hole = data.draw(st.integers(0, 60))
    tables = [
        {(i + 1) * size: 100 * t + i for i in range(last) if i != hole + t}
        | {end * hash_size: 1000 * t + end for end in partial if end * hash_size % size}
        for t in range(data.draw(st.integers(1, 2)))
    ]
    limit, drop = data.draw(st.integers(0, 41 * size)), data.draw(st.booleans())
    assert find(rules, tables, limit, drop) == full_model(tables, size, unit, hash_size, limit, drop)


def mask_model(i, size, window, segment, retention, flagged, prompt, boundary):
    """Rule A32, word by word."""
    shift = int(flagged)
    needed = -(-(window - 1) // size) + shift
    interval = segment if retention is None else retention
    keep = False
    if interval:
        per = interval // size
        if needed >= per:
            return True
        keep = i >= shift and (i - shift) % per >= per - needed
    if retention is not None:
        for x in (prompt - 1, *([boundary] if boundary else [])):
            end = x // segment * segment // size + shift
            keep = keep or end - needed <= i < end
    return keep


@pytest.mark.parametrize(
    ("shape", "flagged", "kept"),
    [
        ((64, 128), False, [2, 3, 6, 7, 10, 11]),
        ((64, 128), True, [2, 3, 4, 6, 7, 8, 10, 11]),
        ((4, 8), False, [62, 63, 126, 127, 190, 191]),
        ((8, 128), False, [*range(16, 32), *range(48, 64), *range(80, 96)]),
    ],
)
def test_every_segment_keeps_its_end(shape, flagged, kept):
    (rules,) = rules_of(shape, draft=0 if flagged else None)
    assert rules.cacheable(0, 768 // shape[0], Request("r", range(800))).tolist() == kept


def test_without_segments_only_the_prompts_end_is_kept():
    (rules,) = rules_of((4, 8), retention=0)
    assert rules.cacheable(0, 200, Request("r", range(700))).tolist() == [126, 127]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_what_is_worth_caching(data):
    size, window = data.draw(st.sampled_from([(64, 128), (8, 128), (4, 8), (64, 1000)]))
    flagged, retention = data.draw(st.booleans()), data.draw(st.sampled_from([None, 0, 256, 768]))
    (rules,) = rules_of((size, window), draft=0 if flagged else None, retention=retention)
    request = Request("r", [0] * data.draw(st.integers(1, 1500)))
    request.shared_prefix_boundary = data.draw(st.sampled_from([0, 256, 512, 1024]))
    start = data.draw(st.integers(0, 1500 // size))
    stop = start + data.draw(st.integers(0, 1500 // size))
    expected = [
        i
        for i in range(start, stop)
        if mask_model(
            i, size, window, 256, retention, flagged, request.num_prompt_tokens, request.shared_prefix_boundary
        )
    ]
    assert rules.cacheable(start, stop, request).tolist() == expected


@pytest.mark.parametrize("draft", [None, 1, 2])
def test_the_writers_and_the_readers_blocks_meet(draft):
    """vllm-project/vllm#51771: blocks cached by the writer were refused by the reader when tokens were looked ahead."""
    manager = manager_of(draft=draft)
    assert compute(manager, add(manager, "first", range(1024))) == 0
    again = add(manager, "again", range(1024))
    assert manager.get_computed_blocks(again).num_tokens == 768
    for end in (256, 512, 768):  # every segment's end is usable
        shorter = add(manager, f"to {end}", range(end + 1))
        found = manager.get_computed_blocks(shorter).num_tokens
        assert found == (end if draft is None else end - 256)
        assert manager.get_computed_blocks(add(manager, f"past {end}", range(end + 65))).num_tokens == end


@pytest.mark.parametrize("length", [4095, 4096, 4097, 8193])
def test_hits_end_at_the_common_multiple_of_the_block_sizes(length):
    """vllm-project/vllm-ascend#16270: a hit granularity of 4096 tokens looks like a cache that never hits."""
    manager = manager_of(
        (4096, None),
        (128, None),
        (32, 128),
        (2, 8),
        (8, 128),
        num_blocks=9000,
        max_model_len=10_000,
        max_in_flight_tokens=10_000,
    )
    assert manager.hit_granularity == 4096
    assert manager_of((256, None), (64, 128), (4, 8), (8, 128)).hit_granularity == 256
    assert compute(manager, add(manager, "first", range(length)), chunk=length) == 0
    # One token must be left to compute, so a prompt of exactly 4096 tokens hits nothing.
    expected = (length - 1) // 4096 * 4096
    assert compute(manager, add(manager, "again", range(length)), chunk=length) == expected
    manager.check()


def test_a_prompt_of_one_block_hits_none_of_it():
    manager = manager_of()
    compute(manager, add(manager, "first", range(600)))
    hits = {n: manager.get_computed_blocks(add(manager, f"{n}", range(n))).num_tokens for n in (256, 257, 512, 513)}
    assert hits == {256: 0, 257: 256, 512: 256, 513: 512}


def test_groups_agree_on_the_shortest_prefix_and_remember_the_longest():
    manager = manager_of(num_blocks=600)
    first = add(manager, "first", range(1100))
    compute(manager, first, chunk=1100)
    states = manager.tables.table(first._row, 4)
    lost = [block for i, block in enumerate(states.tolist()) if block and i not in (126, 127)]
    manager.free(first)
    manager.evict_blocks(lost)
    found = manager.get_computed_blocks(again := add(manager, "again", range(1000)))
    assert (found.num_tokens, found.shared_prefix_boundary) == (512, 768)
    assert again.shared_prefix_boundary == 768
    assert [len(blocks) for blocks in found.block_ids] == [2, 8, 8, 64, 128]


def test_hits_survive_the_churn_of_blocks_that_are_never_cached():
    """Window and state blocks between segment ends are reused before anything that can be found again."""
    manager = manager_of(num_blocks=160)
    compute(manager, add(manager, "kept", range(600)), chunk=64)
    manager.free(manager.active["kept"])
    for number in range(20):
        request = add(manager, f"churn {number}", [number] * 40, skip_reading_prefix_cache=True)
        compute(manager, request, chunk=20)
        manager.free(request)
    assert manager.get_computed_blocks(add(manager, "again", range(600))).num_tokens == 512
    assert manager.stats().evictions == 0


def test_salts_and_adapters_do_not_share():
    manager = manager_of()
    compute(manager, add(manager, "first", range(600), cache_salt="tenant a"))
    for options in ({}, {"cache_salt": "tenant b"}, {"cache_salt": "tenant a", "lora_name": "x"}):
        assert manager.get_computed_blocks(add(manager, "other", range(600), **options)).num_tokens == 0
    assert manager.get_computed_blocks(add(manager, "own", range(600), cache_salt="tenant a")).num_tokens == 512


def test_equal_secrets_give_equal_keys():
    one, two, other = (manager_of(hash_secret=secret, record_events=True) for secret in (b"s" * 16, b"s" * 16, None))
    for manager in (one, two, other):
        compute(manager, add(manager, "r", range(300)))
    keys = [[event.key for event in manager.take_events()] for manager in (one, two, other)]
    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])


def test_pro_constants():
    manager = manager_of(*PRO)
    assert (manager.hit_granularity, manager.hash_block_size) == (256, 4)
    assert [rules.needed for rules in manager.rules[1:]] == [2, 2, 16, 2]
    assert [rules.admission_blocks(10**6) for rules in manager.rules[1:]] == [7, 7, 49, 67]
    assert manager.rules[3].num_skipped(300) == 173
    assert manager.rules[4].num_skipped(300) == 293
