"""Finds a geometry that admits more requests of a workload than vLLM's default does in the same memory."""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from dsv4kv_jax import capacity as cap
from dsv4kv_jax import geometry, holdings
from dsv4kv_jax.capacity import Mix
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.geometry import Bucket, Choice, Compatible
from dsv4kv_jax.groups import group_block_sizes
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.plan import DEFAULT_IN_FLIGHT_TOKENS, KVCachePlan, plan, plan_from_specs
from dsv4kv_jax.specs import CacheDtype, Draft, Indexer, KVCacheSpec, layer_specs

MAX_GROUPS = 12  # block tables a model may have, where the caller does not say
_FINALISTS = 8  # candidates whose plans are really made and counted exactly


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Optimized:
    """The best geometry found for a workload, beside vLLM's default in the same memory.

    Attributes:
      pools: one plan where all groups share a slab; several where each bucket of groups has a pool of its own. Several
        pools are allocated, and their blocks managed, one by one, each with its `memory_bytes`; a request is admitted
        when all of them admit it.
      default: the plan of vLLM's geometry.
      mix: the workload.
      schedule: how steps are scheduled.
      compatible: the constraint on pages.
      num_requests, default_requests: requests of the mix that each of the two admits.
    """

    pools: tuple[KVCachePlan, ...]
    default: KVCachePlan
    mix: Mix
    schedule: Schedule
    compatible: Compatible
    num_requests: int
    default_requests: int

    @property
    def plan(self) -> KVCachePlan:
        """The one plan.

        Raises:
          PlanError: there are several pools.
        """
        if len(self.pools) != 1:
            raise PlanError(f"this geometry has {len(self.pools)} pools, each with a plan of its own; use pools")
        return self.pools[0]

    @property
    def gain(self) -> float:
        """Requests per request of the default; infinite where the default admits none and this one does."""
        if not self.default_requests:
            return math.inf if self.num_requests else 1.0
        return self.num_requests / self.default_requests

    @property
    def hit_granularity(self) -> int:
        """Tokens at whose multiples prefix hits end (256 for vLLM's default)."""
        return group_block_sizes([group for pool in self.pools for group in pool.groups])[0]


def optimize(
    config: ModelConfig,
    memory_bytes: int,
    workload: int | Mapping[int, float] | Mix,
    *,
    compatible: Compatible = "flashmla",
    several_pools: bool = False,
    max_groups: int = MAX_GROUPS,
    max_page_rows: int = geometry.MAX_PAGE_ROWS,
    cache_dtype: CacheDtype = "fp8_ds_mla",
    indexer: Indexer = "fp8",
    draft: Draft = "none",
    max_model_len: int | None = None,
    max_in_flight_tokens: int = DEFAULT_IN_FLIGHT_TOKENS,
    chunk_tokens: int | None = None,
    steps_in_flight: int = 1,
    lookahead_tokens: int = 0,
) -> Optimized:
    """Searches the legal geometries for the one that admits most requests of a workload.

    vLLM's default takes part and is kept unless another admits more, so the result is never worse at this workload. At
    other workloads one slab stays near or above the default, since its blocks go to whoever needs them; the memory
    split of several pools is right for this one only.

    Args:
      config: the model.
      memory_bytes: bytes for the cache of one worker that holds the whole model.
      workload: tokens that requests grow to, or a mapping from such lengths to weights, or a `Mix`.
      compatible: who must be able to read the pages: `"vllm"`, `"flashmla"` or `"free"`; see `geometry.choices`.
      several_pools: whether buckets may have pools of their own. There is no slack then, but prefix hits are not
        reconciled between pools.
      max_groups: most groups; each costs a block table and its indices in every step.
      max_page_rows: most latents in a page; see `geometry.choices`.
      max_model_len, max_in_flight_tokens, cache_dtype, indexer, draft: see `dsv4kv_jax.plan.plan`.
      chunk_tokens, steps_in_flight, lookahead_tokens: see `holdings.Schedule`.

    Raises:
      PlanError: input that cannot be planned, even with the default geometry.
    """
    mix = Mix.of(workload)
    default = plan(
        config,
        memory_bytes,
        cache_dtype=cache_dtype,
        indexer=indexer,
        draft=draft,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
    )
    schedule = Schedule.of(
        default, chunk_tokens=chunk_tokens, steps_in_flight=steps_in_flight, lookahead_tokens=lookahead_tokens
    )
    specs = layer_specs(config, cache_dtype, indexer=indexer, draft=draft)
    drafts = [name for name in specs if int(name.split(".")[2]) >= config.num_hidden_layers]
    search = _Search(
        parts=geometry.choices(specs, compatible, max_page_rows),
        specs=specs,
        drafts=drafts,
        default=default,
        mix=mix,
        schedule=schedule,
        max_groups=max(max_groups, len(default.groups)),
    )
    best, best_requests = (default,), requests([default], mix, schedule)
    default_requests = best_requests
    for pools in search.finalists(several_pools):
        admitted = requests(pools, mix, schedule)
        if admitted > best_requests:
            best, best_requests = pools, admitted
    return Optimized(
        pools=best,
        default=default,
        mix=mix,
        schedule=schedule,
        compatible=compatible,
        num_requests=best_requests,
        default_requests=default_requests,
    )


