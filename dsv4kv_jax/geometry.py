"""Legal geometries of a model's caches, and what one costs: the search space of the optimizer.

A geometry gives every cache a block size, puts the caches that then share (kind, block size, window) into one *bucket*,
and splits each bucket into groups that fit one stride. A block costs the stride whatever group takes it, so a good
stride is one that every bucket fills.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.formats import FP8_DS_MLA
from dsv4kv_jax.roles import Role, role_of, state_ratio
from dsv4kv_jax.specs import KVCacheSpec, cdiv, round_up

Compatible = Literal["vllm", "flashmla", "free"]
Specs = Mapping[str, KVCacheSpec]
Pages = tuple[tuple[int, int], ...]  # (page size in bytes, number of caches), largest page first

MAX_PAGE_ROWS = 64  # latents a page, as many as the fused attention kernel takes

_WINDOW_BLOCKS = (16, 32, 64, 128)
_STATE_BLOCKS = {4: (2, 4, 8, 16), 128: (4, 8, 16, 32)}
_CONTEXT_BLOCKS = (64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Caches that may share a block table: one kind, block size and window. `names` are in registration order."""

    block_size: int
    sliding_window: int | None
    names: tuple[str, ...]
    pages: Pages

    @property
    def page_size_bytes(self) -> int:
        return sum(size * count for size, count in self.pages)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to store the caches of one role (or of one state's ratio): their specs and buckets."""

    specs: tuple[tuple[str, KVCacheSpec], ...]
    buckets: tuple[Bucket, ...]


def choices(specs: Specs, compatible: Compatible, max_page_rows: int = MAX_PAGE_ROWS) -> list[list[Choice]]:
    """For each part of the model that can be chosen on its own, the block sizes that `compatible` allows.

    * `"vllm"`: pages as vLLM shapes them, so that all of its kernels read them; only groups and strides are free.
    * `"flashmla"`: FlashMLA reads the latents. Its sparse decode kernels (SM90 and SM100) take the rows of a page as a
      run-time value for both caches, divide every index by it, and find the scales behind that many rows; SM100 wants
      `stride(0) % 576 == 0` and a 16-byte base. This library's pages start on 576-byte rows, so every page size is
      readable. Indexer pages keep 64 rows, which DeepGEMM's paged logits kernel demands on SM90. State blocks are read
      only by the compressor, which takes any.
    * `"free"`: everything this library itself reads.

    Except with `"vllm"`, pages of latents get at most `max_page_rows` rows (or what they have now): FlashMLA reads
    longer ones, but this library's fused attention kernel does not.

    Raises:
      PlanError: FlashMLA is asked for and the latents are stored in a format that it does not read.
    """
    if compatible == "flashmla":
        others = {s.format.name for s in specs.values() if role_of(s) in ("window", "compressed")} - {FP8_DS_MLA.name}
        if others:
            raise PlanError(
                f"compatible='flashmla' needs latents stored as {FP8_DS_MLA.name}, but the model's are "
                f"{sorted(others)}: "
                f"use cache_dtype='fp8_ds_mla', or compatible='vllm' or 'free'"
            )
    elif compatible not in ("vllm", "free"):
        raise PlanError(f"compatible={compatible!r} is not supported; use one of vllm, flashmla, free")
    context = {name: spec for name, spec in specs.items() if spec.window is None}
    sliding = {name: spec for name, spec in specs.items() if spec.window is not None}
    parts = [list(_context_choices(context, compatible, max_page_rows))] if context else []
    for window in dict.fromkeys((role_of(spec), spec.window) for spec in sliding.values()):
        part = {name: spec for name, spec in sliding.items() if (role_of(spec), spec.window) == window}
        spec = next(iter(part.values()))
        sizes = _sliding_sizes(spec, compatible, max_page_rows)
        parts.append([_choice({n: dataclasses.replace(s, block_size=b) for n, s in part.items()}) for b in sizes])
    return parts


def _sliding_sizes(spec: KVCacheSpec, compatible: Compatible, max_page_rows: int) -> Sequence[int]:
    if compatible == "vllm":
        return (spec.block_size,)
    if role_of(spec) == "window":
        sizes = [size for size in _WINDOW_BLOCKS if size <= max_page_rows]
    else:
        sizes = _STATE_BLOCKS.get(state_ratio(spec) or 0, ())
    return sorted({spec.block_size, *sizes})


def _context_choices(specs: Specs, compatible: Compatible, max_page_rows: int) -> Iterator[Choice]:
    """Block sizes of the caches that keep everything, chosen for each (role, compress ratio)."""
    kinds: dict[tuple[Role, int], list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault((role_of(spec), spec.compress_ratio), []).append(name)
    sizes = []
    for (role, ratio), names in kinds.items():
        own = specs[names[0]].block_size
        fixed = compatible == "vllm" or (compatible == "flashmla" and role == "indexer")
        most = max_page_rows * ratio if role == "compressed" else _CONTEXT_BLOCKS[-1]
        others = () if fixed else [size for size in _CONTEXT_BLOCKS if size % ratio == 0 and size <= most]
        sizes.append(sorted({own, *others}))
    for chosen in itertools.product(*sizes):
        block_of = {name: size for names, size in zip(kinds.values(), chosen, strict=True) for name in names}
        yield _choice({name: dataclasses.replace(spec, block_size=block_of[name]) for name, spec in specs.items()})


def _choice(specs: Specs) -> Choice:
    buckets: dict[tuple[int, int | None], list[str]] = {}
    for name, spec in specs.items():
        buckets.setdefault((spec.block_size, spec.window), []).append(name)
    return Choice(
        specs=tuple(specs.items()),
        buckets=tuple(
            Bucket(
                block_size=size,
                sliding_window=window,
                names=tuple(names),
                pages=tuple(sorted(Counter(specs[name].page_size_bytes for name in names).items(), reverse=True)),
            )
            for (size, window), names in buckets.items()
        ),
    )


@functools.lru_cache(maxsize=1 << 16)
def num_groups(pages: Pages, stride: int) -> int | None:
    """Groups that first-fit decreasing needs for these pages in blocks of `stride` bytes; None if a page is larger.

    Bins with the same room are counted together, so the number of caches does not matter.
    """
    bins: list[list[int]] = []  # [free bytes, number of such groups], in the order in which they were opened
    for size, left in pages:
        if size > stride:
            return None
        filled: list[list[int]] = []
        for free, count in bins:
            per_bin = free // size
            full = min(left // per_bin, count) if per_bin else 0
            rest = left - full * per_bin if per_bin and full < count else 0
            filled += [[free - per_bin * size, full]] * bool(full)
            filled += [[free - rest * size, 1]] * bool(rest)
            filled += [[free, count - full - bool(rest)]] * (count > full + bool(rest))
            left -= full * per_bin + rest
        per_bin = stride // size
        full, rest = divmod(left, per_bin)
        filled += [[stride - per_bin * size, full]] * bool(full)
        filled += [[stride - rest * size, 1]] * bool(rest)
        bins = filled
    return sum(count for _, count in bins)


def pack(bucket: Bucket, specs: Specs, stride: int) -> list[list[str]]:
    """The bucket's caches in groups of at most `stride` bytes a block, each group in registration order."""
    groups: list[list[str]] = []
    room: list[int] = []
    for name in sorted(bucket.names, key=lambda name: -specs[name].page_size_bytes):
        size = specs[name].page_size_bytes
        index = next((i for i, free in enumerate(room) if free >= size), len(room))
        if index == len(room):
            groups.append([])
            room.append(stride)
        groups[index].append(name)
        room[index] -= size
    order = {name: position for position, name in enumerate(bucket.names)}
    return [sorted(group, key=order.__getitem__) for group in groups]


def strides(parts: Sequence[Sequence[Choice]], alignment: int, max_groups: int) -> list[int]:
    """Strides worth a look: for each bucket and each number of groups, the smallest that holds it in so many."""
    buckets = {(bucket.pages, bucket.page_size_bytes) for part in parts for choice in part for bucket in choice.buckets}
    found = set()
    for pages, total in buckets:
        widest = pages[0][0]
        for groups in range(1, max_groups + 1):
            stride = round_up(max(cdiv(total, groups), widest), alignment)
            while (num_groups(pages, stride) or groups + 1) > groups:
                stride += alignment
            found.add(stride)
            if stride == widest:
                break
    return sorted(found)
