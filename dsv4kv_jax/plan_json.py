"""Plans and specs as JSON.

A plan's JSON has two parts: the figures that other programs read, and under `inputs` what it was planned from.
Reading it back plans anew from the inputs and compares the figures, so a text that was edited by hand is noticed.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsv4kv_jax import _json
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.layout import PackedLayout, PageLayout
from dsv4kv_jax.specs import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

if TYPE_CHECKING:
    from dsv4kv_jax.plan import KVCachePlan, WorkerPlan

SCHEMA_VERSION = 1

_SPEC_KINDS = {"mla": MLAAttentionSpec, "sliding_window_mla": SlidingWindowMLASpec}
_REQUIRED = ("name", "kind", "block_size", "head_size", "dtype", "alignment")
_OPTIONAL = ("num_kv_heads", "compress_ratio", "sliding_window", "cache_dtype_str", "model_version")
_MARKS = ("is_draft", "shares_with")
# What a layer that shares a cache may repeat of its owner's spec.
_SPEC_FIELDS = (*_REQUIRED[2:], *_OPTIONAL)


def to_dict(plan: "KVCachePlan") -> dict[str, Any]:
    """The plan's figures and inputs; the schema is described in `docs/cli.md`."""
    result = {"schema_version": SCHEMA_VERSION, "model": plan.model, "cache_dtype": plan.cache_dtype}
    result |= _worker_dict(plan, plan.workers[0])
    if len(plan.workers) > 1:
        result["workers"] = [_worker_dict(plan, worker) for worker in plan.workers]
    return result | {"inputs": _inputs(plan)}


def _worker_dict(plan: "KVCachePlan", worker: "WorkerPlan") -> dict[str, Any]:
    layout = worker.layout
    groups = [
        {
            "kind": group.kind,
            "block_size": group.block_size,
            "sliding_window": group.sliding_window,
            "is_draft": group.is_draft,
            "layers": list(group.layers),
            "used_bytes": group.page_size_bytes,
            "padding_bytes": group.page_size_bytes - group.real_page_size_bytes,
            "slack_bytes": layout.slack_bytes(index),
        }
        for index, group in enumerate(layout.groups)
    ]
    layers = {name: _page_dict(page, plan.num_blocks) for name, page in layout.pages.items()}
    for name, owner in layout.shared:
        layers[name] = layers[owner] | {"shares_with": owner}
    return {
        "num_blocks": plan.num_blocks,
        "block_stride_bytes": layout.block_stride_bytes,
        "memory_bytes": worker.memory_bytes,
        "groups": groups,
        "layers": layers,
    }


def _page_dict(page: PageLayout, num_blocks: int) -> dict[str, Any]:
    return {
        "offset_bytes": page.offset_bytes,
        "page_size_bytes": page.spec.page_size_bytes,
        "real_page_size_bytes": page.spec.real_page_size_bytes,
        "group": page.group,
        "buffer": page.buffer,
        "shape": list(page.view_shape(num_blocks)),
        "dtype": page.format.page_dtype,
    }


def _inputs(plan: "KVCachePlan") -> dict[str, Any]:
    stages: dict[int, PackedLayout] = {worker.stage: worker.layout for worker in plan.workers}
    drafts = [group.is_draft for group in plan.groups]
    return {
        "specs": [_stage_specs(layout) for layout in stages.values()],
        "groups": [list(group.layers) for group in plan.groups],
        "drafts": drafts,
        "memory_bytes": [worker.memory_bytes for worker in plan.workers],
        "max_model_len": plan.max_model_len,
        "max_in_flight_tokens": plan.max_in_flight_tokens,
    }


def _stage_specs(layout: PackedLayout) -> list[dict[str, Any]]:
    specs = [spec_to_dict(name, page.spec) for name, page in layout.pages.items()]
    shared = [spec_to_dict(name, layout.pages[owner].spec) | {"shares_with": owner} for name, owner in layout.shared]
    return specs + shared


def spec_to_dict(name: str, spec: KVCacheSpec) -> dict[str, Any]:
    """One entry of a spec file."""
    entry: dict[str, Any] = {
        "name": name,
        "kind": "mla" if isinstance(spec, MLAAttentionSpec) else "sliding_window_mla",
    }
    for field in _SPEC_FIELDS:
        value = getattr(spec, field, None)
        if value is not None:
            entry[field] = value
    return entry


