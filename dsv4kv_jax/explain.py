"""A plan in words: what is stored, where the bytes of a block go, and how many blocks there are."""

from collections import Counter
from typing import TYPE_CHECKING

from dsv4kv_jax import capacity
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.roles import describe

if TYPE_CHECKING:
    from dsv4kv_jax.plan import KVCachePlan

_FORMS = {
    "none": "no caches",
    "packed": "one slab; every group overlays the same block of it",
    "pools": "buffers shared by one layer of each group",
    "uniform": "one group; one buffer a layer",
}


def format_bytes(count: int) -> str:
    """`count` bytes with a binary unit and three significant digits, `"9.99 GiB"`."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = f"{value:.0f}" if units[0] == "B" or abs(value) >= 999.5 else f"{value:.3g}"
    return f"{digits} {units[0]}"


def explain(plan: "KVCachePlan") -> str:
    """See `KVCachePlan.explain`."""
    lines = [
        f"{plan.model}, cache dtype {plan.cache_dtype}: {plan.num_blocks:,} blocks on "
        f"{_count(len(plan.workers), 'worker')}"
    ]
    layouts: dict[int, PackedLayout] = {worker.stage: worker.layout for worker in plan.workers}
    for stage, layout in layouts.items():
        if len(layouts) > 1:
            lines += ["", f"pipeline stage {stage}"]
        lines += ["", *_layout_lines(layout, plan.num_blocks)]
    if plan.groups:
        lines += ["", *_request_lines(plan)]
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _layout_lines(layout: PackedLayout, num_blocks: int) -> list[str]:
    per_block = layout.bytes_per_block
    lines = [
        f"allocation: {_FORMS[layout.form]}",
        f"a block takes {per_block:,} bytes; {num_blocks:,} of them take {format_bytes(per_block * num_blocks)}",
    ]
    header = f"{'group':>5}  {'kind':<19}{'tokens':>7}{'window':>8}{'layers':>8}{'used':>12}{'padding':>9}{'slack':>11}"
    lines += ["", header]
    for index, group in enumerate(layout.groups):
        padding = group.page_size_bytes - group.real_page_size_bytes
        lines.append(
            f"{index:>5}  {group.kind:<19}{group.block_size:>7}{group.sliding_window or '-':>8}{len(group.layers):>8}"
            f"{group.page_size_bytes:>12,}{padding:>9,}{layout.slack_bytes(index):>11,}"
            f"{'  draft' if group.is_draft else ''}"
        )
        kinds = Counter((spec.format.name, spec.storage_block_size, spec.page_size_bytes) for spec in group.specs)
        for (name, rows, page), number in kinds.items():
            lines.append(f"{'':>7}{_count(number, 'layer')} of {name}: {_count(rows, 'row')} a page, {page:,} bytes")
    return lines


def _request_lines(plan: "KVCachePlan") -> list[str]:
    length = plan.max_model_len or 131_072
    each = capacity.capacity(plan, length)
    worst = sum(each.worst_case)
    return [
        f"a request of {length:,} tokens holds {' + '.join(f'{count:,}' for count in each.decoding)} = "
        f"{each.decoding_blocks:,} blocks while it decodes, {format_bytes(each.decoding_bytes)}; "
        f"{each.fixed_blocks} of them "
        f"are windows and states",
        f"while its prompt is computed, with {plan.max_in_flight_tokens:,} tokens in flight, it may hold {worst:,}; "
        f"{each.concurrency:.2f} such requests fit, one in its prompt at a time (block 0 is the null block)",
        f"prefix hits end at multiples of {plan.scheduler_block_size} tokens; prefixes are hashed every "
        f"{plan.hash_block_size}",
    ]


def reasons(plan: "KVCachePlan") -> str:
    """Why the plan of worker 0 looks as it does, in sentences: what decides the stride, the groups and the capacity."""
    layout = plan.layout
    if not layout.pages:
        return "this worker holds no cache, so there is nothing to lay out"
    lines = [_why_stride(layout)]
    if layout.form == "packed":
        lines += [_why_group(layout, index) for index in range(len(layout.groups))]
        lines.append(
            "groups overlay the same block because a block id belongs to one group at a time: a block freed by a "
            "window can "
            "become context, at the price that every block costs the whole stride"
        )
    padding = sum(group.page_size_bytes - group.real_page_size_bytes for group in layout.groups)
    used = sum(group.page_size_bytes for group in layout.groups)
    lines.append(
        f"pages are padded to {layout.alignment} bytes, the length of a slab row, so that no page starts inside one: "
        f"{100 * padding / used:.1f}% of all page bytes"
    )
    each = capacity.capacity(plan, plan.max_model_len or 131_072)
    if each.fixed_blocks and each.bytes_per_token:
        even = each.fixed_blocks * each.block_bytes / each.bytes_per_token
        lines.append(
            f"a token of context costs {each.bytes_per_token:,.0f} bytes, and a request "
            f"{format_bytes(each.fixed_blocks * each.block_bytes)} "
            f"for windows and states however short it is: below {even:,.0f} tokens most of its memory is fixed"
        )
    return "\n".join(f"- {line}" for line in lines)


def _why_stride(layout: PackedLayout) -> str:
    if layout.form != "packed":
        return f"a block takes {layout.bytes_per_block:,} bytes: {_FORMS[layout.form]}"
    largest = max(range(len(layout.groups)), key=lambda index: layout.groups[index].page_size_bytes)
    return (
        f"the stride of {layout.block_stride_bytes:,} bytes is the size of the largest group, {largest}; the others "
        f"leave the "
        f"rest of their blocks empty"
    )


def _why_group(layout: PackedLayout, index: int) -> str:
    group = layout.groups[index]
    same = [
        i
        for i, other in enumerate(layout.groups)
        if (other.block_size, other.sliding_window) == (group.block_size, group.sliding_window)
    ]
    used = 100 * group.page_size_bytes / layout.block_stride_bytes
    kinds = ", ".join(dict.fromkeys(describe(spec) for spec in group.specs)) or "nothing on this stage"
    what = (
        "keeps every block"
        if group.sliding_window is None
        else f"keeps what the last {group.sliding_window} tokens need"
    )
    split = (
        ""
        if len(same) == 1
        else f"; groups {', '.join(map(str, same))} share these layers out so that each fits a block"
    )
    return f"group {index} ({kinds}) {what}, {group.block_size} tokens a block, and fills {used:.0f}% of a block{split}"
