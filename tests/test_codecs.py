"""Row formats: bytes from values and values from bytes, against the oracle, for every format."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv4kv_jax import KVCache, formats, kernels, plan_from_specs, specs
from dsv4kv_jax.kernels import codecs, floats

PLAIN = [formats.plain_format("bfloat16", 512), formats.plain_format("float8_e4m3fn", 512)]
PLAIN += [formats.plain_format("float32", 1024)]
SCALED = [formats.FP8_DS_MLA, formats.INDEXER_FP8, formats.INDEXER_FP8_UE8M0, formats.INDEXER_MXFP4]
FORMATS = {fmt.name: fmt for fmt in SCALED + PLAIN}
FLOORS = ["amax", "scale"]
ROWS = 4


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    with jax.enable_x64(request.param):
        yield request.param


@functools.cache
def jitted(direction, name, **options):
    return jax.jit(functools.partial(getattr(codecs, direction), FORMATS[name], **options))


def encoded(fmt, rows, **options):
    """uint8 sections of rows, as numpy."""
    sections = jitted("encode", fmt.name, **options)(jnp.asarray(rows))
    for section, words in zip(fmt.sections, sections, strict=True):
        assert words.dtype == jnp.uint32
        assert words.shape == (len(rows), section.row_bytes // 4)
    return [np.asarray(words).view(np.uint8) for words in sections]


def decoded(fmt, sections, **options):
    words = tuple(jnp.asarray(np.ascontiguousarray(part).view(np.uint32)) for part in sections)
    return np.asarray(jitted("decode", fmt.name, **options)(words).astype(jnp.float32))


def assert_same_bytes(fmt, rows, **options):
    oracle_options = {"floor" if name == "scale_floor" else name: value for name, value in options.items()}
    found = encoded(fmt, rows, **options)
    for index, row in enumerate(rows):
        expected = oracle.encode_row(fmt.name, row, **oracle_options)
        for section, part, want in zip(fmt.sections, found, expected, strict=True):
            np.testing.assert_array_equal(part[index], want, err_msg=f"{fmt.name} {section.name} of row {index}")
    return found


def test_registry():
    for fmt in FORMATS.values():
        assert codecs.codec_of(fmt)
    mixed = dataclasses.replace(formats.FP8_DS_MLA, name="unheard_of")
    with pytest.raises(ValueError, match="'unheard_of' has no codec; register one with"):
        codecs.codec_of(mixed)
    # One field of other values than the row's is not a row as it is.
    shorter = dataclasses.replace(formats.plain_format("bfloat16", 64), name="shorter", num_values=63)
    with pytest.raises(ValueError, match="'shorter' has no codec; register one with"):
        codecs.codec_of(shorter)
    other = codecs.Codec(encode=lambda: (), decode=lambda: jnp.zeros(0))
    with pytest.raises(ValueError, match="'fp8_ds_mla' already has a codec"):
        codecs.register_codec(formats.FP8_DS_MLA, other)


def test_a_format_is_registered_once_under_a_name_of_its_own():
    before = dict(formats._REGISTRY)
    assert formats.register_format(formats.FP8_DS_MLA) is formats.FP8_DS_MLA
    renamed = dataclasses.replace(formats.INDEXER_FP8, name="fp8_ds_mla")
    with pytest.raises(ValueError, match="format 'fp8_ds_mla' is already registered as .*; choose another name"):
        formats.register_format(renamed)
    for name in (*formats.PLAIN_CACHE_STRINGS, *formats._DTYPES):  # a spec with this string would change its meaning
        with pytest.raises(ValueError, match=f"format name '{name}' stands for rows that are stored as they are"):
            formats.register_format(dataclasses.replace(formats.FP8_DS_MLA, name=name))
    with pytest.raises(ValueError, match="'mine' is no RowFormat"):
        formats.register_format("mine")
    assert before == formats._REGISTRY


VALUES = formats.Field(name="values", dtype="uint8", count=4)
SECTION = formats.Section(name="data", fields=(VALUES,))
NOT_POSITIVE = [0, -4, 4.0, True, "4", None]


@pytest.mark.parametrize(
    ("whole", "changes", "message"),
    [
        *((VALUES, {"count": count}, "count of field 'values' is .* at least 1") for count in NOT_POSITIVE),
        *((VALUES, {"dtype": dtype}, "dtype=.* is not a cache dtype") for dtype in ("float64", "int8", None)),
        *((VALUES, {"name": name}, "field name .* must be a string that is not empty") for name in ("", None, 5)),
        *((SECTION, {"name": name}, "section name .* must be a string that is not empty") for name in ("", None, 5)),
        *((SECTION, {"fields": fields}, "has fields=.* a tuple of at least one Field") for fields in ((), [VALUES])),
        *((SECTION, {"fields": fields}, "has fields=.* a tuple of at least one Field") for fields in (None, ("x",))),
        (SECTION, {"fields": (VALUES, VALUES)}, "give them different names"),
        (SECTION, {"fields": (dataclasses.replace(VALUES, count=3),)}, "3 bytes a row; .* add a padding field"),
        *(
            (formats.FP8_DS_MLA, {"num_values": count}, "num_values of format 'fp8_ds_mla' is .* at least 1")
            for count in NOT_POSITIVE
        ),
        *((formats.FP8_DS_MLA, {"name": name}, "format name .* must be a string") for name in ("", None, ["a"])),
        *(
            (formats.FP8_DS_MLA, {"sections": parts}, "has sections=.* at least one Section")
            for parts in ((), [SECTION])
        ),
        *(
            (formats.FP8_DS_MLA, {"sections": parts}, "has sections=.* at least one Section")
            for parts in (None, ("x",))
        ),
        (formats.FP8_DS_MLA, {"sections": (SECTION, SECTION)}, "give them different names"),
        (formats.FP8_DS_MLA, {"page_dtype": "int8"}, "dtype='int8' is not a cache dtype"),
    ],
)
def test_formats_that_cannot_be(whole, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(whole, **changes)


bf16_bits = hnp.arrays(np.uint16, (ROWS, 512), elements=st.integers(0, 2**16 - 1), fill=st.integers(0, 2**16 - 1))
float_bits = hnp.arrays(np.uint32, (ROWS, 1024), elements=st.integers(0, 2**32 - 1), fill=st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("name", list(FORMATS))
@given(bits=bf16_bits)
@settings(max_examples=10, deadline=None)
def test_any_bf16_row(name, floor, bits):
    """Every bit pattern of bf16 there is: subnormals, infinities and NaNs included."""
    fmt = FORMATS[name]
    bits = np.where(bits & 0x7FFF > 0x7F80, np.uint16(0x7FC0), bits)  # one NaN: a payload may change on its way
    rows = np.tile(bits, (1, 2))[:, : fmt.num_values].copy().view(ml_dtypes.bfloat16)
    assert_same_bytes(fmt, rows, scale_floor=floor)


@pytest.mark.parametrize("name", list(FORMATS))
@given(bits=float_bits)
@settings(max_examples=10, deadline=None)
def test_any_float32_row(name, bits):
    fmt = FORMATS[name]
    bits = np.where(bits & 0x7FFFFFFF > 0x7F800000, np.uint32(0x7FC00000), bits)
    rows = bits.view(np.float32)[:, : fmt.num_values]
    assert_same_bytes(fmt, rows)


@pytest.mark.parametrize("floor", FLOORS)
def test_every_bf16_as_largest_magnitude(floor, x64):
    """Scale and codes for all 32,640 finite non-negative values, each as the largest of a block."""
    values = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)
    assert values.size == 32640
    blocks = np.resize(values, (-(-values.size // 7) * 7, 1)) * np.linspace(-1, 1, 64, dtype=np.float32)
    blocks = blocks.astype(ml_dtypes.bfloat16).reshape(-1, 448)
    rows = np.concatenate([blocks, np.zeros((len(blocks), 64), ml_dtypes.bfloat16)], axis=1)
    data, scales = encoded(formats.FP8_DS_MLA, rows, scale_floor=floor)
    expected = np.array([oracle.scale_byte(block, floor) for block in blocks.astype(np.float32).reshape(-1, 64)])
    np.testing.assert_array_equal(scales[:, :7].reshape(-1), expected)
    scaled = blocks.astype(np.float64).reshape(-1, 64) / oracle.ue8m0_value(expected)[:, None]
    np.testing.assert_array_equal(data[:, :448].reshape(-1, 64), oracle.e4m3(scaled))
    assert (data[:, :448] & 0x7F).max() <= 0x7E  # no NaN code for finite input


def test_scales_on_the_boundary_of_a_power_of_two():
    """sgl-project/sglang#31210: a rounded logarithm is one too high exactly there."""
    amax = np.float32([448, 450, 7, 0.013671875, 0.0546875, 448 * 2.0**20, 0])
    rows = np.append(np.repeat(amax, 64), np.zeros(64)).astype(np.float32)[None]
    scales = encoded(formats.FP8_DS_MLA, rows)[1]
    assert scales[0].tolist() == [127, 128, 121, 112, 114, 147, 105, 0]


