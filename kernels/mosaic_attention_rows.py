"""The producer's half of the attention kernel: listed cache rows, dequantised into a tile of shared memory.

A tile is 64 keys of one token's lists: tiles 0, 1, ... go through its window rows, the following ones through its
compressed rows. One warpgroup brings a tile in as two halves of 32 rows, four lanes a row. A row's way:

    slots     read its slot in the list; -1 if it is not listed, not a row of the pool, or past the length
    prefetch  ask for its bytes in L2, while earlier tiles are computed
    fetch     copy its bytes into the tile asynchronously: zeros where the slot is -1
    expand    wait for them, and dequantise them to bfloat16 in place; 0 or -inf into the tile's bias

In place: 16 bytes of fp8 become 32 bytes of bfloat16, and a lane lets them land where the first 16 of those go. It
reads and overwrites only what it fetched itself, so that takes neither a buffer nor a barrier; rope values land where
they stay. The tile has the swizzled layout of the tensor cores from the start.

Every lane has addresses of its own, which Pallas cannot say, so these functions emit the instructions. A row of slot -1
is never read: what lies in the null block, in freed rows, or outside the pool cannot reach a result.
While `mosaic_lanes.interpreted()` is active they are array operations of the same meaning instead.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dsv4kv_jax.formats import FP8_DS_MLA
from dsv4kv_jax.kernels import mosaic_attention_lanes as lanes
from dsv4kv_jax.kernels import mosaic_lanes
from dsv4kv_jax.kernels.codecs import codec_of
from dsv4kv_jax.kernels.mosaic_attention_lanes import Word
from dsv4kv_jax.layout import PageLayout

TILE = 64  # keys
HALF = TILE // 2
ROW_BYTES, SCALE_BYTES = (section.row_bytes for section in FP8_DS_MLA.sections)
NUM_VALUES = FP8_DS_MLA.num_values

_LANES_PER_ROW = 4
_GROUPS = 7  # of 64 fp8 values, each with a scale
_ROPE_PIECES = 2  # of 64 bytes; of each 64-byte piece of its row a lane fetches 16 bytes
_WORDS = 2 + 1  # that a fetch leaves in a lane's registers: scales, bias
_TILE_ROW_GROUP_BYTES = 8 * NUM_VALUES * 2  # eight rows of the tile in shared memory
_SWIZZLE_ATOM_BYTES = 8 * 64 * 2
_MINUS_INFINITY = -(1 << 23)  # as int32 bits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where one list's rows lie. Static.

    Attributes:
      page: the layer's page.
      num_blocks, rows_per_block: of the slab.
      width: columns of the list.
    """

    page: PageLayout
    num_blocks: int
    rows_per_block: int
    width: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.page.storage_block_size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """Which tiles one block of the grid goes through; int32 scalars in the kernel.

    Attributes:
      token: whose lists.
      window_tiles: how many tiles the window rows fill; tiles from there on are compressed rows.
      end: the first tile past this block's share.
      lens: valid columns of the two lists, at most their widths.
    """

    token: jax.Array
    window_tiles: jax.Array
    end: jax.Array
    lens: tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowLoader:
    """The four steps for a pair of lists; `slabs` and `lists` are references to global memory."""

    sources: tuple[Source, Source]
    slabs: tuple[Any, Any]
    lists: tuple[Any, Any]
    walk: Walk

    def slots(self, tile: jax.Array, half: int) -> jax.Array:
        if mosaic_lanes.is_interpreted():
            return self._interpreted_slots(tile, half)
        walk, (window, compressed) = self.walk, self.sources

        @lanes.inline(scalars=6, refs=2, words=1)
        def slots(scalars: list[Word], refs: list[Any], _: Any) -> list[Word]:
            token, tile, window_tiles, end, *lens = scalars
            in_window = tile < window_tiles
            position = in_window.select(tile, tile - window_tiles) * TILE + (_row() + half * HALF)
            valid = (position < in_window.select(*lens)) & (tile < end)
            width = in_window.select(window.width, compressed.width, like=tile)
            lists = in_window.select(*map(Word.address, refs))
            [slot] = lanes.load(lists + (token.wide() * width.wide() + position.wide()) * 4, 1, valid)
            num_slots = in_window.select(window.num_slots, compressed.num_slots, like=tile)
            return [(valid & (slot < num_slots)).select(slot, -1)]

        return slots(walk.token, tile, walk.window_tiles, walk.end, *walk.lens, *self.lists)

    def prefetch(self, tile: jax.Array, slots: jax.Array) -> None:
        if mosaic_lanes.is_interpreted():
            return

        @lanes.inline(scalars=2, refs=2, bundles=(1,), words=0)
        def prefetch(scalars: list[Word], refs: list[Any], bundles: list[list[Word]]) -> None:
            [[slot]] = bundles
            row, scales = self._addresses(scalars, refs, slot)
            valid, quarter = slot.is_natural(), _quarter()
            # Nine 64-byte pieces and the scales, ten prefetches for four lanes.
            for piece in (quarter, quarter + 4):
                lanes.prefetch(row + (piece << 6).wide(), valid)
            lanes.prefetch(quarter.equals(0).select(row + 512, scales), valid & (quarter < 2))

        prefetch(tile, self.walk.window_tiles, *self.slabs, slots)

    def fetch(self, tile: jax.Array, half: int, slots: jax.Array, tile_ref: Any) -> Any:
        """Starts one group of copies, of half a tile into `tile_ref` bf16[64, 512]; returns what `expand` needs."""
        if mosaic_lanes.is_interpreted():
            return self._interpreted_fetch(tile, slots)

        @lanes.inline(scalars=2, refs=2, bundles=(1,), words=_WORDS, tile=True)
        def fetch(scalars: list[Word], refs: list[Any], bundles: list[list[Word]], tile_ref: Any) -> list[Word]:
            [[slot]] = bundles
            valid, quarter, chunks = slot.is_natural(), _quarter(), _Chunks(tile_ref, half)
            row, scale_address = self._addresses(scalars, refs, valid.select(slot, 0))
            size = valid.select(16, 0, like=slot)
            scales = lanes.load(scale_address, 2, valid)
            start = row + (quarter << 4).wide()
            for group in range(_GROUPS):
                lanes.copy(chunks.address(group, quarter << 1), start + group * 64, size)
            for piece in range(_ROPE_PIECES):
                lanes.copy(chunks.address(_GROUPS, quarter + 4 * piece), start + (_GROUPS + piece) * 64, size)
            lanes.commit_copies()
            return [*scales, valid.select(0, _MINUS_INFINITY, like=slot)]

        return fetch(tile, self.walk.window_tiles, *self.slabs, slots, tile_ref)

    def _addresses(self, scalars: list[Word], refs: list[Any], slot: Word) -> tuple[Word, Word]:
        """Global addresses of a row's data and of its scales."""
        tile, window_tiles = scalars
        in_window = tile < window_tiles

        def pick(value: Callable[[Source], int]) -> Word:
            return in_window.select(*map(value, self.sources), like=tile)

        shift = pick(lambda source: source.page.storage_block_size.bit_length() - 1)
        page_rows = pick(lambda source: source.page.storage_block_size)
        first_row = pick(lambda source: source.page.first_row)
        row = slot & (page_rows - 1)
        page = (slot >> shift) * pick(lambda source: source.rows_per_block) + first_row
        base = in_window.select(*map(Word.address, refs))
        data = base + (page + row).wide() * ROW_BYTES
        return data, base + (page + page_rows).wide() * ROW_BYTES + (row << 3).wide()

    def _interpreted_slots(self, tile: jax.Array, half: int) -> jax.Array:
        walk = self.walk
        in_window = tile < walk.window_tiles
        offsets = half * HALF + lax.iota(jnp.int32, HALF)
        position = jnp.where(in_window, tile, tile - walk.window_tiles) * TILE + offsets
        slots = []
        for source, ref, length in zip(self.sources, self.lists, walk.lens, strict=True):
            columns = jnp.minimum(position, source.width - 1)
            slot = jnp.where(position < length, ref[...][walk.token, columns], -1)
            slots.append(jnp.where(slot < source.num_slots, jnp.maximum(slot, -1), -1))
        return jnp.where(tile < walk.end, jnp.where(in_window, *slots), -1)

    def _interpreted_fetch(self, tile: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = []
        for source, ref in zip(self.sources, self.slabs, strict=True):
            page_rows, slab = source.page.storage_block_size, ref[...].reshape(source.num_blocks, -1)
            block, row = jnp.divmod(jnp.clip(slots, 0, source.num_slots - 1), page_rows)
            start = source.page.first_row * ROW_BYTES // 4 + jnp.zeros_like(row)
            data = start + row * (ROW_BYTES // 4)
            scales = start + page_rows * (ROW_BYTES // 4) + row * (SCALE_BYTES // 4)
            words = (
                slab[block[:, None], data[:, None] + lax.iota(jnp.int32, ROW_BYTES // 4)],
                slab[block[:, None], scales[:, None] + lax.iota(jnp.int32, SCALE_BYTES // 4)],
            )
            values = codec_of(FP8_DS_MLA).decode(FP8_DS_MLA, words, kv_scale=1.0).astype(jnp.bfloat16)
            rows.append(jnp.where(slots[:, None] >= 0, values, jnp.zeros_like(values)))
        bias = jnp.where(slots >= 0, jnp.float32(0), -jnp.inf)
        return jnp.where(tile < self.walk.window_tiles, *rows), bias


def expand(half: int, fetched: Any, tile_ref: Any, bias_ref: Any, *, pending: int) -> None:
    """Waits until at most `pending` later groups of copies are under way, then dequantises one half of `tile_ref`.

    Args:
      half: 0 or 1.
      fetched: what `fetch` returned.
      tile_ref: bf16[64, 512].
      bias_ref: f32[64].
    """
    if mosaic_lanes.is_interpreted():
        values, bias = fetched
        tile_ref[pl.ds(half * HALF, HALF), :] = values
        bias_ref[pl.ds(half * HALF, HALF)] = bias
        return

    @lanes.inline(scalars=0, refs=1, bundles=(_WORDS,), words=0, tile=True)
    def expand_half(_: Any, refs: list[Any], bundles: list[list[Word]], tile_ref: Any) -> None:
        [[*scales, bias]] = bundles
        quarter, chunks = _quarter(), _Chunks(tile_ref, half)
        lanes.await_copies(pending)
        first, second = (
            [chunks.address(group, (quarter << 1) + part) for group in range(_GROUPS)] for part in range(2)
        )
        codes = [lanes.load_shared(address, 4) for address in first]
        for group in range(_GROUPS):
            scale = ((scales[group // 4] >> (8 * (group % 4))) & 0xFF) << 23
            pairs = [pair for word in codes[group] for pair in lanes.dequantise(word, scale)]
            lanes.store(first[group], pairs[:4])
            lanes.store(second[group], pairs[4:])
        lanes.store(Word.shared_address(refs[0]) + ((_row() + half * HALF) << 2), [bias])

    expand_half(bias_ref, fetched, tile_ref)


class _Chunks:
    """Where a lane's row lies in a half of a tile: 16-byte chunks, swizzled by row within each 64 columns."""

    def __init__(self, tile_ref: Any, half: int) -> None:
        row = _row()
        self._swizzle = row & 7
        groups = (row >> 3) + half * (HALF // 8)
        self._start = Word.shared_address(tile_ref) + groups * _TILE_ROW_GROUP_BYTES + (self._swizzle << 7)

    def address(self, group: int, index: Word) -> Word:
        """Of chunk `index` of the 64 columns from `64 * group` on."""
        return self._start + group * _SWIZZLE_ATOM_BYTES + ((index ^ self._swizzle) << 4)


def _row() -> Word:
    return lanes.lane() >> 2


def _quarter() -> Word:
    return lanes.lane() & (_LANES_PER_ROW - 1)
