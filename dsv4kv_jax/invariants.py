"""What must hold of every plan and saved cache, checked on the figures themselves, not by planning again.

Each function returns one line per violated invariant, and an empty list where all hold.
"""

import collections
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv4kv_jax import _json, plan_json
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.plan import MAX_SLOTS, MIN_BLOCKS, KVCachePlan

Found = list[str]


def check_plan(text: str) -> Found:
    """Checks a plan as `KVCachePlan.to_json` writes it."""
    try:
        data = _json.parse(text, "the plan")
    except PlanError as error:
        return [str(error)]
    if not isinstance(data, dict) or data.get("schema_version") != plan_json.SCHEMA_VERSION:
        version = data.get("schema_version") if isinstance(data, dict) else None
        return [f"schema_version is {version!r}, not {plan_json.SCHEMA_VERSION}: not a plan that this version reads"]
    try:
        found = _check_figures(data)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
        return [f"the plan is incomplete: {type(error).__name__} {error}"]
    if not found:
        try:  # the figures are sound; are they the ones that follow from the inputs?
            KVCachePlan.from_json(text)
        except PlanError as error:
            found.append(str(error))
    return found


def _check_figures(data: Mapping[str, Any]) -> Found:
    found: Found = []
    stages = data["inputs"]["specs"]
    specs = {entry["name"]: entry for stage in stages for entry in stage}
    workers = data.get("workers", [data])
    fits = []
    for rank, worker in enumerate(workers):
        where = f"worker {rank}: " if len(workers) > 1 else ""
        lines, blocks = _check_worker(worker, specs)
        found += [where + line for line in lines]
        fits += [blocks] * (blocks is not None)
    counts = {worker["num_blocks"] for worker in workers} | {data["num_blocks"]}
    if len(counts) > 1:
        found.append(f"num_blocks differs between workers: {sorted(counts)}")
    elif fits and data["num_blocks"] != min(fits):
        found.append(
            f"num_blocks is {data['num_blocks']}, but the memory of the smallest worker holds {min(fits)} blocks"
        )
    planned = {name for worker in workers for name in worker["layers"]}
    for name in sorted(specs.keys() ^ planned):
        found.append(f"layer {name}: {'has a spec but no pages' if name in specs else 'has pages but no spec'}")
    return found


def _check_worker(worker: Mapping[str, Any], specs: Mapping[str, Any]) -> tuple[Found, int | None]:
    """(violations, blocks that the worker's memory holds)."""
    layers, groups = worker["layers"], worker["groups"]
    stride, num_blocks = worker["block_stride_bytes"], worker["num_blocks"]
    owned = {name: page for name, page in layers.items() if "shares_with" not in page}
    found = _check_membership(groups, layers)
    for name, page in layers.items():
        found += [f"layer {name}: {line}" for line in _check_page(page, specs.get(name), stride)]
        if owner := page.get("shares_with"):
            same = owner in owned and all(page[key] == owned[owner][key] for key in ("offset_bytes", "buffer", "group"))
            found += [] if same else [f"layer {name}: shares the pages of {owner}, but is not where they are"]
    found += _check_overlaps(owned)
    if wrong := [name for name, page in layers.items() if page["shape"][0] != num_blocks]:
        found.append(
            f"{len(wrong)} layers, such as {wrong[0]}, have views of another length than num_blocks={num_blocks}"
        )
    slots = num_blocks * max((group["block_size"] for group in groups), default=0)
    if slots > MAX_SLOTS:
        found.append(
            f"num_blocks={num_blocks} makes {slots} slots, more than the {MAX_SLOTS} that int32 indices can hold"
        )
    for index, group in enumerate(groups):
        used = sum(layers[name]["page_size_bytes"] for name in group["layers"] if name in layers)
        real = sum(layers[name]["real_page_size_bytes"] for name in group["layers"] if name in layers)
        figures = {"used_bytes": used, "padding_bytes": used - real, "slack_bytes": stride - used if stride else 0}
        found += [
            f"group {index}: {key} is {group[key]}, but its pages make {value}"
            for key, value in figures.items()
            if group[key] != value
        ]
    if stride:
        largest = max((group["used_bytes"] for group in groups), default=0)
        if stride != largest:
            found.append(f"block_stride_bytes is {stride}, but the largest group uses {largest}")
        per_block = stride
    else:
        buffers: dict[int, int] = {}
        for page in owned.values():
            buffers[page["buffer"]] = max(buffers.get(page["buffer"], 0), page["page_size_bytes"])
        per_block = sum(buffers.values())
    if not per_block:
        return found, None
    if num_blocks < MIN_BLOCKS:
        found.append(f"num_blocks is {num_blocks}; a pool needs {MIN_BLOCKS}, the null block and one to own")
    if num_blocks * per_block > worker["memory_bytes"]:
        found.append(f"{num_blocks} blocks of {per_block} bytes do not fit memory_bytes={worker['memory_bytes']}")
    return found, worker["memory_bytes"] // per_block


