"""Slabs past 2**31 and 2**32 bytes: every operation at the first, a middle and the last block, and nowhere else.

On a CPU only the small slab runs; it shows that the test itself is right.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pages
import pytest
from jax import lax

from dsv4kv_jax import kernels
from dsv4kv_jax.kernels import _compat

ON_GPU = jax.default_backend() == "gpu"
SIZES = [pytest.param(8 * 2**20, id="8MiB")] + [
    pytest.param(
        int(size * 2**30),
        id=f"{size}GiB",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU that JAX can use")],
    )
    for size in (1.5, 3, 4.002, 6, 40, 100)
]
IMPLEMENTATIONS = ["xla", *(["mosaic_gpu"] if ON_GPU and _compat.why_no_mosaic() is None else [])]


def blocks_of(slab, block_ids):
    """Bytes of some blocks, read by numpy's addressing: a slice of the slab is copied to the host for each."""
    return np.stack([np.asarray(slab[int(block)]).view(np.uint8).reshape(-1) for block in block_ids])


@jax.jit
def checksums(slab):
    """One number for each block, so that a stray write anywhere shows."""
    words = lax.iota(jnp.uint32, int(np.prod(slab.shape[1:]))).reshape(slab.shape[1:])
    return jnp.sum(slab * (words | jnp.uint32(1)), axis=(1, 2), dtype=jnp.uint32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["c4a", "keys_fp8", "c4_state", "swa_bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_every_operation_at_the_far_end(size, name, implementation):
    page = pages.PAGES[name]
    run = {"implementation": implementation}
    num_blocks = size // page.block_stride_bytes
    shape = (num_blocks, page.block_stride_bytes // page.spec.alignment, page.words_per_row)
    slab = jax.jit(lambda: jnp.full(shape, 0x5A5A5A5A, jnp.uint32))()
    rows_per_block = page.storage_block_size
    touched = [1, num_blocks // 2, num_blocks - 1]
    watched = [0, 1, 2, num_blocks // 2, num_blocks - 2, num_blocks - 1]
    slots = [block * rows_per_block + row for block in touched for row in (0, rows_per_block - 1)]
    rows = pages.random_rows(page, len(slots))
    expected = blocks_of(slab, watched)
    floor = "scale" if name == "c4a" else "amax"
    for slot, row in zip(slots, rows, strict=True):
        sections = oracle.encode_row(page.format.name, row, floor)
        where = watched.index(slot // rows_per_block) * rows_per_block + slot % rows_per_block
        oracle.write_row(expected, page.offset_bytes, rows_per_block, where, sections)

    before = np.asarray(checksums(slab))
    hostile = np.int32([*slots, -1, num_blocks * rows_per_block, 2**31 - 1])
    padded = np.concatenate([rows, np.full((3, rows.shape[1]), np.nan, np.float32)])
    write = jax.jit(lambda slab, *args: kernels.insert_rows(slab, page, *args, **run), donate_argnums=0)
    slab = write(slab, hostile, padded)
    np.testing.assert_array_equal(blocks_of(slab, watched), expected)
    after = np.asarray(checksums(slab))
    assert set(np.flatnonzero(before != after)) <= set(touched)

    read = jax.jit(lambda slab, slots: kernels.gather_rows(slab, page, slots, dtype=jnp.float32, **run))
    found = np.asarray(read(slab, hostile))
    for row, value in zip(rows, found, strict=False):
        encoded = oracle.encode_row(page.format.name, row, floor)
        np.testing.assert_array_equal(value, oracle.decode_row(page.format.name, encoded))
    assert not found[len(slots) :].any()

    sequence = jax.jit(
        lambda slab, table, lens: kernels.gather_sequence(
            slab, page, table, lens, max_rows=rows_per_block, dtype=jnp.float32, **run
        )
    )
    ends = np.asarray(sequence(slab, np.int32([[num_blocks - 1], [num_blocks]]), np.int32([rows_per_block] * 2)))
    np.testing.assert_array_equal(ends[0, [0, -1]], found[4:6])
    assert not ends[1].any()

    copy = jax.jit(lambda slab, src, dst: kernels.copy_blocks(slab, src, dst, **run), donate_argnums=0)
    slab = copy(slab, np.int32([num_blocks - 1, 1, 1]), np.int32([2, num_blocks - 2, 0]))
    expected[[2, 4]] = expected[[5, 1]]
    np.testing.assert_array_equal(blocks_of(slab, watched), expected)

    clear = jax.jit(lambda slab, ids: kernels.zero_blocks(slab, ids, page, **run), donate_argnums=0)
    slab = clear(slab, np.int32([num_blocks - 1, num_blocks, -1]))
    expected[5, page.offset_bytes : page.offset_bytes + page.spec.real_page_size_bytes] = 0
    np.testing.assert_array_equal(blocks_of(slab, watched), expected)
    clear_all = jax.jit(lambda slab, ids: kernels.zero_blocks(slab, ids, **run), donate_argnums=0)
    slab = clear_all(slab, np.int32([num_blocks - 2]))
    expected[4] = 0
    np.testing.assert_array_equal(blocks_of(slab, watched), expected)
    untouched = np.setdiff1d(np.arange(num_blocks), [*touched, 2, num_blocks - 2])
    np.testing.assert_array_equal(np.asarray(checksums(slab))[untouched], before[untouched])
