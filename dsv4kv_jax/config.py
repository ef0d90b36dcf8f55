"""What the KV cache needs to know of a DeepSeek-V4 model, read from its Hugging Face `config.json`."""

import dataclasses
import os
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dsv4kv_jax import _json
from dsv4kv_jax.errors import PlanError

SUPPORTED_MODEL_TYPE = "deepseek_v4"
LEGAL_COMPRESS_RATIOS = (1, 4, 128)
MAX_LAYERS = 4096  # far beyond any model; a damaged count is refused before anything is made for each layer
MAX_INT32 = 2**31 - 1  # the device counts in int32
_LARGEST_NUMBER = float(np.finfo(np.float32).max)  # the device computes with float32
_LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def check_int(field: str, value: Any, *, at_least: int, at_most: int | None = None) -> None:
    """Refuses, with a `PlanError`, what is not an integer in this range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise PlanError(f"{field}={value!r} must be an integer of at least {at_least}")
    if at_most is not None and value > at_most:
        raise PlanError(f"{field}={value!r} is too large; at most {at_most} are supported")


def _check_positive_number(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST_NUMBER:
        raise PlanError(f"{field}={value!r} must be a number above 0 and at most {_LARGEST_NUMBER:.1e}")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding of the last `dim` values of a row.

    Window-only layers use `theta`; layers that compress use `compress_theta` with YaRN's `factor`, `beta_fast`,
    `beta_slow` and `original_max_position_embeddings` (arXiv:2309.00071), without its attention factor.

    Raises:
      PlanError: a value that is not a positive, finite number; names the config's field.
    """

    dim: int = 64
    theta: float = 10_000.0
    compress_theta: float = 160_000.0
    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65_536

    def __post_init__(self) -> None:
        check_int("qk_rope_head_dim", self.dim, at_least=1, at_most=MAX_INT32)
        check_int(
            "original_max_position_embeddings", self.original_max_position_embeddings, at_least=1, at_most=MAX_INT32
        )
        positive = {"rope_theta": self.theta, "compress_rope_theta": self.compress_theta, "factor": self.factor}
        positive |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        for field, value in positive.items():
            _check_positive_number(field, value)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The part of a DeepSeek-V4 config that decides its KV cache and the computation that fills it.

    `compress_ratios` has one entry per main layer: 1 (window only), 4 (C4A) or 128 (C128A). `num_draft_stages` is the
    config's `n_mtp_layers`, the number of DSpark stages, or None where it is missing.

    Raises:
      PlanError: a field that no DeepSeek-V4 cache can have; names the field, the value and the remedy.
    """

    name: str
    num_hidden_layers: int
    compress_ratios: tuple[int, ...]
    hidden_size: int = 4096
    num_attention_heads: int = 64
    head_dim: int = 512
    sliding_window: int = 128
    q_lora_rank: int = 1024
    o_lora_rank: int = 1024
    o_groups: int = 8
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    num_nextn_predict_layers: int = 1
    num_draft_stages: int | None = None
    max_position_embeddings: int = 1_048_576
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_attention_heads", "head_dim", "sliding_window", "q_lora_rank", "o_lora_rank")
        sizes += ("o_groups", "index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings")
        for field in sizes:
            check_int(field, getattr(self, field), at_least=1, at_most=MAX_INT32)
        _check_positive_number("rms_norm_eps", self.rms_norm_eps)
        for field in ("num_hidden_layers", "num_nextn_predict_layers"):
            check_int(field, getattr(self, field), at_least=0, at_most=MAX_LAYERS)
        if self.num_draft_stages is not None:
            check_int("n_mtp_layers", self.num_draft_stages, at_least=0, at_most=MAX_LAYERS)
        if len(self.compress_ratios) != self.num_hidden_layers:
            raise PlanError(
                f"compress_ratios has {len(self.compress_ratios)} entries for "
                f"num_hidden_layers={self.num_hidden_layers}; give one entry per layer"
            )
        for layer, ratio in enumerate(self.compress_ratios):
            if type(ratio) is not int or ratio not in LEGAL_COMPRESS_RATIOS:
                raise PlanError(
                    f"compress_ratios[{layer}]={ratio!r} is not supported; use 0 or 1 (window only), 4 or 128"
                )
        if self.index_head_dim != 128:
            raise PlanError(f"index_head_dim={self.index_head_dim} is not supported; indexer rows hold 128 values")
        if self.head_dim != 512 or self.rope.dim != 64:
            raise PlanError(
                f"head_dim={self.head_dim} with qk_rope_head_dim={self.rope.dim} is not supported; DeepSeek-V4 rows "
                f"hold 512 values, the last 64 of them rotated"
            )

    @classmethod
    def from_hf(cls, config: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None) -> "ModelConfig":
        """Reads a Hugging Face config: a `config.json`, the folder that holds one, or its contents.

        Both spellings of the layer pattern are accepted: `compress_ratios`, and transformers' `layer_types` with
        `compress_rates`. Entries past `num_hidden_layers` (the draft layers') are ignored.

        Raises:
          PlanError: the file is no DeepSeek-V4 config; names the field, the value and what is supported.
        """
        if not isinstance(config, Mapping):
            path = os.fspath(config)
            data = _read_json(path)
            file = pathlib.Path(path).resolve()
            name = name or (file.parent.name if file.name == "config.json" else file.stem)
        else:
            data = config
        model_type = data.get("model_type")
        if model_type != SUPPORTED_MODEL_TYPE:
            hint = (
                " (its pages share one cache between layers and use other rows)" if model_type == "deepseek_v41" else ""
            )
            raise PlanError(
                f"model_type={model_type!r} is not supported{hint}; supported: {SUPPORTED_MODEL_TYPE!r} "
                f"(DeepSeek-V4-Flash and DeepSeek-V4-Pro)"
            )
        num_layers = _get(data, "num_hidden_layers")
        check_int("num_hidden_layers", num_layers, at_least=0)
        kwargs: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in data and field.name != "compress_ratios":
                kwargs[field.name] = data[field.name]
        kwargs["name"] = name or str(data.get("_name_or_path") or SUPPORTED_MODEL_TYPE)
        kwargs["num_draft_stages"] = data.get("n_mtp_layers")
        kwargs["compress_ratios"] = _ratios(data, num_layers)
        kwargs["rope"] = _rope(data)
        return cls(**kwargs)

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """The config of a published model: `"deepseek-v4-pro"` or `"deepseek-v4-flash"`.

        Raises:
          PlanError: no such preset.
        """
        try:
            return PRESETS[name.lower()]
        except KeyError:
            raise PlanError(f"no preset called {name!r}; presets are {', '.join(sorted(PRESETS))}") from None


def _get(data: Mapping[str, Any], field: str) -> Any:
    if field not in data:
        raise PlanError(f"the config has no {field!r}, which every {SUPPORTED_MODEL_TYPE} config has")
    return data[field]


def _object(field: str, value: Any) -> dict[str, Any]:
    """A nested object of the config; one that is missing or null is empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PlanError(f"{field}={value!r} must be an object of names and values")
    return dict(value)


def _read_json(path: str) -> Mapping[str, Any]:
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read model config {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"model config {path!r} is not text: {error}") from None
    data = _json.parse(text, f"model config {path!r}")
    if not isinstance(data, dict):
        raise PlanError(f"{path!r} holds a JSON {type(data).__name__}; a model config is an object")
    return data


def _ratios(data: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    if "compress_ratios" in data:
        ratios = data["compress_ratios"]
        field = "compress_ratios"
    elif "layer_types" in data:
        field = "layer_types"
        rates = {"sliding_attention": 1, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
        rates |= _object("compress_rates", data.get("compress_rates"))
        ratios = []
        for layer, layer_type in enumerate(_per_layer(field, data[field], num_layers)):
            if layer_type not in _LAYER_TYPES:
                raise PlanError(f"layer_types[{layer}]={layer_type!r} is not one of {', '.join(_LAYER_TYPES)}")
            ratios.append(rates[layer_type])
    else:
        raise PlanError(
            "the config has neither 'compress_ratios' nor 'layer_types'; one of them gives the layers' kinds"
        )
    ratios = _per_layer(field, ratios, num_layers)
    for layer, ratio in enumerate(ratios):
        if isinstance(ratio, bool) or not isinstance(ratio, int):
            raise PlanError(f"{field}[{layer}]={ratio!r} must be an integer: 0 or 1 (window only), 4 or 128")
    return tuple(1 if ratio == 0 else ratio for ratio in ratios)


def _per_layer(field: str, entries: Any, num_layers: int) -> Sequence[Any]:
    """The main layers' entries of a list that may go on with the draft layers'."""
    if not isinstance(entries, list | tuple):
        raise PlanError(f"{field}={entries!r} must be a list with one entry per layer")
    if len(entries) < num_layers:
        raise PlanError(f"{field} has {len(entries)} entries for num_hidden_layers={num_layers}; give one per layer")
    return entries[:num_layers]


def _rope(data: Mapping[str, Any]) -> RopeConfig:
    parameters = _object("rope_parameters", data.get("rope_parameters"))
    main = _object("rope_parameters.main", parameters.get("main"))
    compress = _object("rope_parameters.compress", parameters.get("compress"))
    scaling = _object("rope_scaling", data.get("rope_scaling"))
    scaling |= {k: v for k, v in compress.items() if k != "rope_theta"}
    kind = scaling.get("type", scaling.get("rope_type", "yarn"))
    if kind != "yarn":
        raise PlanError(f"rope_scaling type {kind!r} is not supported; DeepSeek-V4 uses 'yarn'")
    given = {
        "dim": data.get("qk_rope_head_dim"),
        "theta": main.get("rope_theta", data.get("rope_theta")),
        "compress_theta": compress.get("rope_theta", data.get("compress_rope_theta")),
    }
    given |= {field: scaling.get(field) for field in ("factor", "beta_fast", "beta_slow")}
    given["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
    return RopeConfig(**{field: value for field, value in given.items() if value is not None})


PRESETS: Mapping[str, ModelConfig] = types.MappingProxyType(
    {
        "deepseek-v4-flash": ModelConfig(
            name="deepseek-v4-flash", num_hidden_layers=43, compress_ratios=(1, 1) + (4, 128) * 20 + (4,)
        ),
        "deepseek-v4-pro": ModelConfig(
            name="deepseek-v4-pro",
            num_hidden_layers=61,
            compress_ratios=(128, 128) + (4, 128) * 29 + (4,),
            hidden_size=7168,
            num_attention_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            index_topk=1024,
        ),
    }
)
