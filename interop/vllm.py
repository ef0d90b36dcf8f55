"""vLLM's `KVCacheConfig` and ours, and vLLM's backing tensor as our slab.

Two shapes of the config are read, as objects with vLLM's attribute names or as the JSON of them:

* 0.27: `kv_cache_tensors[]` with `size`, `shared_by`, `offset` and `block_stride` (0 where a layer has a tensor of its
  own): one entry an offset;
* 0.33: `size`, `layers`, `layer_stride`, `block_stride`, `offset`: layer l of the entry starts at
  `offset + l * layer_stride`, and every entry lies in one allocation.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from dsv4kv_jax._integers import as_count
from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.interop.shared import SharedSlab
from dsv4kv_jax.layout import Form, PackedLayout
from dsv4kv_jax.specs import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

_KINDS: dict[str, type[KVCacheSpec]] = {
    "MLAAttentionSpec": MLAAttentionSpec,
    "SlidingWindowMLASpec": SlidingWindowMLASpec,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConfigLayout:
    """A `KVCacheConfig` in this library's terms.

    Attributes:
      layout: where every layer's pages lie.
      num_blocks: blocks of every buffer.
      owners: for each buffer of the layout, a layer whose pages start it.
      starts: for each buffer, its first byte in vLLM's one allocation; None where each buffer is a tensor of its own.
    """

    layout: PackedLayout
    num_blocks: int
    owners: tuple[str, ...]
    starts: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where vLLM puts a layer: its first byte in the allocation, and the bytes between two of its pages."""

    start: int
    block_stride: int
    size: int
    tensor: int  # index of its allocation


def read_config(
    config: Any, *, shared: Mapping[str, str] | None = None, indexer: Literal["fp8", "fp8_ue8m0"] = "fp8"
) -> ConfigLayout:
    """Reads a `KVCacheConfig`.

    Args:
      config: the object, its JSON as a string, or that JSON decoded. In JSON a spec names its class in `type`, or is
        taken for what its fields say.
      shared: layers that use another's cache, and whose.
      indexer: how the fp8 indexer's scales are stored, which the config does not say: fp32, or four UE8M0 bytes, as
        vLLM 0.33 does on SM100.

    Raises:
      ValueError: a spec of another kind (named), or places that are not this library's layout; says what differs.
    """
    if isinstance(config, str | bytes):
        config = json.loads(config)
    try:
        return _read(config, dict(shared or {}), indexer)
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"this KVCacheConfig is not as vLLM 0.27 to 0.33 makes it: {type(error).__name__} {error}"
        ) from error


def _read(config: Any, shared: Mapping[str, str], indexer: str) -> ConfigLayout:
    num_blocks = as_count("num_blocks", _get(config, "num_blocks"), at_least=1)
    places = dict(_places(_get(config, "kv_cache_tensors"), num_blocks))
    groups = []
    for group in _get(config, "kv_cache_groups"):
        names = [name for name in _get(group, "layer_names") if name not in shared]
        if missing := [name for name in names if name not in places]:
            raise ValueError(f"layers {missing} have no cache tensor; name whose cache they use in `shared`")
        names.sort(key=lambda name: places[name].start)  # within a group, pages lie in this order
        specs = _group_specs(_get(group, "kv_cache_spec"), names, indexer)
        groups.append(
            KVCacheGroup(
                layers=tuple(names),
                specs=tuple(specs[name] for name in names),
                spec=next(iter(specs.values())),
                is_draft=bool(_get(group, "is_eagle_group", False)),
            )
        )
    grouped = {name for group in groups for name in group.layers}
    if ungrouped := sorted(places.keys() - grouped - shared.keys()):
        raise ValueError(f"layers {ungrouped} have a cache tensor, but are in no group")
    form, first = _form(groups, places)
    layout = PackedLayout.from_groups(groups, form=form, shared=tuple(shared.items()))
    _check_places(layout, places, num_blocks)
    owners = tuple(
        next(page.name for page in layout.pages.values() if page.buffer == i) for i in range(len(layout.buffers))
    )
    one_allocation = len({places[name].tensor for name in owners}) < len(owners) or (form == "packed" and bool(owners))
    starts = tuple(places[name].start if form != "packed" else first for name in owners) if one_allocation else None
    return ConfigLayout(layout=layout, num_blocks=num_blocks, owners=owners, starts=starts)


