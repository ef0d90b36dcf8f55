"""Arguments for FlashMLA and FlashInfer: the tensors they take, and every constraint with its reason."""

import jax.numpy as jnp
import numpy as np
import pytest

import dsv4kv_jax
from dsv4kv_jax import KVCache, kernels
from dsv4kv_jax.interop import SharedSlab, flash_mla, flashinfer, lend
from dsv4kv_jax.metadata import StepMetadata
from dsv4kv_jax.specs import layer_specs

torch = pytest.importorskip("torch")

FLASH = dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash")
SWA, C4A, C128A = "model.layers.0.attn", "model.layers.2.attn", "model.layers.3.attn"
TOKENS = 3


def plan_of(cache_dtype="fp8_ds_mla"):
    specs = layer_specs(FLASH, cache_dtype, layers=(0, 2, 3, 4))
    stride = dsv4kv_jax.plan_from_specs(specs, 1 << 30).layout.block_stride_bytes
    return dsv4kv_jax.plan_from_specs(specs, 4 * stride)


PLAN = plan_of()


@pytest.fixture(scope="module")
def views():
    return SharedSlab.allocate(PLAN, device="cpu", copy_on_cpu=True)


def query(heads=64, tokens=TOKENS):
    return torch.ones(tokens, heads, 512, dtype=torch.bfloat16)


def indices(width=128, tokens=TOKENS):
    return torch.full((tokens, width), -1, dtype=torch.int32)


def lengths(tokens=TOKENS):
    return torch.zeros(tokens, dtype=torch.int32)


def arguments(views, layer=SWA, q=None, **options):
    options = {"swa_indices": indices(), "swa_lens": lengths()} | options
    return flash_mla.decode_arguments(views, layer, query() if q is None else q, **options)


@pytest.mark.parametrize(("layer", "rows"), [(SWA, None), (C4A, 64), (C128A, 2)])
def test_the_arguments_of_each_kind_of_layer(views, layer, rows):
    stride = PLAN.layout.block_stride_bytes
    more = {} if rows is None else {"compressed_indices": indices(512), "compressed_lens": lengths()}
    found = arguments(views, layer, sink=torch.zeros(64), **more)
    assert tuple(found["q"].shape) == (TOKENS, 1, 64, 512)
    assert tuple(found["k_cache"].shape) == (4, 64, 1, 584)
    assert found["k_cache"].stride() == (stride, 584, 584, 1)
    assert found["k_cache"].data_ptr() == views[layer + ".swa_cache"].data_ptr()
    assert tuple(found["indices"].shape) == (TOKENS, 1, 128) and found["topk_length"].dtype == torch.int32
    assert found["block_table"] is None and found["cache_seqlens"] is None and found["is_fp8_kvcache"] is True
    assert found["softmax_scale"] == 512**-0.5 and found["head_dim_v"] == 512 and found["causal"] is False
    if rows is None:
        assert "extra_k_cache" not in found
    else:
        assert tuple(found["extra_k_cache"].shape) == (4, rows, 1, 584)
        assert found["extra_k_cache"].data_ptr() == views[layer].data_ptr()
        assert tuple(found["extra_indices_in_kvcache"].shape) == (TOKENS, 1, 512)


def test_the_arguments_of_a_steps_metadata(views):
    tables = [jnp.array([[1, 2], [3, -1]], jnp.int32) for _ in PLAN.layout.groups]
    step = StepMetadata.build(PLAN.layout, tables, [0, 1, 3], [300, 5], num_tokens=4, max_model_len=512)
    q = query(tokens=4)
    topk = jnp.full((4, 64), -1, jnp.int32).at[0, :2].set(jnp.array([0, 70]))
    found = flash_mla.step_arguments(views, SWA, q, step)
    assert found["topk_length"].tolist() == [128, 4, 5, 0] and "extra_k_cache" not in found
    found = flash_mla.step_arguments(views, C4A, q, step, topk=topk)
    assert found["extra_indices_in_kvcache"][0, 0, :3].tolist() == [64, 134, -1]
    assert found["extra_topk_length"].tolist() == [2, 0, 0, 0]
    found = flash_mla.step_arguments(views, C128A, q, step, sink=torch.zeros(64))
    assert found["extra_indices_in_kvcache"][0, 0, :3].tolist() == [2, 3, -1]
    assert found["extra_topk_length"].tolist() == [2, 0, 0, 0]
    with pytest.raises(ValueError, match="'model.layers.2.attn' needs topk"):
        flash_mla.step_arguments(views, C4A, q, step)
    with pytest.raises(ValueError, match="'model.layers.3.attn' has no use for topk"):
        flash_mla.step_arguments(views, C128A, q, step, topk=topk)


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (16, 64), (63, 64), (64, 64), (65, 128), (128, 128)])
def test_heads_are_padded_to_what_the_kernel_has(views, heads, padded):
    q = torch.randn(TOKENS, heads, 512).to(torch.bfloat16)
    found = arguments(views, q=q, sink=torch.arange(heads, dtype=torch.float32))
    assert tuple(found["q"].shape) == (TOKENS, 1, padded, 512)
    assert torch.equal(found["q"][:, 0, :heads], q) and not bool(found["q"][:, 0, heads:].any())
    assert found["attn_sink"][:heads].tolist() == list(range(heads))
    assert bool((found["attn_sink"][heads:] == float("-inf")).all())
    assert found["q"].stride(-1) == 1 and found["attn_sink"].is_contiguous()
    assert arguments(views, q=q)["attn_sink"] is None


