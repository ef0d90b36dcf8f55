"""Indexer scores on Hopper: keys are read once, and a head's scores never leave the registers.

A block of the grid takes a few neighbouring query tokens of one request and a run of its keys, in tiles of 64.
It is one warpgroup. Its lanes' work on a tile:

    fetch   bulk copies of the tile's keys and scales into one of a few stages in shared memory, a few tiles ahead
    read    the keys into registers, where e4m3 codes become float16, the layout of a wgmma's left operand
    score   wgmma with a token's query, 64 keys x H heads; relu, times the head weights, summed over heads; store

Codes are exact in float16 and their products in float32, so only sums are rounded. (A wgmma on fp8 would keep fewer
bits of them.) A key's scale is positive, so that it may be applied after the sum over heads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dsv4kv_jax import formats
from dsv4kv_jax.kernels import mosaic_lanes, mosaic_pages
from dsv4kv_jax.kernels._tiles import Tiles
from dsv4kv_jax.kernels.mosaic_attention_lanes import TILE_TRANSFORMS, plgpu
from dsv4kv_jax.kernels.mosaic_index_scores_lanes import (
    DIM,
    HALF,
    HALF_WORDS,
    KEY_WORDS,
    ROW,
    ROWS,
    TILE,
    key_of_row,
    load_query,
    products,
    read,
)
from dsv4kv_jax.kernels.mosaic_lanes import lane_load, lane_store
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import cdiv, round_up

_MAX_HEADS = 128
_BLOCKS_AT_ONCE = 4 * 132  # on the multiprocessors of an H100 or H200; another number costs time only
_MAX_TILES = 128  # of a block, so that requests of very different lengths do not leave some blocks with all the work
_BLOCK_OVERHEAD = 2  # what a block does before its first tile and after its last, in units of one tile's time

_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # a value a head


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What may be chosen freely: it changes the time, never the result.

    Attributes:
      stages: tiles in shared memory.
      tokens: most query tokens of a block.
      tiles: most tiles of a block; None for a choice by the size of the grid.
    """

    stages: int = 3
    tokens: int = 2
    tiles: int | None = None


def why_not(page: PageLayout, heads: int) -> str | None:
    """Why the kernel cannot take these arguments, or None if it can."""
    if page.format != formats.INDEXER_FP8:
        return (
            f"layer {page.name!r} holds {page.format.name!r} rows; the kernel reads {formats.INDEXER_FP8.name!r} rows"
        )
    if page.storage_block_size % HALF:
        return f"layer {page.name!r} has {page.storage_block_size} rows a page; the kernel takes multiples of {HALF}"
    if heads > _MAX_HEADS:
        return f"codes have {heads} heads; the kernel takes up to {_MAX_HEADS}"
    return None


def index_scores(
    slab: jax.Array,
    page: PageLayout,
    block_table: jax.Array,
    query_start_loc: jax.Array,
    codes: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
    *,
    tuning: Tuning | None = None,
) -> jax.Array:
    """`kernels.index_scores` for arguments that were checked, and for which `why_not` is None."""
    where, offset = mosaic_pages.split(page)
    return _index_scores(
        slab, offset, block_table, query_start_loc, codes, weights, visible,
        page_rows=where.storage_block_size, tuning=tuning or Tuning(), interpreted=mosaic_lanes.is_interpreted(),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("page_rows", "tuning", "interpreted"))
