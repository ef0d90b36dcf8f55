"""Groups: layers that share one block table, chosen as vLLM 0.27.1's hybrid planner chooses them.

All caches that keep every block form one group; sliding caches are bucketed by (block size, window) and buckets are
split so that all groups hold about the same number of *layer tuples* (one layer of each page size).
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import jax

from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.specs import KVCacheSpec, MLAAttentionSpec, cdiv, round_up


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheGroup:
    """Layers that share a block table, in the order in which their pages lie in a block.

    Attributes:
      layers: cache names; empty where a pipeline stage holds none of the group's layers.
      specs: their specs, aligned with `layers`.
      spec: the spec of the first layer of the *whole model's* group; it gives the block size and the window, also
        where `layers` is empty.
      is_draft: the group that prefix caching must treat as a draft model's.
    """

    layers: tuple[str, ...]
    specs: tuple[KVCacheSpec, ...]
    spec: KVCacheSpec
    is_draft: bool = False

    @property
    def kind(self) -> Literal["mla_attention", "sliding_window_mla"]:
        return self.spec.kind

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.spec.block_size

    @property
    def sliding_window(self) -> int | None:
        """Tokens, or None where every block is kept."""
        return self.spec.window

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over the group's layers, padding included."""
        return sum(spec.page_size_bytes for spec in self.specs)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block over the group's layers that hold rows."""
        return sum(spec.real_page_size_bytes for spec in self.specs)

    def on_stage(self, held: Collection[str]) -> "KVCacheGroup":
        """The group as a worker that holds only the layers `held` sees it (rule P14)."""
        kept = [(name, spec) for name, spec in zip(self.layers, self.specs, strict=True) if name in held]
        return dataclasses.replace(
            self,
            layers=tuple(name for name, _ in kept),
            specs=tuple(spec for _, spec in kept),
            is_draft=self.is_draft and bool(kept),
        )


def group_layers(
    specs: Mapping[str, KVCacheSpec],
    *,
    draft_layers: Collection[str] = (),
    hybrid: bool = True,
    block_size: int | None = None,
) -> tuple[KVCacheGroup, ...]:
    """Groups the layers of a whole model.

    Args:
      specs: cache name to spec, in registration order, which decides the order of everything below.
      draft_layers: names of draft caches; the one group that holds the last of them is flagged `is_draft`.
      hybrid: False puts every layer in one group that keeps all blocks, as vLLM does with its hybrid manager disabled.
      block_size: tokens per block of that single group; by default that of the first full-attention layer.

    Raises:
      PlanError: a draft layer that does not exist, or layers of different block sizes that the rules put in one group.
    """
    if unknown := [name for name in draft_layers if name not in specs]:
        raise PlanError(f"draft layers {unknown} are not among the {len(specs)} layers")
    if not specs:
        return ()
    full = [name for name, spec in specs.items() if spec.window is None]
    sliding = [name for name, spec in specs.items() if spec.window is not None]
    if full and sliding and not hybrid:
        size = block_size or specs[full[0]].block_size
        return (_group(specs, {name: _without_window(spec, size) for name, spec in specs.items()}),)
    if not sliding or (not full and len(set(specs.values())) == 1):
        return (_group(specs, specs),)
    groups = [full] * bool(full) + _split_buckets(specs, full, sliding)
    last_draft = next((name for name in reversed(list(specs)) if name in draft_layers), None)
    return tuple(_group(names, specs, is_draft=last_draft in names) for names in groups)


def explicit_groups(
    specs: Mapping[str, KVCacheSpec], names: Sequence[Sequence[str]], drafts: Sequence[bool] | None = None
) -> tuple[KVCacheGroup, ...]:
    """Groups given by hand: `names[i]` are the layers of group i, in page order.

    Raises:
      PlanError: a layer in no group or in two, an unknown layer, or a group that mixes block sizes, windows or kinds.
    """
    flat = [name for group in names for name in group]
    counts = collections.Counter(flat)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise PlanError(f"layers {repeated} are in more than one place; a layer belongs to exactly one group")
    if unknown := [name for name in flat if name not in specs]:
        raise PlanError(f"groups name unknown layers {unknown}; known are the {len(specs)} layers that have specs")
    if missing := [name for name in specs if name not in counts]:
        raise PlanError(f"layers {missing} are in no group; add them, or drop their specs")
    for index, group in enumerate(names):
        if not group:
            raise PlanError(f"groups[{index}] is empty; a group needs at least one layer")
        shapes = {(specs[name].kind, specs[name].block_size, specs[name].window) for name in group}
        if len(shapes) > 1:
            raise PlanError(
                f"groups[{index}] mixes (kind, block_size, sliding_window) {sorted(shapes, key=str)}; layers of a "
                f"group share one block table, so these must be equal"
            )
    drafts = drafts if drafts is not None else [False] * len(names)
    return tuple(_group(group, specs, is_draft=draft) for group, draft in zip(names, drafts, strict=True))


