"""One layer's attention over the cache: write what this step adds, choose what each token reads, attend.

The order is fixed, because each part reads what the one before wrote: window rows and states, boundary compression,
index scoring, attention. Every write but the first follows from a read of the slab, so XLA updates it in place.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv4kv_jax import compressor, indexer
from dsv4kv_jax._pytrees import pytree
from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.kernels.attention import sparse_attention
from dsv4kv_jax.kernels.codecs import ScaleFloor
from dsv4kv_jax.kernels.floats import round_to_bfloat16
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
      implementation: of the attention; see `sparse_attention`.
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
    """Writes window rows, states, and the compressed rows and keys of the groups that this step completes."""
    rows = rotate(inputs.kv.astype(jnp.float32), step.cos_sin(layer.compress_ratio))
    cache = cache.insert_rows(layer.window_cache, step.metadata.slots(layer.window_cache), rows)
    return cache if layer.compress_ratio == 1 else update_compressed(cache, layer, weights, step, inputs)


def update_compressed(
    cache: KVCache, layer: AttentionLayer, weights: LayerWeights, step: Step, inputs: LayerInputs
) -> KVCache:
    """The compressor's part of `update_cache`: saves states, then compresses, and for C4A the same for the keys."""
    assert inputs.compressor is not None
    assert weights.compressor is not None
    # All states first: no read lies between these writes, so none of them has to wait for one.
    cache = _save_states(cache, layer.state_cache, weights.compressor, step, inputs.compressor)
    if layer.compress_ratio == 4:
        assert inputs.index is not None
        assert weights.indexer is not None
        cache = _save_states(cache, layer.key_state_cache, weights.indexer.compressor, step, inputs.index.compressor)
    slots = step.boundaries(cache.page(layer.name)).slots
    # Rounded to bfloat16 before they are quantised, whatever the format.
    rows = round_to_bfloat16(_compressed_rows(cache, layer, layer.state_cache, weights.compressor, step))
    cache = cache.insert_rows(layer.name, slots, rows, scale_floor=layer.scale_floor)
    if layer.compress_ratio == 4:
        assert weights.indexer is not None
        keys = _compressed_rows(cache, layer, layer.key_state_cache, weights.indexer.compressor, step)
        keys = indexer.hadamard(keys) if layer.use_hadamard else keys
        key_slots = step.boundaries(cache.page(layer.key_cache)).slots  # keys may be in another group than latents
        cache = cache.insert_rows(layer.key_cache, key_slots, round_to_bfloat16(keys))
    return cache


def select_compressed(cache: KVCache, layer: AttentionLayer, step: Step, inputs: LayerInputs) -> Selection | None:
    """The compressed rows that each token attends to: all (C128A), the indexer's choice (C4A), none (ratio 1)."""
    if layer.compress_ratio == 1:
        return None
    if layer.compress_ratio == 128:
        return Selection.of(step.metadata.dense(layer.name))
    assert inputs.index is not None
    codes, folded = indexer.fold_query(
        inputs.index.q, inputs.index.weights, step.cos_sin(4), use_hadamard=layer.use_hadamard
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
    )
    return Selection.of(step.metadata.picked(layer.name, top))


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


def _save_states(
    cache: KVCache, name: str, weights: CompressorWeights, step: Step, inputs: CompressorInputs
) -> KVCache:
    slots = step.metadata.slots(name)
    return compressor.save_states(cache, name, slots, step.metadata.positions, inputs.kv, inputs.score, weights.ape)


def _compressed_rows(
    cache: KVCache, layer: AttentionLayer, state: str, weights: CompressorWeights, step: Step
) -> jax.Array:
    return compressor.compress(
        cache,
        state,
        step.metadata.block_table(state),
        step.boundaries(cache.page(layer.name)),
        norm=weights.norm,
        rope_table=step.rope.of(layer.compress_ratio),
        eps=layer.eps,
    )
