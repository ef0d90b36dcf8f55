"""Writing and reading rows: byte for byte against the oracle, for every kind of page, with hostile slots."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dsv4kv_jax import kernels
from dsv4kv_jax.kernels import rows as rows_module
from dsv4kv_jax.layout import PageLayout
from dsv4kv_jax.specs import SlidingWindowMLASpec

BLOCKS = 4
SLOTS = 12  # written or read at once
INT32_MAX = 2**31 - 1
every_page = pytest.mark.parametrize("name", list(pages.PAGES))
some_pages = pytest.mark.parametrize("name", ["swa", "c128a", "keys_mxfp4", "c4_state", "swa_fp8"])


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@functools.cache
def jitted(operation, name, **options):
    function = getattr(kernels, operation)
    page = pages.PAGES[name]
    donate = (0,) if operation == "insert_rows" else ()
    return jax.jit(lambda slab, *args: function(slab, page, *args, **options), donate_argnums=donate)


def filled(name, seed=0):
    """(slab, its bytes): encoded rows in every slot of the page, noise everywhere else."""
    page = pages.PAGES[name]
    raw = pages.as_bytes(pages.random_slab(page, BLOCKS, seed))
    count = BLOCKS * page.storage_block_size
    for slot, row in enumerate(pages.random_rows(page, count, seed)):
        sections = oracle.encode_row(page.format.name, row, default_floor(page))
        oracle.write_row(raw, page.offset_bytes, page.storage_block_size, slot, sections)
    return pages.as_slab(raw, page), raw


def insert(name, slab, slots, rows, **options):
    """`insert_rows` of at most `SLOTS` rows, compiled once for each page and set of options."""
    slots = np.append(slots, np.full(SLOTS - len(slots), -1)).astype(np.int32)
    padding = np.full((SLOTS - len(rows), rows.shape[1]), np.nan, rows.dtype)
    return jitted("insert_rows", name, **options)(jnp.array(slab), slots, np.concatenate([rows, padding]))


def gather(name, slab, slots):
    """`gather_rows` of at most `SLOTS` slots as float32, compiled once for each page."""
    padded = np.append(slots, np.full(SLOTS - len(slots), -1)).astype(np.int32)
    return np.asarray(jitted("gather_rows", name)(slab, padded))[: len(slots)].astype(np.float32)


def default_floor(page):
    return "scale" if page.spec.compress_ratio > 1 and page.format.name == "fp8_ds_mla" else "amax"


def expected_rows(name, raw, slots, fill=0.0):
    """What gather_rows gives, as float32."""
    page = pages.PAGES[name]
    out = np.full((len(slots), page.format.num_values), fill, np.float32)
    for index, slot in enumerate(slots):
        sections = oracle.read_row(raw, page.offset_bytes, page.storage_block_size, slot, pages.section_bytes(page))
        if sections is not None:
            out[index] = oracle.decode_row(page.format.name, sections)
    return out


def hostile_slots(page):
    """Slots of the pool, of its edges, far outside it, and the same ones again and again."""
    end = BLOCKS * page.storage_block_size
    inside = st.integers(0, end - 1)
    outside = st.sampled_from([-1, -2, -5, -end, -(2**31), end, end + 1, INT32_MAX, INT32_MAX - 63])
    edges = st.sampled_from([0, end - 1, page.storage_block_size - 1, min(page.storage_block_size, end - 1)])
    return st.lists(inside | outside | edges, min_size=SLOTS, max_size=SLOTS)


@every_page
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_insert_writes_these_bytes_and_no_others(name, data):
    page = pages.PAGES[name]
    slots = data.draw(hostile_slots(page))
    rows = pages.random_rows(page, SLOTS, seed=data.draw(st.integers(0, 9)))
    slab = pages.random_slab(page, BLOCKS)
    expected = pages.as_bytes(slab)
    for slot, row in zip(slots, rows, strict=True):  # in order: the last row of a repeated slot wins
        sections = oracle.encode_row(page.format.name, row, default_floor(page))
        oracle.write_row(expected, page.offset_bytes, page.storage_block_size, slot, sections)
    found = jitted("insert_rows", name)(slab, jnp.int32(slots), rows)
    np.testing.assert_array_equal(pages.as_bytes(found), expected)


@every_page
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_gather_reads_these_rows(name, data):
    page = pages.PAGES[name]
    slots = data.draw(hostile_slots(page))
    slab, raw = _filled_once(name)
    found = jitted("gather_rows", name)(slab, np.int32(slots))
    expected = expected_rows(name, raw, slots)
    if page.format.name == "float32":
        assert found.dtype == jnp.float32
    else:
        assert found.dtype == jnp.bfloat16
        expected = expected.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(found), expected)


@some_pages
def test_gather_into_another_dtype_with_another_fill(name):
    slab, raw = _filled_once(name)
    slots = [1, -1, 7, INT32_MAX]
    found = jitted("gather_rows", name, fill=-7.0, dtype="float32")(slab, np.int32(slots))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected_rows(name, raw, slots, fill=-7.0))


_filled_once = functools.cache(filled)


@some_pages
def test_with_64_bit_types_on(name):
    page = pages.PAGES[name]
    end = BLOCKS * page.storage_block_size
    rows = pages.random_rows(page, 5, seed=3)
    slots = [end - 1, -1, page.storage_block_size, end, page.storage_block_size + 1]
    slab = pages.random_slab(page, BLOCKS)
    plain = insert(name, slab, slots, rows)
    read = gather(name, plain, slots)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(insert(name, slab, slots, rows), plain)
        np.testing.assert_array_equal(gather(name, plain, slots), read)
    assert not read[[1, 3]].any()


@pytest.mark.parametrize("floor", ["amax", "scale"])
@pytest.mark.parametrize("name", ["swa", "c4a"])
def test_scale_floor(name, floor):
    """Each page has vLLM's floor by default, and takes the other one."""
    page = pages.PAGES[name]
    row = np.full((1, 512), 1e-5, np.float32)
    slab = pages.random_slab(page, BLOCKS)
    given = pages.as_bytes(insert(name, slab, [3], row, scale_floor=floor))
    sections = oracle.read_row(given, page.offset_bytes, page.storage_block_size, 3, pages.section_bytes(page))
    assert sections[1].tolist() == [{"amax": 105, "scale": 114}[floor]] * 7 + [0]
    default = pages.as_bytes(insert(name, slab, [3], row))
    assert (default == given).all() == (floor == default_floor(page))


