"""What the lanes of one block do together in the top-k kernel: sums, extremes and places over all of their keys.

A block is one or more warpgroups that all call the same operation. Its keys lie in the order of `segment_layout`: every
warp holds neighbouring entries, so that ranks within a block follow from those within a warp and the warps' totals.
Each operation has a meaning of its own as an array operation, which is what runs under `mosaic_lanes.interpreted()`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from dsv4kv_jax.kernels import mosaic_lanes
from dsv4kv_jax.kernels.mosaic_attention_lanes import Word, load_shared
from dsv4kv_jax.kernels.mosaic_lanes import LANES, mgpu, plgpu

WARP = 32  # lanes
BINS_PER_LANE = 4  # of the histogram; one load of 16 bytes
_WARPS = LANES // WARP  # of a warpgroup
_FOUND = 4  # words
_SCALAR = plgpu.Layout.WG_SPLAT(())


class Shared(NamedTuple):
    """Shared memory of a block, all 32-bit integers.

    Attributes:
      bins: the histogram, `BINS_PER_LANE` a lane, zeros between uses; and one bin for the rest.
      sums: totals of the warps.
      ends: the warps' extremes.
      found: the bin found, and a spare word.
    """

    bins: Any
    sums: Any
    ends: Any
    found: Any

    @staticmethod
    def types(warpgroups: int) -> tuple[Any, ...]:
        sizes = (warpgroups * LANES * BINS_PER_LANE + BINS_PER_LANE, WARP, 2 * WARP, 2 * _FOUND)
        return tuple(plgpu.SMEM((size,), jnp.uint32) for size in sizes)

    @property
    def num_bins(self) -> int:
        return self.bins.shape[0] - BINS_PER_LANE

    @property
    def num_warps(self) -> int:
        return self.num_bins // (WARP * BINS_PER_LANE)


class Range(NamedTuple):
    """The keys below `base`, and the first `wanted` of those from there to `base + width`. All uint32 scalars."""

    base: jax.Array
    width: jax.Array
    wanted: jax.Array


def segment_layout(size: int, width: int) -> Any:
    """Registers of a vector `[size]`: a warp holds a quarter, of which its lanes take `width` values in turn.

    `size` is a multiple of `LANES * width`.
    """
    quarters = () if size == LANES * width else ((size // _WARPS,),)  # a tile of the size of the next is refused
    tiling = plgpu.Tiling(((size,), *quarters, (WARP * width,), (width,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3 - len(quarters),), lane_dims=(-2,), vector_dim=-1)


def extremes(low: jax.Array, high: jax.Array, layout: Any, shared: Shared) -> tuple[jax.Array, jax.Array]:
    """The smallest of all uint32 `low` of the block, and the largest `high`."""
    if mosaic_lanes.is_interpreted():
        return jnp.min(low), jnp.max(high)

    def lanes(low: Any, high: Any, ends: Any) -> list[Word]:
        def over_warp(low: Word, high: Word) -> list[Word]:
            return [_redux("min.u32", low), _redux("max.u32", high)]

        lane, warp = _lane_and_warp()
        smallest = over_warp(_fold(arith.minui, low), _fold(arith.maxui, high))
        address = Word.shared_address(ends)
        _ptx("@$3 st.shared.v2.b32 [$0], {$1, $2};", address + warp * 8, *smallest, lane.equals(0))
        _barrier()
        text = "mov.b32 $0, 0xffffffff; mov.b32 $1, 0; @$3 ld.shared.v2.b32 {$0, $1}, [$2];"
        return over_warp(*_ptx(text, address + lane * 8, lane < shared.num_warps, results=2))

    return _call(lanes, (low, high), (), (shared.ends,), layout, returns=2)


def count(digit: jax.Array, layout: Any, shared: Shared) -> None:
    """Adds one to `bins[digit]` for every element, as `locate` will see. A digit past the last bin is not seen."""
    if mosaic_lanes.is_interpreted():
        shared.bins[...] = shared.bins[...].at[jnp.minimum(digit, shared.num_bins)].add(jnp.uint32(1))
        return

    def lanes(digit: Any, bins: Any) -> list[Word]:
        address = Word.shared_address(bins)
        for bin_ in _words(digit):
            # No branch around it: lanes that add to the same bin, such as that for the rest, do so together.
            bin_ = Word(arith.minui(bin_.value, _constant(shared.num_bins).value))
            _ptx("red.shared.add.u32 [$0], 1;", address + (bin_ << 2))
        return []

    _call(lanes, (digit,), (), (shared.bins,), layout)


def locate(wanted: jax.Array, shared: Shared) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The bin with the `wanted`-th counted element: (its number, which of its elements that is, how many it has).

    `wanted` is from 1 to the number of counted elements. Clears the histogram. All three are uint32.
    """
    if mosaic_lanes.is_interpreted():
        bins = shared.bins[...][: shared.num_bins]
        shared.bins[...] = jnp.zeros(shared.bins.shape, jnp.uint32)
        up_to = jnp.cumsum(bins, dtype=jnp.uint32)
        bin_ = jnp.argmax(up_to >= wanted).astype(jnp.uint32)
        return bin_, wanted - (up_to[bin_] - bins[bin_]), bins[bin_]

    def lanes(wanted: Word, bins: Any, sums: Any, found: Any) -> list[Word]:
        lane, warp = _lane_and_warp()
        target = Word.shared_address(found)
        thread = warp * WARP + lane
        mine = Word.shared_address(bins) + thread * (4 * BINS_PER_LANE)
        _barrier()
        counts = load_shared(mine, BINS_PER_LANE)
        _ptx("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", mine, _constant(0))
        total = counts[0] + counts[1] + counts[2] + counts[3]
        through = _scan(total)
        _publish(sums, through)
        _barrier()
        before = _of_earlier_warps(sums) + through - total
        for index, inside in enumerate(counts):
            rank = wanted - before  # 1 is the first one of this bin
            hit = (rank - 1) < inside
            _ptx("@$4 st.shared.v4.b32 [$0], {$1, $2, $3, $3};", target, thread * 4 + index, rank, inside, hit)
            before = before + inside
        _barrier()
        return load_shared(target, 4)[:3]

    refs = (shared.bins, shared.sums, shared.found)
    return _call(lanes, (), (wanted,), refs, None, returns=3)


