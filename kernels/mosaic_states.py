"""Means over windows of compressor states, on Mosaic GPU.

The channels of all windows lie side by side, and a program takes some neighbouring ones of them. Short windows are held
whole by each lane, which has channels of its own, so that a program takes 512 channels and no lane needs another. Long
windows are shared: eight lanes side by side take 32 channels, and the warpgroup's other lanes other tokens, so that the
few windows that a decode step completes still occupy many programs. Either way a program reads 32 KiB, all of it under
way at once, and nothing of it twice.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dsv4kv_jax import formats
from dsv4kv_jax.kernels import mosaic_lanes, mosaic_pages
from dsv4kv_jax.kernels._arguments import INT32_MAX
from dsv4kv_jax.kernels.mosaic_lanes import iota, lane_load, lane_loads, lane_store, per_row
from dsv4kv_jax.kernels.mosaic_pages import Rows
from dsv4kv_jax.kernels.states import Geometry, StateWindows, geometry
from dsv4kv_jax.specs import cdiv, round_up

_LONGEST_HELD = 16  # tokens of a window that one lane holds
_TOKENS = 16  # of a shared window that a warpgroup reads with one instruction
_MOST_PROGRAMS = 1056  # 8 a multiprocessor; each takes several parts where there are more


class _Job(NamedTuple):
    """What the code for the windows of a layer depends on: layers of a kind share their kernels."""

    where: Rows
    of: Geometry
    size: int

    @property
    def values(self) -> int:
        """Neighbouring channels of a lane: a unit."""
        return math.gcd(self.of.width, 4)

    @property
    def is_held(self) -> bool:
        return self.of.window <= _LONGEST_HELD

    @property
    def units(self) -> int:
        """Of a program."""
        return mosaic_lanes.LANES if self.is_held else 8

    @property
    def tokens(self) -> int:
        """Of a program's tile, the window's last ones at its end."""
        return self.of.window if self.is_held else round_up(self.of.window, _TOKENS)

    @property
    def layouts(self) -> "_Layouts":
        held, values = self.is_held, self.values
        tile = mosaic_lanes.held_layout(self.tokens, values) if held else mosaic_lanes.word_layout(values)
        return _Layouts(tile, tile.reduce(2), tile.reduce(0), tile.reduce((0, 2)))

    @property
    def num_parts(self) -> int:
        """Times a program's units that there are."""
        return cdiv(self.size * self.of.width, self.units * self.values)

    @property
    def num_programs(self) -> int:
        return min(self.num_parts, _MOST_PROGRAMS)


class _Layouts(NamedTuple):
    """Of a program's tile `[tokens, units, values]`, and of what has fewer dimensions."""

    tile: Any
    units_of_tokens: Any
    channels: Any
    units: Any


def window_means(slab: jax.Array, windows: Sequence[StateWindows]) -> tuple[jax.Array, ...]:
    """`states.window_means` for arguments that were checked, in one launch."""
    jobs, arrays = [], []
    for window in windows:
        where, offset = mosaic_pages.split(window.page)
        of, size = geometry(window.page, window.compress_ratio), window.positions.shape[0]
        if size and window.block_table.size:
            jobs.append(_Job(where, of, size))
            arrays.append((offset, window.count, window.block_table, window.requests, window.positions))
    means = iter(_means(slab, tuple(arrays), jobs=tuple(jobs), interpreted=mosaic_lanes.is_interpreted()))
    return tuple(
        next(means)
        if window.positions.shape[0] and window.block_table.size
        else jnp.zeros((window.positions.shape[0], geometry(window.page, window.compress_ratio).width), jnp.float32)
        for window in windows
    )


@functools.partial(jax.jit, static_argnames=("jobs", "interpreted"))
def _means(
    slab: jax.Array, arrays: tuple[Any, ...], *, jobs: tuple[_Job, ...], interpreted: bool
) -> tuple[jax.Array, ...]:
    if not jobs:
        return ()
    operands = []
    for offset, count, table, requests, positions in arrays:
        operands += [offset, count.reshape(1), table, requests[None, :], positions[None, :]]
    means = mosaic_lanes.kernel(
        functools.partial(_body, jobs=jobs),
        name="window_means",
        out_type=[jax.ShapeDtypeStruct((1, job.size * job.of.width), jnp.float32) for job in jobs],
        grid=(sum(job.num_programs for job in jobs),),
    )(slab.reshape(slab.shape[0], -1), *operands)
    return tuple(mean.reshape(job.size, job.of.width) for mean, job in zip(means, jobs, strict=True))


