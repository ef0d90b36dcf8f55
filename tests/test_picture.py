"""Pictures of the slab: bands that match the layout, addresses that match the bytes, files that are pictures."""

import re
import xml.etree.ElementTree as ET

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from dsv4kv_jax import KVCache, picture
from dsv4kv_jax.address import row_address
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.plan import plan

PRO = ModelConfig.preset("deepseek-v4-pro")
SMALL = ModelConfig(name="small", num_hidden_layers=3, compress_ratios=(1, 4, 128))
GIB = 2**30


@pytest.mark.parametrize("options", [{}, {"cache_dtype": "bf16"}, {"draft": "mtp"}, {"hybrid": False}])
def test_bands_are_the_pages_of_the_layout(options):
    layout = plan(PRO, 100 * GIB, **options).layout
    drawn = picture.bands(layout)
    for group, runs in zip(layout.groups, drawn, strict=True):
        assert [run.start for run in runs] == [0, *(run.end for run in runs[:-1])]
        assert runs[-1].end == group.page_size_bytes
        assert sum(run.count for run in runs) == len(group.layers)
        if layout.form == "packed":
            starts = [run.start + i * run.page_size_bytes for run in runs for i in range(run.count)]
            assert starts == [layout.pages[name].offset_bytes for name in group.layers]


def test_letters_are_in_proportion_to_bytes():
    text = picture.text(plan(PRO, 10 * GIB))
    bars = re.findall(r"\|(.{64})\|", text)
    assert len(bars) == 5
    assert (bars[0].count("C"), bars[0].count("k"), bars[0].count("H")) == (50, 12, 2)
    assert bars[1].strip("w·") == ""
    assert bars[1].count("w") == round(64 * 1_160_640 / 1_435_968)
    assert bars[3].count("S") == round(64 * 1_017_792 / 1_435_968)


@given(token=st.integers(0, 10_000), layer=st.sampled_from(["model.layers.1.attn", "model.layers.2.attn"]))
def test_the_address_is_where_the_row_is(token, layer):
    page = plan(SMALL, GIB).layout.page(layer)
    address = row_address(page, token)
    entry = token // 256
    assert address.entry == entry
    assert address.row == (token - 256 * entry) // page.spec.compress_ratio
    (data, data_start, data_size), (scale, scale_start, scale_size) = address.parts
    assert (data, data_size, scale, scale_size) == ("data", 576, "scale", 8)
    assert data_start == page.offset_bytes + 576 * address.row
    assert scale_start == page.offset_bytes + 576 * page.storage_block_size + 8 * address.row


def test_a_row_written_by_the_cache_is_at_its_address():
    cache = KVCache.allocate(plan(SMALL, 64 * 2**20), num_blocks=4)
    layer = "model.layers.1.attn"
    address = row_address(cache.page(layer), 77)
    slot = 3 * cache.page(layer).storage_block_size + address.row
    written = cache.insert_rows(layer, jnp.array([slot], jnp.int32), jnp.ones((1, 512), jnp.float32))
    block = np.asarray(written.slab)[3].view(np.uint8).reshape(-1)
    expected = {start + i for _, start, size in address.parts for i in range(size)}
    assert set(np.flatnonzero(block)) <= expected
    for _, start, size in address.parts:
        assert np.any(block[start : start + size])


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_files_are_pictures_and_the_same_every_time(tmp_path, ending):
    files = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.{ending}"
        figure = picture.draw(plan(PRO, 10 * GIB), layer="model.layers.2.attn", token=1000)
        assert figure.get_size_inches()[0] * figure.dpi == 800
        picture.save(figure, str(path))
        files.append(path.read_bytes())
    assert files[0] == files[1]
    if ending == "png":
        assert files[0].startswith(b"\x89PNG")
    else:
        assert ET.fromstring(files[0]).tag.endswith("svg")


def test_every_label_of_the_figure_is_inside_it():
    """No text may be cut off at the edges or lie on another text."""
    for planned, layer in (
        (plan(PRO, 10 * GIB), "model.layers.30.attn"),
        (plan(ModelConfig.preset("deepseek-v4-flash"), 10 * GIB, draft="mtp"), None),
        (plan(PRO, 100 * GIB, cache_dtype="bf16"), "model.layers.30.attn.indexer.k_cache"),
    ):
        figure = picture.draw(planned, layer=layer, token=123_456)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        width, height = figure.bbox.width, figure.bbox.height
        found = figure.findobj(Text, include_self=False)
        texts = {
            (t.get_text(), t.get_window_extent(renderer).bounds) for t in found if t.get_text() and t.get_visible()
        }
        boxes = [(words, Bbox.from_bounds(*bounds)) for words, bounds in texts]  # findobj lists legends twice
        assert len(boxes) > 10
        for words, box in boxes:
            assert box.x0 >= 0, words
            assert box.y0 >= 0, words
            assert box.x1 <= width, words
            assert box.y1 <= height, words
        for i, (words, box) in enumerate(boxes):
            for other, other_box in boxes[i + 1 :]:
                shared_x = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
                shared_y = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
                assert shared_x < 1 or shared_y < 1, f"{words!r} lies on {other!r}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": "model.layers.99.attn"}, r"no layer 'model.layers.99.attn' here"),
        ({"layer": "model.layers.2.attn", "token": -1}, r"token=-1 must be a position of at least 0"),
        ({"worker": 1}, r"worker=1 does not exist; the plan has 1"),
    ],
)
@pytest.mark.parametrize("draw", [picture.draw, picture.text])
def test_bad_input_is_refused(draw, arguments, message):
    with pytest.raises(PlanError, match=message):
        draw(plan(PRO, 10 * GIB), **arguments)


def test_other_file_endings_are_refused(tmp_path):
    with pytest.raises(PlanError, match=r"must end in .png or .svg"):
        picture.save(picture.draw(plan(PRO, 10 * GIB)), str(tmp_path / "slab.gif"))


def test_a_plan_without_caches_has_no_picture():
    empty = plan(ModelConfig(name="none", num_hidden_layers=0, compress_ratios=()), 1)
    with pytest.raises(PlanError, match="nothing to draw"):
        picture.draw(empty)
