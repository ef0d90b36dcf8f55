"""State rows written in parts, and the means over windows of them: the kernels against XLA, and against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import mosaic_support
import numpy as np
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mosaic_support import INT32_MAX, ON_GPU, assert_same, mosaic

from dsv4kv_jax import kernels
from dsv4kv_jax.kernels import RowWrite, StateRows, StateWindows, _compat, states
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import SlidingWindowMLASpec

HAS_MOSAIC = _compat.why_no_mosaic() is None
needs_mosaic = pytest.mark.skipif(not HAS_MOSAIC, reason=str(_compat.why_no_mosaic()))
RATIO = {"c4_state": 4, "c4_key_state": 4, "c128_state": 128}
every_state = pytest.mark.parametrize("name", list(RATIO))
xla_means = functools.partial(kernels.window_means, implementation="xla")
xla_insert = functools.partial(kernels.insert_rows, implementation="xla")


@pytest.fixture(autouse=True)
def _strict():
    with mosaic_support.strict():
        yield


def toy_page(width, *, block_size=4, window=8, offset=1):
    """A page of float32 rows of any length, for windows of any length."""
    spec = SlidingWindowMLASpec(
        block_size=block_size, head_size=width, dtype="float32", alignment=576, sliding_window=window
    )
    stride = spec.page_size_bytes + 3 * 576
    return PageLayout(name="toy", spec=spec, group=0, buffer=0, offset_bytes=576 * offset, block_stride_bytes=stride)


def random_states(page, count, ratio, seed=0):
    rng, width = np.random.default_rng(seed), page.format.num_values // 2
    kv, score = rng.standard_normal((2, count, width), np.float32)
    ape = rng.standard_normal((ratio, width), np.float32)
    positions = rng.integers(-1, 5 * ratio, count).astype(np.int32)
    return StateRows(*map(jnp.asarray, (kv, 5 * score, ape, positions)))


def insert(slab, page, slots, rows, **options):
    function = functools.partial(kernels.insert_rows, **options)
    return mosaic(function, slab, page, jnp.asarray(slots, jnp.int32), rows)


@pytest.mark.parametrize(("words", "count"), [(2, 20), (66, 1), (400, 20), *((name, 20) for name in RATIO)])
def test_rows_in_parts_equal_joined_rows(words, count):
    """Byte for byte, in every implementation: score + ape is one addition of float32 numbers."""
    page = pages.PAGES[words] if isinstance(words, str) else toy_page(words)
    rows = random_states(page, count, RATIO.get(words, 4))
    blocks = 3
    limit = blocks * page.storage_block_size
    slots = np.random.default_rng(1).permutation(limit)[:count].astype(np.int32)
    slots = np.pad(slots, (0, count - len(slots)), constant_values=-1)
    slots[1::5] = [(-1, limit, INT32_MAX)[i % 3] for i in range(len(slots[1::5]))]
    bias = np.asarray(rows.ape)[np.maximum(rows.positions, 0) % rows.ape.shape[0]]
    joined = jnp.asarray(np.concatenate([rows.kv, np.asarray(rows.score) + bias], axis=1))
    slab = pages.random_slab(page, blocks)
    want = xla_insert(slab, page, jnp.asarray(slots), joined)
    assert_same(xla_insert(slab, page, jnp.asarray(slots), rows), want)
    if HAS_MOSAIC:
        assert_same(insert(slab, page, slots, rows, unique_slots=True), want)
        assert_same(insert(slab, page, slots, rows), want)


@pytest.mark.mosaic
@needs_mosaic
def test_all_that_a_layer_saves_in_one_call():
    """Window rows, states and key states, whose pages lie on one another in blocks of different groups."""
    slab, blocks = pages.random_slab(pages.PAGES["swa"], 5), {"keys_fp8": 1, "c4_state": 2, "c4_key_state": 4}
    writes = []
    for name, block in blocks.items():
        page = pages.PAGES[name]
        slots = block * page.storage_block_size + np.random.default_rng(block).permutation(4)[:3].astype(np.int32)
        is_state = name in RATIO
        rows = random_states(page, 3, 4) if is_state else jnp.asarray(pages.random_rows(page, 3))
        writes.append(RowWrite(page, jnp.asarray(np.where([1, 0, 1], slots, -1)), rows))
    want = slab
    for write in writes:
        want = xla_insert(want, *write[:3])
    assert_same(kernels.insert_many(slab, writes, implementation="xla"), want)
    assert_same(mosaic(functools.partial(kernels.insert_many, unique_slots=True), slab, writes), want)


def make_case(page, ratio, lengths, positions, *, num_blocks=None, seed=0, holes=0):
    """A slab of noise in which `lengths[r]` states of each request are written; windows (requests, positions)."""
    rng, size = np.random.default_rng(seed), page.spec.block_size
    width = max(-(-n // size) for n in lengths)
    num_blocks = num_blocks or 2 + sum(-(-n // size) for n in lengths)
    blocks = iter(rng.permutation(num_blocks - 1) + 1)
    table = np.zeros((len(lengths), width), np.int32)
    for request, length in enumerate(lengths):
        used = -(-length // size)
        table[request, :used] = [next(blocks) for _ in range(used)]
    slab = np.array(pages.random_slab(page, num_blocks, seed))
    flat = slab.reshape(num_blocks, -1)
    flat[:] = 0x7FC00000  # what must not be read is NaN
    state = {}
    for request, length in enumerate(lengths):
        for position in range(length):
            row = rng.standard_normal(page.format.num_values).astype(np.float32)
            row[page.format.num_values // 2 :] *= 4
            state[request, position] = row
            first = page.offset_bytes // 4 + position % size * row.size
            flat[table[request, position // size], first : first + row.size] = row.view(np.uint32)
    for _ in range(holes):
        request, column = rng.integers(len(lengths)), rng.integers(width)
        table[request, column] = rng.choice([0, -1, num_blocks, INT32_MAX])
        for position in range(column * size, column * size + size):
            state.pop((request, position), None)
    requests = np.array([request for request, _ in positions], np.int32)
    where = np.array([position for _, position in positions], np.int32)
    arrays = (jnp.asarray(array) for array in (table, requests, where))
    return jnp.asarray(slab), StateWindows(page, *arrays, compress_ratio=ratio), state


def oracle(page, ratio, state, positions, count=None):
    """The means in float64, from what was written."""
    window, groups = page.spec.window, page.spec.window // ratio
    width = page.format.num_values // (2 * groups)
    means = np.zeros((len(positions), width))
    for index, (request, position) in enumerate(positions[:count]):
        kv, score = [], []
        for token in range(window):
            row = state.get((request, position - (window - 1) + token)) if position >= 0 else None
            if row is not None:
                group = token // ratio
                kv.append(row[group * width :][:width])
                score.append(row[(groups + group) * width :][:width])
        if kv:
            kv, score = np.array(kv, np.float64), np.array(score, np.float64)
            weights = np.exp(score - score.max(axis=0))
            means[index] = (weights * kv).sum(axis=0) / weights.sum(axis=0)
    return means


def check(slab, windows, want):
    """Every implementation against the oracle."""
    results = [xla_means(slab, windows)]
    if HAS_MOSAIC:
        results.append(mosaic(kernels.window_means, slab, windows))
    for means in results:
        for mean, expected in zip(means, want, strict=True):
            assert (mean.shape, mean.dtype) == (expected.shape, jnp.float32)
            np.testing.assert_allclose(mean, expected, rtol=2e-5, atol=2e-6)


@every_state
def test_means(name):
    """The start of a sequence, windows across blocks, unused entries among used ones, a request that does not exist."""
    page, ratio = pages.PAGES[name], RATIO[name]
    lengths = [2 * ratio, 3 * ratio, 1]
    positions = [(1, 3 * ratio - 1), (0, ratio - 1), (-1, -1), (1, ratio - 1), (2, 0), (0, 2 * ratio - 1), (9, 3)]
    slab, windows, state = make_case(page, ratio, lengths, positions)
    check(slab, [windows], [oracle(page, ratio, state, positions)])


@pytest.mark.parametrize("entry", [0, -1, 6, 7, INT32_MAX, -(2**31)])
def test_blocks_that_do_not_exist_have_no_weight(entry):
    """The null block, no block, and blocks past the pool of 6."""
    page, positions = pages.PAGES["c4_key_state"], [(0, 7), (0, 11), (0, 5), (0, 3)]
    slab, windows, state = make_case(page, 4, [12], positions, num_blocks=6)
    table = windows.block_table.at[0, 0].set(entry)
    for position in range(page.spec.block_size):
        del state[0, position]
    check(slab, [windows._replace(block_table=table)], [oracle(page, 4, state, positions)])


def test_several_layers_at_once():
    """Pages of a C4A layer's two state caches lie side by side; the second call leaves one of them without windows."""
    main, key = (pages.PAGES[name] for name in ("c4_state", "c4_key_state"))
    positions = [(0, 7), (0, 3), (-1, -1), (0, 11), (0, 15)]
    cases = [make_case(page, 4, [16], positions, num_blocks=6) for page in (main, key)]
    slab = jnp.where(cases[0][0] == 0x7FC00000, cases[1][0], cases[0][0])
    tables = [case[1].block_table for case in cases]
    assert_same(tables[0], tables[1])
    want = [oracle(page, 4, case[2], positions) for page, case in zip((main, key), cases, strict=True)]
    check(slab, [case[1] for case in cases], want)
    none = cases[0][1]._replace(requests=jnp.zeros(0, jnp.int32), positions=jnp.zeros(0, jnp.int32))
    check(slab, [none, cases[1][1]], [np.zeros((0, 512)), want[1]])
    check(slab, [cases[0][1]._replace(block_table=jnp.zeros((1, 0), jnp.int32))], [np.zeros((5, 512))])