def approximate_gcd(values: Sequence[int], lower_bound: int = 1) -> int:
    """The divisor d >= `lower_bound` that pads `values` least when each is rounded up to a multiple of d.

    Ties go to the larger d (rule P11).

    Raises:
      PlanError: no values, or a value below 1.
    """
    if not values or min(values) < 1:
        raise PlanError(f"approximate_gcd needs positive values, got {list(values)}")
    candidates = range(max(1, lower_bound), max(values) + 1)
    if not candidates:
        return max(1, lower_bound)
    return min(candidates, key=lambda d: (sum(round_up(value, d) - value for value in values), -d))


def group_block_sizes(
    groups: Sequence[KVCacheGroup], *, enable_caching: bool = True, prefix_match_unit: int | None = None
) -> tuple[int, int]:
    """(scheduler block size, hash block size) in tokens: lcm and gcd of the groups' block sizes (rule P21).

    Prefix hits end at multiples of the first; prefixes are hashed in steps of the second.

    Raises:
      PlanError: `prefix_match_unit` does not divide every group's block size.
    """
    sizes = [group.block_size for group in groups]
    if len(sizes) < 2:
        size = sizes[0] if sizes else 1
        return size, size
    scheduler = math.lcm(*sizes)
    if not enable_caching:
        return scheduler, scheduler
    if prefix_match_unit is None:
        return scheduler, math.gcd(*sizes)
    if prefix_match_unit < 1 or any(size % prefix_match_unit for size in sizes):
        raise PlanError(
            f"prefix_match_unit={prefix_match_unit} must divide the block size of every group, {sizes}; "
            f"use a divisor of {math.gcd(*sizes)}"
        )
    return scheduler, prefix_match_unit


def _group(names: Iterable[str], specs: Mapping[str, KVCacheSpec], *, is_draft: bool = False) -> KVCacheGroup:
    names = tuple(names)
    sizes = {specs[name].block_size: name for name in reversed(names)}
    if len(sizes) > 1:
        examples = ", ".join(f"{size} ({name!r})" for size, name in sorted(sizes.items()))
        raise PlanError(
            f"layers of one group have block sizes {examples}, but share one block table: give them one block_size, or "
            f"put them in different groups by hand"
        )
    return KVCacheGroup(
        layers=names, specs=tuple(specs[name] for name in names), spec=specs[names[0]], is_draft=is_draft
    )


def _without_window(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    """The full-attention form of a sliding spec (rule P13)."""
    if spec.window is None:
        return spec
    return MLAAttentionSpec(
        block_size=block_size,
        head_size=spec.head_size,
        dtype=spec.dtype,
        alignment=spec.alignment,
        num_kv_heads=spec.num_kv_heads,
        cache_dtype_str=spec.cache_dtype_str,
        model_version=spec.model_version,
    )


def _by_page_size(specs: Mapping[str, KVCacheSpec], names: Iterable[str]) -> list[list[str]]:
    lists: dict[int, list[str]] = {}
    for name in names:
        lists.setdefault(specs[name].page_size_bytes, []).append(name)
    return list(lists.values())


def _split_buckets(specs: Mapping[str, KVCacheSpec], full: list[str], sliding: list[str]) -> list[list[str]]:
    """Buckets sliding layers and deals each bucket's layer tuples out to its groups (rules P9 to P12)."""
    buckets: dict[tuple[int, int | None], list[str]] = {}
    for name in sliding:
        buckets.setdefault((specs[name].block_size, specs[name].window), []).append(name)
    by_size = [_by_page_size(specs, names) for names in ([full] if full else []) + list(buckets.values())]
    num_tuples = [max(map(len, lists)) for lists in by_size]
    tuples_per_group = approximate_gcd(num_tuples, num_tuples[0] if full else 1)
    groups = []
    for lists in by_size[bool(full) :]:
        longest = max(map(len, lists))
        num_groups = cdiv(longest, tuples_per_group)
        for first in range(num_groups):
            dealt = range(first, longest, num_groups)
            groups.append([names[i] for i in dealt for names in lists if i < len(names)])
    return groups
