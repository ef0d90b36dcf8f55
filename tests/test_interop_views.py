"""The four view forms, from a spec and a stride order; and blocks that a kernel counts smaller."""

import dataclasses
import itertools

import numpy as np
import pytest

import dsv4kv_jax
from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.interop import PageView, page_view
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec, layer_specs

torch = pytest.importorskip("torch")

LATENT = MLAAttentionSpec(
    block_size=256, head_size=512, dtype="uint8", alignment=576, compress_ratio=128, cache_dtype_str="fp8_ds_mla"
)
PLAIN = MLAAttentionSpec(block_size=64, head_size=512, dtype="bfloat16", alignment=512, cache_dtype_str="auto")
PADDED = SlidingWindowMLASpec(block_size=8, head_size=24, dtype="float32", alignment=512, sliding_window=8)


def test_packed_pages_step_over_the_other_layers():
    view = page_view(LATENT, 5, form="packed", block_stride_bytes=1_435_968, offset_bytes=3456)
    assert view == PageView(dtype="uint8", shape=(5, 2, 584), strides=(1_435_968, 584, 1), offset=3456)
    assert view.end_bytes == 4 * 1_435_968 + 3456 + 1168


def test_padded_pages_step_over_their_padding():
    view = page_view(PADDED, 3, form="padded")
    assert (view.dtype, view.shape, view.strides) == ("float32", (3, 8, 24), (256, 24, 1))  # 768 B padded to 1024


def test_kv_first_pages_are_two_halves():
    view = page_view(PADDED, 3, form="kv_first")
    assert (view.shape, view.strides) == ((2, 3, 8, 12), (96, 256, 12, 1))
    # A page is contiguous: the V half starts where the K half ends.
    flat = torch.arange(3 * 256, dtype=torch.float32).view(torch.uint8)
    pages = view.on(flat)
    assert pages[0, 1].flatten().tolist() == list(range(256, 352))
    assert pages[1, 1].flatten().tolist() == list(range(352, 448))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_contiguous_in_any_order(order):
    view = page_view(PLAIN, 4, form="contiguous", stride_order=order)
    flat = torch.arange(4 * 64 * 512, dtype=torch.int32).to(torch.bfloat16).view(torch.uint8)
    shape = (4, 64, 512)
    physical = flat.view(torch.bfloat16).view([shape[dim] for dim in order])
    wanted = physical.permute([order.index(dim) for dim in range(3)])
    assert view.shape == shape and torch.equal(view.on(flat), wanted)
    assert view.strides == wanted.stride()


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_rows_may_be_transposed_inside_a_page(form):
    view = page_view(PLAIN, 3, form=form, block_stride_bytes=3 * 65_536, stride_order=(0, 2, 1))
    assert view.strides == (3 * 32_768, 1, 64)


