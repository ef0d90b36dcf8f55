"""Capacity figures against pools that really hand out blocks."""

import random

import brute_pool
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax import capacity as cap
from dsv4kv_jax import holdings
from dsv4kv_jax.capacity import Mix, capacity
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.plan import plan, plan_from_specs
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec

GIB = 2**30
PRO = ModelConfig.preset("deepseek-v4-pro")
FLASH = ModelConfig.preset("deepseek-v4-flash")
SHAPES = ((256, None), (64, 128), (64, 128), (8, 128), (4, 8))  # Pro's groups
BOUNDARIES = sorted({m * b + d for b in (4, 8, 64, 128, 256, 8192) for m in (1, 2, 3) for d in (-1, 0, 1)})
SCHEDULES = {
    "plain": Schedule(chunk_tokens=8192, in_flight_tokens=8192),
    "short chunks": Schedule(chunk_tokens=200, in_flight_tokens=8192),
    "two steps in flight": Schedule(chunk_tokens=512, in_flight_tokens=1024, steps_in_flight=2),
    "drafts": Schedule(chunk_tokens=512, in_flight_tokens=1024, steps_in_flight=2, lookahead_tokens=6),
    "no reservation": Schedule(chunk_tokens=512, in_flight_tokens=512, reserve_full_sequence=False),
}


def blocks(num_blocks: int, **options):
    return plan(PRO, 1, num_gpu_blocks_override=num_blocks, **options)


def brute(schedule: Schedule, shapes=SHAPES):
    return lambda num_blocks: brute_pool.BrutePool(
        shapes, num_blocks, in_flight=schedule.in_flight_tokens, max_model_len=schedule.max_model_len
    )


@pytest.mark.parametrize(
    ("memory_gib", "model", "options", "stride"),
    [
        (10, PRO, {}, 1_435_968),
        (10, FLASH, {}, 1_002_240),
        (10, PRO, {"indexer": "mxfp4"}, 1_315_008),
        (10, PRO, {"cache_dtype": "bf16"}, 2_290_688),
    ],
)
def test_blocks_are_counted_at_the_real_stride(memory_gib, model, options, stride):
    planned = plan(model, memory_gib * GIB, **options)
    result = capacity(planned, 2048)
    assert result.block_bytes == stride
    assert result.num_blocks == memory_gib * GIB // stride


def test_a_request_of_a_million_tokens_is_admitted_up_to_7450_blocks():
    result = capacity(blocks(7477), 1_048_576)
    assert result.worst_case == (4096, 131, 131, 1041, 2051)
    assert sum(result.worst_case) == result.peak_blocks == 7450
    assert result.num_requests == 1
    assert result.decoding == (4096, 3, 3, 17, 3)
    assert capacity(blocks(7451), 1_048_576).num_requests == 1
    assert capacity(blocks(7450), 1_048_576).num_requests == 0


def test_a_request_of_2048_tokens_spends_26_of_34_blocks_on_windows_and_states():
    result = capacity(plan(PRO, 80 * GIB), 2048)
    assert (result.decoding_blocks, result.fixed_blocks) == (34, 26)
    assert result.decoding_bytes == 34 * 1_435_968 == 48_822_912
    assert result.bytes_per_token == 1_435_968 / 256


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_equals_the_brute_pool(name):
    schedule = SCHEDULES[name]
    rng = random.Random(name)
    lengths = [*rng.sample(BOUNDARIES, 12), 1, *(rng.randrange(1, 40_000) for _ in range(4))]
    groups = blocks(100).groups
    for length in lengths:
        pool = brute(schedule)(10**6)
        assert brute_pool.prefill(pool, "a", length, schedule) == (
            True,
            sum(holdings.prefilling_blocks(groups, length, schedule)),
        )
        assert brute_pool.grow(pool, "b", length, schedule)
        assert tuple(pool.held("b")) == holdings.exact_blocks(groups, length, schedule)
        _, most = brute_pool.fullest_length(brute(schedule), length, schedule)
        assert most == sum(holdings.decoding_blocks(groups, length, schedule))


def test_a_million_tokens_equal_the_brute_pool():
    schedule = SCHEDULES["plain"]
    for length in (1_048_576, 1_048_575, 777_777):
        pool = brute(schedule)(20_000)
        ok, most = brute_pool.prefill(pool, "a", length, schedule)
        assert ok
        assert most == sum(holdings.prefilling_blocks(blocks(100).groups, length, schedule))
        assert most <= sum(cap.blocks_per_request(blocks(100).groups, length, 8192))


