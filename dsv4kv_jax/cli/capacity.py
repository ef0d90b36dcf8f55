"""`dsv4kv capacity`: what requests cost, how many fit, and which geometry would fit more."""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from dsv4kv_jax import tables, trace
from dsv4kv_jax.capacity import LONGEST_CONTEXT, Mix, longest_context, mixed_concurrency, whole_requests
from dsv4kv_jax.cli import _options
from dsv4kv_jax.config import MAX_INT32, ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.explain import format_bytes
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.optimize import MAX_GROUPS, Optimized, optimize
from dsv4kv_jax.plan import KVCachePlan
from dsv4kv_jax.plots import context_lengths, short_tokens


def parse_tokens(text: str) -> int:
    """A number of tokens: an integer, or one with K or M (1024 or 1024 x 1024).

    Raises:
      PlanError: anything else, less than 1, or more than int32 positions can count.
    """
    match = re.fullmatch(r"\s*([0-9]{1,40})\s*([KkMm]?)\s*", text)
    count = int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    if not 1 <= count <= MAX_INT32:
        raise PlanError(
            f"{text!r} is not a number of tokens; write a whole number from 1 to {MAX_INT32}, such as 2048, 2K or 1M"
        )
    return count


def parse_mix(text: str) -> Mix:
    """A mix of lengths, `2K:3,128K:1`; a weight may be left out where it is 1.

    Raises:
      PlanError: another form, or see `Mix`.
    """
    weights: dict[int, float] = {}
    for part in text.split(","):
        length, _, weight = part.partition(":")
        try:
            weights[parse_tokens(length)] = float(weight or 1)
        except ValueError as error:
            reason = error if isinstance(error, PlanError) else f"weight {weight!r} is not a number"
            raise PlanError(f"--mix {text!r}: {reason}; write LENGTH:WEIGHT pairs, such as 2K:3,128K:1") from None
    return Mix.of(weights)


@click.command("capacity", help="How many requests of which length fit, what they cost, and where the bytes go.")
@_options.plan_options
@click.option("--context", metavar="TOKENS", help="Context lengths, such as 2K,128K. [default: powers of two to 1M]")
@click.option(
    "--chunk-tokens", type=int, metavar="TOKENS", help="Prompt tokens a step. [default: all that may be in flight]"
)
@click.option("--steps-in-flight", type=int, metavar="N", default=1, show_default=True, help="2 if steps overlap.")
@click.option(
    "--lookahead-tokens", type=int, metavar="TOKENS", default=0, show_default=True, help="Slots kept for drafts."
)
@click.option(
    "--requests", type=int, metavar="N", help="Also print the longest context that N requests reach together."
)
@click.option("--mix", metavar="LENGTH:WEIGHT,...", help="Also print how many requests of a mix run together.")
@click.option("--trace", "trace_file", metavar="FILE", help="Also replay a trace: a line 'PROMPT OUTPUT' per request.")
@click.option("--compatible", type=click.Choice(["vllm", "flashmla"]), help="Search a geometry with such pages.")
@click.option("--free", is_flag=True, help="Search a geometry with any pages this library reads.")
@click.option("--several-pools", is_flag=True, help="Let the search give groups pools of their own.")
@click.option(
    "--max-groups", type=int, metavar="N", default=MAX_GROUPS, show_default=True, help="Most groups of the search."
)
@click.option("--prove", is_flag=True, help="Let the manager admit requests until it refuses, and compare.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    make_plan: Callable[..., KVCachePlan],
    context: str | None,
    chunk_tokens: int | None,
    steps_in_flight: int,
    lookahead_tokens: int,
    requests: int | None,
    mix: str | None,
    trace_file: str | None,
    compatible: Any,
    free: bool,
    several_pools: bool,
    max_groups: int,
    prove: bool,
    as_json: bool,
) -> int:
    options = click.get_current_context().params
    plan = make_plan()
    schedule = Schedule.of(
        plan, chunk_tokens=chunk_tokens, steps_in_flight=steps_in_flight, lookahead_tokens=lookahead_tokens
    )
    longest = min(plan.max_model_len or LONGEST_CONTEXT, LONGEST_CONTEXT)
    lengths = [parse_tokens(part) for part in context.split(",")] if context is not None else context_lengths(longest)
    config = _options.resolve_model(options["model"]) if options["model"] else None
    if several_pools and not (compatible or free):
        raise PlanError(
            "--several-pools belongs to a search; give --compatible vllm, --compatible flashmla or --free with it"
        )
    answers: dict[str, tuple[Any, str]] = {}  # JSON key -> (figures, text)
    if requests is not None:
        answers["longest_context"] = _longest(plan, requests, schedule)
    workload = parse_mix(mix) if mix is not None else None
    if workload:
        answers["mix"] = _of_mix(plan, workload, schedule)
    if trace_file is not None:
        arrivals = trace.read_trace(trace_file)
        answers["trace"] = _of_trace(plan, arrivals, schedule)
        workload = workload or trace.as_mix(arrivals)
    found = None
    if compatible or free:
        if compatible and free:
            raise PlanError("give one of --compatible and --free")
        workload = workload or (Mix.of(lengths[0]) if context is not None and len(lengths) == 1 else None)
        found = _optimize(config, plan, workload, "free" if free else compatible, options, schedule)
        answers["optimized"] = (tables.optimized_figures(found), tables.optimized_text(found))
    rows = tables.capacity_rows(plan, lengths, schedule, index_topk=config.index_topk if config else None)
    passed = True
    if prove:
        answers["proof"], passed = _prove(plan, rows, found, schedule)
    if as_json:
        figures = _setting(plan, schedule) | {"rows": rows} | {key: figure for key, (figure, _) in answers.items()}
        click.echo(json.dumps(figures, indent=2))
    else:
        click.echo("\n".join([_heading(plan, schedule), *_tables(rows), *(text for _, text in answers.values())]))
    return 0 if passed else 1


