"""One self-contained HTML page about a model and a memory size: the slab, what it holds, and what would hold more."""

import html
import io
import re
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsv4kv_jax import explain, picture, plots, tables
from dsv4kv_jax.capacity import LONGEST_CONTEXT
from dsv4kv_jax.holdings import Schedule

if TYPE_CHECKING:
    from dsv4kv_jax.optimize import Optimized
    from dsv4kv_jax.plan import KVCachePlan

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 860px; margin: 2rem auto;
padding: 0 1rem; } h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; display: block; overflow-x:
auto; } th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { font-weight: 600; border-bottom: 2px solid #888; } td:first-child, th:first-child { text-align: left; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 12.5px; line-height: 1.4; white-space:
pre-wrap; } svg { max-width: 100%; height: auto; } p.note { color: #555; font-size: 13.5px; max-width: 70ch; }
"""


def render(
    plan: "KVCachePlan",
    *,
    schedule: Schedule | None = None,
    index_topk: int | None = None,
    optimized: Sequence["Optimized"] = (),
) -> str:
    """The report as HTML text that needs no other file and no network.

    Args:
      plan: the plan; its worker 0 is drawn.
      schedule: how steps are scheduled; by default what the plan was made for.
      index_topk: compressed rows that the indexer picks; a preset's own unless given. Without it the bytes read are
      left out. optimized: geometries found for the same model and memory, to compare with.

    Raises:
      PlanError: a plan without caches, or matplotlib is missing.
    """
    schedule = schedule or Schedule.of(plan)
    longest = min(plan.max_model_len or LONGEST_CONTEXT, LONGEST_CONTEXT)
    rows = tables.capacity_rows(plan, plots.context_lengths(longest), schedule, index_topk=index_topk)
    lines = {"this plan": [plan]} | {_label(found): list(found.pools) for found in optimized}
    parts = [
        f"<h1>KV cache of {html.escape(plan.model)}</h1>",
        f"<p>{html.escape(explain.explain(plan).splitlines()[0])}</p>",
        _section(
            "One block",
            _svg(picture.draw(plan)),
            note="Every group overlays the same block; a block id belongs to one group at a time.",
        ),
        _section("Why it looks like this", _bullets(explain.reasons(plan))),
        _section(
            "How many requests fit",
            _svg(plots.plot_capacity(lines, longest, schedule)),
            _table(tables.capacity_table(rows)),
            note="requests: decoding together while one more is in its prompt, none preempted. fixed: window and state "
            "blocks, which a "
            "request holds however short it is. prefill peak: blocks of the newest request, paid once. all "
            "prefilling: what a "
            "count without the difference between the two phases would report.",
        ),
        _section(
            "Where the bytes of a request are",
            _table(tables.waste_table(rows)),
            note="On average over the last tokens before this length. Slack: what a group's pages leave of the stride. "
            "Stale states: compressor rows that the manager keeps but no later compression reads.",
        ),
    ]
    if rows[0]["bytes_read"]:
        parts.append(
            _section(
                "Bytes read to decode one token",
                _svg(plots.plot_bytes_read(plan, longest, index_topk)),
                _table(tables.read_table(rows)),
            )
        )
    for found in optimized:
        drawings = [_svg(picture.draw(pool)) for pool in found.pools] if found.pools != (found.default,) else []
        parts.append(_section(f"A geometry {_label(found)}", _pre(tables.optimized_text(found)), *drawings))
    parts.append(_section("The plan in full", _pre(plan.explain())))
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>KV cache of {html.escape(plan.model)}</title>"
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>\n{body}\n</body></html>\n"
    )


def _label(found: "Optimized") -> str:
    lengths = " + ".join(plots.short_tokens(length) for length in found.mix.lengths)
    kind = "one slab" if len(found.pools) == 1 else f"{len(found.pools)} pools"
    return f"tuned for {lengths}: {kind}"


def _section(title: str, *content: str, note: str = "") -> str:
    caption = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"<h2>{html.escape(title)}</h2>\n" + "\n".join(content) + caption


def _table(table: tables.Table) -> str:
    headers, rows = table
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in headers)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _bullets(text: str) -> str:
    items = "\n".join(f"<li>{html.escape(line.removeprefix('- '))}</li>" for line in text.splitlines())
    return f"<ul>\n{items}\n</ul>"


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _svg(figure: Any) -> str:
    """The figure as an `<svg>` element. Its ids get a prefix of their own, since several drawings share the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    prefix = f"f{zlib.crc32(text.encode()):08x}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", text)
