"""What a step's layers share: where its tokens' rows go, and which rows they read."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from dsv4kv_jax import kernels
from dsv4kv_jax._integers import as_count
from dsv4kv_jax.kernels import codecs
from dsv4kv_jax.kernels._arguments import as_int32
from dsv4kv_jax.kernels.step import StepIndex, step_indices
from dsv4kv_jax.layout import PackedLayout, PageLayout

DENSE_RATIO = 128  # layers of this compress ratio read every entry; those of a smaller one have an indexer that picks


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "token_to_req", "valid", "query_start_loc", "seq_lens", "block_tables", "made"],
    meta_fields=["layout", "wanted"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """Slots and indices of one step, for every layer of a cache; a pytree, made inside jit.

    Only what the layout's groups need is computed, and once for all layers of a group. Tokens lie one request after
    another and are padded to `num_tokens`; padding tokens have position -1, slots of -1, rows of -1 and length 0.

    Attributes:
      positions: int32 `[T]`, a token's absolute position in its request; -1 for padding.
      token_to_req: int32 `[T]`; 0 for padding.
      valid: bool `[T]`, False for padding.
      query_start_loc: int32 `[R + 1]`, as given.
      seq_lens: int32 `[R]`, as given.
      block_tables: for each group int32 `[R, max_blocks]`, as given, or None for a group without layers here.
      made: what `wanted` names, in its order.
      layout: the cache's layout.
      wanted: which arrays there are.
    """

    positions: jax.Array
    token_to_req: jax.Array
    valid: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    block_tables: tuple[jax.Array | None, ...]
    made: tuple[Any, ...]
    layout: PackedLayout
    wanted: tuple[StepIndex, ...]

    @classmethod
    def build(
        cls,
        layout: PackedLayout,
        block_tables: Sequence[Any],
        query_start_loc: Any,
        seq_lens: Any,
        *,
        num_tokens: int,
        max_model_len: int,
        window: int = 128,
        dense_width: int | None = None,
        implementation: str | None = None,
    ) -> "StepMetadata":
        """Computes the metadata of one step.

        Args:
          layout: the cache's layout (`cache.layout`); it says which groups and compress ratios there are.
          block_tables: int32 `[R, max_blocks]` for each group of the layout, in order; an entry of 0 or less is no
            block. For a group without layers on this worker anything will do, None included.
          query_start_loc: int32 `[R + 1]`.
          seq_lens: int32 `[R]`, this step's tokens included.
          num_tokens: tokens of the step, padding included.
          max_model_len: tokens of the longest request; it bounds the rows of C128A layers.
          window: tokens that a window layer sees, for caches whose spec does not say (a plan without hybrid groups).
          dense_width: columns of C128A rows, if fewer will do for this step, as `kernels.c128a_width` says. Entries
            past them are not read.
          implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

        Raises:
          ValueError: wrong dtypes, lengths or sizes, or a number of tables that is not that of the groups.
        """
        block_tables = tuple(block_tables)
        if len(block_tables) != len(layout.groups):
            raise ValueError(
                f"{len(block_tables)} block tables for {len(layout.groups)} groups; give one per group, in order"
            )
        most = kernels.c128a_width(max_model_len, max_model_len, compress_ratio=DENSE_RATIO)
        dense_width = most if dense_width is None else as_count("dense_width", dense_width, at_least=1)
        window = as_count("window", window, at_least=1)
        wanted = _wanted(layout, window, dense_width)
        used = {want.group for want in wanted}
        tables = [table if group in used else None for group, table in enumerate(block_tables)]
        step, made = step_indices(
            wanted, tables, query_start_loc, seq_lens, num_tokens=num_tokens, implementation=implementation
        )
        return cls(
            positions=step.positions,
            token_to_req=step.token_to_req,
            valid=step.valid,
            query_start_loc=as_int32("query_start_loc", query_start_loc),
            seq_lens=as_int32("seq_lens", seq_lens),
            block_tables=tuple(None if table is None else as_int32("block_table", table) for table in tables),
            made=made,
            layout=layout,
            wanted=wanted,
        )

    def slots(self, layer: str | PageLayout) -> jax.Array:
        """Where each token's row of this layer goes, int32 `[T]`.

        For a compressed cache that is the slot of the entry that the token completes, -1 for most tokens.
        """
        page = self._page(layer)
        ratio = page.spec.compress_ratio
        return self._find(page, "slots" if ratio == 1 else "compressed_slots", ratio)

    def window(self, layer: str | PageLayout) -> tuple[jax.Array, jax.Array]:
        """The window rows that each token reads of this layer: slots, int32 `[T, window]`, and lengths, int32 `[T]`."""
        return self._find(self._page(layer), "window", 1)

    def dense(self, layer: str | PageLayout) -> tuple[jax.Array, jax.Array]:
        """All compressed rows that each token sees of this C128A layer: slots, int32 `[T, width]`, and lengths."""
        page = self._page(layer)
        return self._find(page, "dense", page.spec.compress_ratio)

    def picked(
        self, layer: str | PageLayout, topk: jax.Array, *, implementation: str | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The compressed rows of this C4A layer that the indexer picked, as `kernels.topk_to_slots` gives them.

        Args:
          layer: the layer.
          topk: int32 `[T, k]`, entries counted within each token's request, packed to the left, -1 behind them.
          implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

        Raises:
          ValueError: a layer that reads all rows or none, or a `topk` that does not fit the step.
        """
        page = self._page(layer)
        if not 1 < page.spec.compress_ratio < DENSE_RATIO:
            raise ValueError(
                f"layer {page.name!r} has no indexer that picks rows: its compress ratio is {page.spec.compress_ratio}"
            )
        return kernels.topk_to_slots(
            topk,
            self.token_to_req,
            self.block_table(page),
            storage_block_size=page.storage_block_size,
            valid=self.valid,
            implementation=implementation,
        )

    def block_table(self, layer: str | PageLayout) -> jax.Array:
        """The block table of this layer's group, int32 `[R, max_blocks]`.

        Raises:
          ValueError: a layer of a group without layers here, or of another cache.
        """
        page = self._page(layer)
        table = self.block_tables[page.group] if 0 <= page.group < len(self.block_tables) else None
        if table is None:
            raise ValueError(f"layer {page.name!r} is in group {page.group}, of which no layer is in this cache")
        return table

    def _page(self, layer: str | PageLayout) -> PageLayout:
        return self.layout.page(layer) if isinstance(layer, str) else layer

    def _find(self, page: PageLayout, kind: str, ratio: int) -> Any:
        for want, made in zip(self.wanted, self.made, strict=True):
            if (want.kind, want.group, want.compress_ratio) == (kind, page.group, ratio):
                return made
        raise ValueError(
            f"layer {page.name!r} has no {kind!r} indices: its compress ratio is {page.spec.compress_ratio}, its row "
            f"format {page.format.name!r}"
        )


def _wanted(layout: PackedLayout, window: int, dense_width: int) -> tuple[StepIndex, ...]:
    """What the groups of `layout` need, each thing once."""
    wanted: dict[StepIndex, None] = {}
    for index, group in enumerate(layout.groups):
        for spec in group.specs:
            ratio, size = spec.compress_ratio, group.block_size
            if ratio > 1:
                wanted[StepIndex(kind="compressed_slots", group=index, block_size=size, compress_ratio=ratio)] = None
            else:
                wanted[StepIndex(kind="slots", group=index, block_size=size)] = None
                if not _is_state(spec.format):
                    width = spec.window or window
                    wanted[StepIndex(kind="window", group=index, block_size=size, width=width)] = None
            if ratio == DENSE_RATIO:
                wanted[
                    StepIndex(kind="dense", group=index, block_size=size, compress_ratio=ratio, width=dense_width)
                ] = None
    return tuple(wanted)


def _is_state(fmt: Any) -> bool:
    """Whether a cache holds compressor states, which are read by position and not by window."""
    return codecs.is_plain(fmt) and fmt.page_dtype == "float32"