def test_negative_slots_do_not_wrap():
    """jax-ml/jax#29434: `.at[-1].set(mode="drop")` writes the last row."""
    page = pages.PAGES["c128a"]  # two rows a page: two blocks are four rows
    slab = pages.random_slab(page, 2)
    before = pages.as_bytes(slab)
    rows = np.ones((5, 512), np.float32)
    run = jax.jit(lambda *args: kernels.insert_rows(args[0], page, *args[1:]))
    after = pages.as_bytes(run(slab, np.int32([-1, 2, 4, -5, INT32_MAX]), rows))
    oracle.write_row(before, page.offset_bytes, 2, 2, oracle.encode_row("fp8_ds_mla", rows[1], "scale"))
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("name", ["swa", "c4_state"])
def test_last_of_many_equal_slots_wins(name):
    page = pages.PAGES[name]
    count = 300
    rows = pages.random_rows(page, count, seed=5)
    slots = np.random.default_rng(0).integers(-1, 6, count).astype(np.int32)
    found = jitted("insert_rows", name)(pages.random_slab(page, BLOCKS), slots, rows)
    last = {int(slot): index for index, slot in enumerate(slots) if slot >= 0}
    expected = pages.as_bytes(pages.random_slab(page, BLOCKS))
    for slot, index in last.items():
        sections = oracle.encode_row(page.format.name, rows[index], default_floor(page))
        oracle.write_row(expected, page.offset_bytes, page.storage_block_size, slot, sections)
    np.testing.assert_array_equal(pages.as_bytes(found), expected)


@given(slots=st.lists(st.integers(-2, 4) | st.sampled_from([INT32_MAX, -(2**31)]), min_size=9, max_size=9))
@settings(max_examples=30, deadline=None)
def test_keep_last(slots):
    """A CPU scatters in order, so whole writes alone would not show that no slot is left twice."""
    found = _keep_last(np.int32(slots)).tolist()
    assert found == [slot if slot not in slots[index + 1 :] else -1 for index, slot in enumerate(slots)]


