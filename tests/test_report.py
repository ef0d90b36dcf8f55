"""The HTML report and the plots in it."""

import html.parser
import re

import pytest

from dsv4kv_jax import plots, report
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.footprint import bytes_read
from dsv4kv_jax.holdings import Schedule
from dsv4kv_jax.optimize import optimize
from dsv4kv_jax.plan import plan
from dsv4kv_jax.tables import as_text, capacity_rows, capacity_table, read_table, waste_table

GIB = 2**30
PRO = ModelConfig.preset("deepseek-v4-pro")


class Tags(html.parser.HTMLParser):
    """Collects ids, references and whether every tag is closed in order."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open += [] if tag in self.VOID else [tag]
        self.handle_attributes(attrs)

    def handle_startendtag(self, tag, attrs):
        self.handle_attributes(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_attributes(self, attrs):
        for name, value in attrs:
            self.ids += [value] if name == "id" else []
            self.links += [value] if name in ("href", "xlink:href", "src") else []
            self.links += [f"#{found}" for found in re.findall(r"url\(#([^)]*)\)", value or "")]


@pytest.fixture(scope="module")
def page():
    found = [optimize(PRO, 40 * GIB, 2048, several_pools=several) for several in (False, True)]
    return report.render(plan(PRO, 40 * GIB), optimized=found)


def test_the_report_is_one_sound_page_that_needs_nothing_else(page):
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    assert len(set(tags.ids)) == len(tags.ids), "two drawings share an id"
    assert all(link.startswith("#") and link[1:] in tags.ids for link in tags.links)
    for word in ("http-equiv", "<script", "@import", "src="):
        assert word not in page


def test_the_report_holds_all_of_it(page):
    for title in (
        "One block",
        "How many requests fit",
        "Where the bytes of a request are",
        "Bytes read to decode one token",
    ):
        assert f"<h2>{title}</h2>" in page
    assert "tuned for 2K: one slab" in page
    assert "tuned for 2K: 5 pools" in page
    assert page.count("<svg") == 3 + 1 + 5
    assert "1,435,968 bytes" in page
    assert "<td>1M</td>" in page


def test_names_are_escaped():
    config = ModelConfig(name="<b>&", num_hidden_layers=2, compress_ratios=(4, 128))
    page = report.render(plan(config, GIB))
    assert "<b>" not in page
    assert "KV cache of &lt;b&gt;&amp;" in page
    assert "Bytes read" not in page  # the top-k of an unknown model is not known
    assert "Bytes read to decode one token" in report.render(plan(config, GIB), index_topk=512)


def test_tables_and_plots_show_the_same_lengths():
    planned = plan(PRO, 40 * GIB, max_model_len=5000)
    lengths = plots.context_lengths(5000)
    assert lengths == [1024, 2048, 4096, 5000]
    assert plots.context_lengths(300) == [300]
    rows = capacity_rows(planned, lengths, Schedule.of(planned))
    for table in (capacity_table(rows), waste_table(rows), read_table(rows)):
        assert [row[0] for row in table[1]] == ["1K", "2K", "4K", "5,000"]
        text = as_text(table).splitlines()
        assert len({len(line) for line in text}) == 1
    assert rows[1]["decoding_blocks"] == [8, 3, 3, 17, 3]
    assert rows[1]["bytes_read"]["total"] == bytes_read(planned, 2048).total


def test_plots_draw_their_figures():
    planned = plan(PRO, 80 * GIB)
    figure = plots.plot_capacity({"plan": [planned]}, 1 << 20)
    (line,) = figure.axes[0].lines
    assert list(line.get_ydata())[1] == 1735
    figure = plots.plot_capacity({"plan": [planned], "twin": [planned]}, 1 << 20)
    assert list(figure.axes[0].lines[1].get_ydata()) == [1.0] * 11
    lines = {line.get_label(): line for line in plots.plot_bytes_read(planned, 1 << 20).axes[0].lines}
    assert lines["indexer"].get_ydata()[-1] == pytest.approx(30 * 262_144 * 132 / 1e6)
    plots.plot_capacity({"plan": [planned]}, 500)


def test_a_plan_without_caches_has_no_report():
    with pytest.raises(PlanError):
        report.render(plan(ModelConfig(name="none", num_hidden_layers=0, compress_ratios=()), 1))
