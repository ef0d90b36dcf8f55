"""Writing rows into pages and reading them back.

One mechanism serves every format. A row's part of a section is moved as whole runs of `RowFormat.chunk_words` words,
the longest run that never straddles a row of the slab: one window of 144 words for the data of an fp8_ds_mla row, one
of 2 words for its scales. A window is addressed by (block, slab row, word), three int32 numbers that stay small however
large the slab is. The slab itself is never bitcast or reshaped: on a CPU a write through such a view copies all of it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4kv_jax.formats import WORD_BYTES
from dsv4kv_jax.kernels import codecs
from dsv4kv_jax.kernels._arguments import as_int32, as_lengths, check_count, check_page
from dsv4kv_jax.kernels._implementation import mosaic_kernel
from dsv4kv_jax.kernels.codecs import ScaleFloor
from dsv4kv_jax.kernels.slots import row_slots
from dsv4kv_jax.layout import PageLayout

_COMPARED = 512  # slots of which all pairs are compared, which takes less time than sorting them


def insert_rows(
    slab: jax.Array,
    page: PageLayout,
    slots: jax.Array,
    rows: "jax.Array | StateRows",
    *,
    scale_floor: ScaleFloor | None = None,
    kv_scale: Any = 1.0,
    unique_slots: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Quantises `rows` and writes them at `slots` of a layer's pages.

    Args:
      slab: `uint32[num_blocks, rows_per_block, words_per_row]`. Donate it, or the whole slab is copied.
      page: the layer's pages in it.
      slots: int32 `[T]`. A slot that is negative or past the pool writes nothing. Where a slot occurs several times,
        the last row wins.
      rows: float32 or bfloat16 `[T, page.format.num_values]`, as `codecs.encode` takes them; or `StateRows`, for pages
        of compressor states.
      scale_floor: how small block scales are floored; by default as vLLM's CUDA writers do it: `"scale"` for C4A and
        C128A rows, `"amax"` for the others.
      kv_scale: per-tensor scale of plain fp8 pages.
      unique_slots: promises that no slot of the pool occurs twice, as in a `slot_mapping` of tables that share no
        block: the search for the last row of a slot is left out. Which row wins is open where the promise is broken.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      The slab with the rows written; every byte outside them is as it was.

    Raises:
      ValueError: arguments that do not fit together, or an implementation that this operation does not have.
    """
    _, slots, rows, *_ = _checked(slab, RowWrite(page, slots, rows))
    scale_floor = scale_floor or default_scale_floor(page)
    if kernel := mosaic_kernel("insert_rows", implementation, page):
        return kernel(slab, page, slots, rows, scale_floor=scale_floor, kv_scale=kv_scale, unique_slots=unique_slots)
    rows = rows.joined() if isinstance(rows, StateRows) else rows
    sections = codecs.encode(page.format, rows, scale_floor=scale_floor, kv_scale=kv_scale)
    block, row, valid = locate(page, slots if unique_slots else keep_last(slots), slab.shape[0])
    # What is dropped gets a block past the end; a different one each, so that all windows are indeed distinct.
    block = jnp.where(valid, block, slab.shape[0] + lax.iota(jnp.int32, slots.shape[0]))
    for section, words in enumerate(sections):
        windows = row_windows(page, section, block, row)
        slab = lax.scatter(
            slab,
            windows,
            words.reshape(*windows.shape[:-1], _chunk_words(page, section)),
            lax.ScatterDimensionNumbers(
                update_window_dims=(2,), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, 2)
            ),
            unique_indices=True,
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )
    return slab


class StateRows(NamedTuple):
    """State rows `[kv | score + ape[position % ratio]]` of a compressor, in parts that are joined as they are written.

    Attributes:
      kv, score: float32 `[T, W]`, the two projections of each token.
      ape: float32 `[ratio, W]`, the learned position bias of the scores; row 0 belongs to a group's first token.
      positions: int32 `[T]`; of a token that is not written, any number.
    """

    kv: Any
    score: Any
    ape: Any
    positions: Any

    def joined(self) -> jax.Array:
        """The rows, float32 `[T, 2 * W]`."""
        ratio = self.ape.shape[0]
        bias = self.ape.at[jnp.maximum(self.positions, 0) % ratio].get(mode="promise_in_bounds")
        return jnp.concatenate([self.kv, self.score + bias], axis=1)


class RowWrite(NamedTuple):
    """Rows to write to the pages of one layer; the fields are arguments of `insert_rows`."""

    page: PageLayout
    slots: Any
    rows: Any
    scale_floor: ScaleFloor | None = None
    kv_scale: Any = 1.0


