"""Planning: from a model or its specs, and the memory of each worker, to groups, layout and number of blocks."""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from dsv4kv_jax import capacity, plan_json
from dsv4kv_jax._static import cached_hash
from dsv4kv_jax.config import MAX_INT32, ModelConfig, check_int
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.groups import KVCacheGroup, explicit_groups, group_block_sizes, group_layers
from dsv4kv_jax.layout import PackedLayout, allocation_form
from dsv4kv_jax.specs import DEFAULT_BLOCK_SIZE, CacheDtype, Draft, Indexer, KVCacheSpec, cdiv, layer_specs

MIN_BLOCKS = 2  # the null block and one that a request can own
MAX_WORKERS = 4096  # of one plan; a mistyped count is refused before anything is made for each worker
MAX_SLOTS = 2**31  # slots are int32 on the device
DEFAULT_IN_FLIGHT_TOKENS = 8192


@jax.tree_util.register_static
@cached_hash
@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """One worker's share: its memory in bytes, its pipeline stage and the layout of the layers that it holds."""

    memory_bytes: int
    stage: int
    layout: PackedLayout

    @property
    def num_blocks(self) -> int:
        """Blocks that this worker's memory would hold; the plan uses the minimum over workers."""
        return self.memory_bytes // self.layout.bytes_per_block if self.layout.bytes_per_block else 1


