"""`sparse_attention` and `workspace_attention` against float64, with hostile index lists."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle_model
import pages
import pytest

from dsv4kv_jax import kernels
from dsv4kv_jax.kernels import attention
from dsv4kv_jax.kernels.attention import sparse_attention, workspace_attention

SWA, C4A, C128A = pages.PAGES["swa"], pages.PAGES["c4a"], pages.PAGES["c128a"]
NUM_BLOCKS = 5
HEADS = 3


# Compiled as a whole: called eagerly, every operation in them would be compiled on its own.
PAGE_NAMES = ("swa_page", "compressed_page")
attend = jax.jit(sparse_attention, static_argnames=PAGE_NAMES)
insert = jax.jit(kernels.insert_rows, static_argnums=1)
gather = jax.jit(kernels.gather_rows, static_argnums=1, static_argnames="dtype")


def make_cache(swa=SWA, compressed=C4A):
    """A slab whose window rows are in blocks 1-2 and compressed rows in blocks 3-4, and its rows as float64."""
    rng = np.random.default_rng(0)
    slab = jnp.zeros((NUM_BLOCKS, swa.block_stride_bytes // swa.spec.alignment, swa.words_per_row), jnp.uint32)
    rows = []
    for page, first in ((swa, 1), (compressed, 3)):
        count = 2 * page.storage_block_size
        slots = first * page.storage_block_size + jnp.arange(count, dtype=jnp.int32)
        slab = insert(slab, page, slots, jnp.asarray(rng.standard_normal((count, 512)), jnp.float32))
        rows.append(np.asarray(gather(slab, page, slots, dtype=jnp.float32), np.float64))
    return slab, rows


def query(tokens, dtype=jnp.float32, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((tokens, HEADS, 512)), dtype)


def lists(rows_per_token, width):
    """int32 indices and lengths from a list of lists."""
    indices = np.full((len(rows_per_token), width), -1, np.int32)
    for row, slots in zip(indices, rows_per_token, strict=True):
        row[: len(slots)] = slots
    return jnp.asarray(indices), jnp.asarray([len(slots) for slots in rows_per_token], jnp.int32)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 2e-6), (jnp.bfloat16, 3e-3)], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "kinds", [("swa", "c4a"), ("swa", "c128a"), ("swa_bf16", "c128a_bf16"), ("swa_fp8", "c128a_fp8")]
)
def test_window_and_compressed_rows_share_one_softmax(kinds, dtype, bound):
    swa, compressed = (pages.PAGES[kind] for kind in kinds)
    slab, (window, entries) = make_cache(swa, compressed)
    rng = np.random.default_rng(2)
    per_block = compressed.storage_block_size
    picked = [rng.permutation(2 * swa.storage_block_size)[:n] for n in (100, 128, 1, 0)]
    extra = [rng.permutation(2 * per_block)[:n] for n in (min(2 * per_block, 60), 0, 2, 0)]
    q, sink = query(4, dtype), jnp.asarray([0.5, -np.inf, 8.0], jnp.float32)
    swa_lists = lists([p + swa.storage_block_size for p in picked], 128)
    compressed_lists = lists([p + 3 * per_block for p in extra], 128)
    out, lse = attend(
        q, slab, swa, *swa_lists, compressed_page=compressed, compressed_indices=compressed_lists[0],
        compressed_lens=compressed_lists[1], sink=sink,
    )  # fmt: skip
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    for token in range(4):
        keys = np.concatenate([window[picked[token]], entries[extra[token]]])
        want, want_lse = oracle_model.attention(np.asarray(q[token], np.float64), keys, sink)
        if len(keys):
            assert relative(out[token], want) < bound
            np.testing.assert_allclose(lse[token], want_lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(out[3], np.float32), 0)
    np.testing.assert_array_equal(np.asarray(lse[3]), np.inf)


def test_sink_scales_the_output_and_leaves_lse_alone():
    slab, (window, _) = make_cache()
    q, rows = query(1), lists([np.arange(64, 69)], 64)
    plain, lse = attend(q, slab, SWA, *rows)
    sunk, lse_too = attend(q, slab, SWA, *rows, sink=jnp.zeros(HEADS))
    np.testing.assert_array_equal(lse, lse_too)
    np.testing.assert_allclose(sunk / plain, np.broadcast_to(1 / (1 + np.exp(-lse))[..., None], sunk.shape), rtol=1e-5)
    want, want_lse = oracle_model.attention(np.asarray(q[0]), window[:5], np.full(HEADS, -np.inf))
    assert relative(plain[0], want) < 1e-6
    np.testing.assert_allclose(lse[0], want_lse, rtol=1e-6)


@pytest.mark.parametrize("x64", [False, True])
def test_entries_that_do_not_count_are_never_used(x64):
    """vllm#57156, sglang#25837: -1, slots past the pool and entries past the length; every unlisted byte is NaN."""
    slab, (window, _) = make_cache()
    listed = [64, 70, 127]
    clean = np.asarray(slab)
    poisoned = pages.as_bytes(slab)
    poisoned[:] = 0xFF
    for slot in listed:
        for start, size in ((slot % 64 * 576, 576), (64 * 576 + slot % 64 * 8, 8)):
            start += SWA.offset_bytes
            poisoned[slot // 64, start : start + size] = pages.as_bytes(jnp.asarray(clean))[
                slot // 64, start : start + size
            ]
    slab = pages.as_slab(poisoned, SWA)
    q = query(6)
    rows = np.full((6, 8), 65, np.int32)  # 65 is a NaN row
    rows[:, :3] = listed
    rows[1, :5] = [64, -1, 70, -2, 127]
    rows[2, :5] = [64, NUM_BLOCKS * 64, 70, 2**31 - 1, 127]
    rows[3] = -1
    lens = jnp.asarray([3, 5, 5, 8, 0, 3], jnp.int32)
    with jax.enable_x64(x64):
        out, lse = attend(q, slab, SWA, jnp.asarray(rows), lens, sink=jnp.zeros(HEADS, jnp.float32))
    for token in (0, 1, 2, 5):
        want, want_lse = oracle_model.attention(np.asarray(q[token]), window[[0, 6, 63]], np.zeros(HEADS))
        assert relative(out[token], want) < 1e-6
        np.testing.assert_allclose(lse[token], want_lse, rtol=1e-5)
    for token in (3, 4):
        np.testing.assert_array_equal(out[token], 0)
        np.testing.assert_array_equal(lse[token], np.inf)
    np.testing.assert_array_equal(pages.as_bytes(slab), poisoned)


