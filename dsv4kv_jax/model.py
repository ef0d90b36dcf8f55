"""A small model with DeepSeek-V4's attention, to drive the cache with the real computation.

Embedding, layers, RMSNorm, output head. A layer is `x + attention(RMSNorm(x))` with everything that touches the cache
as in DeepSeek-V4: low-rank queries normalised per head, one 512-wide latent as key and value, partial RoPE (YaRN where
the layer compresses), window, compressor, indexer, sinks, inverse rotation, grouped output projection. Left out,
because no cache byte depends on how they are made: the experts (layers have no feed-forward part at all),
hyper-connections (plain residuals instead), the draft layers, and tensor parallelism.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dsv4kv_jax.attention import (
    AttentionLayer,
    Captured,
    CompressorInputs,
    IndexerInputs,
    LayerInputs,
    cached_attention,
)
from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.kernels._dots import einsum_f32
from dsv4kv_jax.kernels._implementation import Implementation
from dsv4kv_jax.kernels.codecs import ScaleFloor
from dsv4kv_jax.rope import RopeTables, rotate
from dsv4kv_jax.step import Step
from dsv4kv_jax.weights import CompressorWeights, LayerWeights, ModelWeights, check_weights, init_weights


def miniature(
    config: ModelConfig,
    num_layers: int = 4,
    *,
    hidden_size: int = 256,
    num_attention_heads: int = 4,
    q_lora_rank: int = 128,
    o_lora_rank: int = 64,
    o_groups: int = 2,
) -> ModelConfig:
    """`config` with fewer layers and heads and narrower projections, but the same cache rows, window and indexer.

    The layers are the first `num_layers` consecutive ones that cover most kinds: for V4-Flash ratios 1, 4, 128, 4.

    Raises:
      PlanError: the model has fewer layers, or sizes that no model can have.
    """
    if not 0 < num_layers <= config.num_hidden_layers:
        raise PlanError(f"num_layers={num_layers} must be from 1 to the model's {config.num_hidden_layers}")
    ratios = config.compress_ratios
    starts = range(len(ratios) - num_layers + 1)
    start = max(starts, key=lambda first: len(set(ratios[first : first + num_layers])))
    return dataclasses.replace(
        config,
        name=f"{config.name}-miniature",
        num_hidden_layers=num_layers,
        compress_ratios=ratios[start : start + num_layers],
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        q_lora_rank=q_lora_rank,
        o_lora_rank=o_lora_rank,
        o_groups=o_groups,
    )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weights", "rope"], meta_fields=["config", "layers", "vocab_size"]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Weights and rope tables with what is static about them: a pytree that jitted functions take as it is.

    Make one with `build` or `random`, which check the weights.

    Attributes:
      weights: checked against `config`.
      rope: tables that reach past every position the model is used at.
      config: the model's sizes; static.
      layers: the layers' static descriptions.
      vocab_size: of embedding and output head.
    """

    weights: ModelWeights
    rope: RopeTables
    config: ModelConfig
    layers: tuple[AttentionLayer, ...]
    vocab_size: int

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        vocab_size: int,
        max_positions: int,
        use_hadamard: bool = False,
        scale_floor: ScaleFloor | None = None,
        implementation: Implementation | None = None,
    ) -> "Model":
        """A model from weights.

        Args:
          config: the model's sizes.
          weights: as `weight_shapes` describes them.
          vocab_size: tokens.
          max_positions: rope tables are made for this many, 512 bytes each.
          use_hadamard, scale_floor, implementation: see `AttentionLayer`.

        Raises:
          ValueError: weights that do not fit the config; every one that differs is named, with both shapes.
        """
        check_weights(config, weights, vocab_size=vocab_size)
        layers = tuple(
            AttentionLayer(
                name=f"model.layers.{index}.attn",
                compress_ratio=ratio,
                top_k=config.index_topk,
                eps=config.rms_norm_eps,
                use_hadamard=use_hadamard,
                scale_floor=scale_floor,
                implementation=implementation,
            )
            for index, ratio in enumerate(config.compress_ratios)
        )
        rope = RopeTables.make(config.rope, max_positions)
        return cls(weights=weights, rope=rope, config=config, layers=layers, vocab_size=vocab_size)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        key: jax.Array,
        *,
        vocab_size: int = 256,
        max_positions: int,
        dtype: str = "bfloat16",
        **options: Any,
    ) -> "Model":
        """A model with random weights from a JAX key; `options` are those of `build`.

        Raises:
          ValueError: sizes or a dtype that `weight_shapes` refuses.
        """
        weights = init_weights(config, key, vocab_size=vocab_size, dtype=dtype)
        return cls.build(config, weights, vocab_size=vocab_size, max_positions=max_positions, **options)


