"""The index kernels: as the XLA versions, for the model's shapes and for small odd ones, with hostile tables."""

import functools

import jax
import jax.numpy as jnp
import mosaic_support
import numpy as np
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mosaic_support import INT32_MAX, assert_same, mosaic

from dsv4kv_jax import kernels
from dsv4kv_jax.kernels.step import StepIndex, step_indices

pytestmark = mosaic_support.pytestmark
TOKENS = 7
BLOCKS_64, BLOCKS_256, BLOCKS_8 = 9, 4, 60  # of a request
WANTED = (
    StepIndex(kind="slots", group=0, block_size=64),
    StepIndex(kind="window", group=0, block_size=64, width=128),
    StepIndex(kind="compressed_slots", group=1, block_size=256, compress_ratio=4),
    StepIndex(kind="compressed_slots", group=1, block_size=256, compress_ratio=128),
    StepIndex(kind="dense", group=1, block_size=256, compress_ratio=128, width=1100),
    StepIndex(kind="slots", group=2, block_size=8),
)


@pytest.fixture(autouse=True)
def _strict():
    with mosaic_support.strict():
        yield


def requests(lens, queries):
    """(query_start_loc, seq_lens) of requests of these lengths and numbers of new tokens."""
    return jnp.asarray(np.cumsum([0, *queries]), jnp.int32), jnp.asarray(lens, jnp.int32)


def tables(rng, num_requests):
    """A table for each group, with null and negative entries, and ids too large for slots."""
    made = []
    for width in (BLOCKS_64, BLOCKS_256, BLOCKS_8):
        table = rng.integers(1, 5000, (num_requests, width))
        holes = rng.random(table.shape)
        table[holes < 0.1] = rng.choice([0, -1, -7, INT32_MAX, 2**26])
        made.append(jnp.asarray(table, jnp.int32))
    return tuple(made)


def check(function, *args):
    assert_same(mosaic(function, *args), function(*args, implementation="xla"))


def all_of(tables, starts, lens, *, implementation):
    return step_indices(WANTED, tables, starts, lens, num_tokens=TOKENS, implementation=implementation)


BATCHES = {
    "decode": ([130, 1, 512], [1, 1, 1]),
    "speculative": ([300, 128, 5], [2, 3, 2]),
    "prefill": ([7, 0, 0], [7, 0, 0]),
    "chunk": ([500, 700, 129], [0, 4, 1]),
    "past the table": ([2**20, 577, 1025], [1, 3, 2]),
    "longer than it is": ([2, 1, 4], [4, 2, 1]),
    "nothing": ([0, 0, 0], [0, 0, 0]),
}


@pytest.mark.parametrize("batch", list(BATCHES))
def test_step(batch):
    starts, lens = requests(*BATCHES[batch])
    check(all_of, tables(np.random.default_rng(0), 3), starts, lens)


