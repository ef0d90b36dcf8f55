"""The fused scoring kernel: against float64, lowered for a GPU, and what it refuses.

Without a GPU the interpreter runs the copies, barriers, masks and stores; the two functions in which each lane reads
codes, and the products, are array operations there. On a GPU the same tests run the instructions.
"""

import functools

import index_cases
import jax
import jax.numpy as jnp
import mosaic_support
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mosaic_support import mosaic

from dsv4kv_jax import kernels

pytestmark = mosaic_support.pytestmark
PAGE = index_cases.page_of()
TABLE = np.array([[3, 1, 7], [2, -1, 5], [0, 8, 400]], np.int32)


@pytest.fixture(autouse=True)
def _strict():
    with mosaic_support.strict():
        yield


@pytest.fixture
def kernel():
    from dsv4kv_jax.kernels import mosaic_index_scores

    return mosaic_index_scores


def tuned(kernel, *args, implementation, **tuning):
    assert implementation == "mosaic_gpu"
    return kernel.index_scores(*args, tuning=kernel.Tuning(**tuning))


def check(page, table, counts, visible, function=kernels.index_scores, **options):
    args = index_cases.step(page, table, counts, visible, **options)
    before = np.asarray(args[0])
    index_cases.assert_scores(mosaic(function, *args), page, table, counts, visible, args)
    np.testing.assert_array_equal(args[0], before)


@pytest.mark.parametrize(
    ("rows", "heads", "counts", "visible"),
    [
        pytest.param(64, 64, (1, 1, 1), (192, 129, 0), id="decode"),
        pytest.param(64, 8, (4, 0, 3), (1, 64, 65, 100, 192, 190, 0, 0), id="several tokens, padding"),
        pytest.param(64, 3, (0, 9, 1), (*range(60, 69), 192), id="few heads, tiles of three tokens"),
        pytest.param(32, 8, (1, 1, 1), (96, 33, 64), id="half a tile a block"),
        pytest.param(96, 72, (1, 1, 1), (288, 97, 0), id="tiles across blocks, many heads"),
        pytest.param(128, 8, (1, 1, 1), (384, 1, 200), id="two tiles a block"),
    ],
)
def test_matches_reference(rows, heads, counts, visible):
    check(index_cases.page_of(rows), TABLE, counts, visible, heads=heads)


def test_page_that_starts_in_another_place():
    check(index_cases.page_of(cache_dtype="bf16"), TABLE, (1, 1, 1), (192, 129, 70))


@settings(max_examples=mosaic_support.examples(6, 100), deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    rows=st.sampled_from([32, 64, 96]),
    columns=st.integers(1, 4),
    heads=st.sampled_from([1, 8, 13, 64]),
    seed=st.integers(0, 1000),
)
def test_any_step(counts, rows, columns, heads, seed):
    rng = np.random.default_rng(seed)
    table = rng.integers(1, index_cases.BLOCKS, (3, columns))
    holes = rng.random(table.shape) < 0.2
    table[holes] = rng.choice([0, -1, -(2**31), 2**31 - 1, index_cases.BLOCKS], holes.sum())
    visible = np.append(rng.integers(0, columns * rows + 1, sum(counts)), [0] * int(rng.integers(1, 3)))
    check(index_cases.page_of(rows), table, counts, visible.tolist(), heads=heads, seed=seed)


def test_visible_past_the_table():
    check(PAGE, TABLE[:, :1], (1, 1, 1), (2**31 - 1, 65, -5))


