"""Exact top-k on Mosaic GPU: a block finds the best of one chunk of a row, in rounds until a chunk is all there is.

A block keeps its chunk in registers, as integer keys that fall as the scores rise. It narrows the range that holds the
`top_k`-th smallest key: a histogram over the range, in shared memory, tells in which bin that key is; the bin is the
next range. Most often the second bin is taken as a whole; else the range shrinks to one key, and the earliest entries
with that key are taken. Every entry's place follows from how many are taken before it, so entries stay in order.

What is found in the chunks of a row is again a row, with keys instead of scores and with the entries that they belong
to. Entries in order keep ties right. How many there are follows from `visible` alone.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dsv4kv_jax.kernels import mosaic_lanes
from dsv4kv_jax.kernels.mosaic_lanes import LANES, lane_load, lane_store, plgpu, splat
from dsv4kv_jax.kernels.mosaic_top_k_lanes import (
    Range,
    Shared,
    compact,
    count,
    extremes,
    locate,
    segment_layout,
)
from dsv4kv_jax.specs import cdiv, round_up

_I32, _U32 = jnp.int32, jnp.uint32
_MOST = 8192  # entries that are picked of a row
_VECTOR = 4  # most scores of one load
_NO_KEY = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What may be chosen freely: it changes the time, never the result.

    Attributes:
      chunk: most entries of a block, at least twice `top_k` where rows are longer, below 2**16.
      warpgroups: most of a block, at most 8.
    """

    chunk: int = 8_192
    warpgroups: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """One round over rows of `width`, cut into chunks of `size`.

    Attributes:
      num_scores: columns of the first round's rows.
      top_k: how many to pick.
      earlier: chunk sizes of the rounds before.
      width: a row's columns, whether there is something in them or not.
      size: of a chunk; the last one may be cut short.
      warpgroups: of a block.
    """

    num_scores: int
    top_k: int
    earlier: tuple[int, ...]
    width: int
    size: int
    warpgroups: int

    @property
    def chunks(self) -> int:
        return cdiv(self.width, self.size)

    @property
    def is_first(self) -> bool:
        """Scores come in; in later rounds it is entries and their keys."""
        return not self.earlier

    @property
    def is_last(self) -> bool:
        """The picked entries come out; in earlier rounds it is entries and their keys."""
        return self.chunks == 1

    @property
    def out_width(self) -> int:
        return self.top_k if self.is_last else round_up(self.chunks * self.top_k, _VECTOR)

    @property
    def vector(self) -> int:
        """Neighbouring entries of a lane: as many as may be loaded at a time, whatever the row."""
        return math.gcd(self.width, _VECTOR)


def why_not(top_k: int) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    return f"top_k={top_k} is more than the {_MOST} that the kernel picks" if top_k > _MOST else None


def top_k_indices(scores: jax.Array, visible: jax.Array, top_k: int, *, tuning: Tuning | None = None) -> jax.Array:
    """`kernels.top_k_indices` for arguments that were checked: scores `[rows, n]`, all sizes positive."""
    return _top_k(scores, visible, top_k, tuning=tuning or Tuning(), interpreted=mosaic_lanes.is_interpreted())


@functools.partial(jax.jit, static_argnames=("top_k", "tuning", "interpreted"))
def _top_k(scores: Any, visible: Any, top_k: int, *, tuning: Tuning, interpreted: bool) -> jax.Array:
    arrays: list[jax.Array] = [scores]
    for this in _rounds(scores.shape[1], top_k, tuning):
        # The interpreted operations see all of a block at once.
        arrays = _launch(arrays, visible, dataclasses.replace(this, warpgroups=1) if interpreted else this)
    return arrays[0]


def _rounds(num_scores: int, top_k: int, tuning: Tuning) -> Iterator[_Round]:
    chunk, earlier, width = max(tuning.chunk, 2 * top_k), (), num_scores
    while True:
        blocks = cdiv(width, chunk)
        warpgroups = min(cdiv(width, blocks * LANES * _VECTOR), tuning.warpgroups)
        size = round_up(cdiv(width, blocks), warpgroups * LANES * _VECTOR)
        this = _Round(
            num_scores=num_scores, top_k=top_k, earlier=earlier, width=width, size=size, warpgroups=warpgroups
        )
        yield this
        if this.is_last:
            return
        earlier, width = (*earlier, size), this.out_width