@jax.tree_util.register_static
@cached_hash
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCachePlan:
    """A planned KV cache: immutable, hashable, static data of a jitted function.

    Attributes:
      model: the model's name, for people.
      cache_dtype: `"fp8_ds_mla"`, `"bf16"`, `"fp8"`, or `"custom"` for a plan made from specs.
      num_blocks: blocks of the pool, the same on every worker; block 0 is the null block.
      groups: the whole model's groups. Group ids mean the same on every worker.
      workers: pipeline-stage-major, as vLLM numbers ranks.
      max_model_len: tokens of the longest request that was checked to fit, or None.
      max_in_flight_tokens: tokens scheduled but not yet settled, for admission.
    """

    model: str
    cache_dtype: str
    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    workers: tuple[WorkerPlan, ...]
    max_model_len: int | None = None
    max_in_flight_tokens: int = DEFAULT_IN_FLIGHT_TOKENS

    @property
    def layout(self) -> PackedLayout:
        """The layout of worker 0."""
        return self.workers[0].layout

    @property
    def block_stride_bytes(self) -> int:
        """Worker 0's bytes between two blocks of the packed slab; 0 where there is one buffer a layer."""
        return self.layout.block_stride_bytes

    @property
    def scheduler_block_size(self) -> int:
        """Tokens at whose multiples prefix hits end (rule P21)."""
        return group_block_sizes(self.layout.groups)[0]

    @property
    def hash_block_size(self) -> int:
        """Tokens per prefix hash (rule P21)."""
        return group_block_sizes(self.layout.groups)[1]

    @property
    def needs_zeroing(self) -> bool:
        """Whether new blocks of worker 0 should be zeroed; see `PackedLayout.needs_zeroing`."""
        return self.layout.needs_zeroing

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan as JSON text: what `dsv4kv plan --json` prints, and what `from_json` reads."""
        return json.dumps(plan_json.to_dict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "KVCachePlan":
        """The plan written by `to_json`; it is planned anew from its inputs and compared with the figures beside them.

        Raises:
          PlanError: not such a text, another schema version, or figures that do not follow from the inputs.
        """
        return plan_json.from_text(text)

    def explain(self) -> str:
        """The plan in words and tables, for people."""
        from dsv4kv_jax import explain

        return explain.explain(self)


def plan(
    config: ModelConfig,
    memory_bytes: int | Sequence[int],
    *,
    cache_dtype: CacheDtype = "fp8_ds_mla",
    indexer: Indexer = "fp8",
    draft: Draft = "none",
    block_size: int = DEFAULT_BLOCK_SIZE,
    max_model_len: int | None = None,
    max_in_flight_tokens: int = DEFAULT_IN_FLIGHT_TOKENS,
    num_gpu_blocks_override: int | None = None,
    pipeline_stages: int | Sequence[int] = 1,
    tensor_parallel: int | None = None,
    hybrid: bool = True,
) -> KVCachePlan:
    """Plans the KV cache of a DeepSeek-V4 model, block for block as vLLM 0.27.1 does.

    Args:
      config: the model.
      memory_bytes: bytes for the cache on every worker, or one number per worker (stage-major).
      cache_dtype, indexer, draft, block_size: see `layer_specs`.
      max_model_len: tokens; if given, one request of this length must fit.
      max_in_flight_tokens: most tokens scheduled but not yet settled.
      num_gpu_blocks_override: plan this many blocks whatever the memory.
      pipeline_stages: number of stages, or the number of main layers of each stage.
      tensor_parallel: workers per stage; by default as many as `memory_bytes` asks for, or 1.
      hybrid: False keeps every block of every layer, in one group (vLLM's hybrid manager disabled).

    Raises:
      PlanError: an input that cannot be planned, or too little memory; names the figures and the remedy.
    """
    stages: list[dict[str, KVCacheSpec]] = []
    start = 0
    for count in pipeline_partition(config.num_hidden_layers, pipeline_stages):
        layers = range(start, start + count)
        stages.append(
            layer_specs(config, cache_dtype, indexer=indexer, draft=draft, block_size=block_size, layers=layers)
        )
        start += count
    first_draft = config.num_hidden_layers
    drafts = [name for name in stages[-1] if int(name.split(".")[2]) >= first_draft] if draft != "none" else []
    return plan_from_specs(
        stages,
        memory_bytes,
        draft_layers=drafts,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        num_gpu_blocks_override=num_gpu_blocks_override,
        tensor_parallel=tensor_parallel,
        hybrid=hybrid,
        block_size=block_size,
        model=config.name,
        cache_dtype=cache_dtype,
    )


def plan_from_specs(
    specs: Mapping[str, KVCacheSpec] | Sequence[Mapping[str, KVCacheSpec]],
    memory_bytes: int | Sequence[int],
    *,
    groups: Sequence[Sequence[str]] | None = None,
    draft_layers: Collection[str] = (),
    shares_with: Mapping[str, str] | None = None,
    max_model_len: int | None = None,
    max_in_flight_tokens: int = DEFAULT_IN_FLIGHT_TOKENS,
    num_gpu_blocks_override: int | None = None,
    tensor_parallel: int | None = None,
    hybrid: bool = True,
    block_size: int | None = None,
    model: str = "custom",
    cache_dtype: str = "custom",
) -> KVCachePlan:
    """Plans caches given as specs: layer name to spec in registration order, or one such mapping per pipeline stage.

    Args:
      specs: the caches.
      memory_bytes: bytes on every worker, or one number per worker (stage-major).
      groups: names of the layers of each group, in page order, to bypass the grouping rules.
      draft_layers: names of draft layers' caches.
      shares_with: layer name to the layer whose cache it reads and writes; such a layer has no spec of its own.
      block_size: tokens per block of the single group where `hybrid` is False.
      The rest: see `plan`.

    Raises:
      PlanError: an input that cannot be planned, or too little memory; names the figures and the remedy.
    """
    stages = [dict(specs)] if isinstance(specs, Mapping) else [dict(stage) for stage in specs]
    merged = _merge(stages)
    shared = _check_shared(shares_with or {}, merged)
    if groups is not None:
        model_groups = explicit_groups(merged, groups, [any(n in draft_layers for n in names) for names in groups])
    else:
        model_groups = group_layers(merged, draft_layers=draft_layers, hybrid=hybrid, block_size=block_size)
    form = allocation_form(model_groups)
    layouts = [
        PackedLayout(
            groups=tuple(group.on_stage(stage) for group in model_groups),
            form=form,
            shared=tuple(pair for pair in shared if pair[1] in stage),
        )
        for stage in stages
    ]
    workers = _workers(layouts, memory_bytes, tensor_parallel, num_gpu_blocks_override)
    check_int("max_in_flight_tokens", max_in_flight_tokens, at_least=1, at_most=MAX_INT32)
    if max_model_len is not None:
        check_int("max_model_len", max_model_len, at_least=1, at_most=MAX_INT32)
    num_blocks = min(worker.num_blocks for worker in workers) if form != "none" else 1
    result = KVCachePlan(
        model=model,
        cache_dtype=cache_dtype,
        num_blocks=num_blocks,
        groups=model_groups,
        workers=workers,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
    )
    if form != "none":
        _check_capacity(result)
    return result


def pipeline_partition(num_layers: int, stages: int | Sequence[int]) -> tuple[int, ...]:
    """Main layers of each pipeline stage (rule P6): an even split whose spare layers go to the last stages but one.

    Raises:
      PlanError: no stage, a negative count, or explicit counts that do not add up.
    """
    if not isinstance(stages, list | tuple):
        check_int("pipeline_stages", stages, at_least=1, at_most=MAX_WORKERS)
    if isinstance(stages, int):
        base, spare = divmod(num_layers, stages)
        return tuple(base + (stages - 1 - spare <= stage < stages - 1) for stage in range(stages))
    counts = tuple(stages)
    for count in counts:
        check_int("pipeline_stages", count, at_least=0)
    if not counts or sum(counts) != num_layers:
        raise PlanError(
            f"pipeline_stages={list(counts)} adds up to {sum(counts)} layers, but the model has {num_layers}: give one "
            f"count per stage, with that sum"
        )
    return counts


def _merge(stages: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """All stages' layers, the first occurrence deciding the position (rule P7)."""
    if not stages:
        raise PlanError("specs is an empty list; give one mapping per pipeline stage")
    if any(stages) and not all(stages):
        empty = [index for index, stage in enumerate(stages) if not stage]
        raise PlanError(f"pipeline stages {empty} of {len(stages)} hold no layer; use at most one stage per layer")
    merged: dict[str, KVCacheSpec] = {}
    for index, stage in enumerate(stages):
        for name, spec in stage.items():
            if merged.setdefault(name, spec) != spec:
                raise PlanError(f"layer {name!r} has two specs: {merged[name]}, and on stage {index} {spec}")
    return merged


def _check_shared(shares_with: Mapping[str, str], merged: Mapping[str, KVCacheSpec]) -> list[tuple[str, str]]:
    for layer, owner in shares_with.items():
        if layer in merged:
            raise PlanError(
                f"layer {layer!r} shares the cache of {owner!r} but has a spec of its own; drop one of them"
            )
        if owner not in merged:
            chain = " (itself a sharing layer: name the owner of the pages)" if owner in shares_with else ""
            raise PlanError(f"layer {layer!r} shares the cache of {owner!r}, which has no spec{chain}")
    return list(shares_with.items())


def _workers(
    layouts: Sequence[PackedLayout],
    memory_bytes: int | Sequence[int],
    tensor_parallel: int | None,
    num_gpu_blocks_override: int | None,
) -> tuple[WorkerPlan, ...]:
    memories: list[Any] = list(memory_bytes) if isinstance(memory_bytes, list | tuple) else [memory_bytes]
    if tensor_parallel is None:
        tensor_parallel = max(len(memories) // len(layouts), 1)
    check_int("tensor_parallel", tensor_parallel, at_least=1, at_most=MAX_WORKERS // len(layouts))
    num_workers = len(layouts) * tensor_parallel
    if len(memories) == 1:
        memories *= num_workers
    if len(memories) != num_workers:
        raise PlanError(
            f"memory_bytes has {len(memories)} sizes for {num_workers} workers ({len(layouts)} pipeline stages x "
            f"{tensor_parallel} tensor-parallel): give one size, or one per worker"
        )
    if num_gpu_blocks_override is not None:
        check_int("num_gpu_blocks_override", num_gpu_blocks_override, at_least=1, at_most=MAX_INT32)
    workers = []
    for rank, memory in enumerate(memories):
        layout = layouts[rank // tensor_parallel]
        if isinstance(memory, bool) or not isinstance(memory, int):
            raise PlanError(f"memory_bytes={memory!r} for worker {rank} must be an integer number of bytes")
        if num_gpu_blocks_override is not None:
            memory = num_gpu_blocks_override * layout.bytes_per_block
        if memory <= 0 and layout.bytes_per_block:
            raise PlanError(
                f"memory_bytes={memory} leaves worker {rank} no memory for the cache: one block takes "
                f"{layout.bytes_per_block} bytes, give at least {MIN_BLOCKS * layout.bytes_per_block}",
                required_bytes=MIN_BLOCKS * layout.bytes_per_block,
                available_bytes=memory,
                min_blocks=MIN_BLOCKS,
                max_context_that_fits=0,
            )
        workers.append(WorkerPlan(memory_bytes=memory, stage=rank // tensor_parallel, layout=layout))
    return tuple(workers)


def _check_capacity(result: KVCachePlan) -> None:
    """Refuses too few blocks for any request, or for one of `max_model_len`, and slots that int32 cannot hold."""
    rank, worker = min(enumerate(result.workers), key=lambda item: item[1].num_blocks)
    needed = MIN_BLOCKS
    reason = f"at least {MIN_BLOCKS} (the null block and one to own)"
    if result.max_model_len is not None:
        per_group = capacity.blocks_per_request(result.groups, result.max_model_len, result.max_in_flight_tokens)
        needed = max(needed, sum(per_group) + 1)
        reason = (
            f"{needed} for one request of max_model_len={result.max_model_len} tokens "
            f"({sum(per_group)} and the null block)"
        )
    if result.num_blocks < needed:
        limit = result.max_model_len or capacity.LONGEST_CONTEXT
        fits = capacity.longest_request(result.groups, result.num_blocks, result.max_in_flight_tokens, limit)
        required = needed * worker.layout.bytes_per_block
        raise PlanError(
            f"too little memory on worker {rank}: memory_bytes={worker.memory_bytes} holds {worker.num_blocks} blocks "
            f"of {worker.layout.bytes_per_block} bytes, but the cache needs {reason}: give at least {required} "
            f"bytes, or lower max_model_len to the longest context that fits, {fits} tokens",
            required_bytes=required,
            available_bytes=worker.memory_bytes,
            min_blocks=needed,
            max_context_that_fits=fits,
        )
    rows = max(spec.storage_block_size for group in result.groups for spec in group.specs)
    widest = max(max(group.block_size for group in result.groups), rows)
    if result.num_blocks * widest > MAX_SLOTS:
        raise PlanError(
            f"num_blocks={result.num_blocks} with {widest} slots a block passes {MAX_SLOTS} slots, which int32 slot "
            f"indices cannot hold: give the worker less memory (at most {MAX_SLOTS // widest} blocks), or use a "
            f"smaller block size; {cdiv(result.num_blocks * widest, MAX_SLOTS)} pools would hold it"
        )