def test_null_block_full_of_nan_gives_exact_zeros():
    slab, _ = make_cache()
    slab = slab.at[0].set(jnp.uint32(0xFFFFFFFF))
    rows = jnp.full((8, 128), -1, jnp.int32)
    out, lse = attend(query(8), slab, SWA, rows, jnp.full(8, 128, jnp.int32))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, np.inf)


def test_chunks_of_tokens_change_nothing(monkeypatch):
    slab, _ = make_cache()
    rng = np.random.default_rng(3)
    rows = lists([rng.integers(64, 192, n) for n in rng.integers(0, 128, 37)], 128)
    whole = attend(query(37), slab, SWA, *rows)
    monkeypatch.setattr(attention, "_WORKSPACE_BYTES", 128 * (512 * 4 + HEADS * 8) * 5)
    assert attention._tokens_at_once(query(37), 128) == 5
    for a, b in zip(whole, jax.jit(sparse_attention, static_argnums=2)(query(37), slab, SWA, *rows), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_million_token_context_does_not_need_its_rows_at_once():
    """4,096 tokens over 8,192 dense entries: 100 GB of rows and scores, of which a chunk is held at a time."""
    shapes = (
        jax.ShapeDtypeStruct((4096, 128, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((NUM_BLOCKS, *slab_rows()), jnp.uint32),
    )
    indices, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4096, 8192), (4096,)))

    def attend(q, slab, indices, lens):
        return sparse_attention(q, slab, C128A, indices, lens)

    compiled = jax.jit(attend).lower(*shapes, indices, lens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * attention._WORKSPACE_BYTES


def slab_rows():
    return SWA.block_stride_bytes // SWA.spec.alignment, SWA.words_per_row


def test_workspace_attention_equals_paged_attention_token_by_token():
    """Prefill over gathered rows and combined indices, against decode over the pages."""
    slab, _ = make_cache()
    swa_table = jnp.asarray([[2, 1], [1, 2]], jnp.int32)
    c4_table = jnp.asarray([[4, 3], [3, 4]], jnp.int32)
    query_start_loc, seq_lens = jnp.asarray([0, 20, 33], jnp.int32), jnp.asarray([100, 13], jnp.int32)
    tokens, top_k = 33, 12
    rng = np.random.default_rng(5)
    positions = np.concatenate([np.arange(80, 100), np.arange(13)])
    topk = np.full((tokens, top_k), -1, np.int32)
    for row, p in zip(topk, positions, strict=True):
        n = min((p + 1) // 4, top_k)
        row[:n] = rng.permutation((p + 1) // 4)[:n]
    q, sink = query(tokens), jnp.asarray([0.1, 0.2, 0.3], jnp.float32)

    @jax.jit
    def prefill(slab, topk):
        gathered = kernels.gather_lens(query_start_loc, seq_lens)
        compressed = kernels.gather_sequence(slab, C4A, c4_table, seq_lens // 4, max_rows=25, fill=np.nan)
        starts = seq_lens - gathered
        window = kernels.gather_sequence(slab, SWA, swa_table, gathered, starts=starts, max_rows=100, fill=np.nan)
        workspace = jnp.concatenate([compressed, window], axis=1).reshape(-1, 512)
        indices, lens = kernels.combine_topk_swa(
            topk, query_start_loc, seq_lens, gathered, compress_ratio=4, compressed_rows=25, workspace_rows=125
        )
        return workspace_attention(q, workspace.astype(jnp.float32), indices, lens, sink=sink)

    @jax.jit
    def decode(slab, topk):
        window = kernels.swa_indices(swa_table, query_start_loc, seq_lens, block_size=64, num_tokens=tokens)
        token_to_req = jnp.asarray([0] * 20 + [1] * 13, jnp.int32)
        indices, lens = kernels.topk_to_slots(topk, token_to_req, c4_table, storage_block_size=64)
        extra = {"compressed_page": C4A, "compressed_indices": indices, "compressed_lens": lens}
        return sparse_attention(q, slab, SWA, *window, **extra, sink=sink)

    (out, lse), (want, want_lse) = prefill(slab, jnp.asarray(topk)), decode(slab, jnp.asarray(topk))
    assert relative(out, want) < 1e-6
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "width"), [(0, 128), (3, 0), (0, 0)])
def test_empty_work(tokens, width):
    slab, _ = make_cache()
    rows = jnp.zeros((tokens, width), jnp.int32), jnp.zeros(tokens, jnp.int32)
    out, lse = attend(query(tokens), slab, SWA, *rows)
    assert out.shape == (tokens, HEADS, 512)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, np.inf)


def test_runs_under_strict_promotion_and_jit():
    slab, _ = make_cache()
    rows = lists([[64, 65]], 64)
    with jax.numpy_dtype_promotion("strict"):
        out, _ = jax.jit(sparse_attention, static_argnums=2)(
            query(1), slab, SWA, *rows, sink=jnp.zeros(HEADS, jnp.float32)
        )
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 3, 576))}, r"q has shape \[2, 3, 576\]; it must be \[tokens, heads, 512\]"),
        ({"q": jnp.zeros((2, 3, 512), jnp.float16)}, "q has dtype float16; use float32 or bfloat16"),
        ({"swa_lens": jnp.zeros(3, jnp.int32)}, r"swa indices \[2, 8\] and lens \[3\] must be \[2, width\] and \[2\]"),
        (
            {"swa_indices": jnp.zeros((2, 8), jnp.uint32)},
            "swa indices and lens are uint32 and int32; both must be int32",
        ),
        ({"sink": jnp.zeros(4)}, r"sink is float32\[4\]; it must be float32\[3\]"),
        ({"compressed_page": C4A}, "give compressed_page, compressed_indices and compressed_lens together"),
        ({"implementation": "cuda"}, "implementation='cuda' is not known"),
    ],
)
def test_bad_arguments_are_named(change, message):
    slab, _ = make_cache()
    good = {"q": query(2), "slab": slab, "swa_page": SWA, "swa_indices": jnp.zeros((2, 8), jnp.int32)}
    good |= {"swa_lens": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        sparse_attention(**(good | change))
