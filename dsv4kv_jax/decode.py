"""Running the small model over the cache: prefill, and a greedy decode loop that is one jitted program.

Both are the same step; they differ in how many tokens each request brings. The cache is donated, so the one passed in
is gone afterwards, and its bytes are updated where they lie.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax.attention import Captured
from dsv4kv_jax.cache import COMPILER_OPTIONS, KVCache
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.model import Model, forward
from dsv4kv_jax.specs import cdiv
from dsv4kv_jax.step import Step


def allocate_block_tables(
    layout: PackedLayout, max_lens: Sequence[int], num_blocks: int, *, rng: np.random.Generator | None = None
) -> tuple[np.ndarray, ...]:
    """Blocks for whole requests, up front: for runs whose lengths are known, without a manager.

    Args:
      layout: the cache's.
      max_lens: tokens that each request will have at its end.
      num_blocks: of the cache, the null block included.
      rng: shuffles the blocks; in order by default.

    Returns:
      int32 `[R, max_blocks]` for each group, -1 past a request's blocks.

    Raises:
      PlanError: too few blocks.
    """
    widths = [[cdiv(length, group.block_size) for length in max_lens] for group in layout.groups]
    needed = sum(map(sum, widths))
    if needed > num_blocks - 1:
        raise PlanError(
            f"{len(max_lens)} requests of {list(max_lens)} tokens need {needed} blocks; the cache has {num_blocks} and "
            f"keeps one of them empty: use fewer or shorter requests, or more memory"
        )
    ids = np.arange(1, num_blocks, dtype=np.int32)
    free = iter((ids if rng is None else rng.permutation(ids)).tolist())
    tables = []
    for counts in widths:
        table = np.full((len(max_lens), max(counts, default=0)), -1, np.int32)
        for request, count in enumerate(counts):
            table[request, :count] = [next(free) for _ in range(count)]
        tables.append(table)
    return tuple(tables)


def prefill(
    model: Model,
    cache: KVCache,
    tokens: Any,
    query_start_loc: Any,
    seq_lens: Any,
    block_tables: Sequence[Any],
    *,
    capture: bool = False,
) -> tuple[KVCache, jax.Array, tuple[Captured, ...] | None]:
    """One step over any mix of new tokens: whole prompts, chunks of them, single tokens.

    Args:
      model: the model.
      cache: donated.
      tokens: int32 `[T]`, one request after another, then padding.
      query_start_loc: int32 `[R + 1]`.
      seq_lens: int32 `[R]`, these tokens included.
      block_tables: int32 `[R, max_blocks]` for each group of the layout.
      capture: also return what each layer attended with.

    Returns:
      The cache, float32 logits `[R, vocab]` after each request's last token, and the captures or None.

    Raises:
      ValueError: lengths that the rope tables or block tables cannot hold, or arguments that do not fit together.
    """
    _check_lengths(model, cache, seq_lens, block_tables)
    arrays = (jnp.asarray(array, jnp.int32) for array in (tokens, query_start_loc, seq_lens))
    return _prefill(model, cache, *arrays, _as_arrays(block_tables), capture=capture)


def decode(
    model: Model,
    cache: KVCache,
    tokens: Any,
    seq_lens: Any,
    block_tables: Sequence[Any],
    *,
    steps: int,
    capture: bool = False,
) -> tuple[KVCache, jax.Array, tuple[Captured, ...] | None]:
    """Decodes `steps` tokens of every request greedily, in one `lax.scan`.

    Args:
      model: the model.
      cache: donated.
      tokens: int32 `[R]`, each request's newest token, which is not in the cache yet.
      seq_lens: int32 `[R]`, tokens of each request that are.
      block_tables: int32 `[R, max_blocks]` for each group, with blocks for all steps.
      steps: tokens to decode, at least 1.
      capture: also return what each layer attended with in the last step.

    Returns:
      The cache, the tokens int32 `[steps, R]`, and the captures or None. `seq_lens + steps` tokens are in the cache
      now; the last token returned is not.

    Raises:
      ValueError: as `prefill`, or fewer than 1 step.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be an integer of at least 1")
    _check_lengths(model, cache, np.asarray(seq_lens) + steps, block_tables)
    tokens, seq_lens = (jnp.asarray(array, jnp.int32) for array in (tokens, seq_lens))
    return _decode(model, cache, tokens, seq_lens, _as_arrays(block_tables), steps=steps, capture=capture)


