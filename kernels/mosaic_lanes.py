"""Reads and writes in which every lane has an address of its own: what Pallas on Mosaic GPU lacks for paged caches.

Mosaic GPU slices references with one index for the whole warpgroup. A paged cache needs one index a row, or a value, so
`lane_load` and `lane_store` emit the loads and stores themselves: a register tile of (block, word) addresses goes in, a
tile of values comes out, and a lane whose address is negative touches no memory. Everything else in the kernels is
ordinary Pallas.

The interpreter runs no such inline code. Inside `interpreted()` the two operations become array operations of the same
meaning, which is how the kernels are tested without a GPU.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu
from jax.experimental.pallas import mosaic_gpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

# JAX 0.10 lacks some of what is used here, and type checkers may see that version.
mgpu: Any = gpu
plgpu: Any = mosaic_gpu

LANES = 128  # of one warpgroup, the unit that runs a kernel's body
_WARPS = 4
_LANES_PER_WARP = 32
_LONGEST_AXIS = 65_535  # of a grid, its first axis excepted

_INTERPRETED: contextvars.ContextVar[bool] = contextvars.ContextVar("dsv4kv_jax_mosaic_interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Runs the Mosaic GPU kernels traced inside on the CPU, by Pallas' interpreter; for tests."""
    token = _INTERPRETED.set(True)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
    finally:
        _INTERPRETED.reset(token)


def is_interpreted() -> bool:
    """Whether kernels are traced for the interpreter. What caches traces of a kernel must have it among its keys."""
    return _INTERPRETED.get()


def kernel(body: Callable[..., None], *, name: str, out_type: Any, grid: Sequence[int]) -> Callable[..., Any]:
    """`plgpu.kernel` for bodies that stage nothing in shared memory, so that no barriers are needed around accesses.

    The grid's one or two axes are called "i" and "j".
    """
    axes = list(zip("ij", grid, strict=False))
    # Pallas makes the last axis CUDA's first one, which alone may be longer than this.
    if grid[0] > _LONGEST_AXIS:
        axes.reverse()
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(size for _, size in axes),
        grid_names=tuple(name for name, _ in axes),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )


