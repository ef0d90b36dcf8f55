"""What the lanes of the scoring kernel do with codes: bring them into the operands of a wgmma, and multiply.

An operand that passes through registers has 64 rows of 128 float16 values: keys, or the heads of a query on their way
to shared memory. Four lanes share a row; a lane has 16 pairs of values of two rows, 8 apart. Two permutations keep
shared memory free of bank conflicts, and every value in the lane that loaded it:

* The operand wants a lane's pairs 8 columns apart, but a product does not depend on the order of the columns if both
  operands have the same. A lane loads two runs of 16 neighbours, half a row apart, and they go for its columns.
* Row r of the keys is key `r // 2` of the tile's first half for even r, of its second half for odd r. Halves lie 64
  bytes out of step with the banks, so that neighbouring rows meet in none.

While `mosaic_lanes.interpreted()` is active these functions are array operations of the same meaning.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.mlir import ir

from dsv4kv_jax import formats
from dsv4kv_jax.kernels import codecs, mosaic_lanes
from dsv4kv_jax.kernels import mosaic_attention_lanes as lanes
from dsv4kv_jax.kernels._dots import einsum_f32
from dsv4kv_jax.kernels.mosaic_attention_lanes import Word, mgpu, plgpu

TILE = 64  # keys
HALF = TILE // 2
DIM = formats.INDEXER_FP8.num_values
KEY_WORDS = DIM // formats.WORD_BYTES
HALF_WORDS = HALF * KEY_WORDS + 16  # of half a tile in shared memory: the next one is 64 bytes out of step
ROWS = 64  # of an operand
ROW = plgpu.Layout.WGMMA.reduce(1)  # the layout of a value a row

_PARTS = 2  # rows of an operand that a lane has
_RUNS = 2  # of 16 values that it loads of each


def load_query(codes_ref: Any, token: jax.Array, start: int) -> jax.Array:
    """The codes of 64 heads from `start` on as float16 `[64, 128]`, in the order of `read`; zeros past the last one.

    Args:
      codes_ref: bfloat16 `[T, H, 128]` in global memory.
      token: int32, below T.
      start: a multiple of 64.
    """
    heads = codes_ref.shape[1]
    if mosaic_lanes.is_interpreted():
        codes = codes_ref[...][token, start : start + ROWS].astype(jnp.float16)
        return _ordered(jnp.pad(codes, ((0, ROWS - codes.shape[0]), (0, 0))))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((ROWS, DIM), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def load(_: Any, codes_ref: Any, token: Any) -> Any:
        lane = lanes.lane()
        warp, group, quarter = lane >> 5, (lane >> 2) & 7, lane & 3
        words = []
        for part in range(_PARTS):
            head = (warp << 4) + group + (start + 8 * part)
            row = (Word(token.registers.item()) * heads + head).wide() * (2 * DIM)
            first = Word.address(codes_ref) + row + (quarter << 5).wide()
            offsets = [run * DIM + eight * 16 for run in range(_RUNS) for eight in range(2)]
            words.append([word for offset in offsets for word in lanes.load(first + offset, 4, head < heads)])
        return _fragment([[_bfloat16_to_float16(word) for word in part] for part in words])

    return load(codes_ref, token)


def read(keys_ref: Any, scales_ref: Any) -> tuple[jax.Array, jax.Array]:
    """The keys of a stage as float16 `[64, 128]` for a wgmma and their scales, float32 `[64]`; both in operand order.

    When it returns, all lanes have read the stage.

    Args:
      keys_ref: uint32 `[2, words]` in shared memory, a half of the tile each.
      scales_ref: uint32 `[64]`.
    """
    if mosaic_lanes.is_interpreted():
        words = keys_ref[...][:, : HALF * KEY_WORDS].reshape(2, HALF, KEY_WORDS)
        values = codecs.from_words(words.swapaxes(0, 1).reshape(TILE, KEY_WORDS), jnp.float8_e4m3fn)
        scales = lax.bitcast_convert_type(scales_ref[...], jnp.float32)
        return _ordered(values.astype(jnp.float16)), scales.reshape(2, HALF).swapaxes(0, 1).reshape(TILE)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=(
            plgpu.ShapeDtypeStruct((TILE, DIM), jnp.float16, layout=plgpu.Layout.WGMMA),
            plgpu.ShapeDtypeStruct((TILE,), jnp.float32, layout=ROW),
        ),
    )
    def read(_: Any, keys_ref: Any, scales_ref: Any) -> tuple[Any, Any]:
        lane = lanes.lane()
        warp, group, quarter = lane >> 5, (lane >> 2) & 7, lane & 3
        half, key = group & 1, (warp << 3) + (group >> 1)  # of its first row; that of the second one is 4 keys on
        start = Word.shared_address(keys_ref) + half * (HALF_WORDS * 4) + key * DIM + (quarter << 4)
        scale = Word.shared_address(scales_ref) + (half * HALF + key) * 4
        codes, factors = [], []
        for part in range(_PARTS):
            runs = [lanes.load_shared(start + (4 * DIM * part + DIM // 2 * run), 4) for run in range(_RUNS)]
            codes.append([word for run in runs for word in run])
            factors.append(_load_word(scale + 16 * part))
        mgpu.utils.warpgroup_barrier()
        values = _fragment([[pair for word in part for pair in _e4m3_to_float16(word)] for part in codes])
        f32 = ir.VectorType.get((1,), ir.F32Type.get())
        registers = np.array([mgpu.utils.bitcast(factor.value, f32) for factor in factors], dtype=object)
        layout = ROW.to_mgpu()
        registers = registers.reshape(layout.registers_shape((TILE,)))
        return values, mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(keys_ref, scales_ref)


def key_of_row() -> jax.Array:
    """int32 `[64]`: which key of the tile each row of what `read` returns is."""
    row = mosaic_lanes.iota((TILE,), 0, ROW)
    return (row & 1) * HALF + (row >> 1)


def products(keys: jax.Array, query_ref: Any) -> jax.Array:
    """float32 `[64, H]`: of float16 keys `[64, 128]` in registers and queries `[H, 128]` in shared memory."""
    if mosaic_lanes.is_interpreted():  # the interpreter's wgmma knows no operand in registers
        return einsum_f32("kd,hd->kh", keys.astype(jnp.float32), query_ref[...].astype(jnp.float32))

    def multiply(sums: Any) -> jax.Array:
        plgpu.wgmma(sums, keys, query_ref.transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE, query_ref.shape[0]), jnp.float32))


def _ordered(values: jax.Array) -> jax.Array:
    """`[..., 128]` as `read` and `load_query` order the values of a row."""
    split = values.reshape(*values.shape[:-1], _RUNS, 4, 8, 2)  # run, lane, pair, value
    return split.swapaxes(-3, -2).reshape(values.shape)


def _fragment(pairs: list[list[Word]]) -> Any:
    """float16 `[64, 128]` in the layout of wgmma from a lane's pairs of values: 16 for each of its two rows.

    In this layout a lane's pairs are 8 columns apart, but all rows may have their values in any order, if it is the
    same for all: a lane's are those that it could load at once.
    """
    layout, register = plgpu.Layout.WGMMA.to_mgpu(), ir.VectorType.get((2,), ir.F16Type.get())
    registers = np.array([[mgpu.utils.bitcast(pair.value, register) for pair in part] for part in pairs], dtype=object)
    registers = registers.T.reshape(layout.registers_shape((ROWS, DIM)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _load_word(address: Word) -> Word:
    i32 = ir.IntegerType.get_signless(32)
    text = "ld.shared.b32 $0, [$1];"
    return Word(mgpu.utils.inline_ptx(text, address.value, result_types=i32, has_side_effects=True))


def _e4m3_to_float16(codes: Word) -> list[Word]:
    """Four e4m3 values as two words of float16 pairs; exact."""
    i32 = ir.IntegerType.get_signless(32)
    text = """{
      .reg .b16 low, high; mov.b32 {low, high}, $2;
      cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
    return [Word(pair) for pair in mgpu.utils.inline_ptx(text, codes.value, result_types=[i32, i32])]


def _bfloat16_to_float16(pair: Word) -> Word:
    """Two bfloat16 values as a float16 pair; exact for e4m3 values."""
    i32 = ir.IntegerType.get_signless(32)
    text = """{
      .reg .b32 low, high; shl.b32 low, $1, 16; and.b32 high, $1, 0xffff0000;
      cvt.rn.f16x2.f32 $0, high, low;
    }"""
    return Word(mgpu.utils.inline_ptx(text, pair.value, result_types=i32))