@pytest.mark.parametrize(
    "spec", layer_specs(dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash"), layers=(2, 3)).values()
)
def test_the_packed_form_is_the_layouts(spec):
    wider = dataclasses.replace(spec, block_size=512)
    groups = [
        KVCacheGroup(layers=("before", "layer"), specs=(spec, spec), spec=spec),
        KVCacheGroup(layers=("other",), specs=(wider,), spec=wider),
    ]
    page = PackedLayout.from_groups(groups).page("layer")
    assert 0 < page.offset_bytes < page.block_stride_bytes
    view = page_view(spec, 7, form="packed", block_stride_bytes=page.block_stride_bytes, offset_bytes=page.offset_bytes)
    assert view == PageView.of_page(page, 7)


def test_kernel_blocks_divide_a_dense_block():
    view = page_view(PLAIN, 6, form="padded", kernel_block_size=16)
    assert (view.shape, view.strides) == ((6 * 64 // 16, 16, 512), (16 * 512, 512, 1))
    flat = torch.zeros(6 * 65_536, dtype=torch.uint8)
    whole, parts = page_view(PLAIN, 6, form="padded").on(flat), view.on(flat)
    whole[2, 33] = 1.0
    assert bool((parts[2 * 4 + 2, 1] == 1).all()) and int(parts.count_nonzero()) == 512
    assert page_view(PLAIN, 6, form="padded", kernel_block_size=64) == page_view(PLAIN, 6, form="padded")
    compressed = dataclasses.replace(PLAIN, block_size=256, compress_ratio=4)
    assert page_view(compressed, 2, form="contiguous", kernel_block_size=64).shape == (8, 16, 512)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (PLAIN, {"form": "packed", "block_stride_bytes": 131_072}, "next one starts 131072 B later, so kernel blocks"),
        (PADDED, {"form": "padded"}, "a page has 768 B and the next one starts 1024 B later"),
        (LATENT, {"form": "padded"}, "stores all scale rows behind all data rows"),
        (dataclasses.replace(PADDED, head_size=128), {"form": "kv_first"}, "the V half of a page comes after"),
    ],
)
def test_kernel_blocks_are_refused_where_strides_cannot_name_them(spec, options, message):
    with pytest.raises(ValueError, match=message):
        page_view(spec, 4, kernel_block_size=spec.block_size // 2, **options)


@pytest.mark.parametrize("size", [0, -16, 24, 128])
def test_kernel_blocks_must_divide(size):
    with pytest.raises(ValueError, match=f"kernel_block_size={size} cannot divide blocks of 64 tokens"):
        page_view(PLAIN, 4, form="padded", kernel_block_size=size)
    with pytest.raises(ValueError, match="a multiple of the 128 token"):
        page_view(LATENT, 4, form="padded", kernel_block_size=64)


@dataclasses.dataclass
class MambaSpec:
    block_size: int = 16


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (MambaSpec(), {"form": "padded"}, "a MambaSpec has no pages of rows; supported are MLAAttentionSpec"),
        (PLAIN, {"form": "ragged"}, "form='ragged' must be"),
        (PLAIN, {"form": "packed"}, "needs block_stride_bytes"),
        (PLAIN, {"form": "packed", "block_stride_bytes": 65_535}, "so pages overlap"),
        (PLAIN, {"form": "packed", "block_stride_bytes": 65_537}, "multiples of the 2 B of bfloat16"),
        (PLAIN, {"form": "padded", "offset_bytes": 1}, "multiples of the 2 B of bfloat16"),
        (PLAIN, {"form": "contiguous", "block_stride_bytes": 65_540}, "use form='padded'"),
        (PLAIN, {"form": "padded", "stride_order": (1, 0, 2)}, "does not put the blocks .* outermost"),
        (PLAIN, {"form": "kv_first", "stride_order": (0, 1, 2, 3)}, r"the blocks \(dimension 1\) outermost"),
        (PLAIN, {"form": "contiguous", "stride_order": (0, 1)}, "must hold each of the dimensions 0 to 2 once"),
        (PLAIN, {"form": "padded", "num_blocks": -1}, "num_blocks=-1"),
        (PLAIN, {"form": "padded", "num_blocks": 4.0}, "num_blocks=4.0"),
        (PLAIN, {"form": "padded", "num_blocks": None}, "num_blocks=None"),
        (PLAIN, {"form": "padded", "offset_bytes": -512}, "offset_bytes=-512"),
        (PLAIN, {"form": "padded", "offset_bytes": True}, "offset_bytes=True"),
        (PLAIN, {"form": "packed", "block_stride_bytes": 65_536.0}, "block_stride_bytes=65536.0"),
        (PLAIN, {"form": "packed", "block_stride_bytes": "64K"}, "block_stride_bytes='64K'"),
        (PLAIN, {"form": "padded", "kernel_block_size": 16.0}, "kernel_block_size=16.0"),
        (PLAIN, {"form": "contiguous", "stride_order": (0.0, 1, 2)}, "must hold each of the dimensions 0 to 2 once"),
        (LATENT, {"form": "kv_first"}, "a latent row is both K and V"),
        (LATENT, {"form": "contiguous", "stride_order": (2, 0, 1)}, "only the natural order can name"),
    ],
)
def test_what_strides_cannot_express_is_refused(spec, options, message):
    with pytest.raises(ValueError, match=message):
        page_view(spec, **{"num_blocks": 4, **options})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offset": -4}, r"offset \(-4,\) must be integers of at least 0"),
        ({"shape": (-1,)}, "shape"),
        ({"shape": (True,)}, "shape"),
        ({"strides": (1.0,)}, "strides"),
        ({"strides": (1, 1)}, "needs a stride a dimension"),
        ({"dtype": "int7"}, "dtype='int7' is not a cache dtype"),
    ],
)
def test_views_that_cannot_be(fields, message):
    """A negative offset used to read what lies before the buffer."""
    with pytest.raises(ValueError, match=message):
        PageView(**{"dtype": "uint8", "shape": (2,), "strides": (1,)} | fields)


@pytest.mark.parametrize("flat", [lambda t: t[::2], lambda t: t.view(2, -1), lambda t: t.numpy(), lambda t: None])
def test_a_view_lies_on_compact_memory(flat):
    """On every second byte of a buffer, it used to show the bytes between."""
    with pytest.raises(ValueError, match=r"compact one-dimensional tensor.*tensor.reshape\(-1\)"):
        page_view(PADDED, 3, form="padded").on(flat(torch.zeros(8192, dtype=torch.uint8)))


def test_a_view_never_passes_the_buffer():
    view = page_view(PADDED, 3, form="padded")
    assert view.end_bytes == 2 * 1024 + 768
    view.on(torch.zeros(3 * 1024, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"needs 2816 B, and the buffer has 2048 B"):
        view.on(torch.zeros(2048, dtype=torch.uint8))
    assert page_view(PADDED, 0, form="padded").end_bytes == 0


def test_the_offset_counts_from_the_tensor_not_from_its_storage():
    flat = torch.arange(8192, dtype=torch.uint8)[4096:]
    view = page_view(PADDED, 3, form="padded", offset_bytes=256).on(flat)
    assert view.data_ptr() == flat.data_ptr() + 256
    assert np.array_equal(view.view(torch.uint8)[0, 0].numpy(), flat[256 : 256 + 96].numpy())