def _index_scores(
    slab: jax.Array,
    offset: jax.Array,
    block_table: jax.Array,
    query_start_loc: jax.Array,
    codes: jax.Array,
    weights: jax.Array,
    visible: jax.Array,
    *,
    page_rows: int,
    tuning: Tuning,
    interpreted: bool,
) -> jax.Array:
    num_tokens, heads, _ = codes.shape
    weights = jnp.pad(weights, ((0, 0), (0, -heads % 8)))
    groups = Tiles.cut(query_start_loc, num_tokens, min(tuning.tokens, max(256 // heads, 1)))
    flat = slab.reshape(slab.shape[0], -1)
    kernel = scores_kernel(
        num_tokens=num_tokens,
        heads=weights.shape[1],
        tokens=groups.size,
        groups=groups.request.shape[0],
        num_requests=block_table.shape[0],
        num_blocks=flat.shape[0],
        columns=block_table.shape[1],
        page_rows=page_rows,
        tuning=tuning,
    )
    plan = [groups.request, groups.largest(visible)]
    if groups.size > 1:  # a single token is its group's number
        plan += [groups.first, groups.stop]
    return kernel(*plan, block_table, offset, flat, codes, weights)


def tiles_per_block(groups: int, tiles: int) -> int:
    """How many tiles a block goes through, so that all multiprocessors are full to the end, in few blocks."""

    def cost(share: int) -> int:
        blocks = groups * cdiv(tiles, share)
        return cdiv(blocks, _BLOCKS_AT_ONCE) * (share + _BLOCK_OVERHEAD)

    shares = {cdiv(tiles, parts) for parts in range(cdiv(tiles, _MAX_TILES), tiles + 1)}
    return min(shares, key=lambda share: (cost(share), -share))


def scores_kernel(
    *,
    num_tokens: int,
    heads: int,
    tokens: int,
    groups: int,
    num_requests: int,
    num_blocks: int,
    columns: int,
    page_rows: int,
    tuning: Tuning,
) -> Any:
    """The kernel `(request, seen, first, stop, block_table, offset, slab, codes, weights) -> scores`.

    The first four are int32 `[groups]`, for each group of up to `tokens` tokens: its request, how many entries it sees,
    its first token, and the token after its last one; `first` and `stop` only if `tokens` is more than 1. The others
    are int32 `[num_requests, columns]`; int32 `[1]`, the page's place in a block in words; uint32 `[num_blocks, n]`,
    the slab; bfloat16 `[T, H, 128]`; and float32 `[T, heads]`, heads being H rounded up to a multiple of 8. The result
    is float32 `[T, columns * page_rows]`.
    """
    num_keys, stages, int32 = columns * page_rows, tuning.stages, jnp.int32
    num_tiles, padded = cdiv(num_keys, TILE), round_up(heads, ROWS)
    share = min(tuning.tiles or tiles_per_block(groups, num_tiles), num_tiles)
    scale_words = page_rows * KEY_WORDS  # where a page's scales start

    def body(*refs) -> None:
        *plan, table, offset, slab, codes, weights, out, queries, keys, scales, full = refs
        group = lax.axis_index("group").astype(int32)
        request, seen, *span = (ref[group] for ref in plan)
        token, stop = span or (group, group + 1)
        seen = jnp.where(request < num_requests, jnp.minimum(seen, num_keys), 0)
        first = lax.axis_index("part").astype(int32) * share
        steps = jnp.minimum(lax.div(seen + int32(TILE - 1), int32(TILE)) - first, share)
        origin = offset[0]

        def blocks(tile: jax.Array) -> list[jax.Array]:
            """The blocks of the tile's halves; the null block, which there always is, for one that is not to be read.

            What it holds is not looked at: `score` leaves out such entries.
            """
            found = []
            for half in range(2):
                column = lax.div(tile * TILE + half * HALF, int32(page_rows))
                block = table[request, jnp.minimum(column, columns - 1)]
                found.append(jnp.where((block < num_blocks) & (column < columns), jnp.maximum(block, 0), 0))
            return found

        def fetch(tile: jax.Array, stage: jax.Array, blocks: list[jax.Array]) -> None:
            for half, block in enumerate(blocks):
                row = lax.rem(tile * TILE + half * HALF, int32(page_rows))
                parts = (
                    (row * KEY_WORDS, HALF * KEY_WORDS, keys.at[stage, half, pl.ds(0, HALF * KEY_WORDS)]),
                    (scale_words + row, HALF, scales.at[stage, pl.ds(half * HALF, HALF)]),
                )
                for start, words, target in parts:
                    plgpu.copy_gmem_to_smem(
                        slab.at[block, pl.ds(origin + start, words)],
                        target,
                        full.at[stage],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # which makes it a plain bulk copy
                    )

        def work() -> None:
            ahead = [blocks(first + int32(index)) for index in range(stages + 1)]
            for index in range(stages):
                pl.when(index < steps)(functools.partial(fetch, first + int32(index), int32(index), ahead[index]))
            here = [jnp.minimum(token + index, num_tokens - 1) for index in range(tokens)]
            head_weights = [plgpu.load(weights.at[each], layout=_COLUMN, optimized=False) for each in here]
            for index, each in enumerate(here):
                for start in range(0, padded, ROWS):
                    queries[index, pl.ds(start, ROWS)] = load_query(codes, each, start)
            plgpu.commit_smem()
            key = key_of_row()

            def step(index: jax.Array, next_blocks: list[jax.Array]) -> list[jax.Array]:
                stage, tile = lax.rem(index, int32(stages)), first + index
                plgpu.barrier_wait(full.at[stage])
                values, scale = read(keys.at[stage], scales.at[stage])
                pl.when(index + stages < steps)(lambda: fetch(tile + stages, stage, next_blocks))
                next_blocks = blocks(tile + (stages + 1))
                entry = tile * TILE + key
                exists = entry < num_keys
                block = lane_load(table, jnp.where(exists, request, -1), lax.div(entry, int32(page_rows)), ROW)
                has_key = (block > 0) & (block < num_blocks)
                for nth, head_weight in enumerate(head_weights):
                    per_head = jnp.maximum(products(values, queries.at[nth, pl.ds(0, heads)]), 0)
                    per_head *= lax.broadcast_in_dim(head_weight, per_head.shape, (1,))
                    score = jnp.where(has_key, per_head.sum(axis=1) * scale, jnp.float32(0))
                    target = jnp.where(exists & (token + nth < stop), token + nth, -1)
                    lane_store(out, target, entry, score, ROW)
                return next_blocks

            lax.fori_loop(int32(0), steps, step, ahead[stages])

        pl.when(steps > 0)(work)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tokens, num_keys), jnp.float32),
        grid=(cdiv(num_tiles, share), groups),
        grid_names=("part", "group"),
        kernel_name="index_scores",
        # Lanes read a stage before `read`'s barrier, and the copy into it starts after; nothing else is shared.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        scratch_types=(
            plgpu.SMEM((tokens, padded, DIM), jnp.float16, transforms=TILE_TRANSFORMS),
            plgpu.SMEM((stages, 2, HALF_WORDS), jnp.uint32),  # keys
            plgpu.SMEM((stages, TILE), jnp.uint32),  # their scales
            plgpu.Barrier(num_arrivals=4, num_barriers=stages),  # a stage is full
        ),
    )
