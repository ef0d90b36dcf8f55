"""`dsv4kv picture`: draw one block of the slab."""

import json
from collections.abc import Callable

import click

from dsv4kv_jax import picture
from dsv4kv_jax.address import row_address
from dsv4kv_jax.cli import _options
from dsv4kv_jax.plan import KVCachePlan

_ANY_MEMORY = 80 * 2**30  # a picture shows one block, so the size does not matter


@click.command("picture", help="Draw one block of the slab: groups as bands, caches by kind, waste hatched.")
@_options.plan_options
@click.option("--output", metavar="FILE", help="A .png or .svg file. [default: characters on the terminal]")
@click.option("--layer", metavar="NAME", help="Mark this cache, such as model.layers.2.attn.")
@click.option(
    "--token", type=int, metavar="N", default=0, show_default=True, help="Mark the row of this position of it."
)
@click.option("--worker", type=int, metavar="N", default=0, show_default=True, help="Draw this worker's block.")
@click.option("--json", "as_json", is_flag=True, help="Print the bands, and the address of the marked row, as JSON.")
def command(
    make_plan: Callable[..., KVCachePlan], output: str | None, layer: str | None, token: int, worker: int, as_json: bool
) -> None:
    plan = make_plan(default_memory=_ANY_MEMORY)
    text = picture.text(plan, layer=layer, token=token, worker=worker)
    if output is not None:
        picture.save(picture.draw(plan, layer=layer, token=token, worker=worker), output)
    if as_json:
        click.echo(json.dumps(_figures(plan, layer, token, worker), indent=2))
    elif output is None:
        click.echo(text)
    else:
        click.echo(f"wrote {output}")


def _figures(plan: KVCachePlan, layer: str | None, token: int, worker: int) -> dict[str, object]:
    layout = plan.workers[worker].layout
    bands = [
        [
            {"kind": run.kind, "offset_bytes": run.start, "page_size_bytes": run.page_size_bytes, "pages": run.count}
            for run in runs
        ]
        for runs in picture.bands(layout)
    ]
    figures: dict[str, object] = {"block_bytes": layout.bytes_per_block, "bands": bands}
    if layer is not None:
        page = layout.page(layer)
        address = row_address(page, token)
        figures["address"] = {
            "layer": page.name,
            "token": token,
            "group": page.group,
            "buffer": page.buffer,
            "block_stride_bytes": page.block_stride_bytes,
            "block_table_entry": address.entry,
            "row": address.row,
            "parts": [{"name": n, "offset_bytes": offset, "size_bytes": size} for n, offset, size in address.parts],
        }
    return figures