@pytest.mark.parametrize(("value", "of_amax", "of_scale"), [(0.0, 105, 114), (1e-3, 109, 114), (1e-5, 105, 114)])
def test_tiny_tiles(value, of_amax, of_scale):
    """vllm-project/vllm#58032: tiles of zeros and of tiny values."""
    row = np.append(np.full(448, value), np.zeros(64)).astype(np.float32)[None]
    for floor, byte in (("amax", of_amax), ("scale", of_scale)):
        data, scales = encoded(formats.FP8_DS_MLA, row, scale_floor=floor)
        assert scales[0].tolist() == [byte] * 7 + [0]
        assert value or not data.any()


def test_negative_zero_keeps_its_sign():
    for name, width in (("fp8_ds_mla", 512), ("indexer_fp8", 128), ("float8_e4m3fn", 512), ("bfloat16", 512)):
        data = encoded(FORMATS[name], np.full((1, width), -0.0, np.float32))[0]
        assert set(data[0].tolist()) <= {0x80, 0x00}
        assert data[0, 0 if name != "bfloat16" else 1] == 0x80
    assert encoded(formats.INDEXER_MXFP4, np.full((1, 128), -0.0, np.float32))[0][0].tolist() == [0x88] * 64


def test_e4m3_saturates():
    """jax-ml/ml_dtypes#260: the plain cast turns everything above 464 into NaN."""
    values = jnp.float32([448, 464, 465, 1000, -1000, np.inf, -np.inf, np.nan, -np.nan])
    codes = np.asarray(jax.lax.bitcast_convert_type(floats.to_e4m3(values), jnp.uint8))
    assert codes.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x7F]