@settings(max_examples=mosaic_support.examples(6, 100), deadline=None)
@given(
    queries=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    lens=st.lists(st.integers(0, 700) | st.sampled_from([128, 256, INT32_MAX, -1]), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
    first=st.sampled_from([0, 3]),
)
def test_any_step(queries, lens, seed, first):
    starts, lens = requests(lens, queries)
    check(all_of, tables(np.random.default_rng(seed), 3), starts + first, lens)


@pytest.mark.parametrize(
    ("name", "table", "options"),
    [
        ("slot_mapping", 0, {"block_size": 64}),
        ("compressed_slot_mapping", 1, {"block_size": 256, "compress_ratio": 128}),
        ("swa_indices", 2, {"block_size": 8, "window": 13, "width": 20}),
        ("swa_indices", 0, {"block_size": 64, "width": 256}),
        ("c128a_indices", 1, {"width": 5}),
        ("c128a_indices", 1, {"width": 130, "local": True, "compress_ratio": 4}),
        ("c128a_indices", 1, {"width": 0}),
    ],
)
def test_each_by_itself(name, table, options):
    starts, lens = requests(*BATCHES["chunk"])
    function = functools.partial(getattr(kernels, name), num_tokens=TOKENS, **options)
    check(function, tables(np.random.default_rng(1), 3)[table], starts, lens)


@pytest.mark.parametrize("starts", [[0, 5, 3, 3, 7], [2, 0, 6, 4, 7]])
def test_starts_that_decrease(starts):
    """Tokens that belong to no request are padding, as with XLA."""
    lens = jnp.asarray([20, 30, 40, 50], jnp.int32)
    function = functools.partial(kernels.slot_mapping, block_size=64, num_tokens=TOKENS)
    check(function, tables(np.random.default_rng(1), 4)[0], jnp.asarray(starts, jnp.int32), lens)


@pytest.mark.parametrize("width", [37, 1024, 0])
def test_topk(width):
    rng = np.random.default_rng(2)
    topk = jnp.asarray(rng.integers(-1, 300, (TOKENS, width)), jnp.int32)
    topk = topk.at[:, ::7].set(INT32_MAX) if width else topk
    request = jnp.asarray([0, 1, 2, 2, 3, -1, 0], jnp.int32)
    valid = jnp.asarray([True] * 6 + [False])
    function = functools.partial(kernels.topk_to_slots, storage_block_size=64, valid=valid)
    check(function, topk, request, tables(rng, 3)[1])


@pytest.mark.parametrize(("top_k", "ratio"), [(37, 4), (0, 1)])
def test_combine(top_k, ratio):
    rng = np.random.default_rng(3)
    starts, lens = requests(*BATCHES["speculative"])
    topk = jnp.asarray(rng.integers(-1, 70, (TOKENS, top_k)), jnp.int32)
    gathered = kernels.gather_lens(starts, lens)
    geometry = {"compress_ratio": ratio, "compressed_rows": 75, "workspace_rows": 400, "window": 128}
    check(functools.partial(kernels.combine_topk_swa, **geometry), topk, starts, lens, gathered)


@pytest.mark.parametrize("with_compressed", [True, False])
def test_flashinfer(with_compressed):
    rng = np.random.default_rng(4)
    page = pages.PAGES["swa_fp8"]
    swa = jnp.asarray(rng.integers(-1, 900, (5, 128)), jnp.int32)
    args = ()
    if with_compressed:
        args = jnp.asarray(rng.integers(-1, 900, (5, 37)), jnp.int32), jnp.asarray([0, 37, 3, 9, 1], jnp.int32)
    function = functools.partial(kernels.flashinfer_indices, swa_page=page, compressed_page=page, top_k=40)
    check(function, swa, *args)


def test_many_requests():
    """More requests than one pass over their starts takes."""
    count = 1100
    starts, lens = requests(np.arange(count) + 1, np.arange(count) % 2)
    table = jnp.asarray(np.arange(count * 20).reshape(count, 20) + 1, jnp.int32)
    tokens = 5
    check(functools.partial(kernels.slot_mapping, block_size=64, num_tokens=tokens), table, starts, lens)


def test_with_64_bit_types():
    starts, lens = requests(*BATCHES["decode"])
    groups = tables(np.random.default_rng(5), 3)
    with jax.enable_x64(True):
        check(all_of, groups, starts, lens)
        topk = jnp.asarray(np.arange(TOKENS * 9).reshape(TOKENS, 9), jnp.int32)
        request = jnp.zeros(TOKENS, jnp.int32)
        check(functools.partial(kernels.topk_to_slots, storage_block_size=64), topk, request, groups[1])


@pytest.mark.parametrize("x64", [False, True])
def test_one_launch_makes_all(x64):
    count = 256
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    groups = tuple(ints((count, width)) for width in (2048, 512, 16384))

    def build(groups, starts, lens):
        return step_indices(WANTED, groups, starts, lens, num_tokens=count, implementation="mosaic_gpu")

    with jax.enable_x64(x64):
        text = mosaic_support.lower(build, groups, ints((count + 1,)), ints((count,)))
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("x64", [False, True])
def test_lowers_for_a_gpu(x64):
    with jax.enable_x64(x64):
        lower_all()


def lower_all():
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    options = {"implementation": "mosaic_gpu"}
    mosaic_support.lower(
        lambda *args: kernels.topk_to_slots(*args, storage_block_size=64, **options),
        ints((256, 1024)), ints((256,)), ints((256, 512)),
    )  # fmt: skip
    geometry = {"compress_ratio": 4, "compressed_rows": 2000, "workspace_rows": 4000}
    mosaic_support.lower(
        lambda *args: kernels.combine_topk_swa(*args, **geometry, **options),
        ints((512, 512)), ints((5,)), ints((4,)), ints((4,)),
    )  # fmt: skip
    page = pages.PAGES["swa_fp8"]
    mosaic_support.lower(
        lambda *args: kernels.flashinfer_indices(*args, swa_page=page, compressed_page=page, top_k=512, **options),
        ints((256, 128)), ints((256, 512)), ints((256,)),
    )  # fmt: skip
    mosaic_support.lower(
        lambda *args: kernels.c128a_indices(*args, width=1100, local=True, num_tokens=300, **options),
        ints((4, 512)), ints((5,)), ints((4,)),
    )  # fmt: skip