def _check_membership(groups: list[Any], layers: Mapping[str, Any]) -> Found:
    members = collections.Counter(name for group in groups for name in group["layers"])
    found = [f"layer {name}: is in {count} groups" for name, count in members.items() if count > 1]
    found += [f"layer {name}: is in a group but has no pages" for name in members if name not in layers]
    for name, page in layers.items():
        index = page["group"]
        if "shares_with" in page:
            continue
        if name not in members:
            found.append(f"layer {name}: has pages but is in no group")
        elif not 0 <= index < len(groups) or name not in groups[index]["layers"]:
            found.append(f"layer {name}: names group {index}, which does not list it")
    return found


def _check_page(page: Mapping[str, Any], spec: Mapping[str, Any] | None, stride: int) -> Found:
    found = []
    offset, size, real = page["offset_bytes"], page["page_size_bytes"], page["real_page_size_bytes"]
    alignment = spec["alignment"] if spec else 1
    if real > size:
        found.append(f"its rows take {real} bytes of a page of {size}")
    for what, value in (("offset", offset), ("page size", size)):
        if value % alignment or value < 0:
            found.append(f"its {what} of {value} bytes is not a multiple of the alignment, {alignment}")
    if stride and offset + size > stride:
        found.append(f"its page ends at byte {offset + size} of a block of {stride}")
    rows = page["shape"][1]
    if spec and rows != spec["block_size"] // spec.get("compress_ratio", 1):
        found.append(
            f"its pages have {rows} rows, but its spec gives {spec['block_size'] // spec.get('compress_ratio', 1)}"
        )
    return found


def _check_overlaps(owned: Mapping[str, Any]) -> Found:
    """Pages of one group must not overlap in a buffer; different groups overlay each other on purpose."""
    found = []
    places: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for name, page in owned.items():
        place = (page["offset_bytes"], page["page_size_bytes"], name)
        places.setdefault((page["group"], page["buffer"]), []).append(place)
    for pages in places.values():
        pages.sort()
        for (offset, size, name), (start, _, other) in itertools.pairwise(pages):
            if offset + size > start:
                found.append(
                    f"layers {name} and {other}: their pages overlap at byte {start}, the first ends at {offset + size}"
                )
    return found


def check_cache(path: str) -> Found:
    """Checks a cache that `KVCache.save` wrote: its plan, its slabs' shapes, its checksum, and the null block."""
    import safetensors

    from dsv4kv_jax import storage

    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            slabs = tuple(file.get_tensor(name) for name in sorted(file.keys(), key=_slab_number))
    except (safetensors.SafetensorError, ValueError) as error:
        return [f"neither a plan nor a saved cache: {error}"]
    if missing := [key for key in ("dsv4kv_jax", "plan", "worker", "checksum") if key not in metadata]:
        return [f"not a saved cache: its metadata lacks {', '.join(missing)}"]
    if metadata["dsv4kv_jax"] != storage.SCHEMA_VERSION:
        return [
            f"schema version {metadata['dsv4kv_jax']!r} is not the one that this version reads, "
            f"{storage.SCHEMA_VERSION!r}"
        ]
    found = [f"plan: {line}" for line in check_plan(metadata["plan"])]
    if (checksum := storage.checksum(slabs)) != metadata["checksum"]:
        found.append(f"the slabs have checksum {checksum}, but {metadata['checksum']} was saved: bytes were changed")
    if not found:
        found += _check_slabs(slabs, KVCachePlan.from_json(metadata["plan"]), metadata["worker"])
    for index, slab in enumerate(slabs):
        if slab.ndim and slab.shape[0] and np.any(slab[0]):
            found.append(
                f"slab {index}: block 0, the null block, is not zero; something wrote to a block that no request owns"
            )
    return found


def _check_slabs(slabs: tuple[np.ndarray, ...], plan: KVCachePlan, worker: str) -> Found:
    if not worker.isdecimal() or int(worker) >= len(plan.workers):
        return [f"worker {worker!r} does not exist; the plan has {len(plan.workers)}"]
    buffers = plan.workers[int(worker)].layout.buffers
    if len(buffers) != len(slabs):
        return [f"there are {len(slabs)} slabs, but the plan has {len(buffers)} buffers"]
    found = []
    blocks = {slab.shape[0] if slab.ndim else 0 for slab in slabs}
    if len(blocks) > 1:
        found.append(f"the slabs have different numbers of blocks: {sorted(blocks)}")
    for index, (slab, buffer) in enumerate(zip(slabs, buffers, strict=True)):
        want = buffer.shape(slab.shape[0] if slab.ndim else 0)
        if slab.shape != want or slab.dtype != np.uint32:
            found.append(f"slab {index} is {slab.dtype}{list(slab.shape)}, but the plan makes it uint32{list(want)}")
        elif not MIN_BLOCKS <= slab.shape[0] <= plan.num_blocks:
            found.append(f"slab {index} has {slab.shape[0]} blocks; the plan allows {MIN_BLOCKS} to {plan.num_blocks}")
    return found


def _slab_number(name: str) -> int:
    prefix, _, number = name.partition(".")
    if prefix != "slab" or not number.isdecimal():
        raise ValueError(f"tensor {name!r} is no slab")
    return int(number)