def test_infinity_saturates_and_nan_stays_where_it_is():
    row = np.ones((1, 512), np.float32)
    row[0, 0], row[0, 1], row[0, 64] = np.inf, -np.inf, np.nan
    data, scales = encoded(formats.FP8_DS_MLA, row)
    assert data[0, :3].tolist() == [0x7E, 0xFE, 0x00]
    assert scales[0].tolist() == [247, 119, 119, 119, 119, 119, 119, 0]
    assert data[0, 64] == 0x7F
    back = decoded(formats.FP8_DS_MLA, (data, scales))[0]
    assert back[0] == np.inf
    assert back[1] == -np.inf
    assert np.isnan(back[64])
    np.testing.assert_array_equal(back[65:], 1.0)
    keys = np.ones((1, 128), np.float32)
    keys[0, :3] = np.inf, np.nan, -np.inf
    data, scales = encoded(formats.INDEXER_MXFP4, keys)
    assert (data[0, 0] & 15, data[0, 0] >> 4, data[0, 1] & 15) == (7, 7, 15)
    assert scales[0].tolist() == [253, 125, 125, 125]


def test_ue8m0_bytes():
    """vllm-project/vllm#51946: a scale byte is an exponent, not a number."""
    values = np.asarray(floats.ue8m0_to_float32(jnp.arange(256, dtype=jnp.uint8)))
    assert values[120] == 2.0**-7
    assert values[0].view(np.uint32) == 0x00400000  # 2**-127, a subnormal
    assert np.isnan(values[255])
    np.testing.assert_array_equal(values, oracle.ue8m0_value(np.arange(256)).astype(np.float32))
    for convert in (floats.ue8m0_to_float32, functools.partial(floats.times_ue8m0, jnp.float32(1))):
        with pytest.raises(TypeError, match="UE8M0 scales are uint8 exponents, got float32"):
            convert(jnp.float32(120.0))


