"""Reading compressor states: the softmax-weighted mean, channel by channel, of the states of a window of tokens.

State rows are written by `insert_rows` as `StateRows`: `[kv | score]` in float32. Where the groups of a compressor
overlap, a row holds two sets of both, `[kv0 | kv1 | score0 | score1]`: a token lends its first set to the group after
its own, and its second set to its own. `docs/compressor.md` has a picture.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4kv_jax.kernels import codecs
from dsv4kv_jax.kernels._arguments import as_int32, as_lengths, check_page
from dsv4kv_jax.kernels._implementation import mosaic_kernel
from dsv4kv_jax.kernels.rows import gather_rows
from dsv4kv_jax.kernels.slots import row_slots
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import cdiv

# Windows that XLA reads at once, by their tokens; more are read in a loop that stops at the last one there is. A decode
# step of many requests completes few groups of 128 tokens, so there the loop saves most of the reading.
_AT_ONCE = {8: 2048, 128: 16}


class StateWindows(NamedTuple):
    """Windows over the states of one layer: those of the groups of `compress_ratio` tokens that a step completes.

    Attributes:
      page: the state pages; `spec.window` says how many tokens a window has: one group, or two where groups overlap.
      block_table: int32 `[R, max_blocks]` of their group; positions in a block of 0 or less have no weight.
      requests: int32 `[B]`. Nothing is read for what is no row of the table.
      positions: int32 `[B]`, each window's last position. Nothing is read for -1.
      count: int32 `[]`: nothing is read for windows from this one on either; all count by default.
      compress_ratio: tokens of a group.
    """

    page: PageLayout
    block_table: Any
    requests: Any
    positions: Any
    compress_ratio: int
    count: Any = None


class Geometry(NamedTuple):
    """How a state row is divided.

    Attributes:
      window: tokens of a window.
      ratio: tokens of a group.
      sets: sets of values and scores in a row, 2 where groups overlap; a window has as many groups.
      width: values of a set, and of the mean.
      block_size: tokens of a block.
    """

    window: int
    ratio: int
    sets: int
    width: int
    block_size: int


def window_means(
    slab: jax.Array, windows: Sequence[StateWindows], *, implementation: str | None = None
) -> tuple[jax.Array, ...]:
    """For each window and channel, the softmax of the scores over the window's tokens, and with it the mean of `kv`.

    All arithmetic is in float32. The Mosaic GPU kernel takes one launch for all of `windows`, such as those of a C4A
    layer's entries and of its indexer's keys.

    Args:
      slab: `uint32[num_blocks, rows_per_block, words_per_row]`; not changed.
      windows: of any number of layers.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      Float32 `[B, width]` for each of `windows`; 0 for windows without states.

    Raises:
      ValueError: arguments that do not fit together, pages that hold no states, or an implementation that this
        operation does not have.
    """
    windows = [_checked(slab, window) for window in windows]
    if kernel := mosaic_kernel("window_means", implementation, *(window.page for window in windows)):
        return kernel(slab, windows)
    return tuple(_means(slab, window) for window in windows)


def geometry(page: PageLayout, compress_ratio: int) -> Geometry:
    """How the state rows of a page are divided.

    Raises:
      ValueError: not a page of states for this ratio.
    """
    fmt, window = page.format, page.spec.window
    if not (codecs.is_plain(fmt) and fmt.page_dtype == "float32") or window is None:
        raise ValueError(f"layer {page.name!r} has {fmt.name!r} rows and window {window}; states are float32 rows")
    sets = window // compress_ratio
    if sets not in (1, 2) or window % compress_ratio or fmt.num_values % (2 * sets):
        raise ValueError(
            f"layer {page.name!r} has rows of {fmt.num_values} values and a window of {window} tokens, which do not "
            f"suit compress_ratio={compress_ratio}: a window is one group or two, a row a set of values and scores each"
        )
    width = fmt.num_values // (2 * sets)
    return Geometry(window, compress_ratio, sets, width, page.spec.block_size)


def _checked(slab: jax.Array, windows: StateWindows) -> StateWindows:
    check_page(slab, windows.page)
    geometry(windows.page, windows.compress_ratio)
    positions = as_int32("positions", windows.positions, ndim=1)
    size = positions.shape[0]
    count = jnp.int32(size) if windows.count is None else as_int32("count", windows.count, ndim=0)
    return windows._replace(
        block_table=as_int32("block_table", windows.block_table, ndim=2),
        requests=as_lengths("requests", windows.requests, size=size),
        positions=positions,
        count=count,
    )


def _means(slab: jax.Array, windows: StateWindows) -> jax.Array:
    of = geometry(windows.page, windows.compress_ratio)
    size = windows.positions.shape[0]
    chunk = _AT_ONCE.get(of.window, 16)
    means = functools.partial(_means_at_once, slab, windows.page, windows.block_table, of)
    is_request = (windows.requests >= 0) & (windows.requests < windows.block_table.shape[0])
    used = jnp.where(is_request & (lax.iota(jnp.int32, size) < windows.count), windows.positions, -1)
    if size <= chunk:
        return means(windows.requests, used)
    num_chunks = cdiv(size, chunk)

    def split(array: jax.Array) -> jax.Array:
        return jnp.pad(array, (0, num_chunks * chunk - size), constant_values=-1).reshape(num_chunks, chunk)

    requests, positions = split(windows.requests), split(used)
    rows = lax.fori_loop(
        0,
        (jnp.clip(windows.count, 0, size) + (chunk - 1)) // chunk,
        lambda i, rows: rows.at[i].set(means(requests[i], positions[i])),
        jnp.zeros((num_chunks, chunk, of.width), jnp.float32),
    )
    return rows.reshape(-1, of.width)[:size]


def _means_at_once(
    slab: jax.Array, page: PageLayout, block_table: jax.Array, of: Geometry, requests: jax.Array, positions: jax.Array
) -> jax.Array:
    window = lax.iota(jnp.int32, of.window)
    span = positions[:, None] + (window - (of.window - 1))
    # A position of -1 makes the whole span negative, so that the request of an unused window does not matter.
    request = jnp.broadcast_to(jnp.where(positions >= 0, requests, 0)[:, None], span.shape)
    slots = row_slots(block_table, request, span, of.block_size)
    slots = jnp.where(slots < slab.shape[0] * of.block_size, slots, -1)
    kv, score = _read_states(slab, page, of, slots)
    score = jnp.where(slots[:, :, None] >= 0, score, -jnp.inf)
    top = jnp.max(score, axis=1, keepdims=True)
    weights = jnp.exp(score - jnp.where(top == -jnp.inf, jnp.float32(0), top))
    total = jnp.sum(weights, axis=1)
    return jnp.sum(weights * kv, axis=1) / jnp.where(total == 0, jnp.float32(1), total)


def _read_states(slab: jax.Array, page: PageLayout, of: Geometry, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """kv and score, float32 `[n, window, width]` each, that the states at `slots` (int32 `[n, window]`) give.

    Only the columns in use are read: a state row is seen as `2 * sets` rows of `width` values.
    """
    parts = 2 * of.sets
    spec = dataclasses.replace(page.spec, head_size=of.width, block_size=of.block_size * parts)
    group = np.arange(of.window, dtype=np.int32) // of.ratio  # of the window; each group has a set of its own
    part = np.stack([group, of.sets + group], axis=-1)
    part_slots = jnp.where(slots[:, :, None] >= 0, slots[:, :, None] * parts + part, -1)
    part_page = dataclasses.replace(page, spec=spec)
    rows = gather_rows(slab, part_page, part_slots, dtype=jnp.float32, implementation="xla")
    return rows[:, :, 0], rows[:, :, 1]