@pytest.mark.parametrize(
    "tuning", [{"stages": 1, "tiles": 2}, {"stages": 6, "tokens": 1}, {"stages": 2, "tokens": 8, "tiles": 1}]
)
def test_tuning_changes_nothing(kernel, tuning):
    check(PAGE, TABLE, (5, 1, 2), (70, 192, 1, 64, 65, 192, 0, 100), functools.partial(tuned, kernel, **tuning))


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic_support.ON_GPU, reason="needs a GPU that JAX can use")
def test_slab_past_two_billion_words():
    """The same scores wherever the blocks lie."""
    small, page, table, *rest = index_cases.step(PAGE, [[3, 1, 7]], (3,), (192, 64, 100))
    count = 2**33 // page.block_stride_bytes + 4

    @jax.jit
    def enlarge(small):
        blocks = jnp.asarray([3, 1, 7], jnp.int32)
        return jnp.zeros((count, *small.shape[1:]), jnp.uint32).at[-3:].set(small[blocks])

    far = jnp.asarray([[count - 3, count - 2, count - 1]], jnp.int32)
    near_scores = mosaic(kernels.index_scores, small, page, table, *rest)
    far_scores = mosaic(kernels.index_scores, enlarge(small), page, far, *rest)
    for token, seen in enumerate((192, 64, 100)):
        np.testing.assert_array_equal(far_scores[token, :seen], near_scores[token, :seen])


def test_default_on_a_gpu(kernel, monkeypatch):
    """The kernel where it can run; what it cannot take goes to XLA."""
    from dsv4kv_jax.kernels import _compat

    pages_seen = []
    monkeypatch.setattr(_compat, "is_hopper", lambda: True)
    monkeypatch.setattr(kernel, "index_scores", lambda slab, page, *args: pages_seen.append(page))
    for page in (PAGE, index_cases.page_of(indexer="mxfp4")):
        kernels.index_scores(*index_cases.step(page, TABLE, (1, 0, 0), (64,)))
    assert pages_seen == [PAGE]


@pytest.mark.parametrize(
    ("page", "heads", "message"),
    [
        (index_cases.page_of(indexer="mxfp4"), 8, "holds 'indexer_mxfp4' rows; the kernel reads 'indexer_fp8' rows"),
        (index_cases.page_of(16), 8, "has 16 rows a page; the kernel takes multiples of 32"),
        (PAGE, 129, "codes have 129 heads; the kernel takes up to 128"),
    ],
)
def test_refuses(page, heads, message):
    args = index_cases.step(page, TABLE, (1, 1, 1), (5, 5, 5), heads=heads)
    with pytest.raises(ValueError, match=f"implementation='mosaic_gpu': .*{message}; use 'xla' or None"):
        kernels.index_scores(*args, implementation="mosaic_gpu")


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("requests", "tokens", "columns", "heads", "rows"),
    [
        pytest.param(256, 256, 32, 64, 64, id="decode"),
        pytest.param(16, 16, 4096, 64, 64, id="long contexts"),
        pytest.param(1, 2048, 512, 64, 64, id="prefill"),
        pytest.param(3, 7, 5, 100, 96, id="odd"),
    ],
)
def test_lowers_for_a_gpu(requests, tokens, columns, heads, rows, x64):
    page = index_cases.page_of(rows)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    slab = (3000, page.block_stride_bytes // page.spec.alignment, page.words_per_row)

    def score(slab, *args):
        return kernels.index_scores(slab, page, *args, implementation="mosaic_gpu")

    with jax.enable_x64(x64):
        text = mosaic_support.lower(
            score,
            jax.ShapeDtypeStruct(slab, jnp.uint32),
            ints((requests, columns)),
            ints((requests + 1,)),
            jax.ShapeDtypeStruct((tokens, heads, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
            ints((tokens,)),
        )
    assert text.count("custom_call @mosaic_gpu") == 1


def test_blocks_fill_the_multiprocessors(kernel):
    for plans in (1, 2, 16, 64, 256, 512, 4096):
        for tiles in (1, 2, 18, 130, 4096):
            share = kernel.tiles_per_block(plans, tiles)
            assert 1 <= share <= min(tiles, 128)
            blocks = plans * -(-tiles // share)
            if plans * tiles >= 4 * 132:
                assert blocks >= 120
    assert kernel.tiles_per_block(256, 32) == 16
    assert kernel.tiles_per_block(16, 4096) == 125