def _body(slab: Any, *refs: Any, jobs: Sequence[_Job]) -> None:
    outs, first = refs[5 * len(jobs) :], 0
    for index, job in enumerate(jobs):
        program = lax.axis_index("i") - first
        write = functools.partial(_write_parts, job, slab, *refs[5 * index : 5 * index + 5], outs[index], program)
        if len(jobs) == 1:
            write()
        else:
            pl.when((program >= 0) & (program < job.num_programs))(write)
        first += job.num_programs


def _write_parts(
    job: _Job, slab: Any, offset: Any, count: Any, table: Any, requests: Any, positions: Any, out: Any, program: Any
) -> None:
    """All of a program's parts; those without windows are only cleared."""
    layouts, width = job.layouts, job.units * job.values
    used = jnp.minimum(count[0], job.size) * job.of.width
    mean = functools.partial(_mean, job, slab, offset, used, table, requests, positions)

    def write(turn: Any) -> None:
        part = program + turn * jnp.int32(job.num_programs)
        unit = part * job.units + iota((job.units,), 0, layouts.units)

        def store(values: jax.Array) -> None:
            channel = per_row(unit * job.values, values.shape) + iota(values.shape, 1, layouts.channels)
            lane_store(out, jnp.where(channel < out.shape[1], 0, -1), channel, values, layouts.channels)

        def clear() -> None:
            store(mosaic_lanes.splat(0, (job.units, job.values), layouts.channels, jnp.float32))

        lax.cond(part * width < used, lambda: store(mean(unit)), clear)

    turns = cdiv(job.num_parts, job.num_programs)
    if turns == 1:
        write(jnp.int32(0))
    else:
        lax.fori_loop(jnp.int32(0), jnp.int32(turns), lambda turn, _: write(turn), None)


def _mean(
    job: _Job, slab: Any, offset: Any, used: Any, table: Any, requests: Any, positions: Any, unit: jax.Array
) -> jax.Array:
    """The means of some units of channels, float32 `[units, values]`."""
    of, layouts = job.of, job.layouts
    tile = (job.tokens, job.units, job.values)
    channel = unit * job.values
    window = lax.div(channel, jnp.int32(of.width))
    channel = lax.rem(channel, jnp.int32(of.width))
    window = jnp.where(unit * job.values < used, window, -1)
    zero = jnp.where(window < 0, -1, 0)
    position = jnp.where(window < 0, -1, lane_load(positions, zero, window, layouts.units))
    request = lane_load(requests, zero, window, layouts.units)
    request = jnp.where((request < table.shape[0]) & (position >= 0), request, -1)

    def across(per_unit: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(per_unit, tile[:2], (1,))

    # Within the window; negative ahead of it.
    token = iota(tile[:2], 0, layouts.units_of_tokens) - (job.tokens - of.window)
    index = across(position) + (token - (of.window - 1))
    size = jnp.int32(of.block_size)
    index = jnp.where(token < 0, -1, index)
    column = lax.div(index, size)
    is_entry = (index >= 0) & (column < table.shape[1])
    block = lane_load(table, jnp.where(is_entry, across(request), -1), column, layouts.units_of_tokens)
    limit = min(slab.shape[0], (INT32_MAX - of.block_size + 1) // of.block_size + 1)
    block = jnp.where((block > 0) & (block < limit), block, -1)
    first = job.where.first_element(0, offset[0], lax.rem(index, size), formats.WORD_BYTES) + across(channel)
    # The set of the token's group: the first group of a window lends the first one.
    first += lax.div(token, jnp.int32(of.ratio)) * of.width

    # All scores and all values at once.
    words = [
        lax.broadcast_in_dim(first + start, tile, (0, 1)) + iota(tile, 2, layouts.tile)
        for start in (of.sets * of.width, 0)
    ]
    loaded = lane_loads(slab, lax.broadcast_in_dim(block, tile, (0, 1)), words, layouts.tile)
    score, kv = (lax.bitcast_convert_type(words, jnp.float32) for words in loaded)
    score = jnp.where(lax.broadcast_in_dim(block, tile, (0, 1)) >= 0, score, jnp.full_like(score, -jnp.inf))
    top = jnp.max(score, axis=0)
    top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
    weights = jnp.exp(score - lax.broadcast_in_dim(top, tile, (1, 2)))
    total = jnp.sum(weights, axis=0)
    return jnp.sum(weights * kv, axis=0) / jnp.where(total == 0, jnp.ones_like(total), total)
