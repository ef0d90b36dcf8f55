"""Cache specs: what one cache of one layer stores per block, and the specs of a whole model.

The two spec classes carry vLLM's names and fields. Only true inputs are stored; every size is derived.
"""

import abc
import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from dsv4kv_jax import formats
from dsv4kv_jax.config import LEGAL_COMPRESS_RATIOS, MAX_INT32, ModelConfig, check_int
from dsv4kv_jax.errors import PlanError

CacheDtype = Literal["fp8_ds_mla", "bf16", "fp8"]
Indexer = Literal["fp8", "fp8_ue8m0", "mxfp4"]
Draft = Literal["none", "mtp", "dspark"]

DEFAULT_BLOCK_SIZE = 256  # tokens
SWA_BLOCK_SIZE = 64  # tokens
STATE_BLOCK_SIZES = types.MappingProxyType({4: 4, 128: 8})  # compress ratio -> tokens
DSPARK_STAGES = 3


# Also NumPy's integer arrays, by which the manager counts many requests at once.
_Integers = TypeVar("_Integers", int, np.ndarray)


def cdiv(a: _Integers, b: Any) -> _Integers:
    """Ceiling division."""
    return -(-a // b)


def round_up(a: _Integers, multiple: Any) -> _Integers:
    """`a` rounded up to a multiple of `multiple`."""
    return cdiv(a, multiple) * multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCacheSpec(abc.ABC):
    """One cache of one layer. Abstract; the two kinds below are final.

    Attributes:
      block_size: tokens one block covers.
      head_size: values of one row; for indexer rows, bytes (132 or 68), as vLLM counts them.
      dtype: numpy name of the stored dtype.
      alignment: page sizes are padded to a multiple of this many bytes.
      compress_ratio: tokens summarised in one row.
      cache_dtype_str: a registered row format's name, or vLLM's cache string; None for keys and states.

    Raises:
      PlanError: a value that no page can have; names the field, the value and the remedy.
    """

    block_size: int
    head_size: int
    dtype: str
    alignment: int
    num_kv_heads: int = 1
    compress_ratio: int = 1
    cache_dtype_str: str | None = None
    model_version: str | None = None

    def __post_init__(self) -> None:
        _check_spec(self)

    @property
    @abc.abstractmethod
    def kind(self) -> Literal["mla_attention", "sliding_window_mla"]:
        """The group kind in vLLM's words."""

    @property
    def window(self) -> int | None:
        """Tokens a query can look back at, itself included; None where it sees all."""
        return None

    @property
    def is_quantized(self) -> bool:
        """Whether the cache string names a quantised latent, which is what vLLM compares beside the dtype."""
        return (self.cache_dtype_str or "").startswith("fp8")

    @functools.cached_property
    def format(self) -> formats.RowFormat:
        return formats.format_of(self.dtype, self.head_size * self.num_kv_heads, self.cache_dtype_str)

    @property
    def storage_block_size(self) -> int:
        """Rows of one page: `block_size // compress_ratio`."""
        return self.block_size // self.compress_ratio

    @functools.cached_property
    def real_page_size_bytes(self) -> int:
        """Bytes of one page that hold rows."""
        return self.storage_block_size * self.format.row_bytes

    @functools.cached_property
    def page_size_bytes(self) -> int:
        """Bytes of one page with its padding."""
        return round_up(self.real_page_size_bytes, self.alignment)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(KVCacheSpec):
    """A cache that keeps every block of a request: C4A and C128A latents, indexer keys."""

    @property
    def kind(self) -> Literal["mla_attention"]:
        return "mla_attention"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(KVCacheSpec):
    """A cache that keeps the blocks of the last `sliding_window` tokens: window latents and compressor states."""

    sliding_window: int

    @property
    def kind(self) -> Literal["sliding_window_mla"]:
        return "sliding_window_mla"

    @property
    def window(self) -> int:
        return self.sliding_window


def _check_spec(spec: KVCacheSpec) -> None:
    sizes = {"block_size": spec.block_size, "head_size": spec.head_size, "alignment": spec.alignment}
    sizes |= {"num_kv_heads": spec.num_kv_heads, "compress_ratio": spec.compress_ratio}
    if spec.window is not None:
        sizes["sliding_window"] = spec.window
    for field, value in sizes.items():
        check_int(field, value, at_least=1, at_most=MAX_INT32)
    names = {"dtype": spec.dtype, "cache_dtype_str": spec.cache_dtype_str, "model_version": spec.model_version}
    for field, value in names.items():
        if not isinstance(value, str) and (field == "dtype" or value is not None):
            raise PlanError(f"{field}={value!r} must be a string{'' if field == 'dtype' else ' or left out'}")
    if spec.compress_ratio not in LEGAL_COMPRESS_RATIOS:
        raise PlanError(f"compress_ratio={spec.compress_ratio} is not one of {LEGAL_COMPRESS_RATIOS}")
    if spec.block_size % spec.compress_ratio:
        raise PlanError(
            f"block_size={spec.block_size} is not a multiple of compress_ratio={spec.compress_ratio}: "
            f"choose a multiple, so that a block holds a whole number of compressed rows"
        )
    if spec.alignment % formats.WORD_BYTES:
        raise PlanError(f"alignment={spec.alignment} must be a multiple of {formats.WORD_BYTES} bytes")
    try:
        fmt = spec.format
    except ValueError as error:
        raise PlanError(str(error)) from None
    if fmt == formats.FP8_DS_MLA and spec.head_size * spec.num_kv_heads != fmt.num_values:
        raise PlanError(
            f"head_size={spec.head_size} with num_kv_heads={spec.num_kv_heads} does not fit "
            f"cache_dtype_str='fp8_ds_mla', whose rows hold 512 values"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheMode:
    """How latent rows are stored in one cache dtype (rule P1 of vLLM's planner)."""

    dtype: str
    alignment: int
    cache_dtype_str: str


CACHE_MODES: Mapping[str, CacheMode] = types.MappingProxyType(
    {
        "fp8_ds_mla": CacheMode(dtype="uint8", alignment=576, cache_dtype_str="fp8_ds_mla"),
        "bf16": CacheMode(dtype="bfloat16", alignment=512, cache_dtype_str="auto"),
        "fp8": CacheMode(dtype="float8_e4m3fn", alignment=512, cache_dtype_str="fp8"),
    }
)
_INDEXER_FORMATS = {
    "fp8": formats.INDEXER_FP8,
    "fp8_ue8m0": formats.INDEXER_FP8_UE8M0,
    "mxfp4": formats.INDEXER_MXFP4,
}


def _choose(name: str, value: str, legal: Mapping[str, Any] | tuple[str, ...]) -> Any:
    if value not in legal:
        raise PlanError(f"{name}={value!r} is not supported; use one of {', '.join(legal)}")
    return legal[value] if isinstance(legal, Mapping) else value


def layer_specs(
    config: ModelConfig,
    cache_dtype: CacheDtype = "fp8_ds_mla",
    *,
    indexer: Indexer = "fp8",
    draft: Draft = "none",
    block_size: int = DEFAULT_BLOCK_SIZE,
    layers: Sequence[int] | None = None,
) -> dict[str, KVCacheSpec]:
    """The specs of every cache of a model, by vLLM's cache names and in its registration order.

    Args:
      config: the model.
      cache_dtype: how latent rows are stored.
      indexer: how indexer keys are stored (`"fp8"` 132 B with an fp32 scale, `"fp8_ue8m0"` 132 B with four equal UE8M0
        bytes, `"mxfp4"` 68 B).
      draft: extra layers that propose tokens; they come last and are window-only.
      block_size: tokens per block of the compressed and indexer caches.
      layers: the main layers to include, for one pipeline stage; all by default. The draft layers are included where
        the model's last layer is, and in a model without layers.

    Raises:
      PlanError: an option or size that is not supported; names it, its value and the remedy.
    """
    mode = _choose("cache_dtype", cache_dtype, CACHE_MODES)
    key_format = _choose("indexer", indexer, _INDEXER_FORMATS)
    num_drafts = _num_draft_layers(config, draft)
    num_layers = config.num_hidden_layers
    wanted = range(num_layers) if layers is None else layers
    last = num_layers - 1
    caches = functools.cache(functools.partial(_caches_of_ratio, config, mode, key_format, block_size))
    specs: dict[str, KVCacheSpec] = {}
    for layer in wanted:
        specs |= {f"model.layers.{layer}.attn{suffix}": spec for suffix, spec in caches(config.compress_ratios[layer])}
    if not num_layers or last in wanted:
        for layer in range(num_layers, num_layers + num_drafts):
            specs |= {f"model.layers.{layer}.attn{suffix}": spec for suffix, spec in caches(1)}
    return specs


def _num_draft_layers(config: ModelConfig, draft: str) -> int:
    choices = {
        "none": 0,
        "mtp": config.num_nextn_predict_layers,
        "dspark": config.num_draft_stages or DSPARK_STAGES,
    }
    return _choose("draft", draft, choices)


def _caches_of_ratio(
    config: ModelConfig, mode: CacheMode, key_format: formats.RowFormat, block_size: int, ratio: int
) -> list[tuple[str, KVCacheSpec]]:
    """(name suffix, spec) of every cache of a layer with this compress ratio, in registration order (rule P3)."""
    check_int("block_size", block_size, at_least=1, at_most=MAX_INT32)
    if block_size % ratio:
        raise PlanError(
            f"block_size={block_size} is not a multiple of compress_ratio={ratio}, which this model uses: a "
            f"block must hold a whole number of compressed rows, so choose a multiple of {ratio}"
        )
    latent: Any = {
        "head_size": config.head_dim,
        "dtype": mode.dtype,
        "alignment": mode.alignment,
        "cache_dtype_str": mode.cache_dtype_str,
        "model_version": "deepseek_v4",
    }
    window = SlidingWindowMLASpec(block_size=SWA_BLOCK_SIZE, sliding_window=config.sliding_window, **latent)
    if ratio == 1:
        return [(".swa_cache", window)]
    compressed = [
        (".swa_cache", window),
        ("", MLAAttentionSpec(block_size=block_size, compress_ratio=ratio, **latent)),
        (".compressor.state_cache", _state_spec(ratio, config.head_dim, mode)),
    ]
    if ratio == 128:
        return compressed
    key = MLAAttentionSpec(
        block_size=block_size,
        head_size=key_format.row_bytes,
        dtype="uint8",
        alignment=mode.alignment,
        compress_ratio=ratio,
        # The two fp8 scale encodings have one width, so the second one needs its name to be told apart.
        cache_dtype_str=key_format.name if key_format == formats.INDEXER_FP8_UE8M0 else None,
    )
    state = _state_spec(ratio, config.index_head_dim, mode)
    return [(".indexer.k_cache", key), (".indexer.compressor.state_cache", state), *compressed]


def _state_spec(ratio: int, head_dim: int, mode: CacheMode) -> SlidingWindowMLASpec:
    """Compressor state: key-value and score halves, each doubled for C4, whose groups overlap."""
    overlap = 2 if ratio == 4 else 1
    return SlidingWindowMLASpec(
        block_size=STATE_BLOCK_SIZES[ratio],
        head_size=2 * overlap * head_dim,
        dtype="float32",
        alignment=mode.alignment,
        sliding_window=overlap * ratio,
    )