def row_layout(vector: int, *, lanes_per_row: int = 8) -> Any:
    """Registers of a tile `[rows, columns]`: `lanes_per_row` neighbouring lanes share a row, a lane holds `vector`
    neighbouring columns of it.

    `rows` must be a multiple of `LANES // lanes_per_row`, `columns` of `lanes_per_row * vector`. `.reduce(1)` is the
    layout of one value a row.
    """
    rows, columns = _LANES_PER_WARP // lanes_per_row, lanes_per_row * vector
    tiling = plgpu.Tiling(((_WARPS * rows, columns), (rows, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def unit_layout(values: int) -> Any:
    """Registers of a tile `[units, values]`, units in multiples of 128: a lane holds a unit, neighbouring lanes
    neighbouring ones. `.reduce(1)` is the layout of one value a unit."""
    tiling = plgpu.Tiling(((LANES, values), (_LANES_PER_WARP, values)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)


def word_layout(values: int) -> Any:
    """Registers of a tile `[rows, words, values]`: a lane holds all `values` values of a word, eight lanes share a row.

    Rows come in multiples of 16, words of 8. `.reduce(2)` is the layout of the words, `.reduce((1, 2))` of the rows.
    """
    rows = _LANES_PER_WARP // 8
    tiling = plgpu.Tiling(((_WARPS * rows, 8, values), (rows, 8, values)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-3, -2), vector_dim=-1)


def held_layout(rows: int, values: int) -> Any:
    """Registers of a tile `[rows, units, values]`, units in multiples of 128: a lane holds a unit of all rows.

    Reduced layouts as in `word_layout`.
    """
    tiling = plgpu.Tiling(((rows, LANES, values), (rows, _LANES_PER_WARP, values)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1)


def line_layout(size: int) -> Any:
    """Registers of a vector `[size]`, a multiple of `LANES`: neighbouring values in neighbouring lanes."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def iota(shape: Sequence[int], dimension: int, layout: Any) -> jax.Array:
    """int32 positions along `dimension`, in the given layout."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, tuple(shape), dimension), layout)


def splat(value: Any, shape: Sequence[int], layout: Any, dtype: Any = jnp.int32) -> jax.Array:
    """A scalar in every register of a tile."""
    return plgpu.layout_cast(jnp.full(tuple(shape), value, dtype), layout)


def per_row(values: jax.Array, shape: Sequence[int]) -> jax.Array:
    """One value a row, broadcast along the other dimensions."""
    return lax.broadcast_in_dim(values, tuple(shape), (0,))


def lane_load(ref: Any, block: jax.Array, word: jax.Array, layout: Any, *, streaming: bool = False) -> jax.Array:
    """`ref[block, word]` for every element of a tile; 0, without a read, where `block` is negative.

    Args:
      ref: a two-dimensional reference to global memory that nothing writes while the kernel runs.
      block, word: integer tiles of one shape, used as int32: with 64-bit types on, a `where` between a Python constant
        and another makes int64. Elements that share a register of `layout` must be neighbours in memory: equal blocks,
        consecutive words. The first one's address is aligned to the whole register.
      layout: of the tiles and of the result.
      streaming: do not keep what is read in the L1 cache.
    """
    if is_interpreted():
        values = ref[...][jnp.maximum(block, 0), jnp.where(block < 0, 0, word)]
        return jnp.where(block < 0, jnp.zeros_like(values), values)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout, layout),
        return_type=plgpu.ShapeDtypeStruct(block.shape, ref.dtype, layout=layout),
    )
    def load(_: Any, ref: Any, block: Any, word: Any) -> Any:
        registers = np.empty_like(block.registers)
        for index, valid, offset in _addresses(ref, block, word):
            registers[index] = _load_register(ref, valid, offset, _length(block.registers[index]), space)
        return mgpu.FragmentedArray(_registers=registers, _layout=block.layout, _is_signed=is_signed)

    space, is_signed = f"global.nc{'.L1::no_allocate' * streaming}", _is_signed(ref.dtype)
    return load(ref, *_in_layout(layout, block.astype(jnp.int32), word.astype(jnp.int32)))


def lane_loads(ref: Any, block: jax.Array, words: Sequence[jax.Array], layout: Any) -> tuple[jax.Array, ...]:
    """Several `lane_load`s of the same blocks, all of which are under way before the first value can be used.

    Left to itself, the compiler puts off loads until their values are needed, and waits several times.
    """
    if is_interpreted():
        return tuple(lane_load(ref, block, word, layout) for word in words)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout, [layout] * len(words)),
        return_type=[plgpu.ShapeDtypeStruct(block.shape, ref.dtype, layout=layout)] * len(words),
    )
    def load(_: Any, ref: Any, block: Any, words: list[Any]) -> Any:
        loaded = [np.empty_like(block.registers) for _ in words]
        for word, registers in zip(words, loaded, strict=True):
            for index, valid, offset in _addresses(ref, block, word):
                length = _length(block.registers[index])
                registers[index] = _load_register(ref, valid, offset, length, "global.L1::no_allocate")
        zero = _zero_after_barrier()
        for registers in loaded:
            for index, register in np.ndenumerate(registers):
                registers[index] = _xor(register, zero)
        return [
            mgpu.FragmentedArray(_registers=registers, _layout=block.layout, _is_signed=is_signed)
            for registers in loaded
        ]

    is_signed = _is_signed(ref.dtype)
    block, *words = _in_layout(layout, block.astype(jnp.int32), *(word.astype(jnp.int32) for word in words))
    return tuple(load(ref, block, words))


def lane_store(ref: Any, block: jax.Array, word: jax.Array, values: jax.Array, layout: Any, *, hint: str = "") -> None:
    """`ref[block, word] = values` for every element of a tile, nothing where `block` is negative.

    Arguments as in `lane_load`; `hint` goes into the PTX instruction, such as `".cs"` for what is not read again soon.
    Elements with one address must carry one value.
    """
    if is_interpreted():
        ref[...] = ref[...].at[jnp.where(block < 0, ref.shape[0], block), word].set(values, mode="drop")
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, layout))
    def store(_: Any, ref: Any, block: Any, word: Any, values: Any) -> None:
        for index, valid, offset in _addresses(ref, block, word):
            _store_register(ref, valid, offset, values.registers[index], hint)

    store(ref, *_in_layout(layout, block.astype(jnp.int32), word.astype(jnp.int32), values))


def _is_signed(dtype: Any) -> bool | None:
    return bool(jnp.issubdtype(dtype, jnp.signedinteger)) if jnp.issubdtype(dtype, jnp.integer) else None


def _in_layout(layout: Any, *tiles: jax.Array) -> list[jax.Array]:
    """Constants have a layout of their own, which inline code does not accept for another."""
    return [plgpu.layout_cast(tile, layout) for tile in tiles]


