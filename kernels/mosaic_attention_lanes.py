"""What one lane does in the attention kernel: integer arithmetic, loads, copies and stores, as instructions.

A warpgroup's Pallas code calls such a function through `inline`. In it every value is a `Word`, one integer of a lane.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu
from jax.experimental.pallas import mosaic_gpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from dsv4kv_jax.kernels import mosaic_lanes

# Under these names what a type checker says of them does not depend on the installed JAX.
mgpu: Any = gpu
plgpu: Any = mosaic_gpu

TILE_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # what `wgmma` reads


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """A 32- or 64-bit unsigned integer, or a condition, of one lane, with Python's operators. Not for Python's `==`."""

    value: Any

    @staticmethod
    def address(ref: Any) -> "Word":
        i64 = ir.IntegerType.get_signless(64)
        return Word(mgpu.utils.inline_ptx("mov.b64 $0, $1;", mgpu.utils.memref_ptr(ref), result_types=i64))

    @staticmethod
    def shared_address(ref: Any) -> "Word":
        i32 = ir.IntegerType.get_signless(32)
        pointer = mgpu.utils.memref_ptr(ref)
        return Word(mgpu.utils.inline_ptx("mov.b32 $0, $1;", pointer, result_types=i32))

    def _same(self, other: "Word | int") -> Any:
        return other.value if isinstance(other, Word) else mgpu.c(other, self.value.type)

    def __add__(self, other: "Word | int") -> "Word":
        return Word(arith.addi(self.value, self._same(other)))

    def __sub__(self, other: "Word | int") -> "Word":
        return Word(arith.subi(self.value, self._same(other)))

    def __mul__(self, other: "Word | int") -> "Word":
        return Word(arith.muli(self.value, self._same(other)))

    def __and__(self, other: "Word | int") -> "Word":
        return Word(arith.andi(self.value, self._same(other)))

    def __xor__(self, other: "Word | int") -> "Word":
        return Word(arith.xori(self.value, self._same(other)))

    def __lshift__(self, other: "Word | int") -> "Word":
        return Word(arith.shli(self.value, self._same(other)))

    def __rshift__(self, other: "Word | int") -> "Word":
        return Word(arith.shrui(self.value, self._same(other)))

    def __lt__(self, other: "Word | int") -> "Word":
        """Unsigned: a negative number is past every limit."""
        return Word(arith.cmpi(arith.CmpIPredicate.ult, self.value, self._same(other)))

    def equals(self, other: "Word | int") -> "Word":
        return Word(arith.cmpi(arith.CmpIPredicate.eq, self.value, self._same(other)))

    def is_natural(self) -> "Word":
        return Word(arith.cmpi(arith.CmpIPredicate.sge, self.value, mgpu.c(0, self.value.type)))

    def wide(self) -> "Word":
        return Word(arith.extui(ir.IntegerType.get_signless(64), self.value))

    def select(self, true: "Word | int", false: "Word | int", like: "Word | None" = None) -> "Word":
        """`true` where this condition holds, else `false`; `like` gives two constants their type."""
        typed = next(value for value in (like, true, false) if isinstance(value, Word))
        return Word(arith.select(self.value, typed._same(true), typed._same(false)))


def bundle_layout(count: int) -> Any:
    return mosaic_lanes.line_layout(count * mosaic_lanes.LANES)


def _unpack(bundle: Any) -> list[Word]:
    i32 = ir.IntegerType.get_signless(32)
    return [Word(mgpu.utils.bitcast(register, i32)) for register in bundle.registers.flat]


def _pack(words: list[Word]) -> Any:
    kind = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    registers = np.array([mgpu.utils.bitcast(word.value, kind) for word in words], dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=bundle_layout(len(words)).to_mgpu(), _is_signed=False)


def inline(
    *, scalars: int, refs: int, words: int, bundles: tuple[int, ...] = (), tile: bool = False
) -> Callable[..., Any]:
    """Turns `f(scalars, refs, bundles, tile) -> words` into a call on int32 scalars, references, bundles and a tile.

    A bundle is `count` 32-bit words of each lane; outside it is a uint32 array that loops can carry. The tile is a
    reference to a tile in shared memory, where `tile` says that there is one.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def lanes(_: Any, *args: Any) -> Any:
            values, references = args[:scalars], args[scalars : scalars + refs]
            registers = args[scalars + refs : scalars + refs + len(bundles)]
            result = function(
                [Word(value.registers.item()) for value in values],
                list(references),
                [_unpack(bundle) for bundle in registers],
                *args[scalars + refs + len(bundles) :],
            )
            return _pack(result) if words else None

        size, layout = (words * mosaic_lanes.LANES,), bundle_layout(words) if words else None
        return plgpu.inline_mgpu(
            arg_types=(
                *[plgpu.Layout.WG_SPLAT(())] * scalars,
                *[plgpu.RefType()] * refs,
                *[bundle_layout(count) for count in bundles],
                *[plgpu.RefType(TILE_TRANSFORMS)] * tile,
            ),
            return_type=plgpu.ShapeDtypeStruct(size, jnp.uint32, layout=layout) if words else None,
        )(lanes)

    return decorate