def test_jax_metadata_is_shared_not_copied(views):
    table = jnp.array([[1, 2], [3, 0]], jnp.int32)
    swa, lens = kernels.swa_indices(table, [0, 1, 3], [70, 5], block_size=64, num_tokens=TOKENS)
    found = arguments(views, swa_indices=swa, swa_lens=lens, check_values=True)
    assert found["indices"].data_ptr() == swa.unsafe_buffer_pointer()
    assert found["topk_length"].data_ptr() == lens.unsafe_buffer_pointer()
    assert found["topk_length"].tolist() == [70, 4, 5]
    assert found["indices"][0, 0, :2].tolist() == [64, 65]


def test_wide_indices_are_converted(views):
    found = arguments(views, swa_indices=indices().long(), swa_lens=np.zeros(TOKENS, np.int64))
    assert found["indices"].dtype == found["topk_length"].dtype == torch.int32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": query().float()}, r"q is torch.float32\(3, 64, 512\); it must be bfloat16"),
        ({"q": query()[..., :448]}, r"q is torch.bfloat16\(3, 64, 448\)"),
        ({"q": query()[:, :, ::1].transpose(1, 2).contiguous().transpose(1, 2)}, "last dimension must be contiguous"),
        ({"q": query(129)}, "q has 129 heads; the kernel takes 1 to 128: split the heads"),
        ({"q": query().unsqueeze(1).expand(3, 2, 64, 512)}, r"q is torch.bfloat16\(3, 2, 64, 512\)"),
        ({"swa_indices": indices(100)}, "swa_indices has 100 columns; .* pad with -1 to a multiple of 64"),
        ({"swa_indices": indices(0)}, "has 0 columns"),
        ({"swa_indices": indices(tokens=4)}, r"swa_indices has shape \(4, 128\); it must be \[3, width\]"),
        ({"swa_indices": indices().t().contiguous().t()}, "swa_indices has strides .* must be contiguous"),
        ({"swa_indices": indices().float()}, "swa_indices has dtype torch.float32"),
        ({"swa_lens": lengths(4)}, r"swa_lens has shape \(4,\); it must be contiguous \[3\]"),
        ({"swa_lens": torch.zeros(6, dtype=torch.int32)[::2]}, "must be contiguous"),
        ({"swa_lens": None}, "swa_lens is needed"),
        ({"swa_lens": torch.tensor([2**31, 0, 0])}, "swa_lens holds values from 0 to 2147483648"),
        ({"sink": torch.zeros(64, dtype=torch.bfloat16)}, r"sink is torch.bfloat16\(64,\) .* float32 of shape \(64,\)"),
        ({"sink": torch.zeros(32)}, r"float32 of shape \(64,\)"),
        ({"sink": torch.zeros(128)[::2]}, "contiguous float32"),
        ({"layer": "model.layers.7.attn"}, "no attention layer 'model.layers.7.attn'; this cache holds 4"),
        ({"layer": C4A}, "'model.layers.2.attn' has a compressed cache; compressed_indices must be given"),
        ({"compressed_indices": indices()}, "compresses no tokens; compressed_indices must be None"),
        ({"layer": C4A, "compressed_indices": indices(), "compressed_lens": None}, "compressed_lens is needed"),
        ({"layer": C128A, "compressed_indices": indices(96), "compressed_lens": lengths()}, "has 96 columns"),
        (
            {"swa_indices": indices() - 1, "check_values": True},
            "values from -2 to -2; they must be -1 or a slot below 256",
        ),
        ({"swa_indices": indices() + 257, "check_values": True}, "they must be -1 or a slot below 256"),
    ],
)
def test_every_constraint_has_its_reason(views, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(views, **options)


def strided(rows=64, width=584, stride=37_440, offset=0, dtype=torch.uint8):
    backing = torch.zeros(3 * max(stride, 1) + 64, dtype=torch.uint8)
    return torch.as_strided(backing, (2, rows, width), (stride, width, 1), offset).view(dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: strided(width=656), "a last dimension of 584: it reads fp8_ds_mla caches only"),
        (lambda: torch.zeros(2, 64, 584, dtype=torch.bfloat16), "one-byte elements"),
        (lambda: torch.zeros(2, 584, 64, dtype=torch.uint8).transpose(1, 2), "a page must be compact"),
        (lambda: strided(stride=37_384), "must be multiples of 16"),
        (lambda: strided(offset=8), "must be multiples of 16"),
        (lambda: strided(stride=37_376), "no multiple of 576: on SM100"),
        (lambda: strided(rows=2, stride=1_168), "no multiple of 576"),
    ],
)
def test_cache_views_that_the_kernel_would_misread(make, message):
    with pytest.raises(ValueError, match=message):
        flash_mla.check_cache_view(make())