def specs_from_json(data: Any) -> dict[str, Any]:
    """The arguments of `plan_from_specs` that a spec file gives: `specs`, `draft_layers` and `shares_with`.

    Args:
      data: parsed JSON: a list of objects, or a list of such lists, one per pipeline stage. Each object has `name`,
        `kind` (`"mla"` or `"sliding_window_mla"`), `block_size`, `head_size`, `dtype` and `alignment`; and may have
        `num_kv_heads`, `compress_ratio`, `sliding_window`, `cache_dtype_str`, `model_version`, `is_draft` and
        `shares_with`.

    Raises:
      PlanError: another shape, a missing or unknown key, or a value that no page can have; names where.
    """
    if not isinstance(data, list):
        raise PlanError(f"a spec file holds a JSON list of objects, not {type(data).__name__}")
    nested = bool(data) and all(isinstance(stage, list) for stage in data)
    stages: list[dict[str, KVCacheSpec]] = []
    drafts: list[str] = []
    shared: dict[str, str] = {}
    sharers: list[tuple[dict[str, KVCacheSpec], str, str, KVCacheSpec]] = []
    for number, entries in enumerate(data if nested else [data]):
        stage: dict[str, KVCacheSpec] = {}
        names: set[str] = set()
        for index, entry in enumerate(entries):
            where = f"specs[{number}][{index}]" if nested else f"specs[{index}]"
            name, spec = _spec_from_dict(entry, where)
            if name in names:
                raise PlanError(f"{where}: a second layer called {name!r}; names are unique")
            names.add(name)
            owner = entry.get("shares_with")
            if owner is not None:
                if not isinstance(owner, str):
                    raise PlanError(f"{where} ({name}): shares_with={owner!r} must be the name of a layer")
                shared[name] = owner
                sharers.append((stage, name, owner, spec))
                continue
            stage[name] = spec
            if entry.get("is_draft", False):
                drafts.append(name)
        stages.append(stage)
    for stage, name, owner, spec in sharers:
        if owner not in stage:
            raise PlanError(
                f"layer {name!r}: shares_with={owner!r} names a layer that has no pages on the same stage; name the "
                f"owner of the pages"
            )
        if stage[owner] != spec:
            raise PlanError(f"layer {name!r} shares_with {owner!r} but has another spec; make them equal")
    return {"specs": stages, "draft_layers": drafts, "shares_with": shared}


def _spec_from_dict(entry: Any, where: str) -> tuple[str, KVCacheSpec]:
    if not isinstance(entry, Mapping):
        raise PlanError(f"{where} is a JSON {type(entry).__name__}; it must be an object")
    if missing := [key for key in _REQUIRED if entry.get(key) is None]:
        raise PlanError(f"{where} lacks {', '.join(missing)}; required are {', '.join(_REQUIRED)}")
    known = (*_REQUIRED, *_OPTIONAL, *_MARKS)
    if unknown := [key for key in entry if key not in known]:
        raise PlanError(f"{where} has unknown keys {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
    name, kind = entry["name"], entry["kind"]
    if not isinstance(name, str) or not name:
        raise PlanError(f"{where}: name={name!r} must be a non-empty string")
    if not isinstance(kind, str) or kind not in _SPEC_KINDS:
        raise PlanError(f"{where} ({name}): kind={kind!r} is not supported; use one of {', '.join(_SPEC_KINDS)}")
    if not isinstance(entry.get("is_draft", False), bool):
        raise PlanError(f"{where} ({name}): is_draft={entry['is_draft']!r} must be true or false")
    fields = {key: entry[key] for key in _SPEC_FIELDS if entry.get(key) is not None}
    has_window = "sliding_window" in fields
    if has_window != (kind == "sliding_window_mla"):
        need = "needs" if kind == "sliding_window_mla" else "has no"
        raise PlanError(f"{where} ({name}): a cache of kind {kind!r} {need} sliding_window")
    if type(fields.get("compress_ratio")) is int and fields["compress_ratio"] == 0:
        fields["compress_ratio"] = 1  # DeepSeek's configs write 0 for "not compressed"
    try:
        return name, _SPEC_KINDS[kind](**fields)
    except PlanError as error:
        raise PlanError(f"{where} ({name}): {error}") from None


def from_text(text: str) -> "KVCachePlan":
    """See `KVCachePlan.from_json`."""
    from dsv4kv_jax.plan import plan_from_specs

    data = _json.parse(text, "not a plan: the text")
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"schema_version={version!r} is not supported; this version reads {SCHEMA_VERSION}: "
            f"plan again, and save the new plan"
        )
    try:
        inputs = data["inputs"]
        arguments = specs_from_json(inputs["specs"])
        drafts = _draft_layers(inputs["groups"], inputs["drafts"])
        plan = plan_from_specs(
            arguments["specs"],
            inputs["memory_bytes"],
            groups=inputs["groups"],
            draft_layers=drafts,
            shares_with=arguments["shares_with"],
            max_model_len=inputs["max_model_len"],
            max_in_flight_tokens=inputs["max_in_flight_tokens"],
            model=data["model"],
            cache_dtype=data["cache_dtype"],
        )
    except PlanError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PlanError(f"not a plan: {type(error).__name__} {error} while reading its inputs") from None
    figures = to_dict(plan)
    if changed := [key for key, value in figures.items() if data.get(key) != value]:
        raise PlanError(
            f"the figures {', '.join(changed)} do not follow from the plan's inputs; the text was changed, or written "
            f"by another version: plan again"
        )
    return plan


def _draft_layers(groups: Sequence[Sequence[str]], drafts: Sequence[bool]) -> list[str]:
    return [names[-1] for names, draft in zip(groups, drafts, strict=True) if draft and names]
