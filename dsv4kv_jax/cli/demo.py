"""`dsv4kv demo`: a small model through the cache, checked by PyTorch."""

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsv4kv_jax.cli import _options
from dsv4kv_jax.explain import format_bytes
from dsv4kv_jax.specs import CACHE_MODES

_STAGES = 6


@click.command("demo", help="Run a small model through the cache and check it with PyTorch.")
@click.option("--model", metavar="PRESET|PATH", default="deepseek-v4-flash", show_default=True)
@click.option("--layers", type=int, default=4, show_default=True, help="Consecutive layers that cover most kinds.")
@click.option("--memory", metavar="SIZE", default="256MiB", show_default=True, help="For the cache.")
@click.option("--steps", type=int, default=64, show_default=True, help="Tokens to decode per request.")
@click.option(
    "--requests", type=click.IntRange(max=65_536), default=4, show_default=True, help="Prompts, of different lengths."
)
@click.option("--cache-dtype", type=click.Choice(list(CACHE_MODES)), default="fp8_ds_mla", show_default=True)
@click.option("--indexer", type=click.Choice(["fp8", "mxfp4"]), default="fp8", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    model: str,
    layers: int,
    memory: str,
    steps: int,
    requests: int,
    cache_dtype: Any,
    indexer: Any,
    as_json: bool,
) -> int:
    config = _options.resolve_model(model)
    size = _options.parse_size(memory)
    from dsv4kv_jax import demo  # after the cheap checks: this imports the device code

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as progress:
        task = progress.add_task("", total=_STAGES)
        begun = 0

        def announce(stage: str) -> None:
            nonlocal begun
            progress.update(task, description=stage, completed=begun)
            begun += 1

        result = demo.run(
            config,
            num_layers=layers,
            memory_bytes=size,
            steps=steps,
            num_requests=requests,
            cache_dtype=cache_dtype,
            indexer=indexer,
            progress=announce,
        )
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _print(result)
    return 0 if result.passed else 1


def _print(result: Any) -> None:
    console = Console(file=sys.stdout)
    planned = result.plan
    console.print(
        f"{planned.model}, {planned.cache_dtype}: {planned.num_blocks:,} blocks of {planned.block_stride_bytes:,} "
        f"bytes, a slab of {format_bytes(result.slab_bytes)} on {result.device}",
        highlight=False,
    )
    console.print(
        f"{len(result.prompt_lens)} prompts of {', '.join(map(str, result.prompt_lens))} tokens, then {result.steps} "
        f"decoded tokens each in one jitted loop",
        highlight=False,
    )
    table = Table(title="The last step's attention, JAX against PyTorch on the lent slab")
    for header in ("layer", "kind", "window rows", "compressed rows", "output differs by", "lse differs by"):
        table.add_column(header, justify="left" if header in ("layer", "kind") else "right")
    kinds = {1: "window", 4: "C4A", 128: "C128A"}
    for check in result.layers:
        table.add_row(
            check.layer.removeprefix("model.layers.").removesuffix(".attn"),
            kinds[check.compress_ratio],
            f"{check.window_rows:,}",
            f"{check.compressed_rows:,}",
            f"{check.rel_diff:.1e}",
            f"{check.lse_diff:.1e}",
        )
    console.print(table)
    console.print(
        f"largest difference {result.max_rel_diff:.1e}, bound {result.bound:.0e} in {result.dtype}", highlight=False
    )
    console.print(
        f"slab copies in the compiled loop: {result.slab_copies}; slab still where it was: "
        f"{'yes' if result.same_pointer else 'no'}",
        highlight=False,
    )
    console.print("; ".join(f"{stage} {seconds:.1f} s" for stage, seconds in result.seconds.items()), highlight=False)
    console.print("[bold green]passed[/]" if result.passed else "[bold red]FAILED[/]")