def test_sm90_takes_strides_that_sm100_does_not():
    flash_mla.check_cache_view(strided(stride=37_376), sm100=False)
    flash_mla.check_cache_view(strided(stride=37_440))
    with pytest.raises(ValueError, match="multiples of 16"):
        flash_mla.check_cache_view(strided(stride=37_384), sm100=False)


def test_a_stride_past_int32_is_refused():
    view = torch.empty(0, dtype=torch.uint8, device="meta").as_strided((2, 64, 584), (2**31, 584, 1))
    with pytest.raises(ValueError, match="does not fit in the int32"):
        flash_mla.check_cache_view(view)


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_flash_mla_refuses_other_caches(cache_dtype):
    plan = plan_of(cache_dtype)
    with lend(KVCache.allocate(plan)) as views, pytest.raises(ValueError, match="it reads fp8_ds_mla caches only"):
        arguments(views)


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_flashinfer_reads_what_the_offsets_name(cache_dtype):
    """The mixed matrix, resolved as FlashInfer does: row number times row bytes from the view's first byte."""
    plan = plan_of(cache_dtype)
    cache = KVCache.allocate(plan)
    window, compressed = cache.page(C4A + ".swa_cache"), cache.page(C4A)
    slots = jnp.array([[64, 65, 130, -1]], jnp.int32)
    extra = jnp.array([[70, 128, -1]], jnp.int32)
    rows = jnp.arange(1, 6, dtype=jnp.float32)[:, None] * jnp.ones(512)
    slab = kernels.insert_rows(cache.slab, window, slots[0, :3], rows[:3])
    cache = cache.with_slab(kernels.insert_rows(slab, compressed, extra[0, :2], rows[3:]))
    matrix, lens = kernels.flashinfer_indices(
        slots, extra, jnp.array([2], jnp.int32), swa_page=window, compressed_page=compressed
    )
    dtype = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[cache_dtype]
    q = torch.zeros(1, 12, 512).to(dtype) if cache_dtype == "bf16" else torch.zeros(1, 16, 512).to(dtype)
    with lend(cache) as views:
        found = flashinfer.decode_arguments(
            views, C4A, q, indices=matrix, lens=lens, sink=torch.zeros(q.shape[1]), kv_scale=2.0, q_scale=0.5
        )
        assert found["query"].shape == (1, 16, 512) and found["sinks"].shape == (16,)
        assert found["sparse_indices_are_storage_offsets"] is True
        assert found["sparse_topk_lens"].tolist() == [4 + 2]
        assert found["swa_kv_cache"].shape == (4, 64, 1, 512)
        seen = []
        for column, offset in enumerate(found["sparse_indices"][0].tolist()):
            if offset >= 0:
                pool = found["swa_kv_cache" if column < 4 else "compressed_kv_cache"]
                row = torch.as_strided(pool, (512,), (1,), pool.storage_offset() + offset * 512)
                seen.append(float(row.float().mean()))
                del row
        del pool, found
    assert seen == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_flashinfer_scales_and_window_only_layers():
    for cache_dtype, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        with lend(KVCache.allocate(plan_of(cache_dtype))) as views:
            found = flashinfer.decode_arguments(
                views, SWA, torch.zeros(TOKENS, 64, 512).to(dtype), indices=indices(), lens=lengths(), scale=0.5,
                q_scale=3.0, kv_scale=2.0,
            )  # fmt: skip
            assert found["compressed_kv_cache"].data_ptr() == found["swa_kv_cache"].data_ptr()
            assert (found["bmm1_scale"], found["bmm2_scale"]) == ((0.5, 1.0) if cache_dtype == "bf16" else (3.0, 2.0))
            del found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": torch.zeros(TOKENS, 64, 512)}, r"q is torch.float32\(3, 64, 512\); it must be torch.bfloat16"),
        ({"q": torch.zeros(TOKENS, 512, dtype=torch.bfloat16)}, "it must be torch.bfloat16"),
        ({"indices": indices(tokens=2)}, r"indices has shape \(2, 128\)"),
        ({"lens": lengths(2)}, r"lens \(2,\)"),
        ({"q": query(200)}, "q has 200 heads"),
        ({"sink": torch.zeros(3)}, "contiguous float32"),
        ({"q": query(16), "head_counts": (64, 128), "layer": "model.layers.9.attn"}, "no attention layer"),
    ],
)
def test_flashinfer_constraints(options, message):
    options = {"layer": SWA, "q": query(), "indices": indices(), "lens": lengths()} | options
    with lend(KVCache.allocate(plan_of("bf16"))) as views, pytest.raises(ValueError, match=message):
        flashinfer.decode_arguments(views, options.pop("layer"), options.pop("q"), **options)


def test_flashinfer_refuses_fp8_ds_mla(views):
    with pytest.raises(ValueError, match=r"holds fp8_ds_mla rows; .* plan with cache_dtype='bf16' or 'fp8'"):
        flashinfer.decode_arguments(views, SWA, query(), indices=indices(), lens=lengths())