def adopt(
    config: Any,
    backing: Any,
    *,
    shared: Mapping[str, str] | None = None,
    indexer: Literal["fp8", "fp8_ue8m0"] = "fp8",
    copy_on_cpu: bool = False,
) -> SharedSlab:
    """vLLM's memory as a `SharedSlab`: JAX writes into it, and vLLM's own views see it.

    Args:
      config: as `read_config` takes it, with `shared` and `indexer`.
      backing: what vLLM allocated: its one `int8` tensor, or the dict from layer name to raw tensor where layers have
        tensors of their own.
      copy_on_cpu: as `SharedSlab` takes it.

    Raises:
      ValueError: as `read_config` and `SharedSlab`; or a backing tensor that does not fit the config.
    """
    torch = require_torch()
    read = read_config(config, shared=shared, indexer=indexer)
    if read.starts is None:
        if isinstance(backing, torch.Tensor) and len(read.owners) == 1:
            backing = {read.owners[0]: backing}
        if not isinstance(backing, Mapping) or any(name not in backing for name in read.owners):
            raise ValueError(
                f"this config gives layers tensors of their own: pass the dict of raw tensors, with {list(read.owners)}"
            )
        tensors = [backing[name] for name in read.owners]
    else:
        if isinstance(backing, Mapping):
            raise ValueError("this config places all layers in one allocation: pass that one tensor, not a dict")
        if not isinstance(backing, torch.Tensor) or not backing.is_contiguous():
            raise ValueError("backing must be the compact int8 tensor that vLLM allocated for the whole cache")
        flat = backing.reshape(-1).view(torch.uint8)
        sizes = [buffer.block_stride_bytes * read.num_blocks for buffer in read.layout.buffers]
        needed = max((start + size for start, size in zip(read.starts, sizes, strict=True)), default=0)
        if needed > flat.numel():
            raise ValueError(f"backing has {flat.numel()} B; the config places pages up to byte {needed}")
        tensors = [flat[start : start + size] for start, size in zip(read.starts, sizes, strict=True)]
    return SharedSlab(tensors, read.layout, copy_on_cpu=copy_on_cpu)


def write_config(layout: PackedLayout, num_blocks: int, *, version: Literal["0.27", "0.33"] = "0.27") -> dict[str, Any]:
    """The `KVCacheConfig` that vLLM would have for a layout, as plain JSON values.

    Raises:
      ValueError: an unknown version.
    """
    if version not in ("0.27", "0.33"):
        raise ValueError(f"version={version!r} must be '0.27' or '0.33', the two shapes of vLLM's config")
    tensors = _tensors_027(layout, num_blocks) if version == "0.27" else _tensors_033(layout, num_blocks)
    return {
        "num_blocks": num_blocks,
        "kv_cache_tensors": tensors,
        "kv_cache_groups": [
            {
                "layer_names": list(group.layers),
                "kv_cache_spec": _write_group_spec(group, version),
                "is_eagle_group": group.is_draft,
            }
            for group in layout.groups
        ],
    }


def _get(record: Any, field: str, *default: Any) -> Any:
    missing = object()
    value = record.get(field, missing) if isinstance(record, Mapping) else getattr(record, field, missing)
    if value is missing:
        if default:
            return default[0]
        raise ValueError(f"this {type(record).__name__} has no {field!r}; is it a KVCacheConfig of vLLM 0.27 to 0.33?")
    return value


