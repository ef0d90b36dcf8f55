"""Weights of the small model: pytrees whose shapes follow from the config, checked before anything is traced.

Names are those of DeepSeek's checkpoints. Matrices multiply from the right (`x @ w`) and have the model's dtype; norms,
the position bias `ape` and the sinks are float32.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4kv_jax._pytrees import pytree
from dsv4kv_jax.config import ModelConfig

MODEL_DTYPES = ("float32", "bfloat16")


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressorWeights:
    """One compressor; W = d, or 2d for ratio 4, whose groups overlap. d is 512, or 128 in the indexer.

    Attributes:
      wkv, wgate: `[hidden, W]`.
      ape: float32 `[ratio, W]`, position bias of the scores.
      norm: float32 `[d]`.
    """

    wkv: Any
    wgate: Any
    ape: Any
    norm: Any


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerWeights:
    """A C4A layer's indexer.

    Attributes:
      wq: `[q_lora_rank, index_n_heads * 128]`.
      weights_proj: `[hidden, index_n_heads]`.
      compressor: of the keys.
    """

    wq: Any
    weights_proj: Any
    compressor: CompressorWeights


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer; `compressor` is None for ratio 1 and `indexer` for all but ratio 4.

    Attributes:
      norm: float32 `[hidden]`, before the layer.
      wq_a, q_norm, wq_b: `[hidden, q_lora_rank]`, float32 `[q_lora_rank]`, `[q_lora_rank, heads * 512]`.
      wkv, kv_norm: `[hidden, 512]`, float32 `[512]`.
      sink: float32 `[heads]`.
      wo_a: `[o_groups, heads / o_groups * 512, o_lora_rank]`, one matrix a group of heads.
      wo_b: `[o_groups * o_lora_rank, hidden]`.
    """

    norm: Any
    wq_a: Any
    q_norm: Any
    wq_b: Any
    wkv: Any
    kv_norm: Any
    sink: Any
    wo_a: Any
    wo_b: Any
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The stack: `embed` `[vocab, hidden]`, the layers, `norm` float32 `[hidden]`, `head` `[hidden, vocab]`."""

    embed: Any
    layers: tuple[LayerWeights, ...]
    norm: Any
    head: Any


def weight_shapes(config: ModelConfig, *, vocab_size: int, dtype: str = "bfloat16") -> ModelWeights:
    """The weights a config asks for, as `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: another dtype, or heads that do not divide into the output groups.
    """
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported; use one of {', '.join(MODEL_DTYPES)}")
    if config.num_attention_heads % config.o_groups:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of o_groups={config.o_groups}"
        )
    matrix = functools.partial(_shaped, dtype)
    return ModelWeights(
        embed=matrix(vocab_size, config.hidden_size),
        layers=tuple(_layer_shapes(config, ratio, dtype) for ratio in config.compress_ratios),
        norm=_shaped("float32", config.hidden_size),
        head=matrix(config.hidden_size, vocab_size),
    )


def check_weights(config: ModelConfig, weights: ModelWeights, *, vocab_size: int) -> None:
    """Raises `ValueError` unless `weights` are exactly what `config` asks for; names every weight that differs."""
    if len(weights.layers) != config.num_hidden_layers:
        raise ValueError(
            f"the weights have {len(weights.layers)} layers for num_hidden_layers={config.num_hidden_layers}"
        )
    for index, (layer, ratio) in enumerate(zip(weights.layers, config.compress_ratios, strict=True)):
        _check_kind(index, layer, ratio)
    dtype = str(weights.embed.dtype)
    wanted = jax.tree_util.tree_flatten_with_path(weight_shapes(config, vocab_size=vocab_size, dtype=dtype))[0]
    given = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]}
    problems = []
    for path, want in wanted:
        name = jax.tree_util.keystr(path)
        have = given.pop(name, None)
        if have is None or have.shape != want.shape or have.dtype != want.dtype:
            found = "is missing" if have is None else f"is {have.dtype}{list(have.shape)}"
            problems.append(f"{name.removeprefix('.')} {found}, needs {want.dtype}{list(want.shape)}")
    problems += [f"{name.removeprefix('.')} is one too many" for name in given]
    if problems:
        raise ValueError(f"weights do not fit {config.name!r}: " + "; ".join(problems))


def _check_kind(index: int, layer: LayerWeights, ratio: int) -> None:
    """Raises `ValueError` unless a layer's weights have the parts that its compress ratio asks for."""
    ape = None if layer.compressor is None else layer.compressor.ape
    if (1 if ape is None else ape.shape[0]) == ratio and (layer.indexer is not None) == (ratio == 4):
        return
    needs = {
        1: "neither a compressor nor an indexer",
        4: "a compressor of that ratio and an indexer",
        128: "a compressor of that ratio and no indexer",
    }
    has = [kind for kind in ("compressor", "indexer") if getattr(layer, kind) is not None]
    detail = "" if ape is None else f" (compressor.ape {list(ape.shape)})"
    raise ValueError(
        f"layers[{index}] has compress_ratio={ratio} in the config and needs {needs[ratio]}; its weights have "
        f"{' and '.join(has) or 'neither'}{detail}"
    )


def init_weights(config: ModelConfig, key: jax.Array, *, vocab_size: int, dtype: str = "bfloat16") -> ModelWeights:
    """Random weights from a JAX key: matrices normal over the root of their input size, norms near 1, the rest normal.

    Raises:
      ValueError: as `weight_shapes`.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(weight_shapes(config, vocab_size=vocab_size, dtype=dtype))
    keys = jax.random.split(key, len(leaves))
    made = []
    for (path, leaf), leaf_key in zip(leaves, keys, strict=True):
        name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        values = jax.random.normal(leaf_key, leaf.shape, jnp.float32)
        if name.endswith("norm"):
            values = 1 + 0.1 * values
        elif leaf.ndim > 1 and name not in ("ape", "embed"):
            values = values * np.float32(leaf.shape[-2] ** -0.5)
        made.append(values.astype(leaf.dtype))
    return jax.tree_util.tree_unflatten(tree, made)


def _shaped(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _compressor_shapes(config: ModelConfig, ratio: int, head_dim: int, dtype: str) -> CompressorWeights:
    width = head_dim * (2 if ratio == 4 else 1)
    return CompressorWeights(
        wkv=_shaped(dtype, config.hidden_size, width),
        wgate=_shaped(dtype, config.hidden_size, width),
        ape=_shaped("float32", ratio, width),
        norm=_shaped("float32", head_dim),
    )


def _layer_shapes(config: ModelConfig, ratio: int, dtype: str) -> LayerWeights:
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    matrix = functools.partial(_shaped, dtype)
    vector = functools.partial(_shaped, "float32")
    compressor = _compressor_shapes(config, ratio, dim, dtype) if ratio > 1 else None
    indexer = None
    if ratio == 4:
        indexer = IndexerWeights(
            wq=matrix(config.q_lora_rank, config.index_n_heads * config.index_head_dim),
            weights_proj=matrix(hidden, config.index_n_heads),
            compressor=_compressor_shapes(config, ratio, config.index_head_dim, dtype),
        )
    return LayerWeights(
        norm=vector(hidden),
        wq_a=matrix(hidden, config.q_lora_rank),
        q_norm=vector(config.q_lora_rank),
        wq_b=matrix(config.q_lora_rank, heads * dim),
        wkv=matrix(hidden, dim),
        kv_norm=vector(dim),
        sink=vector(heads),
        wo_a=matrix(config.o_groups, heads // config.o_groups * dim, config.o_lora_rank),
        wo_b=matrix(config.o_groups * config.o_lora_rank, hidden),
        compressor=compressor,
        indexer=indexer,
    )