@pytest.mark.parametrize("count", [0, 1, 3, 9])
@pytest.mark.parametrize("name", ["c4_key_state", "c128_state"])
def test_windows_behind_count_are_not_read(name, count, monkeypatch):
    """Also where a program takes several parts, and XLA several chunks."""
    page, ratio = pages.PAGES[name], RATIO[name]
    positions = [(0, ratio - 1), (0, 2 * ratio - 1), (0, ratio), (0, 2 * ratio - 2), (0, ratio + 1)]
    slab, windows, state = make_case(page, ratio, [2 * ratio], positions)
    monkeypatch.setattr(states, "_AT_ONCE", {page.spec.window: 2})
    if HAS_MOSAIC:
        from dsv4kv_jax.kernels import mosaic_states

        monkeypatch.setattr(mosaic_states, "_MOST_PROGRAMS", 13 if ratio == 128 else 1)
    jax.clear_caches()
    check(slab, [windows._replace(count=jnp.int32(count))], [oracle(page, ratio, state, positions, count)])
    jax.clear_caches()


@pytest.mark.parametrize(
    ("width", "window", "ratio"), [(4 * 6, 8, 4), (4 * 5, 8, 4), (2 * 10, 40, 40), (4 * 33, 34, 17), (2, 16, 16)]
)
def test_geometries_of_no_model(width, window, ratio):
    """Widths that are no multiple of a lane's share, windows that are no multiple of 16."""
    page = toy_page(width, window=window)
    positions = [(0, window - 1), (0, 2 * window - 1), (0, 1), (0, 2 * window + 2)]
    slab, windows, state = make_case(page, ratio, [2 * window + 3], positions)
    check(slab, [windows], [oracle(page, ratio, state, positions)])