def _bytes(record: Any, field: str, *default: int) -> int:
    value = _get(record, field, *default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{field}={value!r} of a {type(record).__name__} must be a number of bytes")
    return value


def _places(tensors: Sequence[Any], num_blocks: int) -> Iterator[tuple[str, _Place]]:
    for index, tensor in enumerate(tensors):
        size, offset = _bytes(tensor, "size"), _bytes(tensor, "offset", 0)
        if _get(tensor, "host_resident", False):
            raise ValueError(
                f"kv_cache_tensors[{index}] is host_resident; only caches on the accelerator are supported"
            )
        stride = _bytes(tensor, "block_stride", 0)
        layers = _get(tensor, "layers", None)
        if layers is not None:
            for position, name in enumerate(layers):
                start = offset + position * _bytes(tensor, "layer_stride")
                yield name, _Place(start=start, block_stride=stride, size=size, tensor=0)
            continue
        for name in _get(tensor, "shared_by"):
            own = not stride
            yield (
                name,
                _Place(
                    start=offset,
                    block_stride=size // num_blocks if own else stride,
                    size=size,
                    tensor=index if own else 0,
                ),
            )


def _form(groups: Sequence[KVCacheGroup], places: Mapping[str, _Place]) -> tuple[Form, int]:
    """The allocation form, and for a packed one the first byte of block 0."""
    used = {name: spec for group in groups for name, spec in zip(group.layers, group.specs, strict=True)}
    if not used:
        return "none", 0
    dense = all(places[name].block_stride == spec.page_size_bytes for name, spec in used.items())
    if not dense:
        return "packed", min(places[name].start for name in used)
    return ("uniform" if sum(map(bool, (group.layers for group in groups))) == 1 else "pools"), 0


def _check_places(layout: PackedLayout, places: Mapping[str, _Place], num_blocks: int) -> None:
    """Raises `ValueError` unless every layer is where `layout` says."""
    first = min((places[name].start for name in layout.pages), default=0)
    by_buffer: dict[int, tuple[int, int]] = {}
    for name, page in layout.pages.items():
        place = places[name]
        if place.block_stride != page.block_stride_bytes:
            raise ValueError(
                f"layer {name!r}: the config puts its pages {place.block_stride} B apart; the pages of its groups take "
                f"{page.block_stride_bytes} B: a stride with room to spare is not supported"
            )
        if layout.form == "packed":
            if place.start - first != page.offset_bytes:
                raise ValueError(
                    f"layer {name!r}: the config puts it at byte {place.start - first} of a block; packed without gaps "
                    f"it is at {page.offset_bytes}"
                )
        elif by_buffer.setdefault(page.buffer, (place.tensor, place.start)) != (place.tensor, place.start):
            raise ValueError(f"layer {name!r} shares no pool with the layers at its place in the other groups")
        if place.start + (num_blocks - 1) * place.block_stride + page.spec.page_size_bytes > place.size:
            raise ValueError(f"layer {name!r}: {num_blocks} blocks pass the end of its tensor of {place.size} B")


def _group_specs(spec: Any, names: Sequence[str], indexer: str) -> dict[str, KVCacheSpec]:
    """Spec of each layer of a group; for a group without layers here, its model-wide spec under an empty name."""
    per_layer = _get(spec, "kv_cache_specs", None)
    if per_layer is None:
        one = _spec(spec, indexer)
        return dict.fromkeys(names, one) or {"": one}
    specs = {name: _spec(per_layer[name], indexer) for name in names}
    return specs or {"": _spec(next(iter(per_layer.values())), indexer)}


def _spec(spec: Any, indexer: str) -> KVCacheSpec:
    if isinstance(spec, Mapping):
        default = "SlidingWindowMLASpec" if spec.get("sliding_window") else "MLAAttentionSpec"
        kind = spec.get("type", default)
    else:
        kind = type(spec).__name__
    if kind not in _KINDS:
        raise ValueError(f"a {kind} is not supported: DeepSeek-V4 caches are {' and '.join(_KINDS)}")
    alignment = _get(spec, "alignment", None)
    if alignment is None:
        raise ValueError(
            f"a {kind} with alignment=None is not a DeepSeek-V4 cache, whose pages are aligned to 576 or 512 B"
        )
    fields = {
        "block_size": as_count("block_size", _get(spec, "block_size")),
        "head_size": as_count("head_size", _get(spec, "head_size")),
        "dtype": str(_get(spec, "dtype")).removeprefix("torch."),
        "alignment": as_count("alignment", alignment),
        "num_kv_heads": as_count("num_kv_heads", _get(spec, "num_kv_heads", 1)),
        "compress_ratio": _get(spec, "compress_ratio", None) or _get(spec, "tokens_per_state", 1),
        "cache_dtype_str": _get(spec, "cache_dtype_str", None),
        "model_version": _get(spec, "model_version", None),
    }
    if indexer == "fp8_ue8m0" and (fields["dtype"], fields["head_size"]) == ("uint8", 132):
        fields["cache_dtype_str"] = "indexer_fp8_ue8m0"
    if kind == "SlidingWindowMLASpec":
        fields["sliding_window"] = as_count("sliding_window", _get(spec, "sliding_window"))
    ours = _KINDS[kind](**fields)
    theirs = _get(spec, "page_size_bytes", ours.page_size_bytes)
    if theirs != ours.page_size_bytes:
        raise ValueError(
            f"a {kind} of {fields} has pages of {theirs} B in vLLM and {ours.page_size_bytes} B here; this is another "
            f"row format"
        )
    return ours


def _tensors_027(layout: PackedLayout, num_blocks: int) -> list[dict[str, Any]]:
    tensors: dict[tuple[int, int], dict[str, Any]] = {}
    for page in layout.pages.values():
        record = {
            "size": page.block_stride_bytes * num_blocks,
            "shared_by": [],
            "offset": page.offset_bytes,
            "block_stride": page.block_stride_bytes if layout.form == "packed" else 0,
        }
        tensors.setdefault((page.buffer, page.offset_bytes), record)["shared_by"].append(page.name)
    return [tensors[key] for key in sorted(tensors)]


def _tensors_033(layout: PackedLayout, num_blocks: int) -> list[dict[str, Any]]:
    size = layout.bytes_per_block * num_blocks
    starts = [0]
    for buffer in layout.buffers:
        starts.append(starts[-1] + buffer.block_stride_bytes * num_blocks)
    return [
        {
            "size": size,
            "layers": [page.name],
            "layer_stride": page.spec.page_size_bytes * (1 if layout.form == "packed" else num_blocks),
            "block_stride": page.block_stride_bytes,
            "offset": page.offset_bytes + starts[page.buffer],
        }
        for page in layout.pages.values()
    ]


def _write_group_spec(group: KVCacheGroup, version: str) -> dict[str, Any]:
    if len(set(group.specs)) <= 1:
        return _write_spec(group.spec, version)
    return {
        "type": "UniformTypeKVCacheSpecs",
        "block_size": group.block_size,
        "kv_cache_specs": {
            name: _write_spec(spec, version) for name, spec in zip(group.layers, group.specs, strict=True)
        },
    }


def _write_spec(spec: KVCacheSpec, version: str) -> dict[str, Any]:
    record = {
        "type": type(spec).__name__,
        "block_size": spec.block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "dtype": f"torch.{spec.dtype}",
        "alignment": spec.alignment,
        ("compress_ratio" if version == "0.27" else "tokens_per_state"): spec.compress_ratio,
        "cache_dtype_str": spec.cache_dtype_str,
        "model_version": spec.model_version,
    }
    return record | ({} if spec.window is None else {"sliding_window": spec.window})