def lower_decode(
    model: Model,
    cache: KVCache,
    tokens: Any,
    seq_lens: Any,
    block_tables: Sequence[Any],
    *,
    steps: int,
    capture: bool = False,
) -> jax.stages.Lowered:
    """The program that `decode` runs for these arguments, lowered: to look at, or to compile ahead of time.

    Nothing is donated by lowering. The compiled program takes what `decode` takes, but for `steps` and `capture`, as
    int32 arrays.
    """
    tokens, seq_lens = (jnp.asarray(array, jnp.int32) for array in (tokens, seq_lens))
    return _decode.lower(model, cache, tokens, seq_lens, _as_arrays(block_tables), steps=steps, capture=capture)


@functools.partial(
    jax.jit, static_argnames=("capture",), donate_argnames=("cache",), compiler_options=dict(COMPILER_OPTIONS)
)
def _prefill(
    model: Model,
    cache: KVCache,
    tokens: jax.Array,
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    block_tables: tuple[jax.Array, ...],
    *,
    capture: bool,
) -> tuple[KVCache, jax.Array, tuple[Captured, ...] | None]:
    step = Step.build(cache.layout, model.rope, block_tables, query_start_loc, seq_lens, num_tokens=tokens.shape[0])
    cache, logits, captured = forward(model, cache, tokens, step)
    return cache, logits, captured if capture else None


@functools.partial(
    jax.jit, static_argnames=("steps", "capture"), donate_argnames=("cache",), compiler_options=dict(COMPILER_OPTIONS)
)
def _decode(
    model: Model,
    cache: KVCache,
    tokens: jax.Array,
    seq_lens: jax.Array,
    block_tables: tuple[jax.Array, ...],
    *,
    steps: int,
    capture: bool,
) -> tuple[KVCache, jax.Array, tuple[Captured, ...] | None]:
    query_start_loc = jnp.arange(tokens.shape[0] + 1, dtype=jnp.int32)

    def one_step(cache: KVCache, tokens: jax.Array, seq_lens: jax.Array) -> tuple[KVCache, jax.Array, Any]:
        step = Step.build(cache.layout, model.rope, block_tables, query_start_loc, seq_lens, num_tokens=tokens.shape[0])
        cache, logits, captured = forward(model, cache, tokens, step)
        return cache, jnp.argmax(logits, axis=1).astype(jnp.int32), captured if capture else None

    def body(carry: Any, _: None) -> tuple[Any, jax.Array]:
        cache, tokens, seq_lens, _ = carry
        cache, tokens, captured = one_step(cache, tokens, seq_lens + 1)
        return (cache, tokens, seq_lens + 1, captured), tokens

    # The capture is carried, not stacked: only the last step's is kept.
    shapes = jax.eval_shape(one_step, cache, tokens, seq_lens)[2]
    captured = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (cache, _, _, captured), decoded = jax.lax.scan(body, (cache, tokens, seq_lens, captured), length=steps)
    return cache, decoded, captured


def _as_arrays(block_tables: Sequence[Any]) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(table, jnp.int32) for table in block_tables)


def _check_lengths(model: Model, cache: KVCache, seq_lens: Any, block_tables: Sequence[Any]) -> None:
    """Raises `ValueError` where a request grows past the rope tables or its block tables."""
    longest = int(np.max(np.asarray(seq_lens), initial=0))
    limit, what = model.rope.num_positions, "the model's rope tables"
    for index, (group, table) in enumerate(zip(cache.layout.groups, block_tables, strict=False)):
        if group.layers and table.shape[1] * group.block_size < limit:
            limit, what = (
                table.shape[1] * group.block_size,
                f"block table {index} ({table.shape[1]} blocks of {group.block_size})",
            )
    if longest > limit:
        raise ValueError(
            f"a request reaches {longest} tokens, but {what} end at {limit}; make them longer, or decode fewer steps"
        )