def _launch(arrays: list[jax.Array], visible: jax.Array, this: _Round) -> list[jax.Array]:
    rows = arrays[0].shape[0]
    return plgpu.kernel(
        functools.partial(_body, this=this),
        out_type=[
            jax.ShapeDtypeStruct((rows, this.out_width), dtype) for dtype in ((_I32,) if this.is_last else (_I32, _U32))
        ],
        grid=(rows * this.chunks,),
        grid_names=("block",),
        num_threads=this.warpgroups,
        thread_name="warpgroup",
        kernel_name="top_k",
        scratch_types=Shared.types(this.warpgroups),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(visible, *arrays)


def _body(visible: Any, *refs: Any, this: _Round) -> None:
    inputs, rest = (refs[:1], refs[1:]) if this.is_first else (refs[:2], refs[2:])
    outputs, shared = (rest[:1], Shared(*rest[1:])) if this.is_last else (rest[:2], Shared(*rest[2:]))
    block, part = lax.axis_index("block").astype(_I32), lax.axis_index("warpgroup").astype(_I32)
    row, chunk = lax.div(block, _I32(this.chunks)), lax.rem(block, _I32(this.chunks))
    found = jnp.clip(visible[row], 0, this.num_scores)
    for size in this.earlier:  # each full chunk has left `top_k`
        found = lax.div(found, _I32(size)) * this.top_k + jnp.minimum(lax.rem(found, _I32(size)), this.top_k)
    seen = jnp.clip(found - chunk * this.size, 0, this.size)

    def select() -> None:
        share = this.size // this.warpgroups
        layout = segment_layout(share, this.vector)
        place = mosaic_lanes.iota((share,), 0, layout) + part * share
        is_seen, column = place < seen, place + chunk * this.size
        address = jnp.where(is_seen, row, -1), column
        keys = lane_load(inputs[-1], *address, layout)
        keys = jnp.where(is_seen, _keys(keys) if this.is_first else keys, _U32(_NO_KEY))
        bins = shared.num_bins // this.warpgroups
        shared.bins[pl.ds(part * bins, bins)] = splat(0, (bins,), mosaic_lanes.line_layout(bins), _U32)
        taken, is_whole = _narrow(keys, is_seen, seen, this.top_k, layout, shared)
        entries = chunk * this.size if this.is_first else lane_load(inputs[0], *address, layout)
        options: Any = {"keys": keys, "entries": entries, "taken": taken, "layout": layout, "shared": shared}
        pl.when(is_whole)(lambda: compact(outputs, row, chunk * this.top_k, ties=False, **options))
        pl.when(~is_whole)(lambda: compact(outputs, row, chunk * this.top_k, ties=True, **options))

    pl.when(seen > 0)(select)
    if this.is_last:
        _fill(outputs[0], row, part, jnp.minimum(seen, this.top_k), this.warpgroups)


def _keys(scores: jax.Array) -> jax.Array:
    """uint32 keys in the opposite order of the scores, below that of no score; both zeros have one key."""
    bits = lax.bitcast_convert_type(scores, _U32)
    keys = jnp.where(bits > _U32(1 << 31), bits, ~bits & _U32((1 << 31) - 1))
    return jnp.minimum(keys, _U32(_NO_KEY - 1))


def _narrow(
    keys: jax.Array, is_seen: jax.Array, seen: jax.Array, top_k: int, layout: Any, shared: Shared
) -> tuple[Range, jax.Array]:
    """What to take of a block's keys, and whether that is all below the range's base."""
    low, high = extremes(keys, jnp.where(is_seen, keys, _U32(0)), layout, shared)

    def is_undecided(state: Any) -> jax.Array:
        _, width, wanted, inside = state
        return (inside > wanted) & (width > _U32(0))

    def narrow(state: Any) -> Any:
        base, width, wanted, _ = state
        bits = _I32(32) - lax.clz(width).astype(_I32)
        shift = jnp.maximum(bits - _I32(shared.num_bins.bit_length() - 1), _I32(0)).astype(_U32)
        count((keys - base) >> shift, layout, shared)  # keys below the base wrap round to beyond the last bin
        bin_, wanted, inside = locate(wanted, shared)
        return base + (bin_ << shift), (_U32(1) << shift) - _U32(1), wanted, inside

    start = (low, high - low, jnp.minimum(seen, top_k).astype(_U32), seen.astype(_U32))
    base, width, wanted, inside = lax.while_loop(is_undecided, narrow, start)
    is_whole = inside == wanted
    last = jnp.where(base + width < base, _U32(_NO_KEY - 1), jnp.minimum(base + width, _U32(_NO_KEY - 1)))
    return Range(jnp.where(is_whole, last + _U32(1), base), width, wanted), is_whole


def _fill(picked: Any, row: jax.Array, part: jax.Array, count: jax.Array, warpgroups: int) -> None:
    """-1 in the columns from `count` on."""
    layout = mosaic_lanes.line_layout(LANES)
    for first in range(0, picked.shape[1], warpgroups * LANES):
        column = mosaic_lanes.iota((LANES,), 0, layout) + (first + part * LANES)
        is_empty = (column >= count) & (column < picked.shape[1])
        lane_store(picked, jnp.where(is_empty, row, -1), column, splat(-1, (LANES,), layout), layout)