@pytest.mark.parametrize("name", SCHEDULES)
def test_requests_equal_what_the_brute_pool_admits(name):
    schedule = SCHEDULES[name]
    rng = random.Random(f"{name} admission")
    for length in (*rng.sample(BOUNDARIES, 5), rng.randrange(1, 3000), rng.randrange(3000, 30_000)):
        parked_at, most = brute_pool.fullest_length(brute(schedule), length, schedule)
        for want in (0, 1, 4):
            extra = capacity(blocks(2), length, schedule).extra_blocks
            exactly = 1 + extra + want * most
            for num_blocks in (exactly, exactly - 1, exactly + rng.randrange(most)):
                if num_blocks < 2:
                    continue
                got = capacity(blocks(num_blocks), length, schedule).num_requests
                assert got == brute_pool.admitted(brute(schedule)(num_blocks), length, parked_at, schedule), (
                    f"{length} tokens in {num_blocks} blocks"
                )


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(2, 20_000),
    more=st.integers(0, 5000),
    length=st.integers(1, 1_048_576),
    longer=st.integers(0, 5000),
    chunk=st.integers(64, 8192),
    lookahead=st.integers(0, 8),
)
def test_more_memory_never_admits_less_and_longer_requests_never_more(
    num_blocks, more, length, longer, chunk, lookahead
):
    schedule = Schedule(chunk_tokens=chunk, in_flight_tokens=8192, lookahead_tokens=lookahead)
    longer = min(length + longer, 1_048_576)
    here = capacity(blocks(num_blocks), length, schedule)
    assert capacity(blocks(num_blocks + more), length, schedule).num_requests >= here.num_requests
    beyond = capacity(blocks(num_blocks), longer, schedule)
    assert beyond.num_requests <= here.num_requests
    assert beyond.decoding_blocks >= here.decoding_blocks >= sum(here.exact)
    assert beyond.peak_blocks >= here.peak_blocks


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 200_000), chunk=st.integers(1, 4096), ahead=st.integers(0, 3), lookahead=st.integers(0, 4))
def test_no_schedule_exceeds_the_worst_case(length, chunk, ahead, lookahead):
    in_flight = chunk * (1 + ahead)
    schedule = Schedule(
        chunk_tokens=chunk, in_flight_tokens=in_flight, steps_in_flight=1 + ahead, lookahead_tokens=lookahead
    )
    groups = blocks(100).groups
    bound = cap.blocks_per_request(groups, length + lookahead, in_flight + lookahead * (1 + ahead))
    assert sum(holdings.prefilling_blocks(groups, length, schedule)) <= sum(bound)


def test_longest_context_is_where_one_more_token_costs_a_request():
    planned = plan(PRO, 10 * GIB)
    for num_requests in (1, 5, 40, 200):
        longest = cap.longest_context(planned, num_requests)
        assert capacity(planned, longest).num_requests >= num_requests
        assert longest == 1_048_576 or capacity(planned, longest + 1).num_requests < num_requests
    assert cap.longest_context(planned, 10**6) == 0


def test_max_model_len_bounds_lookahead_and_length():
    planned = blocks(1000, max_model_len=2048)
    schedule = Schedule.of(planned, lookahead_tokens=64)
    assert holdings.exact_blocks(planned.groups, 2048, schedule)[0] == 8
    with pytest.raises(PlanError, match=r"num_tokens=2049 is more than max_model_len=2048"):
        capacity(planned, 2049)


class TestMix:
    def test_a_mix_of_one_length_is_that_length(self):
        planned = plan(PRO, 80 * GIB)
        for length in (1, 100, 2048, 131_072):
            assert cap.mixed_concurrency(planned, length) == pytest.approx(capacity(planned, length).concurrency)

    def test_whole_rounds_of_a_mix_are_admitted_and_one_more_is_not(self):
        schedule = SCHEDULES["short chunks"]
        mix = {700: 3, 3000: 1}
        parked = {n: brute_pool.fullest_length(brute(schedule), n, schedule) for n in mix}
        num_blocks = 2000
        value = cap.mixed_concurrency(blocks(num_blocks), mix, schedule)
        rounds = cap.whole_requests(value) // 4
        pool = brute(schedule)(num_blocks)
        order = [700, 700, 700, 3000]
        for index in range(4 * rounds):
            length = order[index % 4]
            assert brute_pool.prefill(pool, "new", length, schedule)[0]
            pool.free("new")
            assert brute_pool.grow(pool, str(index), parked[length][0], schedule)
        used = rounds * sum(parked[n][1] * w for n, w in mix.items())
        extra = max(capacity(blocks(2), n, schedule).extra_blocks for n in mix)
        assert num_blocks - 1 - used - extra < sum(parked[n][1] * w for n, w in mix.items())

    @pytest.mark.parametrize(
        ("mix", "message"),
        [
            ({}, r"0 lengths and 0 weights"),
            ({2048: 0}, r"weights=\[0\] must all be positive"),
            ({2048: float("nan")}, r"must all be positive"),
            ({0: 1}, r"lengths=0 must be an integer of at least 1"),
        ],
    )
    def test_bad_mixes_are_refused(self, mix, message):
        with pytest.raises(PlanError, match=message):
            Mix.of(mix)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk_tokens": 0}, r"chunk_tokens=0 must be an integer of at least 1"),
        (
            {"in_flight_tokens": 100, "chunk_tokens": 101},
            r"chunk_tokens=101 in each of steps_in_flight=1 are more than",
        ),
        ({"steps_in_flight": 2}, r"chunk_tokens=8 in each of steps_in_flight=2 are more than in_flight_tokens=8"),
        ({"steps_in_flight": 0}, r"steps_in_flight=0 must be an integer of at least 1"),
        ({"lookahead_tokens": -1}, r"lookahead_tokens=-1 must be an integer of at least 0"),
        ({"max_model_len": 0}, r"max_model_len=0 must be an integer of at least 1"),
        ({"max_model_len": 1.5}, r"max_model_len=1.5 must be an integer of at least 1"),
    ],
)
def test_bad_schedules_are_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        Schedule(**({"chunk_tokens": 8, "in_flight_tokens": 8} | fields))