# What follows works on MLIR values, one register at a time.


def _addresses(ref: Any, block: Any, word: Any) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """(register index, whether its block is valid, its byte offset from the start of `ref`) of every register."""
    ref_type = ir.MemRefType(ref.type)
    (stride, unit), _ = ref_type.get_strides_and_offset()
    assert unit == 1, ref_type
    i64 = ir.IntegerType.get_signless(64)
    item = mgpu.bytewidth(ref_type.element_type)
    for index, register in np.ndenumerate(block.registers):
        first_block, first_word = _first(register), _first(word.registers[index])
        valid = arith.cmpi(arith.CmpIPredicate.sge, first_block, mgpu.c(0, first_block.type))
        # 64-bit from here on: a slab has more than 2**31 bytes, and more than 2**31 words.
        row = arith.muli(arith.extsi(i64, first_block), mgpu.c(stride * item, i64))
        yield index, valid, arith.addi(row, arith.muli(arith.extsi(i64, first_word), mgpu.c(item, i64)))


def _length(register: Any) -> int:
    return ir.VectorType(register.type).shape[0] if isinstance(register.type, ir.VectorType) else 1


def _first(register: Any) -> Any:
    is_vector = isinstance(register.type, ir.VectorType)
    return vector.extract(register, dynamic_position=[], static_position=[0]) if is_vector else register


def _ptx_words(count: int, first: int) -> str:
    words = ", ".join(f"${first + i}" for i in range(count))
    return f".v{count}.b32 {{{words}}}" if count > 1 else f".b32 {words}"


def _load_register(ref: Any, valid: Any, offset: Any, length: int, space: str) -> Any:
    element = ir.MemRefType(ref.type).element_type
    i32 = ir.IntegerType.get_signless(32)
    words = length * mgpu.bitwidth(element) // 32
    assert words in (1, 2, 4), (element, length)
    kind, target = _ptx_words(words, 0).split(" ", 1)
    zero = " ".join(f"mov.b32 ${i}, 0;" for i in range(words))
    # All inputs are used up before the first output is written, so that they may share registers.
    text = (
        "{ .reg .b64 address; .reg .pred valid; "
        f"add.s64 address, ${words}, ${words + 1}; and.pred valid, ${words + 2}, ${words + 2}; {zero} "
        f"@valid ld.{space}{kind} {target}, [address]; }}"
    )
    pointer = mgpu.utils.memref_ptr(ref)
    options: Any = {"has_side_effects": not space.startswith("global.nc")}
    loaded = mgpu.utils.inline_ptx(text, pointer, offset, valid, result_types=[i32] * words, **options)
    packed = vector.from_elements(ir.VectorType.get((words,), i32), list(loaded))
    return vector.bitcast(ir.VectorType.get((length,), element), packed)


def _zero_after_barrier() -> Any:
    """A zero that the compiler knows nothing of before all lanes have come here, so that nothing can be made of it."""
    i32 = ir.IntegerType.get_signless(32)
    text = f"{{ .reg .pred never; setp.ne.u32 never, 0, 0; bar.red.popc.u32 $0, 1, {LANES}, never; }}"
    return mgpu.utils.inline_ptx(text, result_types=i32, has_side_effects=True, convergent=True)


def _xor(register: Any, word: Any) -> Any:
    """A register of 32-bit values, each of them combined with a word."""
    i32 = ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((_length(register),), i32)
    return vector.bitcast(register.type, arith.xori(vector.bitcast(words, register), vector.broadcast(words, word)))


def _store_register(ref: Any, valid: Any, offset: Any, register: Any, hint: str) -> None:
    i32 = ir.IntegerType.get_signless(32)
    words = _length(register) * mgpu.bitwidth(ir.MemRefType(ref.type).element_type) // 32
    assert words in (1, 2, 4, 8), register.type
    packed = vector.bitcast(ir.VectorType.get((words,), i32), register)
    values = [vector.extract(packed, dynamic_position=[], static_position=[i]) for i in range(words)]
    pointer = mgpu.utils.memref_ptr(ref)
    # One instruction stores up to 16 bytes: eight float32 values take two.
    for first in range(0, words, 4):
        part = values[first : first + 4]
        kind, source = _ptx_words(len(part), 3).split(" ", 1)
        place = f"[address + {4 * first}]"
        text = f"{{ .reg .b64 address; add.s64 address, $0, $1; @$2 st.global{hint}{kind} {place}, {source}; }}"
        mgpu.utils.inline_ptx(text, pointer, offset, valid, *part)
