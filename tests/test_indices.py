"""Slots and indices against the oracle: random steps, hostile tables, empty work, and what must be refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax import kernels
from dsv4kv_jax.kernels.slots import step_tokens

REQUESTS, BLOCKS_PER_REQUEST, TOKENS = 3, 5, 14
INT32_MAX = 2**31 - 1


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


entries = st.integers(1, 9) | st.sampled_from([-1, 0, -(2**31), INT32_MAX, INT32_MAX // 64, INT32_MAX // 256, 2**25])
tables = st.lists(
    st.lists(entries, min_size=BLOCKS_PER_REQUEST, max_size=BLOCKS_PER_REQUEST), min_size=REQUESTS, max_size=REQUESTS
)


@st.composite
def steps(draw, max_first=0):
    """(block table, query_start_loc, seq_lens): some requests may have no tokens in the step, or none at all."""
    queries = draw(st.lists(st.integers(0, 4), min_size=REQUESTS, max_size=REQUESTS))
    prefixes = draw(
        st.lists(st.integers(0, 400) | st.sampled_from([0, 63, 127, 255, 1279]), min_size=REQUESTS, max_size=REQUESTS)
    )
    starts = np.cumsum([draw(st.integers(0, max_first)), *queries])
    return np.int32(draw(tables)), np.int32(starts), np.int32(queries) + np.int32(prefixes)


@functools.cache
def jitted(operation, **options):
    return jax.jit(functools.partial(getattr(kernels, operation), **options))


def assert_equal(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jnp.int32
        np.testing.assert_array_equal(np.asarray(one), other)


many = settings(max_examples=30, deadline=None)


@pytest.mark.parametrize("block_size", [4, 8, 64, 256])
@given(step=steps())
@many
def test_slot_mapping(block_size, step):
    found = jitted("slot_mapping", block_size=block_size, num_tokens=TOKENS)(*step)
    assert_equal(found, oracle.slot_mapping(*step, block_size, TOKENS))


@pytest.mark.parametrize(("block_size", "ratio"), [(256, 4), (256, 128), (128, 128), (64, 4), (12, 3)])
@given(step=steps())
@many
def test_compressed_slot_mapping(block_size, ratio, step):
    found = jitted("compressed_slot_mapping", block_size=block_size, compress_ratio=ratio, num_tokens=TOKENS)(*step)
    assert_equal(found, oracle.compressed_slot_mapping(*step, block_size, ratio, TOKENS))


@pytest.mark.parametrize(("block_size", "window", "width"), [(64, 128, None), (64, 8, 10), (256, 128, 256), (4, 3, 3)])
@given(step=steps())
@many
def test_swa_indices(block_size, window, width, step):
    found = jitted("swa_indices", block_size=block_size, window=window, width=width, num_tokens=TOKENS)(*step)
    assert_equal(found, oracle.swa_indices(*step, block_size, TOKENS, window, width))


@pytest.mark.parametrize("width", [16, 40])
@given(
    step=steps(), spans=st.lists(st.tuples(st.integers(-5, 3), st.integers(-1, 20)), min_size=TOKENS, max_size=TOKENS)
)
@many
def test_swa_indices_of_images(width, step, spans):
    """Spans around each token's own position, and ones that it is no part of."""
    positions = [-1 if token is None else token[1] for token in oracle.tokens(*step[1:], TOKENS)]
    spans = np.int32([(max(p + a, -1), p + b) for p, (a, b) in zip(positions, spans, strict=True)])
    run = jitted("swa_indices", block_size=64, window=16, width=width, num_tokens=TOKENS)
    expected = oracle.swa_indices(*step, 64, TOKENS, 16, width, spans)
    assert_equal(run(*step, image_spans=spans), expected)