def _setting(plan: KVCachePlan, schedule: Schedule) -> dict[str, Any]:
    return {
        "model": plan.model,
        "cache_dtype": plan.cache_dtype,
        "num_blocks": plan.num_blocks,
        "block_bytes": max(worker.layout.bytes_per_block for worker in plan.workers),
        "chunk_tokens": schedule.chunk_tokens,
        "in_flight_tokens": schedule.in_flight_tokens,
        "steps_in_flight": schedule.steps_in_flight,
        "lookahead_tokens": schedule.lookahead_tokens,
    }


def _heading(plan: KVCachePlan, schedule: Schedule) -> str:
    block_bytes = max(worker.layout.bytes_per_block for worker in plan.workers)
    return (
        f"{plan.model}, {plan.cache_dtype}: {plan.num_blocks:,} blocks of {block_bytes:,} bytes "
        f"({format_bytes(plan.num_blocks * block_bytes)}); {schedule.chunk_tokens:,} prompt tokens a step, "
        f"{schedule.in_flight_tokens:,} in flight"
    )


def _tables(rows: list[dict[str, Any]]) -> list[str]:
    shown = [
        ("", tables.capacity_table(rows)),
        ("bytes that such a request holds, on average over its last tokens", tables.waste_table(rows)),
        ("bytes read to decode one token", tables.read_table(rows)),
    ]
    return [f"{title}\n{tables.as_text(table)}\n" for title, table in shown if table[1]]


def _longest(plan: KVCachePlan, num_requests: int, schedule: Schedule) -> tuple[Any, str]:
    reached = longest_context(plan, num_requests, schedule)
    return (
        {"num_requests": num_requests, "num_tokens": reached},
        f"{num_requests:,} requests reach {reached:,} tokens together",
    )


def _of_mix(plan: KVCachePlan, mix: Mix, schedule: Schedule) -> tuple[Any, str]:
    value = mixed_concurrency(plan, mix, schedule)
    return (
        {"concurrency": value, "num_requests": whole_requests(value)},
        f"of the mix, {value:,.1f} requests run together",
    )


def _of_trace(plan: KVCachePlan, arrivals: list[trace.TraceRequest], schedule: Schedule) -> tuple[Any, str]:
    seen = trace.replay(plan, arrivals, schedule)
    return (
        {"num_requests": len(arrivals)} | dataclasses.asdict(seen),
        f"of the trace's {len(arrivals):,} requests, {seen.mean_running:,.1f} run together while others wait (at most "
        f"{seen.most_running:,}), over {seen.steps:,} steps with {seen.preemptions:,} preemptions",
    )


def _optimize(
    config: ModelConfig | None,
    plan: KVCachePlan,
    workload: Mix | None,
    compatible: Any,
    options: dict[str, Any],
    schedule: Schedule,
) -> Optimized:
    if config is None:
        raise PlanError("a search needs a model: give --model instead of --specs")
    unused = ("block_size", "pipeline_stages", "tensor_parallel", "no_hybrid", "num_gpu_blocks_override")
    if given := [f"--{name.replace('_', '-')}" for name in unused if options[name] not in (None, False)]:
        raise PlanError(
            f"a search plans one worker with vLLM's own block sizes beside its findings; leave out {', '.join(given)}"
        )
    if len(plan.workers) != 1:
        raise PlanError(f"a search plans one worker; give one size to --memory, not {len(plan.workers)}")
    if workload is None:
        raise PlanError("a search needs a workload: give --context with one length, or --mix, or --trace")
    return optimize(
        config,
        plan.workers[0].memory_bytes,
        workload,
        compatible=compatible,
        several_pools=options["several_pools"],
        max_groups=options["max_groups"],
        cache_dtype=options["cache_dtype"],
        indexer=options["indexer"],
        draft=options["draft"],
        max_model_len=plan.max_model_len,
        max_in_flight_tokens=schedule.in_flight_tokens,
        chunk_tokens=schedule.chunk_tokens,
        steps_in_flight=schedule.steps_in_flight,
        lookahead_tokens=schedule.lookahead_tokens,
    )


def _prove(
    plan: KVCachePlan, rows: list[dict[str, Any]], found: Optimized | None, schedule: Schedule
) -> tuple[tuple[Any, str], bool]:
    """Counts with a real manager what the figures promise, for the found geometry and for the plan itself."""
    from dsv4kv_jax.proof import count_admitted

    subjects: list[tuple[str, Sequence[KVCachePlan], int, int]]
    subjects = [("the plan", [plan], row["num_tokens"], row["num_requests"]) for row in rows]
    if found is not None and len(found.mix.lengths) == 1:
        subjects.append(("the geometry found", found.pools, found.mix.lengths[0], found.num_requests))
    lines, figures = [], []
    for name, pools, num_tokens, promised in subjects:
        counted = count_admitted(pools, num_tokens, schedule)
        figures.append({"subject": name, "num_tokens": num_tokens, "promised": promised, "admitted": counted})
        verdict = "as promised" if counted == promised else f"but {promised:,} were promised"
        lines.append(f"{name}: the manager admits {counted:,} requests of {short_tokens(num_tokens)} tokens, {verdict}")
    passed = all(figure["admitted"] == figure["promised"] for figure in figures)
    return (figures, "\n".join(lines)), passed
