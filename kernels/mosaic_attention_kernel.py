"""The fused attention kernel for Hopper: three warpgroups, one tile of 64 keys after another.

One block of the grid takes one token, 64 heads and one share of the token's tiles (the split over the key axis):

    producer    loads rows, dequantises them into one of two tiles in shared memory        (mosaic_attention_rows)
    scorer      Q K^T, softmax numerators P, and the first columns of the output, P V
    follower    the other columns of the output, with P and its rescaling from shared memory

K and V are the same tile. `full` and `empty` hand tiles back and forth, `scored` hands over P. The softmax is the
online one in base 2, with one twist: the running maximum is rounded to an integer. Rescaling is then exact, and P is
rounded to bfloat16 in the same way whatever share of the keys a block sees: a split changes only float32 sums.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dsv4kv_jax.kernels import mosaic_attention_rows as rows
from dsv4kv_jax.kernels import mosaic_lanes
from dsv4kv_jax.kernels.mosaic_attention_lanes import TILE_TRANSFORMS, plgpu
from dsv4kv_jax.kernels.mosaic_attention_rows import NUM_VALUES, TILE, RowLoader, Source, Walk

HEADS = 64  # of one block: the rows of a wgmma
_CHUNK = 64  # columns that the query is copied in and the output is copied out by
_CHUNKS = NUM_VALUES // _CHUNK
_STAGES = 2  # tiles in shared memory
_MAX_COLUMNS = 256  # of one wgmma
_LOWEST = -(2.0**100)  # where the running maximum starts: finite, so that no difference of infinities arises
_LOG2_E = math.log2(math.e)

_ROW = plgpu.Layout.WGMMA.reduce(1)  # a value a head
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # a value a key


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What may be chosen freely: it changes the time, never the result.

    Attributes:
      scorer_columns: output columns that the scorer computes beside the scores, a multiple of 64.
      prefetch: how many tiles ahead rows are asked for in L2; 0 for not at all.
      registers: of a thread of the scorer, the follower and the producer; at most 504 together.
      splits: blocks that share one token's keys; None for a choice by the size of the grid.
    """

    scorer_columns: int = 192
    prefetch: int = 2
    registers: tuple[int, int, int] = (208, 208, 88)
    splits: int | None = None