def test_an_image_sees_itself_from_end_to_end():
    table, starts, lens = np.int32([[1, 2, 3, 4]]), np.int32([0, 200]), np.int32([200])
    spans = np.full((200, 2), -1, np.int32)
    spans[10:40] = 10, 39  # within one window
    spans[50:200] = 50, 199  # longer than the window
    run = jitted("swa_indices", block_size=64, window=128, width=128 + 150, num_tokens=200)
    rows, counts = run(table, starts, lens, image_spans=spans)
    slots = jitted("slot_mapping", block_size=64, num_tokens=200)(table, starts, lens)
    rows, slots = np.asarray(rows), np.asarray(slots)
    for token, first, last in [(9, 0, 9), (10, 0, 39), (39, 0, 39), (40, 0, 40), (60, 0, 199), (190, 50, 199)]:
        assert counts[token] == last + 1 - first
        np.testing.assert_array_equal(rows[token, : counts[token]], slots[first : last + 1])


@given(step=steps(), draft_tokens=st.sampled_from([1, 5]))
@many
def test_draft_indices(step, draft_tokens):
    run = jitted("draft_indices", block_size=64, window=32, draft_tokens=draft_tokens, num_tokens=TOKENS)
    assert_equal(run(*step), oracle.draft_indices(*step, 64, TOKENS, 32, draft_tokens))


def test_a_draft_block_shares_one_range():
    table = np.int32([[3, 5, 7, 9], [4, 6, 0, 0]])
    run = jitted("draft_indices", block_size=64, draft_tokens=5, num_tokens=12)
    rows, lens = map(np.asarray, run(table, np.int32([0, 5, 10]), np.int32([205, 65])))
    assert rows.shape == (12, 256)
    assert lens.tolist() == [133] * 5 + [65] * 5 + [0, 0]
    assert (rows[0, 0], rows[0, 132]) == (5 * 64 + 8, 9 * 64 + 12)
    assert (rows[:5] == rows[0]).all()
    assert (rows[5, 0], rows[5, 64]) == (256, 6 * 64)
    assert (rows[10:] == -1).all()


@pytest.mark.parametrize("rows_per_block", [2, 64])
@given(
    table=tables,
    topk=st.lists(
        st.lists(st.integers(-2, 400) | st.sampled_from([INT32_MAX, -(2**31)]), min_size=6, max_size=6),
        min_size=4,
        max_size=4,
    ),
    requests=st.lists(st.integers(-1, REQUESTS), min_size=4, max_size=4),
    valid=st.lists(st.booleans(), min_size=4, max_size=4),
)
@many
def test_topk_to_slots(rows_per_block, table, topk, requests, valid):
    run = jitted("topk_to_slots", storage_block_size=rows_per_block)
    args = (np.int32(topk), np.int32(requests), np.int32(table))
    assert_equal(run(*args), oracle.topk_to_slots(topk, requests, table, rows_per_block))
    expected = oracle.topk_to_slots(topk, requests, table, rows_per_block, valid)
    assert_equal(run(*args, valid=np.array(valid)), expected)


def test_topk_of_nothing():
    """sgl-project/sglang#25837: -1 is no index, not a large one."""
    topk = np.int32([[-1, -1, -1, -1], [3, -1, 7, -1], [5, -1, -1, -1], [128, -2, -1, -1]])
    slots, lens = jitted("topk_to_slots", storage_block_size=64)(topk, np.int32([0] * 4), np.int32([[7, 3]]))
    assert slots.tolist() == [[-1] * 4, [451, -1, 455, -1], [453, -1, -1, -1], [-1] * 4]
    assert lens.tolist() == [0, 2, 1, 1]


@pytest.mark.parametrize(
    "lens", [(100, 4096), (20000, 131072), (131072, 131072), (1048576, 1048576), (700, 2136), (0, 1)]
)
def test_c128a_width(lens):
    assert kernels.c128a_width(*lens) == oracle.c128a_width(*lens)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("block_size", "ratio", "width"), [(256, 128, 128), (256, 128, 3), (16, 8, 128)])
@given(step=steps())
@many
def test_c128a_indices(local, block_size, ratio, width, step):
    options = {"block_size": block_size, "width": width, "local": local, "num_tokens": TOKENS}
    found = jitted("c128a_indices", compress_ratio=ratio, **options)(*step)
    assert_equal(found, oracle.c128a_indices(*step, ratio=ratio, **options))


