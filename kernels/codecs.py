"""How the values of a row become the bytes of its sections, and back: one codec for each registered row format.

A codec works on rows, never on the slab: `encode` turns `[..., num_values]` values into one `uint32[..., words]` array
a section, `decode` does the reverse. The arithmetic of the number formats is in `dsv4kv_jax.kernels.floats`.

Quantisation rules: vLLM 0.27.1 and FlashMLA; see `docs/formats.md`.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4kv_jax import formats
from dsv4kv_jax.formats import RowFormat, Section
from dsv4kv_jax.kernels.floats import (
    E2M1_MAX,
    E4M3_MAX,
    from_e2m1,
    round_to_bfloat16,
    scale_byte,
    times_power_of_two,
    times_ue8m0,
    to_bfloat16,
    to_e2m1,
    to_e4m3,
    ue8m0_to_float32,
)

ScaleFloor = Literal["amax", "scale"]

# vLLM floors either the block's largest magnitude or the scale itself at 1e-4. Since both round up to powers of two, a
# floor is nothing but a smallest scale byte: ceil(log2(1e-4 / 448)) = -22 and ceil(log2(1e-4)) = -13, biased by 127.
SMALLEST_SCALE_BYTE: Mapping[str, int] = types.MappingProxyType({"amax": 105, "scale": 114})
# DeepGEMM's MXFP4 floor keeps the scale a normal float: 2**-126.
SMALLEST_MXFP4_BYTE = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """The two directions of one row format.

    Attributes:
      encode: `(fmt, rows, *, scale_floor, kv_scale) -> sections`; rows are float32 or bfloat16 `[..., num_values]`,
        sections a tuple of `uint32[..., words]`, one for each of `fmt.sections`.
      decode: `(fmt, sections, *, kv_scale) -> values`, the reverse, in the widest dtype that the format needs.
    """

    encode: Callable[..., tuple[jax.Array, ...]]
    decode: Callable[..., jax.Array]


_CODECS: dict[str, Codec] = {}


def register_codec(fmt: RowFormat, codec: Codec) -> None:
    """Makes `codec` the way rows of `fmt` are stored.

    Raises:
      ValueError: another codec is registered for a format of this name.
    """
    if _CODECS.setdefault(fmt.name, codec) != codec:
        raise ValueError(f"format {fmt.name!r} already has a codec; choose another name for the new format")


def codec_of(fmt: RowFormat) -> Codec:
    """The codec of `fmt`; formats of a single field need none of their own.

    Raises:
      ValueError: no codec is registered for this format.
    """
    if codec := _CODECS.get(fmt.name):
        return codec
    if is_plain(fmt):
        return _PLAIN
    raise ValueError(
        f"row format {fmt.name!r} has no codec; register one with dsv4kv_jax.kernels.codecs.register_codec"
    )


def is_plain(fmt: RowFormat) -> bool:
    """Whether a row is its values as they are, in one dtype."""
    fields = [field for section in fmt.sections for field in section.fields]
    return len(fields) == 1 and fields[0].count == fmt.num_values


def default_dtype(fmt: RowFormat) -> np.dtype:
    """What rows are read as unless told otherwise: float32 and uint8 where a page is plainly that, else bfloat16."""
    own = is_plain(fmt) and fmt.page_dtype in ("float32", "uint8")
    return formats.numpy_dtype(fmt.page_dtype if own else "bfloat16")


def encode(
    fmt: RowFormat, rows: jax.Array, *, scale_floor: ScaleFloor = "amax", kv_scale: Any = 1.0
) -> tuple[jax.Array, ...]:
    """The sections of `rows`, each `uint32[..., words]`.

    Args:
      fmt: the row format.
      rows: float32 or bfloat16 `[..., fmt.num_values]` (uint8 for a plain uint8 format).
      scale_floor: `"amax"` floors a block's largest magnitude at 1e-4, `"scale"` its scale. Formats without block
        scales, and the indexer's, have no choice and ignore it.
      kv_scale: per-tensor scale of a plain fp8 format: stored = value / kv_scale.

    Raises:
      ValueError: a wrong length or dtype, an unknown floor, a `kv_scale` for a format that has none.
    """
    if scale_floor not in get_args(ScaleFloor):
        raise ValueError(f"scale_floor={scale_floor!r} is not one of {get_args(ScaleFloor)}")
    _check_kv_scale(fmt, kv_scale)
    return codec_of(fmt).encode(fmt, as_rows(fmt, rows), scale_floor=scale_floor, kv_scale=kv_scale)


def decode(fmt: RowFormat, sections: tuple[jax.Array, ...], *, kv_scale: Any = 1.0) -> jax.Array:
    """The values `[..., fmt.num_values]` of encoded rows; the reverse of `encode`."""
    _check_kv_scale(fmt, kv_scale)
    return codec_of(fmt).decode(fmt, sections, kv_scale=kv_scale)


def as_rows(fmt: RowFormat, rows: Any) -> jax.Array:
    """`rows` as a device array that `encode` takes.

    Raises:
      ValueError: a wrong length or dtype. float64 is refused as well: rounding it silently is not this library's call.
    """
    if not isinstance(rows, jax.Array):
        rows = np.asarray(rows)
    if rows.ndim < 1 or rows.shape[-1] != fmt.num_values:
        raise ValueError(f"rows have shape {rows.shape}; {fmt.name!r} rows hold {fmt.num_values} values")
    legal = ("uint8",) if fmt.page_dtype == "uint8" and is_plain(fmt) else ("bfloat16", "float32")
    if rows.dtype.name not in legal:
        raise ValueError(f"rows have dtype {rows.dtype}; {fmt.name!r} rows are made from {' or '.join(legal)}")
    return jnp.asarray(rows)


def _check_kv_scale(fmt: RowFormat, kv_scale: Any) -> None:
    if isinstance(kv_scale, int | float):
        if not (np.isfinite(kv_scale) and kv_scale > 0):
            raise ValueError(f"kv_scale={kv_scale!r} must be positive and finite")
        if kv_scale == 1.0:
            return
    if not (is_plain(fmt) and fmt.page_dtype == "float8_e4m3fn"):
        raise ValueError(
            f"kv_scale={kv_scale!r} is only for plain float8_e4m3fn rows; {fmt.name!r} rows carry their own scales"
        )


# --- Words and fields ---


def as_words(values: jax.Array) -> jax.Array:
    """`[..., n]` values of 1, 2 or 4 bytes as little-endian `uint32[..., words]`."""
    per_word = formats.WORD_BYTES // values.dtype.itemsize
    if per_word > 1:
        values = values.reshape(*values.shape[:-1], values.shape[-1] // per_word, per_word)
    return lax.bitcast_convert_type(values, jnp.uint32)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """`uint32[..., words]` as `[..., n]` values of `dtype`; the reverse of `as_words`."""
    values = lax.bitcast_convert_type(words, dtype)
    return _flat(values) if values.ndim > words.ndim else values


def pack(section: Section, *values: jax.Array) -> jax.Array:
    """The words of a section from its fields' values, one `[..., count]` array a field, of the field's dtype."""
    for field, value in zip(section.fields, values, strict=True):
        assert value.dtype == formats.numpy_dtype(field.dtype), (field, value.dtype)
        assert value.shape[-1] == field.count, (field, value.shape)
    if any(field.size_bytes % formats.WORD_BYTES for field in section.fields):
        return as_words(jnp.concatenate([_as_bytes(value) for value in values], axis=-1))
    return jnp.concatenate([as_words(value) for value in values], axis=-1)


def _as_bytes(values: jax.Array) -> jax.Array:
    return values if values.dtype == jnp.uint8 else from_words(values, jnp.uint8)


def unpack(section: Section, words: jax.Array) -> tuple[jax.Array, ...]:
    """The values of a section's fields, in order; the reverse of `pack`."""
    ends = np.cumsum([field.size_bytes for field in section.fields])
    starts = ends - [field.size_bytes for field in section.fields]
    if any(end % formats.WORD_BYTES for end in ends):
        raw, unit = from_words(words, jnp.uint8), 1
    else:
        raw, unit = words, formats.WORD_BYTES
    fields = []
    for field, start, end in zip(section.fields, starts.tolist(), ends.tolist(), strict=True):
        dtype = formats.numpy_dtype(field.dtype)
        part = raw[..., start // unit : end // unit]
        if unit == formats.WORD_BYTES:
            fields.append(from_words(part, dtype))
            continue
        if dtype.itemsize > 1:
            part = part.reshape(*part.shape[:-1], field.count, dtype.itemsize)
        fields.append(lax.bitcast_convert_type(part, dtype))
    return tuple(fields)


def _in_blocks(x: jax.Array, num_blocks: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], num_blocks, x.shape[-1] // num_blocks)


def _flat(x: jax.Array) -> jax.Array:
    """The last two dimensions as one."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _scaled_blocks(
    values: jax.Array, num_blocks: int, largest: float, smallest_byte: int
) -> tuple[jax.Array, jax.Array]:
    """bf16-rounded values over their block's scale, `[..., values]`, and the scale bytes, int32 `[..., blocks]`."""
    blocks = _in_blocks(round_to_bfloat16(values), num_blocks)
    byte = scale_byte(blocks, largest, smallest_byte)
    return _flat(times_power_of_two(blocks, 127 - byte[..., None])), byte


# --- The built-in formats ---


def _encode_fp8_ds_mla(
    fmt: RowFormat, rows: jax.Array, *, scale_floor: ScaleFloor, kv_scale: Any
) -> tuple[jax.Array, ...]:
    data, scale = fmt.sections
    nope, num_blocks = data.fields[0].count, scale.fields[0].count
    scaled, byte = _scaled_blocks(rows[..., :nope], num_blocks, E4M3_MAX, SMALLEST_SCALE_BYTE[scale_floor])
    byte = byte.astype(jnp.uint8)
    pad = jnp.zeros((*byte.shape[:-1], scale.fields[1].count), jnp.uint8)
    return pack(data, to_e4m3(scaled), to_bfloat16(rows[..., nope:])), pack(scale, byte, pad)


def _decode_fp8_ds_mla(fmt: RowFormat, sections: tuple[jax.Array, ...], *, kv_scale: Any) -> jax.Array:
    codes, rope = unpack(fmt.sections[0], sections[0])
    byte, _ = unpack(fmt.sections[1], sections[1])
    nope = times_ue8m0(_in_blocks(codes.astype(jnp.float32), byte.shape[-1]), byte[..., None])
    return jnp.concatenate([_flat(nope).astype(jnp.bfloat16), rope], axis=-1)


def _encode_indexer_fp8(
    fmt: RowFormat, rows: jax.Array, *, scale_floor: ScaleFloor, kv_scale: Any
) -> tuple[jax.Array, ...]:
    scaled, byte = _scaled_blocks(rows, 1, E4M3_MAX, SMALLEST_SCALE_BYTE["amax"])
    scale = ue8m0_to_float32(byte.astype(jnp.uint8))
    return pack(fmt.sections[0], to_e4m3(scaled)), pack(fmt.sections[1], scale)


def _decode_indexer_fp8(fmt: RowFormat, sections: tuple[jax.Array, ...], *, kv_scale: Any) -> jax.Array:
    (codes,), (scale,) = unpack(fmt.sections[0], sections[0]), unpack(fmt.sections[1], sections[1])
    return codes.astype(jnp.float32) * scale


def _encode_indexer_ue8m0(
    fmt: RowFormat, rows: jax.Array, *, scale_floor: ScaleFloor, kv_scale: Any
) -> tuple[jax.Array, ...]:
    scaled, byte = _scaled_blocks(rows, 1, E4M3_MAX, SMALLEST_SCALE_BYTE["amax"])
    copies = fmt.sections[1].fields[0].count
    scales = jnp.broadcast_to(byte.astype(jnp.uint8), (*byte.shape[:-1], copies))
    return pack(fmt.sections[0], to_e4m3(scaled)), pack(fmt.sections[1], scales)


def _decode_indexer_ue8m0(fmt: RowFormat, sections: tuple[jax.Array, ...], *, kv_scale: Any) -> jax.Array:
    (codes,), (byte,) = unpack(fmt.sections[0], sections[0]), unpack(fmt.sections[1], sections[1])
    # Each byte serves its own quarter of the row for a reader of MX scales.
    return _flat(times_ue8m0(_in_blocks(codes.astype(jnp.float32), byte.shape[-1]), byte[..., None]))


def _encode_mxfp4(fmt: RowFormat, rows: jax.Array, *, scale_floor: ScaleFloor, kv_scale: Any) -> tuple[jax.Array, ...]:
    num_blocks = fmt.sections[1].fields[0].count
    scaled, byte = _scaled_blocks(rows, num_blocks, E2M1_MAX, SMALLEST_MXFP4_BYTE)
    codes = to_e2m1(scaled)
    pairs = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return pack(fmt.sections[0], pairs), pack(fmt.sections[1], byte.astype(jnp.uint8))


def _decode_mxfp4(fmt: RowFormat, sections: tuple[jax.Array, ...], *, kv_scale: Any) -> jax.Array:
    (pairs,), (byte,) = unpack(fmt.sections[0], sections[0]), unpack(fmt.sections[1], sections[1])
    codes = _flat(jnp.stack([pairs & 15, pairs >> 4], axis=-1))
    return _flat(times_ue8m0(_in_blocks(from_e2m1(codes), byte.shape[-1]), byte[..., None]))


def _encode_plain(fmt: RowFormat, rows: jax.Array, *, scale_floor: ScaleFloor, kv_scale: Any) -> tuple[jax.Array, ...]:
    (section,) = fmt.sections
    if fmt.page_dtype == "float8_e4m3fn":
        inverse = (
            jnp.float32(1.0 / kv_scale) if isinstance(kv_scale, int | float) else 1.0 / kv_scale.astype(jnp.float32)
        )
        return (pack(section, to_e4m3(rows.astype(jnp.float32) * inverse)),)
    if fmt.page_dtype == "bfloat16":
        return (pack(section, to_bfloat16(rows)),)
    return (pack(section, rows.astype(formats.numpy_dtype(fmt.page_dtype))),)


def _decode_plain(fmt: RowFormat, sections: tuple[jax.Array, ...], *, kv_scale: Any) -> jax.Array:
    (values,) = unpack(fmt.sections[0], sections[0])
    if fmt.page_dtype == "float8_e4m3fn":
        scale = jnp.float32(kv_scale) if isinstance(kv_scale, int | float) else kv_scale.astype(jnp.float32)
        return values.astype(jnp.float32) * scale
    return values


_PLAIN = Codec(encode=_encode_plain, decode=_decode_plain)
register_codec(formats.FP8_DS_MLA, Codec(encode=_encode_fp8_ds_mla, decode=_decode_fp8_ds_mla))
register_codec(formats.INDEXER_FP8, Codec(encode=_encode_indexer_fp8, decode=_decode_indexer_fp8))
register_codec(formats.INDEXER_FP8_UE8M0, Codec(encode=_encode_indexer_ue8m0, decode=_decode_indexer_ue8m0))
register_codec(formats.INDEXER_MXFP4, Codec(encode=_encode_mxfp4, decode=_decode_mxfp4))
