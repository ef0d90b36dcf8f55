"""One layer's attention over the cache: write what this step adds, choose what each token reads, attend.

The order is fixed, because each part reads what the one before wrote: window rows and states, boundary compression,
index scoring, attention. Every write but the first follows from a read of the slab, so XLA updates it in place.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dsv4kv_jax import indexer
from dsv4kv_jax._pytrees import pytree
from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.compressor import Compression, compress
from dsv4kv_jax.kernels._implementation import choose
from dsv4kv_jax.kernels.attention import sparse_attention
from dsv4kv_jax.kernels.codecs import ScaleFloor
from dsv4kv_jax.kernels.floats import round_to_bfloat16
from dsv4kv_jax.kernels.rows import RowWrite, StateRows, insert_many
from dsv4kv_jax.rope import rotate
from dsv4kv_jax.step import Step
from dsv4kv_jax.weights import CompressorWeights, LayerWeights


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayer:
    """What is static about a layer.

    Attributes:
      name: the layer's name in the plan, such as `model.layers.2.attn`; its caches are called after it.
      compress_ratio: 1, 4 or 128.
      top_k: compressed entries that a C4A token attends to.
      eps: of the compressor's RMSNorm.
      use_hadamard: transform indexer queries and keys before quantising them; a cache is all one or all the other.
      scale_floor: of the compressed rows; by default `insert_rows`' choice, `"scale"`.
      implementation: of everything that has several, as for `kernels.insert_rows`: `"xla"`, `"mosaic_gpu"`, or None for
        the default of each operation.
    """

    name: str
    compress_ratio: int
    top_k: int = 512
    eps: float = 1e-6
    use_hadamard: bool = False
    scale_floor: ScaleFloor | None = None
    implementation: Any = None

    @property
    def window_cache(self) -> str:
        return f"{self.name}.swa_cache"

    @property
    def state_cache(self) -> str:
        return f"{self.name}.compressor.state_cache"

    @property
    def key_cache(self) -> str:
        return f"{self.name}.indexer.k_cache"

    @property
    def key_state_cache(self) -> str:
        return f"{self.name}.indexer.compressor.state_cache"


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressorInputs:
    """A compressor's projections of this step's tokens, float32 `[T, W]` each; `score` without the position bias."""

    kv: Any
    score: Any


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerInputs:
    """The indexer's: `q` `[T, heads, 128]` before rotation, `weights` float32 `[T, heads]`, and its compressor's."""

    q: Any
    weights: Any
    compressor: CompressorInputs


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """A layer's projections of a step's tokens: `q` `[T, heads, 512]` and `kv` `[T, 512]`, normalised, not rotated."""

    q: Any
    kv: Any
    compressor: CompressorInputs | None = None
    index: IndexerInputs | None = None


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Rows that each token attends to: int32 slots `[T, K]` and lengths `[T]`."""

    indices: Any
    lens: Any

    @classmethod
    def of(cls, indices_and_lens: tuple[jax.Array, jax.Array]) -> "Selection":
        return cls(indices=indices_and_lens[0], lens=indices_and_lens[1])


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Captured:
    """What a layer attended with, enough to do the same attention elsewhere.

    Attributes:
      q: `[T, heads, 512]`, rotated.
      window: slots and lengths in the window cache.
      compressed: slots and lengths in the compressed cache, or None.
      sink: float32 `[heads]`.
      cos_sin: float32 `[T, 64]`, to rotate the output back with.
      out, lse: the attention's results, before the inverse rotation.
    """

    q: Any
    window: Selection
    compressed: Selection | None
    sink: Any
    cos_sin: Any
    out: Any
    lse: Any


def cached_attention(
    cache: KVCache,
    layer: AttentionLayer,
    weights: LayerWeights,
    step: Step,
    inputs: LayerInputs,
) -> tuple[KVCache, Captured]:
    """Writes a step's tokens into a layer's caches and attends from each of them.

    Args:
      cache: donate it.
      layer: static.
      weights: only `sink` and the compressors' `ape` and `norm` are used.
      step: of these tokens.
      inputs: their projections.

    Returns:
      The cache, and the attention's results with all that led to them.
    """
    cache = update_cache(cache, layer, weights, step, inputs)
    return cache, attend(cache, layer, weights.sink, step, inputs.q, select_compressed(cache, layer, step, inputs))


def update_cache(
    cache: KVCache, layer: AttentionLayer, weights: LayerWeights, step: Step, inputs: LayerInputs
) -> KVCache:
    """Writes window rows, states, and the compressed rows and keys of the groups that this step completes.

    Like every step's, the tokens' (request, position) pairs differ, and the block that a request writes to is its own:
    no two rows go to one place.
    """
    rows = rotate(inputs.kv.astype(jnp.float32), step.cos_sin(layer.compress_ratio))
    window = RowWrite(cache.page(layer.window_cache), step.metadata.slots(layer.window_cache), rows)
    cache = _insert(cache, layer, [window, *_state_writes(cache, layer, weights, step, inputs)])
    return _insert_compressed(cache, layer, weights, step)


def update_compressed(
    cache: KVCache, layer: AttentionLayer, weights: LayerWeights, step: Step, inputs: LayerInputs
) -> KVCache:
    """The compressor's part of `update_cache`: saves states, then compresses, and for C4A the same for the keys."""
    cache = _insert(cache, layer, _state_writes(cache, layer, weights, step, inputs))
    return _insert_compressed(cache, layer, weights, step)


