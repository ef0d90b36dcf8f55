"""What the layers of one step share, beyond slots and indices: rotations, and the groups that the step completes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax._pytrees import pytree
from dsv4kv_jax.compressor import Boundaries
from dsv4kv_jax.layout import PackedLayout, PageLayout
from dsv4kv_jax.metadata import DENSE_RATIO, StepMetadata
from dsv4kv_jax.rope import RopeTables
from dsv4kv_jax.specs import round_up

_WIDTH_ALIGNMENT = 64  # columns of dense rows; attention kernels take tiles of 64 rows


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step's metadata and what is derived from it once for all layers; a pytree, made inside jit.

    Attributes:
      metadata: slots and indices.
      rope: the model's tables.
      plain_cos_sin, compressed_cos_sin: float32 `[T, 64]`, the tables' rows at each token's position.
      groups: the compressed groups that the step completes, by (cache group, compress ratio).
    """

    metadata: StepMetadata
    rope: RopeTables
    plain_cos_sin: jax.Array
    compressed_cos_sin: jax.Array
    groups: Mapping[tuple[int, int], Boundaries]

    @classmethod
    def build(
        cls,
        layout: PackedLayout,
        rope: RopeTables,
        block_tables: Sequence[Any],
        query_start_loc: Any,
        seq_lens: Any,
        *,
        num_tokens: int,
    ) -> "Step":
        """A step over the cache of `layout`.

        Args:
          layout: the cache's.
          rope: tables that reach past every position.
          block_tables: int32 `[R, max_blocks]` per group. Their widths bound what is read: pass no more columns than
            the longest request needs.
          query_start_loc: int32 `[R + 1]`.
          seq_lens: int32 `[R]`, this step's tokens included.
          num_tokens: tokens of the step, padding included.

        Raises:
          ValueError: as `StepMetadata.build`.
        """
        block_tables = tuple(block_tables)
        metadata = StepMetadata.build(
            layout,
            block_tables,
            query_start_loc,
            seq_lens,
            num_tokens=num_tokens,
            max_model_len=rope.num_positions,
            dense_width=_dense_width(layout, block_tables),
        )
        groups = {}
        for want, made in zip(metadata.wanted, metadata.made, strict=True):
            if want.kind == "compressed_slots":
                groups[want.group, want.compress_ratio] = Boundaries.find(
                    made,
                    metadata.token_to_req,
                    metadata.positions,
                    compress_ratio=want.compress_ratio,
                    num_requests=metadata.seq_lens.shape[0],
                )
        plain, compressed = (
            table.at[jnp.maximum(metadata.positions, 0)].get(mode="fill", fill_value=0)
            for table in (rope.plain, rope.compressed)
        )
        return cls(metadata=metadata, rope=rope, plain_cos_sin=plain, compressed_cos_sin=compressed, groups=groups)

    def cos_sin(self, compress_ratio: int) -> jax.Array:
        """float32 `[T, 64]`: the rotation of each token in a layer of this ratio."""
        return self.plain_cos_sin if compress_ratio == 1 else self.compressed_cos_sin

    def boundaries(self, page: PageLayout) -> Boundaries:
        """The groups that this step completes in a compressed cache."""
        return self.groups[page.group, page.spec.compress_ratio]

    def visible(self, compress_ratio: int) -> jax.Array:
        """int32 `[T]`: compressed entries that each token sees, the one it completes included; 0 for padding."""
        return jnp.where(self.metadata.valid, (self.metadata.positions + 1) // compress_ratio, 0)


def _dense_width(layout: PackedLayout, block_tables: Sequence[Any]) -> int | None:
    """Columns that hold every C128A entry of the block tables; None where there is no such layer."""
    # What is no table is left out here, and refused when the metadata are made.
    columns = [shape[1] if len(shape) == 2 else 0 for shape in map(np.shape, block_tables)]
    entries = [
        columns[page.group] * page.storage_block_size
        for page in layout.pages.values()
        if page.spec.compress_ratio == DENSE_RATIO and page.group < len(columns)
    ]
    return max(round_up(max(entries), _WIDTH_ALIGNMENT), _WIDTH_ALIGNMENT) if entries else None
