"""Everything index-like that one step needs, for all groups of a cache in one call.

A step of DeepSeek-V4 needs a handful of slot and index arrays, each shared by all layers of a group. They are asked for
by name, so that one kernel launch can make them all.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax

from dsv4kv_jax.kernels import indices, slots
from dsv4kv_jax.kernels._arguments import check_count
from dsv4kv_jax.kernels._implementation import mosaic_kernel
from dsv4kv_jax.kernels.slots import StepTokens


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepIndex:
    """One array, or pair of arrays, to make from the block table of a group.

    Attributes:
      kind: `"slots"` (as `slot_mapping` gives), `"compressed_slots"` (`compressed_slot_mapping`), `"window"`
        (`swa_indices`) or `"dense"` (`c128a_indices`).
      group: index into the block tables.
      block_size: tokens of a block.
      compress_ratio: tokens of an entry, for the two kinds that deal with entries.
      width: columns of the two kinds that are matrices; for `"window"` the window's tokens as well.
    """

    kind: Literal["slots", "compressed_slots", "window", "dense"]
    group: int
    block_size: int
    compress_ratio: int = 1
    width: int = 0


def step_indices(
    wanted: Sequence[StepIndex],
    block_tables: Sequence[Any],
    query_start_loc: Any,
    seq_lens: Any,
    *,
    num_tokens: int,
    implementation: str | None = None,
) -> tuple[StepTokens, tuple[Any, ...]]:
    """Makes what `wanted` names.

    Args:
      wanted: what to make.
      block_tables: int32 `[R, max_blocks]` for each group; those that `wanted` does not name may be None.
      query_start_loc: int32 `[R + 1]`.
      seq_lens: int32 `[R]`, this step's tokens included.
      num_tokens: tokens of the results, padding included.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      The tokens' positions and requests, and for each of `wanted` an int32 `[num_tokens]`, or the pair int32
      `[num_tokens, width]` and int32 `[num_tokens]`, the lengths.

    Raises:
      ValueError: wrong dtypes, lengths or sizes, or an implementation that this operation does not have.
    """
    check_count("num_tokens", num_tokens)
    tables = {}
    for want in wanted:
        if not 0 <= want.group < len(block_tables) or block_tables[want.group] is None:
            raise ValueError(f"group {want.group} has no block table; {len(block_tables)} were given")
        if want.group not in tables:
            tables[want.group], query_start_loc, seq_lens = slots.step_arguments(
                block_tables[want.group], query_start_loc, seq_lens, num_tokens
            )
    if kernel := mosaic_kernel("step_indices", implementation):
        return kernel(tuple(wanted), tables, query_start_loc, seq_lens, num_tokens=num_tokens)
    step = slots.step_tokens(query_start_loc, seq_lens, num_tokens=num_tokens)
    made = []
    for want in wanted:
        args: Any = (tables[want.group], query_start_loc, seq_lens)
        size: Any = {"block_size": want.block_size, "num_tokens": num_tokens, "implementation": "xla"}
        if want.kind == "slots":
            made.append(slots.slot_mapping(*args, **size))
        elif want.kind == "compressed_slots":
            made.append(slots.compressed_slot_mapping(*args, compress_ratio=want.compress_ratio, **size))
        elif want.kind == "window":
            made.append(indices.swa_indices(*args, window=want.width, **size))
        else:
            ratio = want.compress_ratio
            made.append(indices.c128a_indices(*args, compress_ratio=ratio, width=want.width, **size))
    return step, tuple(made)
