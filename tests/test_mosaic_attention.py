"""The fused attention kernel: against a float64 reference, lowered for a GPU, and what it refuses.

Without a GPU the interpreter runs the pipeline, barriers, masks and splits; what one lane does is an array operation
there (`mosaic_attention_rows`). On a GPU the same tests run the instructions, as `bench_attention.py --check` does.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import mosaic_support
import numpy as np
import oracle
import pages
import pytest

from dsv4kv_jax.kernels import attention

pytestmark = mosaic_support.pytestmark
BLOCKS = 9
SCALE = 512**-0.5
WINDOW, C4A, C128A = (pages.PAGES[name] for name in ("swa", "c4a", "c128a"))
HOSTILE = [-1, -2, -(2**31), 2**31 - 1, BLOCKS * 64, 0]  # 0: a row of the null block, which is full of NaN here


@pytest.fixture(autouse=True)
def _strict():
    with mosaic_support.strict():
        yield


@pytest.fixture
def kernel():
    from dsv4kv_jax.kernels import mosaic_attention

    return mosaic_attention


@functools.cache
def cache(page):
    """(slab, bytes, window slots, compressed slots): rows in every other slot of some blocks, NaN bytes elsewhere."""
    raw = np.full((BLOCKS, page.block_stride_bytes), 0xFF, np.uint8)
    rng = np.random.default_rng(3)
    used = []
    for part, blocks in ((WINDOW, (1, 3)), (page, (2, 4, 5, 6, 7, 8))):
        size = part.storage_block_size
        slots = np.array([block * size + row for block in blocks for row in range(0, size, 2 if size > 2 else 1)])
        for slot in slots:
            row = rng.standard_normal(512).astype(np.float32) * 2
            oracle.write_row(raw, part.offset_bytes, size, slot, oracle.encode_row("fp8_ds_mla", row))
        used.append(slots)
    return pages.as_slab(raw, page), raw, *used


def case(page, heads, widths, lens, *, tokens=2, holes=0.1, seed=0):
    """q, and (page, slots, lens) of one or two lists; what lies past a length is hostile too."""
    _, _, *used = cache(page)
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.standard_normal((tokens, heads, 512)) * 2, jnp.bfloat16)
    lists = []
    for part, slots, width, length in zip((WINDOW, page), used, widths, lens, strict=False):
        chosen = rng.choice(slots, (tokens, width))
        spoiled = rng.random(chosen.shape) < holes
        hostile = rng.choice(HOSTILE[:-1], chosen.shape)
        length = np.asarray(length, np.int32)
        past = np.arange(width) >= length[:, None]
        chosen = np.where(past, rng.choice(HOSTILE, chosen.shape), np.where(spoiled, hostile, chosen))
        lists.append((part, chosen.astype(np.int32), length))
    return q, lists


def attend(kernel, page, q, lists, sink=None, **tuning):
    from dsv4kv_jax.kernels import mosaic_lanes
    from dsv4kv_jax.kernels.mosaic_attention_kernel import Tuning

    slab, raw, *_ = cache(page)
    window, *compressed = [tuple(map(jnp.asarray, (slots, lens))) for _, slots, lens in lists]
    args = (page, *compressed[0], None) if compressed else ()
    with contextlib.nullcontext() if mosaic_support.ON_GPU else mosaic_lanes.interpreted():
        out, lse = kernel.sparse_attention(q, slab, WINDOW, *window, *args, sink=sink, tuning=Tuning(**tuning))
    np.testing.assert_array_equal(pages.as_bytes(slab), raw)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def reference(page, q, lists, sink=None):
    _, raw, *_ = cache(page)
    q = np.asarray(q, np.float64)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], np.inf)
    for token in range(len(q)):
        keys = []
        for part, slots, lens in lists:
            for slot in slots[token, : max(lens[token], 0)]:
                row = oracle.read_row(raw, part.offset_bytes, part.storage_block_size, slot, (576, 8))
                if row is not None:
                    keys.append(oracle.decode_row("fp8_ds_mla", row))
        if not keys:
            continue
        keys = np.array(keys, np.float64)
        scores = q[token] @ keys.T * SCALE
        top = scores.max(axis=1)
        weights = np.exp(scores - top[:, None])
        lse[token] = top + np.log(weights.sum(axis=1))
        denominator = weights.sum(axis=1) + (0 if sink is None else np.exp(np.asarray(sink, np.float64) - top))
        out[token] = weights @ keys / denominator[:, None]
    return out, lse


def assert_close(got, want, out_error=3e-3, lse_error=1e-5):
    for actual, expected, limit in zip(got, want, (out_error, lse_error), strict=True):
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(actual[~finite], expected[~finite])
        norm = np.linalg.norm(expected[finite])
        assert np.linalg.norm(actual[finite] - expected[finite]) <= limit * norm + 1e-30


@pytest.mark.parametrize(
    ("page", "heads", "widths", "lens", "splits"),
    [
        pytest.param(C4A, 64, (128, 70), ([128, 3], [70, 65]), 1, id="c4a"),
        pytest.param(C128A, 64, (64, 130), ([64, 64], [5, 130]), 3, id="c128a, split, shares without tiles"),
        pytest.param(C4A, 80, (64,), ([64, 0],), 1, id="window only, heads padded to 128, no keys"),
        pytest.param(C4A, 3, (50, 20), ([0, 0], [1, 20]), 2, id="few heads, no window rows, one key"),
        pytest.param(C4A, 1, (8, 8), ([1000, -7], [-(2**31), 2**31 - 1]), 1, id="lens past both ends"),
    ],
)
def test_matches_reference(kernel, page, heads, widths, lens, splits):
    q, lists = case(page, heads, widths, lens)
    sink = jnp.linspace(-2.0, 2.0, heads)
    assert_close(attend(kernel, page, q, lists, sink, splits=splits), reference(page, q, lists, sink))


@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_valid(kernel, splits):
    q, lists = case(C4A, 2, (64, 64), ([64, 64], [64, 0]), holes=1.0)
    out, lse = attend(kernel, C4A, q, lists, splits=splits)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, np.inf)


@pytest.mark.parametrize("splits", [1, 2])
def test_infinite_sink(kernel, splits):
    q, lists = case(C4A, 2, (64, 64), ([64, 64], [64, 64]), tokens=2)
    sink = jnp.asarray([jnp.inf, -jnp.inf], jnp.float32)
    out, lse = attend(kernel, C4A, q, lists, sink, splits=splits)
    np.testing.assert_array_equal(out[:, 0], 0)
    assert_close((out[:, 1:], lse), (reference(C4A, q, lists)[0][:, 1:], reference(C4A, q, lists)[1]))


def test_split_agrees_with_whole(kernel):
    """Closer than two roundings of bfloat16 would allow, had each part its own: the maxima are integers."""
    q, lists = case(C4A, 64, (128, 64), ([128], [64]), tokens=1)
    sink = jnp.zeros(64, jnp.float32)
    assert_close(
        attend(kernel, C4A, q, lists, sink, splits=3), attend(kernel, C4A, q, lists, sink, splits=1), 2e-4, 1e-6
    )


@pytest.mark.parametrize("tuning", [{"prefetch": 0, "scorer_columns": 256}, {"prefetch": 3}])
def test_tuning_changes_nothing(kernel, tuning):
    q, lists = case(C4A, 64, (64, 64), ([40], [64]), tokens=1)
    plain, tuned = attend(kernel, C4A, q, lists, splits=1), attend(kernel, C4A, q, lists, splits=1, **tuning)
    for a, b in zip(plain, tuned, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_tokens(kernel):
    q, lists = case(C4A, 64, (64, 64), (np.zeros(0), np.zeros(0)), tokens=0)
    out, lse = attend(kernel, C4A, q, lists)
    assert out.shape == (0, 64, 512) and lse.shape == (0, 64)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "page", "width", "splits"),
    [
        pytest.param(256, 128, C4A, 1024, 1, id="Pro, C4A"),
        pytest.param(256, 64, C4A, 512, None, id="Flash, C4A"),
        pytest.param(256, 128, None, 0, None, id="window only"),
        pytest.param(8, 128, C128A, 8192, None, id="split, C128A"),
    ],
)
def test_lowers_for_a_gpu(kernel, tokens, heads, page, width, splits, x64):
    from dsv4kv_jax.kernels.mosaic_attention_kernel import Tuning

    def call(q, slab, swa, swa_lens, compressed, lens, sink):
        args = () if page is None else (page, compressed, lens)
        return kernel.sparse_attention(q, slab, WINDOW, swa, swa_lens, *args, sink=sink, tuning=Tuning(splits=splits))

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    with jax.enable_x64(x64):
        mosaic_support.lower(
            call,
            array((tokens, heads, 512), jnp.bfloat16),
            array((3000, WINDOW.block_stride_bytes // 576, 144), jnp.uint32),
            array((tokens, 128)),
            array((tokens,)),
            array((tokens, width)),
            array((tokens,)),
            array((heads,), jnp.float32),
        )


@pytest.mark.parametrize(
    ("dtype", "name", "message"),
    [
        ("float32", "swa", "q has dtype float32; the kernel computes on bfloat16"),
        ("bfloat16", "swa_bf16", "holds 'bfloat16' rows; the kernel reads 'fp8_ds_mla' rows"),
        (
            "bfloat16",
            "swa_fp8",
            "holds 'fp8_e4m3fn' rows; the kernel reads|holds 'float8_e4m3fn' rows; the kernel reads",
        ),
    ],
)
def test_refuses(kernel, dtype, name, message):
    page = pages.PAGES[name]
    q = jnp.zeros((1, 64, 512), dtype)
    slab = pages.random_slab(page, 2)
    lists = (jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match=f"implementation='mosaic_gpu'.*{message}.*use 'xla' or None"):
        kernel.sparse_attention(q, slab, page, *lists)


def test_unsupported_pages_run_on_xla_by_default():
    page = pages.PAGES["swa_bf16"]
    q = jnp.ones((1, 4, 512), jnp.bfloat16)
    lists = (jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, jnp.int32))
    out, lse = attention.sparse_attention(q, pages.random_slab(page, 2), page, *lists)
    assert not np.asarray(out, np.float32).any() and np.isposinf(lse).all()


def test_splits_fill_the_multiprocessors(kernel):
    for blocks in (1, 2, 16, 64, 128, 512, 4096):
        for tiles in (1, 2, 18, 130, 1000):
            splits = kernel.num_splits(blocks, tiles)
            assert 1 <= splits <= tiles
            if blocks >= 132:
                assert splits == 1 or blocks * splits > 132
            elif tiles >= 18:
                assert blocks * splits >= min(64, blocks * 18)
    assert kernel.num_splits(16, 18) == 6  # 8 tokens of 128 heads: three tiles each, as eight blocks would have
    assert kernel.num_splits(512, 18) == 1