@pytest.mark.parametrize("name", ["fp8_ds_mla", "indexer_fp8_ue8m0", "indexer_mxfp4"])
def test_every_code_under_every_scale(name):
    """All pairs of data and scale bytes: nothing is flushed to zero, nothing overflows early."""
    fmt = FORMATS[name]
    data_bytes, scale_bytes = (section.row_bytes for section in fmt.sections)
    data = np.tile(np.arange(256, dtype=np.uint8), (256, -(-data_bytes // 256)))[:, :data_bytes].copy()
    if fmt == formats.FP8_DS_MLA:  # 64 codes to a scale: four turns see all of them under each
        data = np.concatenate([np.roll(data[:, :448], 64 * turn, axis=1) for turn in range(4)])
        data = np.concatenate([data, np.zeros((len(data), 128), np.uint8)], axis=1)
    elif fmt == formats.INDEXER_FP8_UE8M0:
        data = np.concatenate([data, data + np.uint8(128)])
    scales = np.resize(np.repeat(np.arange(256, dtype=np.uint8), scale_bytes), (len(data), scale_bytes))
    found = decoded(fmt, (data, scales))
    for index in range(len(data)):
        np.testing.assert_array_equal(
            found[index].view(np.uint32) & _ignore_nan(found[index]),
            (want := oracle.decode_row(name, [data[index], scales[index]])).view(np.uint32) & _ignore_nan(want),
        )


def _ignore_nan(values):
    """A mask that keeps all bits, of a NaN only that it is one."""
    return np.where(np.isnan(values), np.uint32(0x7FC00000), np.uint32(0xFFFFFFFF))


@pytest.mark.parametrize("name", list(FORMATS))
def test_round_trip(name, x64):
    """What was decoded encodes to the same bytes and decodes to the same values."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((8, fmt.num_values)) * np.exp2(rng.integers(-9, 9, (8, 1)))).astype(np.float32)
    first = assert_same_bytes(fmt, rows)
    values = decoded(fmt, first)
    for index in range(len(rows)):
        np.testing.assert_array_equal(
            values[index], oracle.decode_row(name, [part[index] for part in first]).astype(np.float32)
        )
    np.testing.assert_array_equal(decoded(fmt, encoded(fmt, values)), values)


@pytest.mark.parametrize("kv_scale", [0.5, 2.0, 0.3])
def test_kv_scale(kv_scale, x64):
    fmt = FORMATS["float8_e4m3fn"]
    rows = np.linspace(-500, 500, 1024, dtype=np.float32).reshape(2, 512)
    data = assert_same_bytes(fmt, rows, kv_scale=kv_scale)
    want = np.stack([oracle.decode_row(fmt.name, [row], kv_scale) for row in data[0]])
    np.testing.assert_array_equal(decoded(fmt, data, kv_scale=kv_scale), want)
    traced = codecs.encode(fmt, jnp.asarray(rows), kv_scale=jnp.float32(0.5))[0]
    np.testing.assert_array_equal(np.asarray(traced).view(np.uint8), encoded(fmt, rows, kv_scale=0.5)[0])


def test_refusals():
    fmt = formats.FP8_DS_MLA
    rows = jnp.zeros((2, 512), jnp.float32)
    with pytest.raises(ValueError, match=r"rows have shape \(2, 511\); 'fp8_ds_mla' rows hold 512 values"):
        codecs.encode(fmt, rows[:, 1:])
    for dtype in (np.float64, np.int32, np.float16):
        with pytest.raises(ValueError, match=rf"dtype {np.dtype(dtype)}; .* made from bfloat16 or float32"):
            codecs.encode(fmt, np.zeros((2, 512), dtype))
    with pytest.raises(ValueError, match="scale_floor='min' is not one of"):
        codecs.encode(fmt, rows, scale_floor="min")
    with pytest.raises(ValueError, match="kv_scale=2.0 is only for plain float8_e4m3fn rows"):
        codecs.encode(fmt, rows, kv_scale=2.0)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be positive and finite"):
            codecs.encode(FORMATS["float8_e4m3fn"], rows, kv_scale=scale)


def test_plain_bytes():
    fmt = formats.plain_format("uint8", 100)
    rows = np.arange(200, dtype=np.uint8).reshape(2, 100)
    (words,) = codecs.encode(fmt, jnp.asarray(rows))
    np.testing.assert_array_equal(np.asarray(words).view(np.uint8), rows)
    np.testing.assert_array_equal(codecs.decode(fmt, (words,)), rows)
    assert codecs.default_dtype(fmt) == np.uint8
    with pytest.raises(ValueError, match="made from uint8"):
        codecs.encode(fmt, jnp.zeros((2, 100), jnp.float32))


def test_pack_of_fields_that_are_no_whole_words():
    section = formats.Section(
        name="odd",
        fields=(
            formats.Field(name="a", dtype="uint8", count=3),
            formats.Field(name="b", dtype="bfloat16", count=2),
            formats.Field(name="c", dtype="float32", count=1),
            formats.Field(name="d", dtype="uint8", count=1),
        ),
    )
    values = (
        jnp.uint8([[1, 2, 3]]),
        jnp.asarray([[1.0, -2.0]], jnp.bfloat16),
        jnp.float32([[0.1]]),
        jnp.uint8([[9]]),
    )
    words = codecs.pack(section, *values)
    raw = b"".join(np.asarray(value).tobytes() for value in values)
    assert np.asarray(words).tobytes() == raw
    for found, value in zip(codecs.unpack(section, words), values, strict=True):
        chex.assert_trees_all_equal(found, value)


# 96 bytes of bf16 and one float32 scale: a format that the package has never heard of.
INVENTED = formats.RowFormat(
    name="test_invented_100",
    num_values=48,
    sections=(
        formats.Section(name="data", fields=(formats.Field(name="values", dtype="bfloat16", count=48),)),
        formats.Section(name="scale", fields=(formats.Field(name="mean", dtype="float32", count=1),)),
    ),
)


def _encode_invented(fmt, rows, *, scale_floor, kv_scale):
    mean = jnp.mean(rows.astype(jnp.float32), axis=-1, keepdims=True)
    centred = (rows.astype(jnp.float32) - mean).astype(jnp.bfloat16)
    return codecs.pack(fmt.sections[0], centred), codecs.pack(fmt.sections[1], mean)


def _decode_invented(fmt, sections, *, kv_scale):
    (values,), (mean,) = (codecs.unpack(*pair) for pair in zip(fmt.sections, sections, strict=True))
    return values.astype(jnp.float32) + mean


@pytest.mark.parametrize("alignment", [64, 100, 576])
def test_invented_format(alignment):
    """A format registered by a user is planned, written and read; nothing else has to know of it."""
    assert INVENTED.row_bytes == 100
    formats.register_format(INVENTED)
    codecs.register_codec(INVENTED, codecs.Codec(encode=_encode_invented, decode=_decode_invented))
    kind = {"head_size": 48, "dtype": "uint8", "alignment": alignment, "cache_dtype_str": INVENTED.name}
    layers = {
        "a": specs.MLAAttentionSpec(block_size=32, **kind),
        "d": specs.MLAAttentionSpec(block_size=32, **kind),
        "b": specs.SlidingWindowMLASpec(block_size=16, sliding_window=8, **kind),
        "c": specs.SlidingWindowMLASpec(block_size=16, sliding_window=8, **kind),
    }
    cache = KVCache.allocate(plan_from_specs(layers, 0, num_gpu_blocks_override=3))
    page = cache.page("c")
    assert page.spec.real_page_size_bytes == 1600
    assert page.offset_bytes == page.spec.page_size_bytes
    rows = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
    slots = jnp.int32([16, 33, 47])
    noise = pages.random_slab(page, 3)
    assert noise.shape == cache.slab.shape
    slab = kernels.insert_rows(noise, page, slots, rows)
    raw = pages.as_bytes(noise)
    words = codecs.encode(INVENTED, jnp.asarray(rows))
    for index, slot in enumerate(slots.tolist()):
        sections = [np.asarray(part[index]).view(np.uint8) for part in words]
        oracle.write_row(raw, page.offset_bytes, 16, slot, sections)
    np.testing.assert_array_equal(pages.as_bytes(slab), raw)
    back = kernels.gather_rows(slab, page, slots, dtype=jnp.float32)
    np.testing.assert_allclose(back, rows, atol=2**-7)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "indexer_fp8", "indexer_fp8_ue8m0", "indexer_mxfp4"])
def test_rounding_to_bf16_cannot_be_optimised_away(name):
    """XLA drops a cast to bfloat16 and back on a GPU, which moved some e4m3 codes by one."""
    fmt = formats.format_of("uint8", 512, name)
    rows = jax.ShapeDtypeStruct((4, fmt.num_values), jnp.float32)
    text = str(jax.make_jaxpr(lambda rows: codecs.encode(fmt, rows))(rows))
    assert "reduce_precision" in text


@settings(deadline=None, max_examples=50)
@given(hnp.arrays(np.uint32, 64))
def test_bfloat16_of_any_float32(words):
    """Every bit pattern, NaNs with payloads included: the same bits on every device."""
    x = words.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    got = np.asarray(floats.to_bfloat16(jnp.asarray(x))).view(np.uint16)
    np.testing.assert_array_equal(got, want)
    nan = np.isnan(x)
    rounded = np.asarray(floats.round_to_bfloat16(jnp.asarray(x)))
    np.testing.assert_array_equal(rounded[~nan], x.astype(ml_dtypes.bfloat16).astype(np.float32)[~nan])
    assert np.isnan(rounded[nan]).all()