_keep_last = jax.jit(rows_module.keep_last)


def test_scattered_windows_are_distinct(monkeypatch):
    """Insertion promises XLA so; the dropped ones count."""
    scattered = []
    scatter = lax.scatter

    def spy(slab, windows, *args, **options):
        assert options["unique_indices"]
        scattered.append(np.asarray(windows).reshape(-1, 3).tolist())
        return scatter(slab, windows, *args, **options)

    monkeypatch.setattr(lax, "scatter", spy)
    page = pages.PAGES["swa"]
    slots = np.int32([3, -1, 3, 64, -1, INT32_MAX, 64, 3])
    kernels.insert_rows(pages.random_slab(page, 2), page, slots, np.ones((8, 512), np.float32))
    assert len(scattered) == 2
    for windows in scattered:
        assert len(windows) == len(set(map(tuple, windows))) == 8


def test_poison_is_never_read():
    """vllm-project/vllm#57156: the null block and every row that is not asked for hold NaN bytes."""
    page = pages.PAGES["swa"]
    slab = jnp.full_like(pages.random_slab(page, BLOCKS), 0xFFFFFFFF)
    slots = [64, 130, -1, -1, -1, -1, -1, -1]
    rows = np.concatenate([pages.random_rows(page, 2), np.full((6, 512), np.nan, np.float32)])
    slab = insert("swa", slab, slots, rows)
    expected = np.full((BLOCKS, page.block_stride_bytes), 0xFF, np.uint8)
    for slot, row in zip(slots, rows, strict=True):
        oracle.write_row(expected, page.offset_bytes, 64, slot, oracle.encode_row("fp8_ds_mla", row))
    np.testing.assert_array_equal(pages.as_bytes(slab), expected)
    found = gather("swa", slab, slots)
    assert np.isfinite(found).all()
    assert not found[2:].any()
    for topk in ([-1, -1, -1, -1], [BLOCKS * 64, -2, -1, -1]):  # no valid entry
        assert not gather("swa", slab, topk).any()
    found = gather("swa", slab, [64, -1, 130, -1])
    assert found[[0, 2]].any(axis=1).all()
    assert not found[[1, 3]].any()


table_entries = st.sampled_from([-1, 0, 1, 2, 3, 4, 7, INT32_MAX, -(2**31)])


@some_pages
@given(
    table=st.lists(st.lists(table_entries, min_size=3, max_size=3), min_size=3, max_size=3),
    lengths=st.lists(st.integers(-1, 20), min_size=3, max_size=3),
    starts=st.lists(st.sampled_from([0, 1, 3, 60, 65, 190, -2, INT32_MAX - 40]), min_size=3, max_size=3),
)
@settings(max_examples=10, deadline=None)
def test_gather_sequence(name, table, lengths, starts):
    page = pages.PAGES[name]
    slab, raw = _filled_once(name)
    found = np.asarray(_sequences(name)(slab, np.int32(table), np.int32(lengths), np.int32(starts)))
    assert found.shape == (3, 17, page.format.num_values)
    for request in range(3):
        slots = [oracle.row_slot(table[request], starts[request] + j, page.storage_block_size) for j in range(17)]
        slots = [slot if j < lengths[request] else -1 for j, slot in enumerate(slots)]
        np.testing.assert_array_equal(found[request], expected_rows(name, raw, slots, fill=2.5))


@functools.cache
def _sequences(name):
    page = pages.PAGES[name]
    return jax.jit(
        lambda slab, table, lengths, starts: kernels.gather_sequence(
            slab, page, table, lengths, max_rows=17, starts=starts, fill=2.5, dtype=jnp.float32
        )
    )


def test_rows_past_the_length_are_filled():
    """vllm-project/vllm#51252: lengths 3, 0 and 17 of 32 rows; the rest is the fill value, not leftovers."""
    slab, raw = _filled_once("keys_fp8")
    run = jitted("gather_sequence", "keys_fp8", max_rows=32)
    found = np.asarray(run(slab, np.int32([[1], [2], [3]]), np.int32([3, 0, 17])))
    for request, length in enumerate([3, 0, 17]):
        slots = [64 * (request + 1) + row for row in range(length)]
        np.testing.assert_array_equal(found[request, :length].astype(np.float32), expected_rows("keys_fp8", raw, slots))
        assert not found[request, length:].any()