def requests(pools: Sequence[KVCachePlan], mix: Mix, schedule: Schedule) -> int:
    """Requests of a mix that decode together, while one more is prefilled, when every pool must admit each of them."""
    return min(cap.whole_requests(cap.mixed_concurrency(pool, mix, schedule)) for pool in pools)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """What one choice costs: blocks of a slab, or bytes of pools of its own.

    `each` is the mean over the mix of what a decoding request holds; `once` what prefilling adds, for each length.
    """

    each: float
    once: tuple[float, ...]
    groups: int
    choice: Choice

    def beats(self, other: "_Point") -> bool:
        """Whether the other choice is never better."""
        pairs = zip((self.each, self.groups, *self.once), (other.each, other.groups, *other.once), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Search:
    parts: Sequence[Sequence[Choice]]
    specs: Mapping[str, KVCacheSpec]
    drafts: Sequence[str]
    default: KVCachePlan
    mix: Mix
    schedule: Schedule
    max_groups: int

    def finalists(self, several_pools: bool) -> Iterator[tuple[KVCachePlan, ...]]:
        """The most promising geometries, best first, as plans."""
        found = heapq.nlargest(_FINALISTS, self._slabs(), key=lambda item: item[0])
        for _, stride, chosen in found:
            yield from self._planned(lambda s=stride, c=chosen: (self._slab(s, c),))
        if several_pools and (best := max(self._pools(), key=lambda item: item[0], default=None)):
            yield from self._planned(lambda: self._separate(best[1], cap.whole_requests(best[0])))

    def _planned(self, make) -> Iterator[tuple[KVCachePlan, ...]]:
        try:
            yield make()
        except PlanError:  # too many slots for int32, or too few blocks for max_model_len
            return

    @functools.cached_property
    def _memory_bytes(self) -> int:
        return self.default.workers[0].memory_bytes

    def _slabs(self) -> Iterator[tuple[tuple[int, int, float], int, list[Choice]]]:
        """(rank, stride, choices) of every geometry with one slab that is not plainly worse than another."""
        alignment = self.default.layout.alignment
        for stride in geometry.strides(self.parts, alignment, self.max_groups):
            fronts = [_front(self._points(part, stride)) for part in self.parts]
            num_blocks = self._memory_bytes // stride
            for points in itertools.product(*fronts):
                groups = sum(point.groups for point in points)
                if groups <= self.max_groups:
                    value = cap.concurrency(num_blocks, sum(point.each for point in points), _once(points))
                    yield (cap.whole_requests(value), -groups, value), stride, [point.choice for point in points]

    def _points(self, part: Sequence[Choice], stride: int) -> Iterator[_Point]:
        for choice in part:
            counts = [geometry.num_groups(bucket.pages, stride) for bucket in choice.buckets]
            if None not in counts:
                yield self._point(choice, counts, sum(count or 0 for count in counts))

    def _pools(self) -> Iterator[tuple[float, list[Choice]]]:
        """(requests, choices) of the geometries in which every bucket has a pool whose stride is its own."""
        fronts = [
            _front(self._point(c, [bucket.page_size_bytes for bucket in c.buckets], len(c.buckets)) for c in part)
            for part in self.parts
        ]
        for points in itertools.product(*fronts):
            if sum(point.groups for point in points) <= self.max_groups:
                choices = [point.choice for point in points]
                null_blocks = sum(bucket.page_size_bytes for choice in choices for bucket in choice.buckets)
                once = sum(max(point.once) for point in points) + null_blocks
                yield max(self._memory_bytes - once, 0) / sum(point.each for point in points), choices

    def _point(self, choice: Choice, factors: Sequence[int | None], groups: int) -> _Point:
        costs = [
            (factor or 0, *self._cost(b.block_size, b.sliding_window))
            for factor, b in zip(factors, choice.buckets, strict=True)
        ]
        return _Point(
            each=sum(factor * each for factor, each, _ in costs),
            once=tuple(sum(f * once[i] for f, _, once in costs) for i in range(len(self.mix.lengths))),
            groups=groups,
            choice=choice,
        )

    @functools.cached_property
    def _cost(self):
        """(mean blocks while decoding, further blocks while prefilling for each length) of one group of a bucket."""

        @functools.cache
        def cost(block_size: int, window: int | None) -> tuple[float, tuple[int, ...]]:
            group = [Bucket(block_size=block_size, sliding_window=window, names=(), pages=())]
            decoding, once = [], []
            for length in self.mix.lengths:
                (each,) = holdings.decoding_blocks(group, length, self.schedule)
                decoding.append(each)
                once.append(holdings.peak_blocks(group, length, self.schedule) - each)
            return self.mix.average(decoding), tuple(once)

        return cost

    def _slab(self, stride: int, chosen: Sequence[Choice]) -> KVCachePlan:
        specs = {name: spec for choice in chosen for name, spec in choice.specs}
        groups = [names for choice in chosen for b in choice.buckets for names in geometry.pack(b, specs, stride)]
        return self._plan(specs, groups, self._memory_bytes)

    def _separate(self, chosen: Sequence[Choice], num_requests: int) -> tuple[KVCachePlan, ...]:
        """A pool per bucket, each with what `num_requests` need of it; what is left over goes to the first."""
        specs = {name: spec for choice in chosen for name, spec in choice.specs}
        buckets = [bucket for choice in chosen for bucket in choice.buckets]
        memory = []
        for bucket in buckets:
            each, once = self._cost(bucket.block_size, bucket.sliding_window)
            memory.append((1 + max(once) + math.ceil(num_requests * each)) * bucket.page_size_bytes)
        memory[0] += self._memory_bytes - sum(memory)
        return tuple(
            self._plan({name: specs[name] for name in bucket.names}, [bucket.names], size)
            for bucket, size in zip(buckets, memory, strict=True)
        )

    def _plan(
        self, specs: Mapping[str, KVCacheSpec], groups: Sequence[Sequence[str]], memory_bytes: int
    ) -> KVCachePlan:
        # Registration order, so that equal geometries give equal plans whatever the order of the search.
        return plan_from_specs(
            {name: specs[name] for name in self.specs if name in specs},
            memory_bytes,
            groups=groups,
            draft_layers=[name for name in self.drafts if name in specs],
            max_model_len=self.default.max_model_len,
            max_in_flight_tokens=self.default.max_in_flight_tokens,
            model=self.default.model,
            cache_dtype=self.default.cache_dtype,
        )


def _front(points: Iterator[_Point]) -> list[_Point]:
    """The points that no other point beats."""
    kept: list[_Point] = []
    for point in points:
        if not any(other.beats(point) for other in kept):
            kept = [other for other in kept if not point.beats(other)] + [point]
    return kept


def _once(points: Sequence[_Point]) -> float:
    """What the most demanding length adds while it is prefilled."""
    return max(map(sum, zip(*(point.once for point in points), strict=True)))