@pytest.mark.parametrize("num_tokens", [0, -1, True, 2.5])
def test_bad_lengths_are_refused(num_tokens):
    with pytest.raises(PlanError, match="num_tokens="):
        capacity(blocks(100), num_tokens)


def test_a_plan_without_caches_has_no_capacity():
    with pytest.raises(PlanError, match="has no caches"):
        capacity(plan_from_specs({}, 1), 10)


class TestTinyStateBlocks:
    """A pool of 156 blocks with a state group of one-token blocks (vllm-project/tpu-inference#3081)."""

    SPECS = {  # noqa: RUF012
        "full": MLAAttentionSpec(block_size=64, head_size=512, dtype="bfloat16", alignment=512),
        "state": SlidingWindowMLASpec(block_size=1, head_size=1024, dtype="float32", alignment=512, sliding_window=8),
    }

    def test_planning_refuses_what_could_only_wait(self):
        fits = self.planned(None)
        assert fits.num_blocks == 156
        with pytest.raises(PlanError, match="too little memory") as refused:
            self.planned(1000)
        longest = refused.value.max_context_that_fits
        assert longest is not None
        assert self.planned(longest).max_model_len == longest
        with pytest.raises(PlanError):
            self.planned(longest + 1)

    def test_a_request_is_admitted_or_known_never_to_be(self):
        planned = self.planned(None)
        schedule = Schedule.of(planned)
        shapes = [(g.block_size, g.sliding_window) for g in planned.groups]
        longest = cap.longest_context(planned, 1)
        for length, fits in ((longest, True), (longest + 1, False)):
            pool = brute(schedule, shapes)(156)
            assert brute_pool.prefill(pool, "only", length, schedule)[0] is fits
            assert (capacity(planned, length).num_requests == 1) is fits

    def planned(self, max_model_len):
        stride = max(spec.page_size_bytes for spec in self.SPECS.values())
        return plan_from_specs(self.SPECS, 156 * stride, groups=[["full"], ["state"]], max_model_len=max_model_len)


def test_requests_are_charged_blocks_of_the_stride_never_more():
    """A pool of 13,270 blocks of 1,002,240 bytes and a given list of pages (comment on vllm-project/vllm#52495)."""
    planned = plan(FLASH, 1, num_gpu_blocks_override=13_270)
    result = capacity(planned, 100_000)
    assert result.block_bytes == 1_002_240  # not the 1,099,584 that were charged
    pages = (132, 528, 528, 4227, 2129)
    assert sum(pages) == 7544
    assert cap.concurrency(13_270, sum(pages)) == pytest.approx(1.76, abs=0.005)
    # The same request with its pages in flight counted once for the pool: it settles to its window and states.
    settled = (132, 3, 3, 3, 17)
    assert cap.concurrency(13_270, sum(settled), sum(pages) - sum(settled)) > 1.76


def test_one_state_block_short_is_told_before_anything_runs():
    """11,094 blocks needed, 6,958 free, nothing running (vllm-project/vllm-ascend#15204)."""
    with pytest.raises(PlanError, match="too little memory") as refused:
        blocks(6959, max_model_len=1_048_576)
    assert refused.value.min_blocks == 7451
    assert refused.value.required_bytes == 7451 * 1_435_968
    assert refused.value.available_bytes == 6959 * 1_435_968
    fits = refused.value.max_context_that_fits
    assert fits is not None
    assert capacity(blocks(6959), fits).num_requests == 1