def forward(
    model: Model, cache: KVCache, tokens: jax.Array, step: Step
) -> tuple[KVCache, jax.Array, tuple[Captured, ...]]:
    """One step of the model: writes the caches and computes what follows each request's last token.

    Args:
      model: the model.
      cache: donate it.
      tokens: int32 `[T]` token ids; ids outside the vocabulary embed to 0.
      step: of these tokens, built with `model.rope`.

    Returns:
      The cache, float32 logits `[R, vocab]` at each request's last token (meaningless for requests without tokens), and
      what each layer attended with.
    """
    weights, eps = model.weights, model.config.rms_norm_eps
    x = weights.embed.at[jnp.where(tokens < 0, model.vocab_size, tokens)].get(mode="fill", fill_value=0)
    captured = []
    for layer, layer_weights in zip(model.layers, weights.layers, strict=True):
        inputs = project(model.config, layer_weights, rms_norm(x, layer_weights.norm, eps))
        cache, attended = cached_attention(cache, layer, layer_weights, step, inputs)
        out = rotate(attended.out, attended.cos_sin[:, None], inverse=True)
        x = x + output_projection(model.config, layer_weights, out)
        captured.append(attended)
    last = x.at[jnp.maximum(step.metadata.query_start_loc[1:] - 1, 0)].get(mode="fill", fill_value=0)
    logits = matmul(rms_norm(last, weights.norm, eps), weights.head, jnp.float32)
    return cache, logits, tuple(captured)


def project(config: ModelConfig, weights: LayerWeights, x: jax.Array) -> LayerInputs:
    """Everything a layer computes from its normalised input `[T, hidden]` before it touches the cache."""
    num_tokens = x.shape[0]
    query = rms_norm(matmul(x, weights.wq_a, x.dtype), weights.q_norm, config.rms_norm_eps)
    q = matmul(query, weights.wq_b, x.dtype).reshape(num_tokens, config.num_attention_heads, config.head_dim)
    index = None
    if weights.indexer is not None:
        heads = config.index_n_heads
        index = IndexerInputs(
            q=matmul(query, weights.indexer.wq, x.dtype).reshape(num_tokens, heads, config.index_head_dim),
            weights=matmul(x, weights.indexer.weights_proj, jnp.float32),
            compressor=_project_compressor(weights.indexer.compressor, x),
        )
    return LayerInputs(
        q=rms_norm(q, None, config.rms_norm_eps),
        kv=rms_norm(matmul(x, weights.wkv, x.dtype), weights.kv_norm, config.rms_norm_eps),
        compressor=None if weights.compressor is None else _project_compressor(weights.compressor, x),
        index=index,
    )


def output_projection(config: ModelConfig, weights: LayerWeights, out: jax.Array) -> jax.Array:
    """Attention outputs `[T, heads, 512]`, rotated back, to `[T, hidden]`: a low-rank matrix a head group, then one."""
    grouped = out.reshape(out.shape[0], config.o_groups, -1)
    low_rank = einsum_f32("tgi,gir->tgr", grouped, weights.wo_a)
    return matmul(low_rank.astype(out.dtype).reshape(out.shape[0], -1), weights.wo_b, out.dtype)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """RMSNorm of the last dimension in float32, returned in x's dtype."""
    values = x.astype(jnp.float32)
    values = values * jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + jnp.float32(eps))
    return (values if weight is None else values * weight).astype(x.dtype)


def matmul(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """`x @ weight`, summed in float32."""
    return einsum_f32("...i,ij->...j", x, weight).astype(dtype)


def _project_compressor(weights: CompressorWeights, x: jax.Array) -> CompressorInputs:
    return CompressorInputs(kv=matmul(x, weights.wkv, jnp.float32), score=matmul(x, weights.wgate, jnp.float32))