def lane() -> Word:
    i32 = ir.IntegerType.get_signless(32)
    thread = mgpu.utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32)
    return Word(thread) & (mosaic_lanes.LANES - 1)


def load(address: Word, count: int, valid: Word) -> list[Word]:
    """`count` words, zeros without a read where not valid. Volatile: the compiler moves other loads to their use."""
    i32 = ir.IntegerType.get_signless(32)
    targets = ", ".join(f"${index}" for index in range(count))
    kind = f".v{count}.b32 {{{targets}}}" if count > 1 else f".b32 {targets}"
    zeros = " ".join(f"mov.b32 ${index}, 0;" for index in range(count))
    text = f"{zeros} @${count + 1} ld.volatile.global{kind}, [${count}];"
    loaded = mgpu.utils.inline_ptx(text, address.value, valid.value, result_types=[i32] * count, has_side_effects=True)
    return [Word(value) for value in loaded]


def copy(target: Word, source: Word, size: Word) -> None:
    """Starts copying 16 bytes from global to shared memory, of which those from `size` on become zeros, unread."""
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    mgpu.utils.inline_ptx(text, target.value, source.value, size.value)


def load_shared(address: Word, count: int) -> list[Word]:
    targets = ", ".join(f"${index}" for index in range(count))
    types = [ir.IntegerType.get_signless(32)] * count
    text = f"ld.shared.v{count}.b32 {{{targets}}}, [${count}];"
    loaded = mgpu.utils.inline_ptx(text, address.value, result_types=types, has_side_effects=True)
    return [Word(value) for value in loaded]


def prefetch(address: Word, valid: Word) -> None:
    mgpu.utils.inline_ptx("@$1 prefetch.global.L2 [$0];", address.value, valid.value)


def store(address: Word, words: list[Word]) -> None:
    values = ", ".join(f"${index + 1}" for index in range(len(words)))
    kind = f".v{len(words)}.b32" if len(words) > 1 else ".b32"
    values = f"{{{values}}}" if len(words) > 1 else values
    mgpu.utils.inline_ptx(f"st.shared{kind} [$0], {values};", address.value, *[word.value for word in words])


def dequantise(codes: Word, scale: Word) -> list[Word]:
    """Four e4m3 values times a float32 given as its bits, as two words of bfloat16 pairs."""
    i32 = ir.IntegerType.get_signless(32)
    # e4m3 converts to float16 only; the product needs float32's range.
    text = """{
      .reg .b16 low, high, h<4>; .reg .b32 pair<2>; .reg .f32 f<4>, scale;
      mov.b32 {low, high}, $2; mov.b32 scale, $3;
      cvt.rn.f16x2.e4m3x2 pair0, low; cvt.rn.f16x2.e4m3x2 pair1, high;
      mov.b32 {h0, h1}, pair0; mov.b32 {h2, h3}, pair1;
      cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
      mul.f32 f0, f0, scale; mul.f32 f1, f1, scale; mul.f32 f2, f2, scale; mul.f32 f3, f3, scale;
      cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2;
    }"""
    pairs = mgpu.utils.inline_ptx(text, codes.value, scale.value, result_types=[i32, i32])
    return [Word(pair) for pair in pairs]


def commit_copies() -> None:
    """Ends a group of copies."""
    mgpu.utils.inline_ptx("cp.async.commit_group;")


def await_copies(pending: int) -> None:
    """Waits for this lane's groups of copies, all but the `pending` latest."""
    mgpu.utils.inline_ptx(f"cp.async.wait_group {pending};")
