"""Where the rows of a page lie, for the Mosaic GPU kernels.

A page is addressed as (block, element of the block): both stay small however large the slab is.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv4kv_jax import formats
from dsv4kv_jax.formats import RowFormat
from dsv4kv_jax.kernels import codecs, mosaic_lanes
from dsv4kv_jax.layout import PageLayout

ROWS = 16  # of one program
PER_ROW = mosaic_lanes.row_layout(1).reduce(1)  # the layout of one value a row
WORDS_PER_PART = 256  # of a row that is moved as it is; longer rows are shared by several programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """What addresses of rows depend on, besides the page's place in the block: layers of a kind share their kernels."""

    format: RowFormat
    storage_block_size: int

    def locate(self, slots: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array]:
        """(block, row of the page) of each slot; block -1 where there is none."""
        rows = jnp.int32(self.storage_block_size)
        block = lax.div(slots, rows)
        return jnp.where((slots >= 0) & (block < num_blocks), block, -1), lax.rem(slots, rows)

    def first_element(self, section: int, offset: Any, row: jax.Array, item: int) -> jax.Array:
        """Index, among a block's elements of `item` bytes, of the first element of a section of each row.

        `offset` is the page's, in words.
        """
        page = offset * (formats.WORD_BYTES // item)
        start = self.format.section_start(section, self.storage_block_size) // item
        return page + start + row * (self.format.sections[section].row_bytes // item)


def split(page: PageLayout) -> tuple[Rows, jax.Array]:
    """What the kernels of a page depend on, and its place in the block, in words."""
    where = Rows(format=page.format, storage_block_size=page.storage_block_size)
    return where, one(page.offset_bytes // formats.WORD_BYTES, jnp.int32)


def why_not(page: PageLayout) -> str | None:
    """Why the kernels that read and write rows cannot take a page, or None if they can."""
    fmt = page.format
    if page.offset_bytes % 16 or page.block_stride_bytes % 16:  # bytes of the widest access of a lane
        return (
            f"layer {page.name!r} lies at offset {page.offset_bytes} B of blocks {page.block_stride_bytes} B apart; "
            "the kernels need multiples of 16 B"
        )
    if fmt in (formats.FP8_DS_MLA, formats.INDEXER_FP8, formats.INDEXER_FP8_UE8M0, formats.INDEXER_MXFP4):
        return None
    if not codecs.is_plain(fmt):
        return f"no kernel reads or writes rows of format {fmt.name!r}"
    if fmt.page_dtype == "float8_e4m3fn" and fmt.num_values % 64:
        return f"{fmt.name!r} rows have {fmt.num_values} values; the kernels take multiples of 64"
    return None


def one(value: Any, dtype: Any) -> jax.Array:
    """A number that a kernel reads as an array of one."""
    return jnp.asarray(value, dtype).reshape(1)


def word_tiles(num_words: int, part: Any) -> list[tuple[Any, tuple[int, int], Any]]:
    """(first word, shape, layout) of the tiles that cover part `part` of a row that is moved as it is."""
    if num_words % 32:
        size, width, vector = WORDS_PER_PART, 64, 1  # tiles may end past the row: see `inside`
        start = part * size
    else:
        size = min(WORDS_PER_PART, num_words)
        width, vector = math.gcd(size, 128), 4
        start = jnp.minimum(part * size, num_words - size)
    layout = mosaic_lanes.row_layout(vector)
    return [(start + first, (ROWS, width), layout) for first in range(0, size, width)]


def inside(column: jax.Array, num_words: int) -> jax.Array | None:
    """Which words of a tile lie in the row; None where all do."""
    return column < num_words if num_words % 32 else None


def only(inside: jax.Array | None, index: jax.Array) -> jax.Array:
    """`index`, and -1 outside of the mask."""
    return index if inside is None else jnp.where(inside, index, -1)