def test_scores_of_all_sizes():
    """Weights that are 0 or 1 in float32, equal ones, negative zeros, and a window whose scores are all -inf."""
    page = toy_page(2 * 4, window=4)
    slab, windows, state = make_case(page, 4, [12], [(0, 3), (0, 7), (0, 11)])
    score = np.array([[1e4, -1e4, 0, 88], [-3e38, -3e38, -3e38, -3e38], [-0.0, 0.0, -1e-30, 1e-30]], np.float32)
    raw = pages.as_bytes(slab).view(np.float32)
    for position in range(12):
        row = raw[windows.block_table[0, position // 4], 144 + position % 4 * 8 :][:8]
        row[4:] = score[position // 4][(position + np.arange(4)) % 4]
        state[0, position] = row.copy()
    slab = pages.as_slab(raw.view(np.uint8), page)
    check(slab, [windows], [oracle(page, 4, state, [(0, 3), (0, 7), (0, 11)])])
    for position in range(4, 8):
        raw[windows.block_table[0, 1], 144 + position % 4 * 8 + 4 :][:4] = -np.inf
    slab, want = pages.as_slab(raw.view(np.uint8), page), oracle(page, 4, state, [(0, 3), (-1, -1), (0, 11)])
    check(slab, [windows], [want])


@settings(max_examples=mosaic_support.examples(3, 60), deadline=None)
@given(data=st.data(), name=st.sampled_from(["c4_key_state", *(["c4_state", "c128_state"] if ON_GPU else [])]))
def test_any_windows(data, name):
    """Any positions of any requests, holes in the block tables included."""
    page, ratio = pages.PAGES[name], RATIO[name]
    lengths = data.draw(st.lists(st.integers(1, 5 * ratio), min_size=1, max_size=3))
    request = st.integers(0, len(lengths) - 1)
    positions = data.draw(st.lists(st.tuples(request, st.integers(-1, 5 * ratio - 1)), min_size=1, max_size=9))
    positions = [(r, p if p < lengths[r] else -1) for r, p in positions]
    count = data.draw(st.integers(0, len(positions)))
    holes = data.draw(st.integers(0, 2))
    slab, windows, state = make_case(page, ratio, lengths, positions, holes=holes, seed=count)
    want = oracle(page, ratio, state, positions, count)
    check(slab, [windows._replace(count=jnp.int32(count))], [want])


@pytest.mark.mosaic
@needs_mosaic
def test_cutting_windows_differently_changes_no_bit():
    """A window's mean does not depend on its place among the others."""
    page = pages.PAGES["c4_key_state"]
    positions = [(0, 3), (0, 7), (0, 11), (0, 15), (0, 19), (0, 20)]
    slab, windows, _ = make_case(page, 4, [21], positions)
    (together,) = mosaic(kernels.window_means, slab, [windows])
    for index in (0, 3, 5):
        one = windows._replace(requests=windows.requests[index:][:1], positions=windows.positions[index:][:1])
        assert_same(mosaic(kernels.window_means, slab, [one])[0][0], together[index])


def slab_of(page, blocks=4):
    shape = (blocks, page.block_stride_bytes // page.spec.alignment, page.words_per_row)
    return jax.ShapeDtypeStruct(shape, jnp.uint32)


@pytest.mark.mosaic
@needs_mosaic
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("names", [("c4_state", "c4_key_state"), ("c128_state",)])
def test_lowers_for_a_gpu(names, x64):
    layers = [pages.PAGES[name] for name in names]

    def read(slab, table, requests, positions, count):
        windows = [
            StateWindows(page, table, requests, positions, RATIO[name], count)
            for name, page in zip(names, layers, strict=True)
        ]
        return kernels.window_means(slab, windows, implementation="mosaic_gpu")

    def write(slab, slots, *parts):
        writes = [RowWrite(page, slots, StateRows(*parts[4 * i :][:4])) for i, page in enumerate(layers)]
        return kernels.insert_many(slab, writes, unique_slots=True, implementation="mosaic_gpu")

    def int32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    parts = []
    for name, page in zip(names, layers, strict=True):
        width = page.format.num_values // 2
        shapes = (20, width), (20, width), (RATIO[name], width)
        parts += [*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), int32(20)]
    with jax.enable_x64(x64):
        for size in (3, 300):
            text = mosaic_support.lower(read, slab_of(layers[0]), int32(3, 5), int32(size), int32(size), int32())
            assert text.count("custom_call @mosaic_gpu") == 1
        assert mosaic_support.lower(write, slab_of(layers[0]), int32(20), *parts).count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("name", ["c4_key_state"])
def test_with_64_bit_types(name):
    page, ratio = pages.PAGES[name], RATIO[name]
    slab, windows, state = make_case(page, ratio, [9], [(0, 7), (0, 3)])
    with jax.enable_x64(True):
        check(slab, [windows], [oracle(page, ratio, state, [(0, 7), (0, 3)])])
        rows = random_states(page, 2, ratio)
        want = xla_insert(slab, page, jnp.asarray([5, -1], jnp.int32), rows)
        if HAS_MOSAIC:
            assert_same(insert(slab, page, np.int32([5, -1]), rows), want)


def test_bad_state_rows_are_refused():
    page = pages.PAGES["c4_key_state"]
    slab, slots, rows = pages.random_slab(page, 2), jnp.asarray([0, 1], jnp.int32), random_states(page, 2, 4)
    bad = {
        r"kv is float32\[2, 255\]; state rows of layer .* for 2 slots take float32\[2, 256\]": {"kv": rows.kv[:, 1:]},
        r"score is bfloat16\[2, 256\]; .* float32\[2, 256\]": {"score": rows.score.astype(jnp.bfloat16)},
        r"ape is float32\[4, 255\]; .* float32\[4, 256\]": {"ape": rows.ape[:, 1:]},
        r"ape is float32\[0, 256\]; .* float32\[1, 256\]": {"ape": rows.ape[:0]},
        r"ape is float32\[256\]; ": {"ape": rows.ape[0]},
        r"positions has 1 entries; 2 are needed": {"positions": rows.positions[1:]},
        r"positions has dtype float32; pass int32": {"positions": rows.positions.astype(jnp.float32)},
    }
    for message, part in bad.items():
        with pytest.raises(ValueError, match=message):
            kernels.insert_rows(slab, page, slots, rows._replace(**part))
    with pytest.raises(ValueError, match=r"layer .*swa_cache' has 'fp8_ds_mla' rows; state rows go to float32 pages"):
        kernels.insert_rows(slab, pages.PAGES["swa"], slots, rows)


def test_bad_windows_are_refused():
    page = pages.PAGES["c4_key_state"]
    slab, windows, _ = make_case(page, 4, [9], [(0, 7), (0, 3)])
    bad = {
        r"requests has 1 entries; 2 are needed": {"requests": windows.requests[:1]},
        r"positions has dtype float32; pass int32": {"positions": windows.positions.astype(jnp.float32)},
        r"count has shape \(1,\); it must have 0 dimension": {"count": jnp.zeros(1, jnp.int32)},
        r"block_table has shape \(3,\)": {"block_table": windows.block_table[0]},
        r"a window of 8 tokens, which do not suit compress_ratio=3": {"compress_ratio": 3},
        r"a window of 8 tokens, which do not suit compress_ratio=2": {"compress_ratio": 2},
        r"layer .*k_cache' has .* rows and window None; states are float32 rows": {"page": pages.PAGES["keys_fp8"]},
        r"slab has shape .* pass the slab of the same plan": {"page": toy_page(8)},
    }
    for message, part in bad.items():
        with pytest.raises(ValueError, match=message):
            kernels.window_means(slab, [windows._replace(**part)])
