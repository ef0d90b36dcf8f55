"""`dsv4kv plan`: plan the memory and print it as text or JSON, or write it as an HTML report."""

import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from dsv4kv_jax.cli import _options
from dsv4kv_jax.plan import KVCachePlan

if TYPE_CHECKING:
    from dsv4kv_jax.optimize import Optimized

_REPORTED_CONTEXT = 2048  # tokens; the length for which a report looks for a better geometry


@click.command("plan", help="Plan the memory: groups, layout, number of blocks.")
@_options.plan_options
@click.option("--explain", is_flag=True, help="Also say why: what decides the stride, the groups and the capacity.")
@click.option("--html", metavar="FILE", help="Also write a report that holds everything: pictures, capacity, waste.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, which `KVCachePlan.from_json` reads back.")
def command(make_plan: Callable[..., KVCachePlan], explain: bool, html: str | None, as_json: bool) -> None:
    plan = make_plan()
    if html is not None:
        _write_report(plan, html, click.get_current_context().params)
    if as_json:
        click.echo(plan.to_json(indent=2))
        return
    click.echo(plan.explain())
    if explain:
        from dsv4kv_jax.explain import reasons

        click.echo(f"\n{reasons(plan)}")
    if html is not None:
        click.echo(f"\nwrote {html}")


def _write_report(plan: KVCachePlan, path: str, options: dict[str, Any]) -> None:
    from dsv4kv_jax import report

    topk = _options.resolve_model(options["model"]).index_topk if options["model"] else None
    page = report.render(plan, index_topk=topk, optimized=_geometries(plan, options))
    pathlib.Path(path).write_text(page, encoding="utf-8")


def _geometries(plan: KVCachePlan, options: dict[str, Any]) -> "list[Optimized]":
    """Better geometries for short requests, where the search applies: vLLM's own geometry on one worker."""
    from dsv4kv_jax.optimize import optimize

    changed = ("block_size", "num_gpu_blocks_override", "pipeline_stages")
    if not options["model"] or options["no_hybrid"] or len(plan.workers) != 1 or any(options[name] for name in changed):
        return []
    return [
        optimize(
            _options.resolve_model(options["model"]),
            plan.workers[0].memory_bytes,
            min(_REPORTED_CONTEXT, plan.max_model_len or _REPORTED_CONTEXT),
            compatible="flashmla" if options["cache_dtype"] == "fp8_ds_mla" else "free",
            several_pools=several,
            cache_dtype=options["cache_dtype"],
            indexer=options["indexer"],
            draft=options["draft"],
            max_model_len=plan.max_model_len,
            max_in_flight_tokens=plan.max_in_flight_tokens,
        )
        for several in (False, True)
    ]