def compact(
    targets: Sequence[Any],
    row: jax.Array,
    column: jax.Array,
    *,
    keys: jax.Array,
    entries: jax.Array,
    taken: Range,
    ties: bool,
    layout: Any,
    shared: Shared,
) -> None:
    """Writes the entries whose keys are `taken`, in order, and their keys if there is a target for them.

    Args:
      targets: references `[rows, columns]` of 32-bit integers.
      row, column: int32, where in the targets the first one goes.
      keys: uint32 tile.
      entries: int32, a tile, or the scalar number of the first of the block's elements.
      taken: which ones.
      ties: whether some from the base on are wanted; without, it is less work.
      layout: of the tiles.
      shared: of the block.
    """
    if mosaic_lanes.is_interpreted():
        masks = keys < taken.base, (keys - taken.base <= taken.width) & ties
        below, within = (jnp.cumsum(mask, dtype=jnp.int32) - mask.astype(jnp.int32) for mask in masks)
        wanted = taken.wanted.astype(jnp.int32)
        is_taken = masks[0] | (masks[1] & (within < wanted))
        place = column + below + jnp.minimum(within, wanted)
        if not entries.ndim:
            entries = entries + jnp.arange(keys.shape[0], dtype=jnp.int32)
        for target, values in zip(targets, (entries, keys), strict=False):
            target[...] = target[...].at[jnp.where(is_taken, row, target.shape[0]), place].set(values, mode="drop")
        return

    def lanes(keys: Any, *rest: Any) -> list[Word]:
        tile, (base, width, wanted, row, column, *first) = rest[: entries.ndim], rest[entries.ndim : num_arguments]
        sums, found, *targets = rest[num_arguments:]
        lane, warp = _lane_and_warp()

        def counted(key: Word, base: Word) -> tuple[Word, Word, Word]:
            """Whether a key is below, whether it is outside, and a word that counts those below in its lower half,
            those within in its upper one: no block has 2**16 keys."""
            below = key < base
            if not ties:
                return below, below, below.select(1, 0, like=base)
            outside = width < key - base
            return below, outside, below.select(1, outside.select(0, 1 << 16, like=base))

        starts, so_far = [], _constant(0)
        for register in keys.registers.flat:
            total = _constant(0)
            for key in _parts(register):
                total = total + counted(key, base)[2]
            through = _scan(total)
            starts.append(so_far + through - total)
            so_far = so_far + _last_lane(through)
        _publish(sums, so_far)
        # Counting again is cheaper than keeping the counts in registers, which the compiler does where it knows that
        # the base is the same: read from memory, it may be another.
        spare = Word.shared_address(found) + 4 * _FOUND
        _ptx("@$2 st.shared.b32 [$0], $1;", spare, base, (lane + warp).equals(0))
        _barrier()
        (base,) = _ptx("ld.shared.b32 $0, [$1];", spare, results=1)
        earlier = _of_earlier_warps(sums)
        addresses = [_row_address(target, row) for target in targets]
        size = len(_parts(keys.registers.flat[0]))
        number = warp * (len(starts) * WARP * size) + lane * size
        for index, (start, register) in enumerate(zip(starts, keys.registers.flat, strict=True)):
            rank = start + earlier
            for part, key in enumerate(_parts(register)):
                is_taken, outside, count = counted(key, base)
                place = column + rank
                if ties:
                    is_early = (rank >> 16) < wanted
                    place = column + (rank & 0xFFFF) + is_early.select(rank >> 16, wanted)
                    is_taken = outside.select(is_taken, is_early)
                entry = _part(tile[0].registers.flat[index], part) if tile else first[0] + number + part
                for address, value in zip(addresses, (entry, key), strict=False):
                    text = "{ .reg .b64 address; mad.wide.u32 address, $1, 4, $0; @$3 st.global.b32 [address], $2; }"
                    _ptx(text, address, place, value, is_taken)
                rank = rank + count
            number = number + WARP * size
        return []

    tiles, scalars = (keys, entries) if entries.ndim else (keys,), (*taken, row, column)
    scalars = scalars if entries.ndim else (*scalars, entries)
    num_arguments = len(tiles) - 1 + len(scalars)
    _call(lanes, tiles, scalars, (shared.sums, shared.found, *targets), layout)