def select_compressed(cache: KVCache, layer: AttentionLayer, step: Step, inputs: LayerInputs) -> Selection | None:
    """The compressed rows that each token attends to: all (C128A), the indexer's choice (C4A), none (ratio 1)."""
    if layer.compress_ratio == 1:
        return None
    if layer.compress_ratio == 128:
        return Selection.of(step.metadata.dense(layer.name))
    assert inputs.index is not None
    codes, folded = indexer.fold_query(
        inputs.index.q,
        inputs.index.weights,
        step.cos_sin(4),
        use_hadamard=layer.use_hadamard,
        implementation="xla" if layer.use_hadamard else layer.implementation,  # there is no kernel with that transform
    )
    top = indexer.select_top_k(
        cache,
        layer.key_cache,
        step.metadata.block_table(layer.key_cache),
        step.metadata.query_start_loc,
        codes,
        folded,
        step.visible(4),
        top_k=layer.top_k,
        implementation=layer.implementation,
    )
    return Selection.of(step.metadata.picked(layer.name, top, implementation=layer.implementation))


def attend(
    cache: KVCache,
    layer: AttentionLayer,
    sink: jax.Array,
    step: Step,
    q: jax.Array,
    compressed: Selection | None,
) -> Captured:
    """Rotates the queries and attends from each to its window and the `compressed` rows; the cache is only read."""
    cos_sin = step.cos_sin(layer.compress_ratio)
    q = rotate(q, cos_sin[:, None])
    window = Selection.of(step.metadata.window(layer.window_cache))
    page = cache.page(layer.window_cache)
    extra = {}
    if compressed is not None:
        extra = {
            "compressed_page": cache.page(layer.name),
            "compressed_indices": compressed.indices,
            "compressed_lens": compressed.lens,
            "compressed_slab": cache.slab_of(layer.name),
        }
    out, lse = sparse_attention(
        q,
        cache.slabs[page.buffer],
        page,
        window.indices,
        window.lens,
        sink=sink,
        implementation=layer.implementation,
        **extra,
    )
    return Captured(q=q, window=window, compressed=compressed, sink=sink, cos_sin=cos_sin, out=out, lse=lse)


def _insert(cache: KVCache, layer: AttentionLayer, writes: Sequence[RowWrite]) -> KVCache:
    """One launch for all of `writes`, where their pages are in one slab."""
    for buffer, slab in enumerate(cache.slabs):
        inside = [write for write in writes if write.page.buffer == buffer]
        if inside:
            slab = insert_many(slab, inside, unique_slots=True, implementation=layer.implementation)
            cache = cache.with_slab(slab, buffer)
    return cache


def _state_writes(
    cache: KVCache, layer: AttentionLayer, weights: LayerWeights, step: Step, inputs: LayerInputs
) -> list[RowWrite]:
    def write(name: str, weights: CompressorWeights, inputs: CompressorInputs) -> RowWrite:
        rows = StateRows(inputs.kv, inputs.score, weights.ape, step.metadata.positions)
        return RowWrite(cache.page(name), step.metadata.slots(name), rows)

    writes = []
    if layer.compress_ratio > 1:
        assert weights.compressor is not None
        assert inputs.compressor is not None
        writes.append(write(layer.state_cache, weights.compressor, inputs.compressor))
    if layer.compress_ratio == 4:
        assert weights.indexer is not None
        assert inputs.index is not None
        writes.append(write(layer.key_state_cache, weights.indexer.compressor, inputs.index.compressor))
    return writes


def _insert_compressed(cache: KVCache, layer: AttentionLayer, weights: LayerWeights, step: Step) -> KVCache:
    """Writes the compressed rows, and for C4A the keys, of the groups that this step completes."""
    if layer.compress_ratio == 1:
        return cache
    assert weights.compressor is not None
    found = step.boundaries(cache.page(layer.name))
    wanted = [(layer.name, layer.state_cache, weights.compressor)]
    if layer.compress_ratio == 4:
        assert weights.indexer is not None
        wanted.append((layer.key_cache, layer.key_state_cache, weights.indexer.compressor))
    # Kernels read for both caches in one launch. XLA does one cache after the other: were all states read first, the
    # first write would not depend on the second read, and XLA would copy the slab for it.
    at_once = len(wanted) if choose(layer.implementation, "window_means") == "mosaic_gpu" else 1
    for start in range(0, len(wanted), at_once):
        batch = wanted[start : start + at_once]
        compressions = [
            Compression(
                states=states,
                block_table=step.metadata.block_table(states),
                boundaries=found,
                norm=weights.norm,
                rope_table=step.rope.of(layer.compress_ratio),
            )
            for _, states, weights in batch
        ]
        rows = compress(cache, compressions, eps=layer.eps, implementation=layer.implementation)
        writes = [_compressed_write(cache, layer, name, step, row) for (name, *_), row in zip(batch, rows, strict=True)]
        cache = _insert(cache, layer, writes)
    return cache


def _compressed_write(cache: KVCache, layer: AttentionLayer, name: str, step: Step, rows: jax.Array) -> RowWrite:
    page = cache.page(name)
    if is_key := name == layer.key_cache:
        rows = indexer.hadamard(rows) if layer.use_hadamard else rows
    # Keys may be in another group than latents. Rounded to bfloat16 before they are quantised, whatever the format.
    slots, rows = step.boundaries(page).slots, round_to_bfloat16(rows)
    return RowWrite(page, slots, rows, None if is_key else layer.scale_floor)
