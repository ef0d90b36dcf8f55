"""Pictures of the slab: one block, every group as a band over it, coloured by what the caches are for."""

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsv4kv_jax.address import RowAddress, row_address
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.layout import PackedLayout, PageLayout
from dsv4kv_jax.roles import describe

if TYPE_CHECKING:
    from dsv4kv_jax.plan import KVCachePlan

# Okabe and Ito's palette, which people with any common colour vision tell apart; the letter is for terminals.
KINDS: dict[str, tuple[str, str]] = {
    "C4A latent": ("#0072B2", "C"),
    "C128A latent": ("#56B4E9", "H"),
    "indexer key": ("#CC79A7", "k"),
    "window latent": ("#009E73", "w"),
    "C4 state": ("#E69F00", "s"),
    "C128 state": ("#D55E00", "S"),
}
_OTHER = ("#666666", "o")
_SLACK = "·"
_WIDTH_INCHES = 8.0  # 800 pixels at 100 dots an inch
_TEXT_COLUMNS = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Neighbouring pages of one kind in a block, as one piece of a band."""

    kind: str
    start: int
    page_size_bytes: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.page_size_bytes * self.count


def bands(layout: PackedLayout) -> list[list[Run]]:
    """For each group, its pages in order, as runs of equal neighbours.

    Where a layout has one buffer a layer, the pages of a block are drawn side by side all the same.
    """
    result = []
    for group in layout.groups:
        runs: list[Run] = []
        start = 0
        for (kind, size), pages in itertools.groupby((describe(spec), spec.page_size_bytes) for spec in group.specs):
            count = len(list(pages))
            runs.append(Run(kind=kind, start=start, page_size_bytes=size, count=count))
            start = runs[-1].end
        result.append(runs)
    return result


def _style(kind: str) -> tuple[str, str]:
    return KINDS.get(kind, _OTHER)


def text(plan: "KVCachePlan", *, layer: str | None = None, token: int = 0, worker: int = 0) -> str:
    """The picture in characters: a line a group, a letter a slice of the block.

    Raises:
      PlanError: no such layer or worker, or nothing to draw.
    """
    layout = _layout(plan, worker)
    stride = layout.bytes_per_block
    lines = [f"one block of {plan.model}: {stride:,} bytes, {plan.num_blocks:,} blocks; every group overlays it"]
    for index, runs in enumerate(bands(layout)):
        group = layout.groups[index]
        cells = _cells(runs, stride)
        window = f"window {group.sliding_window}" if group.sliding_window else "keeps all"
        lines.append(f"{index:>3} |{cells}| {group.block_size} tokens, {window}, {len(group.layers)} caches")
    if layer is not None:
        page = layout.page(layer)
        first, last = (
            int(_TEXT_COLUMNS * (page.offset_bytes + n) / stride) for n in (0, page.spec.page_size_bytes - 1)
        )
        lines.append(
            f"    |{' ' * first}{'^' * (last - first + 1)}{' ' * (_TEXT_COLUMNS - last - 1)}| group {page.group}"
        )
        lines += _address_lines(page, token)
    used = [kind for kind in KINDS if any(run.kind == kind for runs in bands(layout) for run in runs)]
    lines.append("    " + "  ".join(f"{_style(kind)[1]} {kind}" for kind in used) + f"  {_SLACK} unused")
    return "\n".join(lines)


def _cells(runs: Sequence[Run], stride: int) -> str:
    """One letter a slice of the block; a kind gets as many as its bytes deserve, even if no page fills a slice."""
    owed: dict[str, float] = {}
    cells = []
    for cell in range(_TEXT_COLUMNS):
        start, end = stride * cell / _TEXT_COLUMNS, stride * (cell + 1) / _TEXT_COLUMNS
        filled = 0.0
        for run in runs:
            overlap = max(min(run.end, end) - max(run.start, start), 0)
            owed[run.kind] = owed.get(run.kind, 0.0) + overlap
            filled += overlap
        owed[""] = owed.get("", 0.0) + (end - start) - filled
        kind = max(owed, key=owed.__getitem__)
        owed[kind] -= end - start
        cells.append(_style(kind)[1] if kind else _SLACK)
    return "".join(cells)


def _address_lines(page: PageLayout, token: int) -> list[str]:
    address = row_address(page, token)
    lines = [
        f"token {token} of {page.name} is in row {address.row} of the block at entry {address.entry} of group "
        f"{page.group}'s block table"
    ]
    start = f"block_id x {page.block_stride_bytes:,}"
    lines += [f"  {name}: {size} bytes at {start} + {offset:,}" for name, offset, size in address.parts]
    return lines


def draw(plan: "KVCachePlan", *, layer: str | None = None, token: int = 0, worker: int = 0) -> Any:
    """The picture as a matplotlib `Figure`, 8 inches wide; `layer` enlarged, the token's row marked.

    Raises:
      PlanError: no such layer or worker, nothing to draw, or matplotlib is missing.
    """
    layout = _layout(plan, worker)
    figure_type = figure_class()
    from matplotlib.patches import Rectangle as rectangle

    band_height = 0.34 * len(layout.groups)
    # Inches from the top: title, legend, bands, their axis; then the enlarged page with two lines of text.
    height = 0.72 + band_height + 0.36 + (1.45 if layer is not None else 0.0)
    figure = figure_type(figsize=(_WIDTH_INCHES, height), dpi=100)
    left, width = 0.275, 0.7
    axes = figure.add_axes((left, 1 - (0.72 + band_height) / height, width, band_height / height))
    _draw_bands(axes, layout, rectangle)
    where = "one slab" if layout.form == "packed" else "one buffer a layer"
    figure.text(
        0.012,
        1 - 0.22 / height,
        f"One block of {plan.model} ({plan.cache_dtype}): {layout.bytes_per_block:,} bytes, {where}, "
        f"{len(layout.groups)} groups",
        fontsize=11,
        fontweight="bold",
        va="center",
    )
    _draw_legend(figure, layout, rectangle, height)
    if layer is not None:
        page = layout.page(layer)
        address = row_address(page, token)
        _mark(axes, page, layout)
        zoom = figure.add_axes((left, 0.7 / height, width, 0.36 / height))
        _draw_page(zoom, page, address, rectangle)
        figure.text(left, 1.2 / height, f"the page of {page.name}, enlarged", fontsize=9, va="center")
        for line, words in enumerate(_address_summary(page, token, address)):
            figure.text(left, (0.33 - 0.18 * line) / height, words, fontsize=8.5, va="center")
    return figure


def save(figure: Any, path: str) -> None:
    """Writes a figure to a `.png` or `.svg` file, the same bytes for the same figure.

    Raises:
      PlanError: another ending.
      OSError: the file cannot be written.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending not in (".png", ".svg"):
        raise PlanError(f"{path!r} must end in .png or .svg")
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "dsv4kv_jax"}):
        figure.savefig(path, format=ending[1:], metadata={"Date": None} if ending == ".svg" else None)