@pytest.mark.parametrize("ratio", [1, 2, 4])
@given(
    step=steps(max_first=9),
    topk=st.lists(st.lists(st.integers(-1, 90), min_size=5, max_size=5), min_size=TOKENS, max_size=TOKENS),
    spans=st.none() | st.lists(st.tuples(st.integers(-40, 3), st.integers(-1, 9)), min_size=TOKENS, max_size=TOKENS),
)
@many
def test_combine_topk_swa(ratio, step, topk, spans):
    _, starts, lens = step
    topk = np.int32(topk)[:, : 0 if ratio == 1 else 5]
    gathered = np.asarray(kernels.gather_lens(starts, lens, window=16))
    queries = np.diff(starts)
    assert gathered.tolist() == [oracle.gather_len(int(q), int(s - q), 16) for q, s in zip(queries, lens, strict=True)]
    if spans is not None:
        positions = [-1 if token is None else token[1] for token in oracle.tokens(starts, lens, TOKENS)]
        spans = np.int32([(max(p + a, -1), p + b) for p, (a, b) in zip(positions, spans, strict=True)])
    size = {"compressed_rows": 100, "workspace_rows": 140, "window": 16, "max_image_tokens": 20}
    found = jitted("combine_topk_swa", compress_ratio=ratio, **size)(topk, starts, lens, gathered, image_spans=spans)
    assert_equal(found, oracle.combine_topk_swa(topk, starts, lens, gathered, ratio, image_spans=spans, **size))