def insert_many(
    slab: jax.Array, writes: Sequence[RowWrite], *, unique_slots: bool = False, implementation: str | None = None
) -> jax.Array:
    """Does several `insert_rows` at once, such as those of a layer's window and its compressors' states.

    A decode step writes few rows to many pages, so that most of its time goes into launches; the Mosaic GPU kernel
    needs one for all of them.

    Args:
      slab: `uint32[num_blocks, rows_per_block, words_per_row]`. Donate it, or the whole slab is copied.
      writes: at most one for each page. They have no order, so no two may touch the same bytes. Those of one cache
        never do: pages of a group lie side by side, and a block belongs to one group at a time.
      unique_slots: as in `insert_rows`, for each of `writes`.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      The slab with all rows written; every byte outside them is as it was.

    Raises:
      ValueError: several writes to one page, arguments that do not fit together, or an implementation that this
        operation does not have.
    """
    names = [write.page.name for write in writes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several writes go to {sorted(twice)}; they have no order: pass one for each page")
    if kernel := mosaic_kernel("insert_many", implementation, *(write.page for write in writes)):
        return kernel(slab, [_checked(slab, write) for write in writes], unique_slots=unique_slots)
    for page, slots, rows, scale_floor, kv_scale in writes:
        options: Any = {"scale_floor": scale_floor, "kv_scale": kv_scale, "implementation": "xla"}
        slab = insert_rows(slab, page, slots, rows, unique_slots=unique_slots, **options)
    return slab


def _checked(slab: jax.Array, write: RowWrite) -> RowWrite:
    page, slots, rows, scale_floor, kv_scale = write
    check_page(slab, page)
    slots = as_int32("slots", slots, ndim=1)
    if isinstance(rows, StateRows):
        rows = _checked_states(page, slots.shape[0], rows)
        return RowWrite(page, slots, rows, scale_floor or default_scale_floor(page), kv_scale)
    if np.ndim(rows) != 2 or np.shape(rows)[0] != slots.shape[0]:
        raise ValueError(f"rows have shape {np.shape(rows)} for {slots.shape[0]} slots; pass one row per slot")
    rows = codecs.as_rows(page.format, rows)
    return RowWrite(page, slots, rows, scale_floor or default_scale_floor(page), kv_scale)


def _checked_states(page: PageLayout, num_tokens: int, rows: StateRows) -> StateRows:
    fmt = page.format
    if not (codecs.is_plain(fmt) and fmt.page_dtype == "float32" and fmt.num_values % 2 == 0):
        raise ValueError(f"layer {page.name!r} has {fmt.name!r} rows; state rows go to float32 pages of even width")
    width, ratio = fmt.num_values // 2, np.shape(rows.ape)[0] if np.ndim(rows.ape) else 0
    shapes = {"kv": (num_tokens, width), "score": (num_tokens, width), "ape": (max(ratio, 1), width)}
    arrays = {name: jnp.asarray(getattr(rows, name)) for name in shapes}
    for name, shape in shapes.items():
        if arrays[name].shape != shape or arrays[name].dtype != jnp.float32:
            raise ValueError(
                f"{name} is {arrays[name].dtype}{list(arrays[name].shape)}; state rows of layer {page.name!r} for "
                f"{num_tokens} slots take float32{list(shape)}"
            )
    return StateRows(**arrays, positions=as_lengths("positions", rows.positions, size=num_tokens))


def gather_rows(
    slab: jax.Array,
    page: PageLayout,
    slots: jax.Array,
    *,
    fill: float = 0.0,
    kv_scale: Any = 1.0,
    dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Reads the rows at `slots` of a layer's pages and dequantises them.

    Args:
      slab: `uint32[num_blocks, rows_per_block, words_per_row]`; not changed.
      page: the layer's pages in it.
      slots: int32 of any shape. Nothing is read for a slot that is negative or past the pool.
      fill: the value of every element of such a row.
      kv_scale: per-tensor scale of plain fp8 pages.
      dtype: of the result; by default bfloat16, float32 for plain float32 pages and uint8 for plain uint8 ones.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      `[*slots.shape, page.format.num_values]`.

    Raises:
      ValueError: arguments that do not fit together, or an implementation that this operation does not have.
    """
    check_page(slab, page)
    slots = as_int32("slots", slots)
    dtype = jnp.dtype(dtype or codecs.default_dtype(page.format))
    if kernel := mosaic_kernel("gather_rows", implementation, page):
        return kernel(slab, page, slots, fill=fill, kv_scale=kv_scale, dtype=dtype)
    block, row, valid = locate(page, slots.reshape(-1), slab.shape[0])
    block = jnp.where(valid, block, 0)
    sections = []
    for section in range(len(page.format.sections)):
        windows = row_windows(page, section, block, row)
        words = lax.gather(
            jnp.asarray(slab),
            windows,
            lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 2)),
            slice_sizes=(1, 1, _chunk_words(page, section)),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        sections.append(words.reshape(words.shape[0], page.format.sections[section].row_bytes // WORD_BYTES))
    values = codecs.decode(page.format, tuple(sections), kv_scale=kv_scale).astype(dtype)
    # A select, never a product: what an invalid slot happens to read may be NaN.
    values = jnp.where(valid[:, None], values, jnp.asarray(fill, dtype))
    return values.reshape(*slots.shape, page.format.num_values)


def gather_sequence(
    slab: jax.Array,
    page: PageLayout,
    block_table: jax.Array,
    lengths: jax.Array,
    *,
    max_rows: int,
    starts: jax.Array | None = None,
    fill: float = 0.0,
    kv_scale: Any = 1.0,
    dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Reads a run of consecutive rows of each request: rows `starts[r]` to `starts[r] + lengths[r] - 1`.

    Rows are counted as the page stores them: tokens in a window or state cache, compressed entries in a compressed one.

    Args:
      slab: `uint32[num_blocks, rows_per_block, words_per_row]`; not changed.
      page: the layer's pages in it.
      block_table: int32 `[R, max_blocks]` of the layer's group; entries of 0 or less hold no rows.
      lengths: int32 `[R]`.
      max_rows: rows of the result; a longer run is cut.
      starts: int32 `[R]`; 0 by default.
      fill: the value of every element past a request's length, or where the table has no block.
      kv_scale, dtype, implementation: as in `gather_rows`.

    Returns:
      `[R, max_rows, page.format.num_values]`.

    Raises:
      ValueError: arguments that do not fit together, or an implementation that this operation does not have.
    """
    block_table = as_int32("block_table", block_table, ndim=2)
    num_requests = block_table.shape[0]
    lengths = as_lengths("lengths", lengths, size=num_requests)
    first = jnp.zeros_like(lengths) if starts is None else as_lengths("starts", starts, size=num_requests)
    column = lax.iota(jnp.int32, check_count("max_rows", max_rows))
    request = jnp.broadcast_to(lax.iota(jnp.int32, num_requests)[:, None], (num_requests, max_rows))
    slots = row_slots(block_table, request, first[:, None] + column[None, :], page.storage_block_size)
    slots = jnp.where(column[None, :] < lengths[:, None], slots, -1)
    return gather_rows(slab, page, slots, fill=fill, kv_scale=kv_scale, dtype=dtype, implementation=implementation)


def default_scale_floor(page: PageLayout) -> ScaleFloor:
    """`"scale"` for compressed rows, which vLLM's CUDA compressor writes; `"amax"` for all others."""
    return "scale" if page.spec.window is None and page.spec.compress_ratio > 1 else "amax"


def keep_last(slots: jax.Array) -> jax.Array:
    """`slots`, int32 `[T]`, with every occurrence of a slot but the last replaced by -1.

    A scatter leaves open which of several writes to one place wins, and on a GPU it varies from run to run.
    """
    count = slots.shape[0]
    if count <= _COMPARED:
        position = lax.iota(jnp.int32, count)
        is_later_equal = (slots[:, None] == slots[None, :]) & (position[:, None] < position[None, :])
        return jnp.where(is_later_equal.any(axis=1), -1, slots)
    ordered, order = lax.sort((slots, lax.iota(jnp.int32, count)), num_keys=1, is_stable=True)
    last = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones(1, bool)])
    return (
        jnp.zeros_like(slots).at[order].set(jnp.where(last, ordered, -1), unique_indices=True, mode="promise_in_bounds")
    )


def locate(page: PageLayout, slots: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(block, row of the page, whether they exist) of each slot."""
    block, row = slots // page.storage_block_size, slots % page.storage_block_size
    return block, row, (slots >= 0) & (block < num_blocks)


def _chunk_words(page: PageLayout, section: int) -> int:
    return page.format.chunk_words(section, page.storage_block_size, page.words_per_row)


def row_windows(page: PageLayout, section: int, block: jax.Array, row: jax.Array) -> jax.Array:
    """Starts of the windows of each row's part of a section, int32 `[T, windows, 3]`: (block, slab row, word)."""
    chunk = _chunk_words(page, section)
    words = page.format.sections[section].row_bytes // WORD_BYTES
    start = page.format.section_start(section, page.storage_block_size) // WORD_BYTES
    word = start + row[:, None] * words + chunk * lax.iota(jnp.int32, words // chunk)[None, :]
    block = jnp.broadcast_to(block[:, None], word.shape)
    return jnp.stack([block, page.first_row + word // page.words_per_row, word % page.words_per_row], axis=-1)