def attention_kernel(
    q: jax.Array,
    slabs: tuple[jax.Array, jax.Array],
    lists: tuple[jax.Array, jax.Array],
    lens: tuple[jax.Array, jax.Array],
    sink: jax.Array,
    *,
    sources: tuple[Source, Source],
    scale: float,
    splits: int,
    tuning: Tuning,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each token over its two lists, in `splits` parts.

    Args:
      q: bfloat16 `[T, H, 512]`, H a multiple of 64.
      slabs, lists, lens: for the window rows and for the compressed rows.
      sink: float32 `[H]`.

    Returns:
      One part: `out` bfloat16 `[T, H, 512]` with the sink in the denominator and `lse` float32 `[T, H]`, +inf for none.
      More: `out` float32 `[splits, T, H, 512]` and `lse` `[splits, T, H]` of each part by itself, without the sink,
      `lse` -inf for a part without keys.
    """
    tokens, heads, _ = q.shape
    head_blocks = heads // HEADS
    whole = splits == 1
    columns = (_pieces(0, tuning.scorer_columns), _pieces(tuning.scorer_columns, NUM_VALUES))
    int32 = jnp.int32

    def body(
        q_gmem, sink_gmem, window_slab, other_slab, window_list, other_list, window_lens, other_lens, *refs
    ) -> None:
        out_gmem, lse_gmem, q_smem, tiles, p_smem, biases, rescale_smem, final_smem, lse_smem, *barriers = refs
        q_ready, full, empty, scored, finished = barriers
        block = lax.axis_index("block").astype(int32)
        token, rest = lax.div(block, int32(splits * head_blocks)), lax.rem(block, int32(splits * head_blocks))
        split, head_block = lax.div(rest, int32(head_blocks)), lax.rem(rest, int32(head_blocks))
        lengths = [
            jnp.clip(ref[token], int32(0), int32(source.width))
            for ref, source in zip((window_lens, other_lens), sources, strict=True)
        ]
        window_tiles, other_tiles = (lax.div(length + int32(TILE - 1), int32(TILE)) for length in lengths)
        num_tiles = window_tiles + other_tiles
        share = lax.div(num_tiles + int32(splits - 1), int32(splits))
        first = jnp.minimum(split * share, num_tiles)
        end = jnp.minimum(first + share, num_tiles)
        steps = end - first
        heads_here = pl.ds(head_block * HEADS, HEADS)

        def stage_of(step: jax.Array) -> jax.Array:
            return lax.rem(step, int32(_STAGES))

        def accumulators(warpgroup: int) -> tuple[jax.Array, ...]:
            return tuple(_full((HEADS, size), 0.0, plgpu.Layout.WGMMA) for _, size in columns[warpgroup])

        def add_values(warpgroup: int, stage: jax.Array, rescale: jax.Array, sums: Any) -> tuple[jax.Array, ...]:
            """`sums * rescale + P V` for the warpgroup's columns."""

            def multiply(*refs: Any) -> None:
                for ref, (start, size) in zip(refs, columns[warpgroup], strict=True):
                    plgpu.wgmma(ref, p_smem.at[stage], tiles.at[stage, :, pl.ds(start, size)])

            return _accumulate(multiply, tuple(total * _per_head(rescale, total.shape) for total in sums))

        def write(warpgroup: int, sums: Any, inverse: jax.Array) -> None:
            """Divides by the denominator and writes the warpgroup's columns."""
            for total, (start, size) in zip(sums, columns[warpgroup], strict=True):
                values = total * _per_head(inverse, total.shape)
                if not whole:
                    out_gmem[split, token, heads_here, pl.ds(start, size)] = values
                    continue
                values = values.astype(jnp.bfloat16)
                for offset in range(0, size, _CHUNK):
                    q_smem[(start + offset) // _CHUNK] = values[:, offset : offset + _CHUNK]
            if whole:
                plgpu.commit_smem()
                for start, size in columns[warpgroup]:
                    for column in range(start, start + size, _CHUNK):
                        target = out_gmem.at[token, heads_here, pl.ds(column, _CHUNK)]
                        plgpu.copy_smem_to_gmem(q_smem.at[column // _CHUNK], target)
            plgpu.wait_smem_to_gmem(0)

        def scorer() -> None:
            _set_registers(tuning.registers[0])
            for chunk in range(_CHUNKS):
                source = q_gmem.at[token, heads_here, pl.ds(chunk * _CHUNK, _CHUNK)]
                plgpu.copy_gmem_to_smem(source, q_smem.at[chunk], q_ready)
            plgpu.barrier_wait(q_ready)

            def step(index: jax.Array, carry: Any) -> Any:
                sums, top, total = carry
                stage = stage_of(index)
                plgpu.barrier_wait(full.at[stage])

                def score(scores: Any) -> jax.Array:
                    for chunk in range(_CHUNKS):
                        keys = tiles.at[stage, :, pl.ds(chunk * _CHUNK, _CHUNK)]
                        plgpu.wgmma(scores, q_smem.at[chunk], keys.transpose((1, 0)))
                    return scores[...]

                scores = pl.run_scoped(score, plgpu.ACC((HEADS, TILE), jnp.float32))
                bias = plgpu.load(biases.at[pl.ds(stage * TILE, TILE)], layout=_COLUMN, optimized=False)
                scores = scores * jnp.float32(scale * _LOG2_E) + lax.broadcast_in_dim(bias, (HEADS, TILE), (1,))
                new_top = jnp.maximum(top, lax.round(scores.max(axis=1), lax.RoundingMethod.TO_NEAREST_EVEN))
                rescale = jnp.exp2(top - new_top)
                p = jnp.exp2(scores - _per_head(new_top, scores.shape))
                p_smem[stage] = p.astype(jnp.bfloat16)
                rescale_smem[pl.ds(stage * HEADS, HEADS)] = rescale
                plgpu.commit_smem()
                plgpu.barrier_arrive(scored.at[stage])
                total = total * rescale + p.sum(axis=1)
                sums = add_values(0, stage, rescale, sums)
                plgpu.barrier_arrive(empty.at[stage])
                return sums, new_top, total

            start = (accumulators(0), _full((HEADS,), _LOWEST, _ROW), _full((HEADS,), 0.0, _ROW))
            sums, top, total = lax.fori_loop(int32(0), steps, step, start)
            lse = (top + jnp.log2(total)) * jnp.float32(1 / _LOG2_E)
            denominator = total
            if whole:
                sinks = plgpu.load(sink_gmem.at[heads_here], layout=_ROW, optimized=False)
                denominator = total + jnp.exp2(sinks * jnp.float32(_LOG2_E) - top)
            nothing = jnp.float32(math.inf if whole else -math.inf)
            inverse = jnp.where(total > 0, 1.0 / denominator, jnp.float32(0))
            final_smem[...] = inverse
            lse_smem[...] = jnp.where(total > 0, lse, nothing)
            plgpu.commit_smem()
            plgpu.barrier_arrive(finished)
            lse_row = lse_gmem.at[token] if whole else lse_gmem.at[split, token]
            plgpu.copy_smem_to_gmem(lse_smem, lse_row.at[heads_here])
            write(0, sums, inverse)

        def follower() -> None:
            _set_registers(tuning.registers[1])

            def step(index: jax.Array, sums: Any) -> Any:
                stage = stage_of(index)
                plgpu.barrier_wait(full.at[stage])
                plgpu.barrier_wait(scored.at[stage])
                rescale = plgpu.load(rescale_smem.at[pl.ds(stage * HEADS, HEADS)], layout=_ROW, optimized=False)
                sums = add_values(1, stage, rescale, sums)
                plgpu.barrier_arrive(empty.at[stage])
                return sums

            sums = lax.fori_loop(int32(0), steps, step, accumulators(1))
            plgpu.barrier_wait(finished)
            write(1, sums, plgpu.load(final_smem, layout=_ROW, optimized=False))

        def producer() -> None:
            _set_registers(tuning.registers[2])
            walk = Walk(token=token, window_tiles=window_tiles, end=end, lens=(lengths[0], lengths[1]))
            loader = RowLoader(
                sources=sources, slabs=(window_slab, other_slab), lists=(window_list, other_list), walk=walk
            )
            ahead = max(tuning.prefetch, 1)

            def slots(tile: jax.Array) -> list[jax.Array]:
                return [loader.slots(tile, half) for half in range(2)]

            known = [slots(first + int32(distance)) for distance in range(ahead)]
            for distance in range(1, tuning.prefetch):
                for half in known[distance]:
                    loader.prefetch(first + int32(distance), half)

            def step(index: jax.Array, known: list[list[jax.Array]]) -> list[list[jax.Array]]:
                stage, tile = stage_of(index), first + index
                target, bias = tiles.at[stage], biases.at[pl.ds(stage * TILE, TILE)]
                farthest = slots(tile + int32(ahead))
                pl.when(index >= _STAGES)(lambda: plgpu.barrier_wait(empty.at[stage]))
                fetched = [loader.fetch(tile, half, known[0][half], target) for half in range(2)]
                for half in range(2):
                    rows.expand(half, fetched[half], target, bias, pending=1 - half)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[stage])
                if tuning.prefetch:
                    for half in farthest:
                        loader.prefetch(tile + int32(ahead), half)
                return [*known[1:], farthest]

            lax.fori_loop(int32(0), steps, step, known)

            def drain(index: jax.Array, carry: None) -> None:
                plgpu.barrier_wait(empty.at[stage_of(index)])

            lax.fori_loop(jnp.maximum(steps - int32(_STAGES), int32(0)), steps, drain, None)

        warpgroup = lax.axis_index("warpgroup")
        for index, role in enumerate((scorer, follower, producer)):
            pl.when(warpgroup == index)(role)

    parts = () if whole else (splits,)
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*parts, tokens, heads, NUM_VALUES), jnp.bfloat16 if whole else jnp.float32),
            jax.ShapeDtypeStruct((*parts, tokens, heads), jnp.float32),
        ),
        grid=(tokens * splits * head_blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        scratch_types=(
            plgpu.SMEM((_CHUNKS, HEADS, _CHUNK), jnp.bfloat16, transforms=TILE_TRANSFORMS),  # query, then output
            plgpu.SMEM((_STAGES, TILE, NUM_VALUES), jnp.bfloat16, transforms=TILE_TRANSFORMS),
            plgpu.SMEM((_STAGES, HEADS, TILE), jnp.bfloat16, transforms=TILE_TRANSFORMS),  # P
            plgpu.SMEM((_STAGES * TILE,), jnp.float32),  # biases
            plgpu.SMEM((_STAGES * HEADS,), jnp.float32),  # rescaling of the sums so far
            plgpu.SMEM((HEADS,), jnp.float32),  # final factors
            plgpu.SMEM((HEADS,), jnp.float32),  # lse
            plgpu.Barrier(num_arrivals=_CHUNKS),  # the query is there
            plgpu.Barrier(num_arrivals=1, num_barriers=_STAGES),  # full
            plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),  # empty: both consumers are done
            plgpu.Barrier(num_arrivals=1, num_barriers=_STAGES),  # scored
            plgpu.Barrier(num_arrivals=1),  # finished: final factors are there, the query is no longer needed
        ),
    )
    out, lse = kernel(q, sink, *slabs, *lists, *lens)
    return out, lse


def _set_registers(count: int) -> None:
    """Gives each thread of the calling warpgroup `count` registers instead of its third of the 504 there are."""
    plgpu.set_max_registers(count, action="increase" if count > 504 // 3 else "decrease")


def _pieces(start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of the column ranges of one wgmma each that cover `start .. stop - 1`."""
    return tuple((at, min(stop - at, _MAX_COLUMNS)) for at in range(start, stop, _MAX_COLUMNS))


def _accumulate(multiply: Callable[..., None], sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """`sums` after `multiply(*accumulators)` has added to them."""
    if not mosaic_lanes.is_interpreted():
        accumulators = tuple(plgpu.ACC.init(total) for total in sums)
        return tuple(pl.run_state(lambda refs: multiply(*refs))(accumulators))

    def products(*refs: Any) -> tuple[jax.Array, ...]:  # the interpreter knows no accumulator with a first value
        multiply(*refs)
        return tuple(ref[...] for ref in refs)

    added = pl.run_scoped(products, *(plgpu.ACC(total.shape, jnp.float32) for total in sums))
    return tuple(total + product for total, product in zip(sums, added, strict=True))


def _full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _per_head(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(values, shape, (0,))