@given(
    requests=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 9000)), max_size=12),
    ratio=st.sampled_from([1, 4, 128]),
)
@many
def test_prefill_chunks(requests, ratio):
    queries = [query for query, _ in requests]
    lens = [query + prefix for query, prefix in requests]
    size = {"max_model_len": 10_000, "max_num_batched_tokens": 1024}
    chunks = kernels.prefill_chunks(queries, lens, compress_ratio=ratio, **size)
    found = [(chunk.start, chunk.stop, chunk.compressed_rows, chunk.workspace_rows) for chunk in chunks]
    assert found == oracle.prefill_chunks(queries, lens, ratio, **size)
    limit = 4 * ((-(-10_000 // ratio) if ratio > 1 else 0) + 128 + 1024)
    for chunk in chunks:
        assert (chunk.stop - chunk.start) * chunk.workspace_rows <= limit
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks)][: len(chunks)]


def test_prefill_chunks_refusals():
    size = {"compress_ratio": 4, "max_model_len": 10_000, "max_num_batched_tokens": 1024}
    with pytest.raises(ValueError, match="query_lens has 1 entries, seq_lens 2"):
        kernels.prefill_chunks([1], [1, 2], **size)
    with pytest.raises(ValueError, match="request 1: query_lens 3 must be from 0 to seq_lens 2"):
        kernels.prefill_chunks([1, 3], [1, 2], **size)


def test_storage_offsets():
    slots = jnp.int32([0, 63, 64, 130, -1])
    page = dataclasses.replace(pages.PAGES["swa_bf16"], block_stride_bytes=1957 * 1024)
    assert kernels.storage_offsets(slots, page).tolist() == [0, 63, 1957, 3916, -1]
    dense = dataclasses.replace(page, block_stride_bytes=64 * 1024)
    assert kernels.storage_offsets(slots, dense).tolist() == slots.tolist()
    with pytest.raises(ValueError, match=r"blocks lie 2004480 B apart, .* row's 1024 B \(512 B remain\)"):
        kernels.storage_offsets(slots, dataclasses.replace(page, block_stride_bytes=1957 * 1024 + 512))
    for name in ("swa", "c4a", "c128a"):
        with pytest.raises(ValueError, match=r"no multiple of the row's 584 B .* use bf16 or fp8"):
            kernels.storage_offsets(slots, pages.PAGES[name])


@given(
    swa=st.lists(st.lists(st.integers(-1, 900), min_size=8, max_size=8), min_size=3, max_size=3),
    compressed=st.lists(st.lists(st.integers(-1, 900), min_size=5, max_size=5), min_size=3, max_size=3),
    lens=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    top_k=st.sampled_from([0, 3, 13]),
)
@many
def test_flashinfer_indices(swa, compressed, lens, top_k):
    window, dense = pages.PAGES["swa_fp8"], pages.PAGES["c128a_fp8"]
    spans = [page.block_stride_bytes // 512 for page in (window, dense)]
    expected = oracle.flashinfer_indices(swa, compressed, lens, 64, spans[0], 2, spans[1], top_k)
    run = jitted("flashinfer_indices", swa_page=window, compressed_page=dense, top_k=top_k)
    assert_equal(run(np.int32(swa), np.int32(compressed), np.int32(lens)), expected)
    alone = oracle.flashinfer_indices(swa, np.zeros((3, 0)), [0] * 3, 64, spans[0], 2, spans[1], top_k)
    assert_equal(jitted("flashinfer_indices", swa_page=window, top_k=top_k)(np.int32(swa)), alone)


# --- named cases ---


def test_padding_of_tables():
    """vllm-project/vllm#57388: neither -1 nor the null block 0 nor a column past the table becomes a slot."""
    table = np.int32([[4, 9, -1, -1], [0, 0, 0, 0]])
    slots = jitted("slot_mapping", block_size=64, num_tokens=132)(table, np.int32([0, 130, 130]), np.int32([130, 0]))
    assert slots.tolist() == [*range(256, 320), *range(576, 640), -1, -1, -1, -1]
    beyond = jitted("slot_mapping", block_size=64, num_tokens=3)(table, np.int32([0, 2, 3]), np.int32([257, 1]))
    assert beyond.tolist() == [-1, -1, -1]
    run = jitted("swa_indices", block_size=64, num_tokens=2)
    rows, lens = map(np.asarray, run(table, np.int32([0, 1, 1]), np.int32([130, 0])))
    assert lens.tolist() == [128, 0]
    assert rows[0].tolist() == [*range(258, 320), *range(576, 640), -1, -1]
    assert (rows[1] == -1).all()


@pytest.mark.parametrize("x64", [False, True])
def test_slots_stay_in_int32(x64):
    """ROCm/ATOM#1460: a block id whose slots would wrap is none; the last one that fits is exact."""
    with jax.enable_x64(x64):
        for block_size in (1, 2, 64, 256):
            last = (INT32_MAX + 1) // block_size - 1
            table = np.int32([[last, min(last + 1, INT32_MAX), INT32_MAX]])
            starts, lens = np.int32([0, 3 * block_size]), np.int32([3 * block_size])
            run = jitted("slot_mapping", block_size=block_size, num_tokens=3 * block_size)
            slots = run(table, starts, lens)
            assert slots.dtype == jnp.int32
            wanted = last * block_size + np.arange(block_size, dtype=np.int64)
            np.testing.assert_array_equal(np.asarray(slots, np.int64)[:block_size], wanted)
            if block_size > 1:
                assert (np.asarray(slots)[block_size:] == -1).all()


@pytest.mark.parametrize("x64", [False, True])
def test_one_step_in_every_form(x64):
    """Everything at once with 64-bit types off and on, from host integers of 64 bits."""
    table = np.array([[7, 3, 9, 0], [5, 0, 0, 0]])
    step = (table, np.array([0, 5, 7]), np.array([262, 5]))
    with jax.enable_x64(x64):
        for name, options, expected in [
            ("slot_mapping", {"block_size": 64}, oracle.slot_mapping(*step, 64, 9)),
            ("compressed_slot_mapping", {"block_size": 256, "compress_ratio": 4}, None),
            ("swa_indices", {"block_size": 64}, oracle.swa_indices(*step, 64, 9)),
            ("c128a_indices", {"width": 128}, oracle.c128a_indices(*step, 9, 128)),
        ]:
            if expected is None:
                expected = oracle.compressed_slot_mapping(*step, 256, 4, 9)
            assert_equal(getattr(kernels, name)(*step, num_tokens=9, **options), expected)


LENGTHS = [3, 4, 5, 7, 8, 127, 128, 129, 255, 256, 257]


@pytest.mark.parametrize(
    ("ratio", "counts"),
    [(4, [0, 1, 1, 1, 2, 31, 32, 32, 63, 64, 64]), (128, [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2])],
)
def test_entries_at_the_boundaries(ratio, counts):
    """lightseekorg/tokenspeed#1612: as many entries as groups are complete, whatever the chunks of the prompt."""
    table = np.int32([[1, 2]])
    run = jitted("compressed_slot_mapping", block_size=256, compress_ratio=ratio, num_tokens=257)
    for length, count in zip(LENGTHS, counts, strict=True):
        whole = np.asarray(run(table, np.int32([0, length]), np.int32([length])))
        written = whole[whole >= 0].tolist()
        assert written == [256 // ratio + entry for entry in range(count)]
        for chunk in (1, 3, 5, 64, 127) if length in (129, 257) else ():
            parts = []
            for start in range(0, length, chunk):
                stop = min(start + chunk, length)
                slots = np.asarray(run(table, np.int32([0, stop - start]), np.int32([stop])))
                parts += slots[slots >= 0].tolist()
            assert parts == written


EMPTY = [(0, 3, 0), (0, 0, 4), (2, 0, 4), (2, 3, 0), (2, 3, 4)]


@pytest.mark.parametrize(("requests", "blocks", "num_tokens"), EMPTY)
def test_empty_work(requests, blocks, num_tokens):
    """vllm-project/vllm#51486: no tokens, no requests, no blocks, or only requests of length 0."""
    step = (np.ones((requests, blocks), np.int32), np.zeros(requests + 1, np.int32), np.zeros(requests, np.int32))
    size = {"num_tokens": num_tokens}
    assert (np.asarray(kernels.slot_mapping(*step, block_size=64, **size)) == -1).all()
    assert (np.asarray(kernels.compressed_slot_mapping(*step, block_size=256, compress_ratio=4, **size)) == -1).all()
    pairs = [
        kernels.swa_indices(*step, block_size=64, **size),
        kernels.draft_indices(*step, block_size=64, draft_tokens=5, **size),
        kernels.c128a_indices(*step, width=0, **size),
        kernels.topk_to_slots(
            np.zeros((num_tokens, 0), np.int32), np.zeros(num_tokens, np.int32), step[0], storage_block_size=64
        ),
    ]
    gathered = kernels.gather_lens(*step[1:])
    assert gathered.shape == (requests,)
    no_topk = np.zeros((num_tokens, 0), np.int32)
    space = {"compress_ratio": 1, "compressed_rows": 0, "workspace_rows": 0}
    pairs.append(kernels.combine_topk_swa(no_topk, *step[1:], gathered, **space))
    for rows, lens in pairs:
        assert rows.shape[0] == lens.shape[0] == num_tokens
        assert (np.asarray(rows) == -1).all()
        assert not np.asarray(lens).any()
    assert kernels.prefill_chunks([], [], compress_ratio=4, max_model_len=9, max_num_batched_tokens=9) == []


def test_requests_longer_than_their_sequence():
    """Tokens before position 0, from a broken query_start_loc, are padding."""
    step = step_tokens(np.int32([0, 4]), np.int32([2]), num_tokens=5)
    assert step.positions.tolist() == [-1, -1, 0, 1, -1]
    assert step.valid.tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("starts", [[0, 5, 3], [0, 9, 2], [4, 0, 6]])
def test_starts_that_decrease(starts):
    """Refused on the host; on the device no token has a position past the end of its request."""
    args = np.int32([[1, 2], [3, 4]]), np.int32(starts), np.int32([20, 30])
    with pytest.raises(ValueError, match=f"query_start_loc falls from {max(starts[:2])} to {min(starts[1:])}"):
        kernels.slot_mapping(*args, block_size=16, num_tokens=10)
    step = step_tokens(jnp.asarray(starts, jnp.int32), args[2], num_tokens=10)
    lens = args[2][np.asarray(step.token_to_req)]
    assert (np.asarray(step.positions) < lens).all()
    assert (np.asarray(step.valid) == (np.asarray(step.positions) >= 0)).all()


def test_refusals():
    table, starts, lens = np.ones((2, 3), np.int32), np.int32([0, 1, 2]), np.int32([5, 6])
    size = {"block_size": 64, "num_tokens": 2}
    with pytest.raises(ValueError, match="block_table has 1 rows for 2 requests"):
        kernels.slot_mapping(table[:1], starts, lens, **size)
    with pytest.raises(
        ValueError, match=f"num_tokens={2**31} must be at most {INT32_MAX}; counts and indices are int32"
    ):
        kernels.slot_mapping(table, starts, lens, block_size=64, num_tokens=2**31)
    with pytest.raises(ValueError, match="query_start_loc has 2 entries; 3 are needed"):
        kernels.slot_mapping(table, starts[:2], lens, **size)
    with pytest.raises(ValueError, match=r"block_table has shape \(6,\); it must have 2 dimension"):
        kernels.slot_mapping(table.reshape(-1), starts, lens, **size)
    with pytest.raises(ValueError, match="seq_lens has dtype bool"):
        kernels.slot_mapping(table, starts, np.array([True, False]), **size)
    with pytest.raises(ValueError, match="seq_lens has dtype float32"):
        kernels.slot_mapping(table, starts, jnp.float32(lens), **size)
    for block_size, ratio in ((0, 4), (256, 3), (64, 128), (256, 0), (-256, 4)):
        with pytest.raises(ValueError, match=r"block_size=|compress_ratio="):
            kernels.compressed_slot_mapping(
                table, starts, lens, block_size=block_size, compress_ratio=ratio, num_tokens=2
            )
    with pytest.raises(ValueError, match="width=64 is less than window=128"):
        kernels.swa_indices(table, starts, lens, width=64, **size)
    with pytest.raises(ValueError, match=r"image_spans has shape \(3, 2\); it must be \[2, 2\]"):
        kernels.swa_indices(table, starts, lens, image_spans=np.zeros((3, 2), np.int32), **size)
    with pytest.raises(ValueError, match=r"valid is int32\[2\]; it must be bool\[2\]"):
        kernels.topk_to_slots(table, starts[:2], table, storage_block_size=64, valid=lens)
    with pytest.raises(ValueError, match="num_tokens=-1 must be a Python integer of at least 0"):
        kernels.slot_mapping(table, starts, lens, block_size=64, num_tokens=-1)
    with pytest.raises(ValueError, match="compressed_indices needs compressed_page and compressed_lens"):
        kernels.flashinfer_indices(table, table, swa_page=pages.PAGES["swa_fp8"])
    with pytest.raises(ValueError, match="compressed_indices has 1 rows for 2 rows of swa_indices"):
        page = pages.PAGES["swa_fp8"]
        kernels.flashinfer_indices(table, table[:1], lens, swa_page=page, compressed_page=page)
    for name, args, options in [
        ("slot_mapping", (table, starts, lens), size),
        ("compressed_slot_mapping", (table, starts, lens), size | {"compress_ratio": 4}),
        ("swa_indices", (table, starts, lens), size),
        ("c128a_indices", (table, starts, lens), {"width": 128, "num_tokens": 2}),
        ("topk_to_slots", (table, starts[:2], table), {"storage_block_size": 64}),
        (
            "combine_topk_swa",
            (table, starts, lens, lens),
            {"compress_ratio": 4, "compressed_rows": 2, "workspace_rows": 9},
        ),
        ("flashinfer_indices", (table,), {"swa_page": pages.PAGES["swa_fp8"]}),
    ]:
        with pytest.raises(ValueError, match="implementation='fast' is not known; use one of 'xla', 'mosaic_gpu'"):
            getattr(kernels, name)(*args, implementation="fast", **options)
