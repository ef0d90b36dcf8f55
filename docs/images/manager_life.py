"""Draws `manager_life.svg`, a request's tables at three moments of a real run: `python docs/images/manager_life.py`."""

import itertools
import pathlib

import dsv4kv_jax as dsv4
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.request import Request

WIDTH, LEFT, SCALE, ROW, GAP = 860, 150, 0.88, 20, 46  # pixels; SCALE in pixels per token
COLOURS = {"null": "#f4f4f4", "own": "#9aa7b4", "hit": "#4c8dd6", "cached": "#5fae6b"}
LEGEND = {
    "hit": "taken over from another request's prefix",
    "cached": "own, in the prefix cache",
    "own": "own",
    "null": "null block: let go, or never needed",
}
NAMES = ("C4A, C128A, indexer", "window, first half", "window, second half", "C128A states", "C4A states")

plan = dsv4.plan(
    dsv4.ModelConfig.preset("deepseek-v4-pro"), memory_bytes=1, num_gpu_blocks_override=1000, max_model_len=2048
)
manager = KVCacheManager(plan)


def add(name: str, num_tokens: int) -> Request:
    request = Request(name, [1] * 512 + [len(name)] * (num_tokens - 512))
    manager.add_request(request)
    return request


def compute(request: Request, count: int) -> None:
    manager.allocate_slots(request, count)
    request.num_computed_tokens += count


def kind_of(block: int, hits: set[int]) -> str:
    if not block:
        return "null"
    if not manager.pool.covered[block]:
        return "own"
    return "hit" if block in hits else "cached"


def panel(title: str, request: Request, top: int, hits: list[set[int]]) -> str:
    parts = [f'<text x="8" y="{top}" font-weight="bold">{title}</text>']
    for group, (rules, table) in enumerate(zip(manager.rules, manager.get_block_ids(request), strict=True)):
        y, width = top + 10 + group * ROW, rules.block_size * SCALE
        parts.append(f'<text x="8" y="{y + 12}">{NAMES[group]}, {rules.block_size}</text>')
        kinds = [kind_of(block, hits[group]) for block in table]
        start = 0
        for kind, run in itertools.groupby(kinds):
            count = len(list(run))
            # Blocks of a few tokens are too narrow to draw one by one.
            cells = [(start + n, 1) for n in range(count)] if width > 6 else [(start, count)]
            for first, blocks in cells:
                parts.append(
                    f'<rect x="{LEFT + first * width:.1f}" y="{y}" width="{blocks * width:.1f}" height="{ROW - 5}" '
                    f'fill="{COLOURS[kind]}" stroke="#ffffff" stroke-width="0.6"/>'
                )
            start += count
    bottom = top + 10 + len(manager.rules) * ROW - 4
    x = LEFT + request.num_computed_tokens * SCALE
    parts.append(f'<line x1="{x}" y1="{top + 4}" x2="{x}" y2="{bottom}" stroke="#c0392b" stroke-width="1.2"/>')
    return "\n".join(parts)


def main() -> None:
    first = add("first", 600)
    compute(first, 600)
    manager.free(first)
    request = add("second", 560)
    found = manager.get_computed_blocks(request)
    hits = [set(blocks.tolist()) for blocks in found.block_ids]
    manager.allocate_slots(request, 48, new_computed_blocks=found)
    request.num_computed_tokens = found.num_tokens + 48
    height = ROW * len(manager.rules) + GAP
    panels = [panel("1  admitted: 512 tokens hit, blocks for the other 48", request, 20, hits)]
    for _ in range(30):
        request.append([7])
        compute(request, 1)
    panels.append(
        panel("2  decoding: windows slide, the hit blocks they leave are given back", request, 20 + height, hits)
    )
    for _ in range(190):
        request.append([7])
        compute(request, 1)
    panels.append(
        panel(
            "3  past 768 tokens: what a hit of 768 would need has entered the prefix cache",
            request,
            20 + 2 * height,
            hits,
        )
    )
    y = 20 + 3 * height
    legend = []
    for number, (kind, text) in enumerate(LEGEND.items()):
        x = 8 + 214 * number
        legend.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}" stroke="#bbbbbb"/>')
        legend.append(f'<text x="{x + 17}" y="{y}">{text}</text>')
    body = "\n".join([*panels, *legend])
    path = pathlib.Path(__file__).with_suffix(".svg")
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 16}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