@some_pages
def test_nothing_to_do(name):
    page = pages.PAGES[name]
    slab = pages.random_slab(page, BLOCKS)
    width = page.format.num_values
    none = np.zeros(0, np.int32)
    after = jitted("insert_rows", name)(jnp.array(slab), none, np.zeros((0, width), np.float32))
    np.testing.assert_array_equal(after, slab)
    assert jitted("gather_rows", name)(slab, none).shape == (0, width)
    assert jitted("gather_rows", name)(slab, np.zeros((3, 0), np.int32)).shape == (3, 0, width)
    for requests, blocks, rows in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        args = (slab, np.ones((requests, blocks), np.int32), np.ones(requests, np.int32))
        found = jitted("gather_sequence", name, max_rows=rows)(*args)
        assert found.shape == (requests, rows, width)
        assert blocks or not found.any()


# --- the slab is never copied ---


def _compiled(function, *args):
    return jax.jit(function, donate_argnums=0).lower(*args).compile()


def _assert_in_place(function, page, *args, num_bytes=256 * 2**20):
    """The function, compiled for a large slab that is donated, needs no second one."""
    shape = (num_bytes // page.block_stride_bytes, page.block_stride_bytes // page.spec.alignment, page.words_per_row)
    slab = jax.ShapeDtypeStruct(shape, jnp.uint32)
    memory = _compiled(function, slab, *args).memory_analysis()
    size = np.prod(shape) * 4
    assert memory.temp_size_in_bytes < 0.05 * size
    assert memory.alias_size_in_bytes == size


@pytest.mark.parametrize("name", ["c4a", "keys_fp8", "c4_state", "swa_bf16"])
def test_writes_are_in_place(name):
    """openxla/xla#45912, on a slab of 256 MiB: alone, in a loop, and in a scan with two reads and an output."""
    page = pages.PAGES[name]
    slots = jax.ShapeDtypeStruct((16,), jnp.int32)
    rows = jax.ShapeDtypeStruct((16, page.format.num_values), jnp.float32)
    write, read = kernels.insert_rows, functools.partial(kernels.gather_rows, dtype=jnp.float32)
    _assert_in_place(lambda slab, slots, rows: write(slab, page, slots, rows), page, slots, rows)

    def step(i, slab, slots, rows):
        rows = 0.5 * rows + read(slab, page, slots + i)
        return write(slab, page, slots, rows), rows

    def loop(slab, slots, rows):
        return lax.fori_loop(0, 8, lambda i, state: step(i, state[0], slots, state[1]), (slab, rows))

    def scan(slab, slots, rows):
        def body(state, i):
            before = read(state[0], page, slots + 2 * i)
            slab, rows = step(i, state[0], slots, state[1] + before)
            return (slab, rows), before.sum()

        return lax.scan(body, (slab, rows), jnp.arange(8, dtype=jnp.int32))

    for function in (loop, scan):
        _assert_in_place(function, page, slots, rows)


def test_pointer_stays_the_same():
    page = pages.PAGES["swa"]
    slab = jnp.array(pages.random_slab(page, 4))
    step = jax.jit(lambda slab, slots, rows: kernels.insert_rows(slab, page, slots, rows), donate_argnums=0)
    rows = jnp.ones((2, 512), jnp.bfloat16)
    pointer = slab.unsafe_buffer_pointer()
    for slot in range(100):
        slab = step(slab, jnp.int32([slot, slot + 1]), rows)
        assert slab.unsafe_buffer_pointer() == pointer


# --- addresses of large slabs, without the memory ---


def _page_with_stride(stride, rows=64):
    spec = SlidingWindowMLASpec(
        block_size=rows, head_size=512, dtype="uint8", alignment=576, cache_dtype_str="fp8_ds_mla", sliding_window=128
    )
    offset = (stride - spec.page_size_bytes) // 576 * 576
    return PageLayout(name="x", spec=spec, group=0, buffer=0, offset_bytes=offset, block_stride_bytes=stride)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("stride", "first"),
    [(1435968, 1496), (1228800 // 576 * 576, 1748), (1315008, 1634), (1473408, 1458), (149760, 14340)],
)
def test_addresses_past_31_bits(stride, first, x64):
    """ROCm/aiter#4427: block_id * stride wraps in int32; (block, row, word) never does."""
    page = _page_with_stride(stride)
    num_blocks = INT32_MAX // 64
    assert first * stride >= 2**31 > (first - 1) * stride
    block_ids = np.array([1, first - 1, first, 4564, 495_727, num_blocks - 1])
    slots = (block_ids[:, None] * 64 + np.array([0, 1, 63])).reshape(-1)
    with jax.enable_x64(x64):
        block, row, valid = rows_module.locate(page, jnp.asarray(slots, jnp.int32), num_blocks)
        assert valid.all()
        for section, (start, size) in enumerate([(0, 576), (64 * 576, 8)]):
            windows = rows_module.row_windows(page, section, block, row)
            assert windows.dtype == jnp.int32
            found = np.asarray(windows, np.int64)
            address = found[..., 0] * stride + found[..., 1] * 576 + found[..., 2] * 4
            wanted = slots // 64 * stride + page.offset_bytes + start + slots % 64 * size
            np.testing.assert_array_equal(address[:, 0], wanted)
            assert (np.diff(address, axis=1) == 4 * size // 4 // windows.shape[1]).all()
    beyond = jnp.asarray([num_blocks * 64, INT32_MAX, -1, -64], jnp.int32)
    assert not rows_module.locate(page, beyond, num_blocks)[2].any()


# --- refusals ---


def test_refusals():
    page = pages.PAGES["swa"]
    slab = pages.random_slab(page, 2)
    slots, rows = jnp.int32([64, 65]), jnp.zeros((2, 512), jnp.float32)
    insert = functools.partial(kernels.insert_rows, slab, page)
    with pytest.raises(ValueError, match=r"rows have shape \(2, 512\) for 1 slots; pass one row per slot"):
        insert(slots[:1], rows)
    with pytest.raises(ValueError, match=r"rows have shape \(2, 448\); 'fp8_ds_mla' rows hold 512 values"):
        insert(slots, rows[:, :448])
    with pytest.raises(ValueError, match="rows have dtype float64; .* bfloat16 or float32"):
        insert(slots, np.zeros((2, 512)))
    with pytest.raises(ValueError, match="slots has dtype float32; pass int32"):
        insert(jnp.float32([1, 2]), rows)
    with pytest.raises(ValueError, match="slots holds values from 64 to 4294967360, which do not fit in int32"):
        insert(np.array([64, 2**32 + 64]), rows)
    with pytest.raises(ValueError, match=r"slots has shape \(1, 2\); it must have 1 dimension"):
        insert(slots[None], rows)
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"slots has dtype int64; pass int32, e\.g\. slots\.astype\(jnp\.int32\)"),
    ):
        insert(jnp.asarray([1, 2], jnp.int64), rows)
    wide = insert(np.array([64, 65], np.int64), rows)  # host integers are converted once their range is known
    np.testing.assert_array_equal(wide, insert(slots, rows))
    with pytest.raises(ValueError, match="implementation='triton' is not known; use one of 'xla', 'mosaic_gpu'"):
        insert(slots, rows, implementation="triton")
    with pytest.raises(ValueError, match=r"slab has shape \(2, .*pass the slab of the same plan"):
        kernels.insert_rows(slab, pages.PAGES["swa_bf16"], slots, rows)
    with pytest.raises(ValueError, match=r"slab is uint8\[2, 3, 4\]; it must be uint32\[num_blocks"):
        kernels.gather_rows(jnp.zeros((2, 3, 4), jnp.uint8), page, slots)
    with pytest.raises(ValueError, match="slab is NoneType"):
        kernels.gather_rows(None, page, slots)
    with pytest.raises(ValueError, match="lengths has 3 entries; 2 are needed"):
        kernels.gather_sequence(slab, page, jnp.ones((2, 1), jnp.int32), jnp.ones(3, jnp.int32), max_rows=4)
    for max_rows in (-1, 2.0, True):
        with pytest.raises(ValueError, match=f"max_rows={max_rows} must be a Python integer of at least 0"):
            kernels.gather_sequence(slab, page, jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32), max_rows=max_rows)
