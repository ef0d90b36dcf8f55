"""Where bytes are, against a row by row count of what later tokens read; and which bytes a token reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax import footprint, holdings
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.footprint import bytes_by_cause, bytes_read, mean_bytes_by_cause
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.plan import plan
from dsv4kv_jax.roles import role_of, state_ratio

GIB = 2**30
PRO = ModelConfig.preset("deepseek-v4-pro")
SMALL = ModelConfig(name="small", num_hidden_layers=4, compress_ratios=(1, 4, 128, 4), index_topk=16)


def read_later(spec, num_tokens: int) -> set[int]:
    """Written positions that some token from position `num_tokens` on reads."""
    later = range(num_tokens, num_tokens + 300)
    if spec.window is None:
        return set(range(num_tokens))
    ratio = state_ratio(spec)
    readers = [t for t in later if ratio is None or (t + 1) % ratio == 0]
    return {p for t in readers for p in range(max(t - spec.window + 1, 0), t + 1) if p < num_tokens}


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 8, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 1000])
@pytest.mark.parametrize("lookahead", [0, 5])
def test_bytes_by_cause_equal_a_count_of_rows(num_tokens, lookahead):
    planned = plan(SMALL, GIB)
    schedule = Schedule(chunk_tokens=64, in_flight_tokens=64, lookahead_tokens=lookahead)
    held = holdings.exact_blocks(planned.groups, num_tokens, schedule)
    for group, blocks, result in zip(planned.groups, held, bytes_by_cause(planned, num_tokens, schedule), strict=True):
        last = -(-(num_tokens + lookahead) // group.block_size)
        positions = range((last - blocks) * group.block_size, last * group.block_size)
        counted = {"live": 0, "tails": 0, "beyond_window": 0, "stale_states": 0}
        for spec in group.specs:
            later = read_later(spec, num_tokens)
            for row in range(positions.start // spec.compress_ratio, positions.stop // spec.compress_ratio):
                tokens = range(row * spec.compress_ratio, (row + 1) * spec.compress_ratio)
                if tokens[-1] >= num_tokens:
                    cause = "tails"
                elif set(tokens) <= later:
                    cause = "live"
                else:
                    cause = "stale_states" if role_of(spec) == "state" else "beyond_window"
                counted[cause] += spec.format.row_bytes
        assert {cause: getattr(result, cause) for cause in counted} == counted
        assert result.total == blocks * planned.block_stride_bytes


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 1_048_576),
    options=st.sampled_from([{}, {"cache_dtype": "bf16"}, {"hybrid": False}, {"draft": "mtp"}]),
)
def test_every_byte_of_every_block_has_one_cause(num_tokens, options):
    planned = plan(PRO, 80 * GIB, **options)
    parts = bytes_by_cause(planned, num_tokens)
    held = holdings.exact_blocks(planned.groups, num_tokens, Schedule.of(planned))
    assert sum(part.total for part in parts) == sum(held) * planned.layout.bytes_per_block
    for part in parts:
        assert min(getattr(part, cause) for cause in ("live", *footprint.WASTE)) >= 0


def test_the_mean_is_over_one_period():
    planned = plan(PRO, 80 * GIB)
    mean = mean_bytes_by_cause(planned, 2048)
    single = [bytes_by_cause(planned, length) for length in range(2048 - 255, 2049)]
    for cause, value in mean.items():
        assert value == pytest.approx(sum(getattr(part, cause) for parts in single for part in parts) / 256)
    assert 0.4 < mean["live"] / sum(mean.values()) < 0.6


def test_bytes_read_by_one_token():
    planned = plan(PRO, 80 * GIB)
    read = bytes_read(planned, 1_048_576)
    assert read.window == 61 * 128 * 584
    assert read.compressed == 30 * 1024 * 584 + 31 * 8192 * 584
    assert read.indexer == 30 * 262_144 * 132
    assert read.state == 30 * (8192 + 2048) + 31 * 4096
    assert read.total == read.window + read.compressed + read.indexer + read.state
    short = bytes_read(planned, 100)
    assert (short.window, short.compressed, short.indexer) == (61 * 100 * 584, 30 * 25 * 584, 30 * 25 * 132)


def test_states_are_read_once_a_row_on_average():
    """Over 128 tokens: C4 layers compress 32 times from 8 half rows, C128 layers once from 128 whole ones."""
    read = bytes_read(plan(PRO, 80 * GIB), 4096).state
    assert 128 * read == 30 * 32 * 8 * (8192 + 2048) // 2 + 31 * 128 * 4096


def test_bytes_read_need_the_models_topk():
    planned = plan(SMALL, GIB)
    assert bytes_read(planned, 1024, index_topk=16).compressed == 2 * 16 * 584 + 8 * 584
    with pytest.raises(PlanError, match="model 'small' is no preset.*give index_topk"):
        bytes_read(planned, 1024)
    with pytest.raises(PlanError, match="num_tokens=0"):
        bytes_read(planned, 0, index_topk=16)