# What follows works on the values of one lane.


def _call(
    function: Callable[..., list[Word]],
    tiles: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    refs: Sequence[Any],
    layout: Any,
    *,
    returns: int = 0,
) -> Any:
    """`function(*tiles, *scalars, *refs)`, whose words, equal in all lanes, become uint32 scalars."""

    @plgpu.inline_mgpu(
        arg_types=(*[layout] * len(tiles), *[_SCALAR] * len(scalars), *[plgpu.RefType()] * len(refs)),
        return_type=tuple(plgpu.ShapeDtypeStruct((), jnp.uint32, layout=_SCALAR) for _ in range(returns)),
    )
    def lanes(_: Any, *args: Any) -> Any:
        end = len(tiles) + len(scalars)
        words = [Word(scalar.registers.item()) for scalar in args[len(tiles) : end]]
        result = function(*args[: len(tiles)], *words, *args[end:])
        return tuple(mgpu.FragmentedArray.splat(word.value, (), is_signed=False) for word in result)

    return lanes(*(plgpu.layout_cast(tile, layout) for tile in tiles), *scalars, *refs)


def _constant(value: int) -> Word:
    return Word(mgpu.c(value, ir.IntegerType.get_signless(32)))


def _part(register: Any, index: int) -> Word:
    return Word(vector.extract(register, dynamic_position=[], static_position=[index]))


def _parts(register: Any) -> list[Word]:
    return [_part(register, index) for index in range(register.type.shape[0])]


def _words(tile: Any) -> list[Word]:
    return [word for register in tile.registers.flat for word in _parts(register)]


def _fold(operation: Callable[[Any, Any], Any], tile: Any) -> Word:
    first, *rest = _words(tile)
    for word in rest:
        first = Word(operation(first.value, word.value))
    return first


def _ptx(text: str, *words: Word, results: int = 0) -> Any:
    """Instructions that stay where they are, and that all lanes of a warp reach together."""
    i32 = ir.IntegerType.get_signless(32)
    values = mgpu.utils.inline_ptx(
        text,
        *(word.value for word in words),
        result_types=[i32] * results if results else None,
        has_side_effects=True,
        convergent=True,
    )
    return [Word(value) for value in values] if results else None


def _barrier() -> None:
    """Of all warpgroups of the block."""
    _ptx("bar.sync 0;")


def _lane_and_warp() -> tuple[Word, Word]:
    i32 = ir.IntegerType.get_signless(32)
    thread = Word(mgpu.utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32))
    return thread & (WARP - 1), thread >> int(np.log2(WARP))


def _redux(operation: str, word: Word) -> Word:
    return _ptx(f"redux.sync.{operation} $0, $1, 0xffffffff;", word, results=1)[0]


def _scan(word: Word) -> Word:
    """The sum up to and with this lane, over the warp."""
    for distance in (1, 2, 4, 8, 16):
        text = f"""{{
          .reg .b32 other; .reg .pred valid;
          shfl.sync.up.b32 other|valid, $1, {distance}, 0, 0xffffffff; mov.b32 $0, $1; @valid add.u32 $0, $0, other;
        }}"""
        word = _ptx(text, word, results=1)[0]
    return word


def _last_lane(word: Word) -> Word:
    return _ptx(f"shfl.sync.idx.b32 $0, $1, {WARP - 1}, {WARP - 1}, 0xffffffff;", word, results=1)[0]


def _publish(sums: Any, last: Word) -> None:
    """Makes the last lane's word the total of this warp."""
    lane, warp = _lane_and_warp()
    _ptx("@$2 st.shared.b32 [$0], $1;", Word.shared_address(sums) + warp * 4, last, lane.equals(WARP - 1))


def _of_earlier_warps(sums: Any) -> Word:
    """The sum of the totals of the warps before this one."""
    lane, warp = _lane_and_warp()
    text = "mov.b32 $0, 0; @$2 ld.shared.b32 $0, [$1];"
    return _redux("add.u32", *_ptx(text, Word.shared_address(sums) + lane * 4, lane < warp, results=1))


def _row_address(target: Any, row: Word) -> Word:
    (stride, unit), _ = ir.MemRefType(target.type).get_strides_and_offset()
    assert unit == 1, target.type
    return Word.address(target) + row.wide() * (4 * stride)