def _layout(plan: "KVCachePlan", worker: int) -> PackedLayout:
    if not 0 <= worker < len(plan.workers):
        raise PlanError(f"worker={worker} does not exist; the plan has {len(plan.workers)}")
    layout = plan.workers[worker].layout
    if not layout.pages:
        raise PlanError(f"worker {worker} of {plan.model!r} holds no cache; there is nothing to draw")
    return layout


def figure_class() -> Any:
    """matplotlib's `Figure`, which needs no display and no global state.

    Raises:
      PlanError: matplotlib is missing; names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError(f"{error}; pictures need an extra: pip install 'dsv4kv_jax[cli]'") from None
    return Figure


def _draw_bands(axes: Any, layout: PackedLayout, rectangle: Any) -> None:
    stride = layout.bytes_per_block
    labels = []
    for index, (group, runs) in enumerate(zip(layout.groups, bands(layout), strict=True)):
        for run in runs:
            color = _style(run.kind)[0]
            # Pages wider than two pixels get an outline each; thinner ones would be all outline.
            edges = run.page_size_bytes > stride / 300
            for page in range(run.count) if edges else [0]:
                width = run.page_size_bytes if edges else run.end - run.start
                axes.add_patch(
                    rectangle(
                        (run.start + page * run.page_size_bytes, index - 0.4),
                        width,
                        0.8,
                        facecolor=color,
                        edgecolor="white",
                        linewidth=0.4 if edges else 0.0,
                    )
                )
        slack = stride - group.page_size_bytes
        if slack:
            axes.add_patch(
                rectangle(
                    (group.page_size_bytes, index - 0.4),
                    slack,
                    0.8,
                    facecolor="#f4f4f4",
                    edgecolor="#999999",
                    hatch="////",
                    linewidth=0,
                )
            )
        keeps = f"window {group.sliding_window}" if group.sliding_window else "keeps all"
        labels.append(f"{len(group.layers)} caches, {group.block_size} tokens, {keeps}")
    axes.set_xlim(0, stride)
    axes.set_ylim(len(layout.groups) - 0.45, -0.55)
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    step = _round_step(stride / 7)
    ticks = [step * i for i in range(int(stride // step) + 1)]
    axes.set_xticks(ticks, [f"{tick / 1000:,.0f} kB" if tick else "0" for tick in ticks], fontsize=8.5)
    for tick, label in zip(ticks, axes.get_xticklabels(), strict=True):
        if tick > 0.93 * stride:  # centred, it would pass the edge of the picture
            label.set_horizontalalignment("right")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _round_step(value: float) -> int:
    magnitude = 10 ** (len(str(int(value))) - 1)
    return next(int(m * magnitude) for m in (1, 2, 2.5, 5, 10) if m * magnitude >= value)


def _draw_legend(figure: Any, layout: PackedLayout, rectangle: Any, height: float) -> None:
    kinds = dict.fromkeys(run.kind for runs in bands(layout) for run in runs)
    handles = [rectangle((0, 0), 1, 1, facecolor=_style(kind)[0]) for kind in kinds]
    names = list(kinds)
    if any(layout.bytes_per_block - group.page_size_bytes for group in layout.groups):
        handles.append(rectangle((0, 0), 1, 1, facecolor="#f4f4f4", edgecolor="#999999", hatch="////", linewidth=0))
        names.append("unused (slack)")
    figure.legend(
        handles,
        names,
        loc="center left",
        bbox_to_anchor=(0.0, 1 - 0.5 / height),
        ncols=len(names),
        fontsize=8.5,
        frameon=False,
        handlelength=1.1,
        columnspacing=1.1,
        handletextpad=0.4,
    )


def _mark(axes: Any, page: PageLayout, layout: PackedLayout) -> None:
    start = page.offset_bytes
    if layout.form != "packed":
        group = layout.groups[page.group]
        start = sum(spec.page_size_bytes for spec in group.specs[: group.layers.index(page.name)])
    middle = start + page.spec.page_size_bytes / 2
    axes.annotate(
        "",
        xy=(middle, page.group - 0.1),
        xytext=(middle, len(layout.groups) - 0.45),
        arrowprops={"arrowstyle": "-|>", "color": "black", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0},
    )


def _draw_page(axes: Any, page: PageLayout, address: RowAddress, rectangle: Any) -> None:
    spec, rows = page.spec, page.storage_block_size
    color = _style(describe(spec))[0]
    for index, section in enumerate(page.format.sections):
        start = page.format.section_start(index, rows)
        size = rows * section.row_bytes
        axes.add_patch(rectangle((start, 0), size, 1, facecolor=color, alpha=1.0 if index == 0 else 0.55, linewidth=0))
        if size > spec.page_size_bytes / 12:
            axes.text(
                start + size / 2,
                0.5,
                f"{section.name}: {rows} x {section.row_bytes} B",
                ha="center",
                va="center",
                fontsize=8.5,
                color="white",
            )
    padding = spec.page_size_bytes - spec.real_page_size_bytes
    if padding:
        axes.add_patch(
            rectangle(
                (spec.real_page_size_bytes, 0),
                padding,
                1,
                facecolor="#f4f4f4",
                edgecolor="#999999",
                hatch="////",
                linewidth=0,
            )
        )
    for _, offset, size in address.parts:
        start = offset - page.offset_bytes
        axes.add_patch(
            rectangle(
                (start, -0.12),
                max(size, spec.page_size_bytes / 250),
                1.24,
                facecolor="black",
                linewidth=0,
                clip_on=False,
            )
        )
    axes.set_xlim(0, spec.page_size_bytes)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    ticks = [0, spec.page_size_bytes]
    axes.set_xticks(ticks, ["0", f"{spec.page_size_bytes:,} B"], fontsize=8)
    axes.get_xticklabels()[1].set_horizontalalignment("right")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _address_summary(page: PageLayout, token: int, address: RowAddress) -> list[str]:
    where = ", ".join(f"{name} at + {offset:,}" for name, offset, _ in address.parts)
    return [
        f"token {token:,}: block table entry {address.entry:,}, row {address.row}; bytes block_id x "
        f"{page.block_stride_bytes:,}:",
        where,
    ]
