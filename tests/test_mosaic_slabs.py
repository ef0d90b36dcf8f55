"""The kernels on slabs of real size, in place, on a GPU: past 2**31 bytes and words, and nothing else changed.

A uint8 slab of 2 to 4 GiB makes a Pallas-Triton kernel read illegal addresses (triton-lang/triton#2821), and a product
of a block id and a stride passes 2**31 at block 1,496 (ROCm/aiter#4427).
"""

import functools

import jax
import jax.numpy as jnp
import mosaic_support
import numpy as np
import pages
import pytest
from jax import lax
from mosaic_support import assert_same

from dsv4kv_jax import ModelConfig, kernels
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.specs import layer_specs

pytestmark = [*mosaic_support.pytestmark, *mosaic_support.gpu]
GIB = 2**30
SENTINEL = 0xA5A5A5A5
PRO = PackedLayout.from_groups(group_layers(layer_specs(ModelConfig.preset("deepseek-v4-pro"))))
KEYS = ["model.layers.60.attn.swa_cache", "model.layers.60.attn", "model.layers.59.attn"]
KEYS += ["model.layers.60.attn.indexer.k_cache", "model.layers.60.attn.compressor.state_cache"]
mosaic = functools.partial(functools.partial, implementation="mosaic_gpu")


def filled_slab(size_bytes):
    shape = PRO.buffers[0].shape(size_bytes // PRO.block_stride_bytes)
    return jax.block_until_ready(jax.jit(lambda: jnp.full(shape, SENTINEL, jnp.uint32))())


@jax.jit
def changed_words(slab, block):
    """How many words of the slab, and of one block, are no sentinels."""
    changed = slab != jnp.uint32(SENTINEL)
    return changed.sum(dtype=jnp.int32), changed[block].sum(dtype=jnp.int32)


@pytest.mark.parametrize("size", [1.5, 3, 6, 100], ids="{} GiB".format)
def test_slabs_of_all_sizes(size):
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if 0 < limit < (size + 2) * GIB:
        pytest.skip("the GPU lacks the memory; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 for the largest")
    slab = filled_slab(int(size * GIB))
    num_blocks = slab.shape[0]
    pointer = slab.unsafe_buffer_pointer()
    picked = sorted({0, 1, num_blocks // 2, min(1496, num_blocks - 2), num_blocks - 1})
    small = jnp.full((len(picked), *slab.shape[1:]), SENTINEL, jnp.uint32)  # the same blocks, by the XLA versions
    for name in KEYS:
        page = PRO.page(name)
        rows = page.storage_block_size
        where = [(index, row) for index in range(len(picked)) for row in (0, rows - 1)]
        slots = jnp.asarray([picked[index] * rows + row for index, row in where] + [-1, num_blocks * rows], jnp.int32)
        small_slots = jnp.asarray([index * rows + row for index, row in where] + [-1, -1], jnp.int32)
        values = jnp.asarray(pages.random_rows(page, slots.shape[0]))
        slab = jax.jit(mosaic(kernels.insert_rows), static_argnums=1, donate_argnums=0)(slab, page, slots, values)
        small = kernels.insert_rows(small, page, small_slots, values, implementation="xla")
        got = jax.jit(mosaic(kernels.gather_rows), static_argnums=1)(slab, page, slots)
        assert_same(got, kernels.gather_rows(small, page, small_slots, implementation="xla"))
    assert slab.unsafe_buffer_pointer() == pointer
    total = 0
    for index, block in enumerate(picked):
        assert_same(slab[block], small[index])
        everywhere, here = changed_words(slab, block)
        total += int(here)
    assert int(everywhere) == total
    last, middle = num_blocks - 1, num_blocks // 2
    source, target = jnp.asarray([last, middle, 1, -1]), jnp.asarray([middle, last, 0, 5])
    slab = jax.jit(mosaic(kernels.copy_blocks), donate_argnums=0)(slab, source, target)
    assert slab.unsafe_buffer_pointer() == pointer
    assert_same(slab[last], small[picked.index(middle)])
    assert_same(slab[middle], small[picked.index(last)])
    assert int(changed_words(slab, 0)[0]) == total
    page = PRO.page(KEYS[1])
    slab = jax.jit(lambda slab, ids: mosaic(kernels.zero_blocks)(slab, ids, page), donate_argnums=0)(
        slab, jnp.asarray([last, -1, num_blocks, 3], jnp.int32)
    )
    real, start = page.spec.real_page_size_bytes, page.offset_bytes
    for block in (last, 3):
        raw = np.asarray(slab[block]).view(np.uint8).reshape(-1)
        assert (raw[start : start + real] == 0).all()
    assert (np.asarray(slab[3]).view(np.uint8).reshape(-1)[start + real :] == 0xA5).all()
    assert (np.asarray(slab[3]).view(np.uint8).reshape(-1)[:start] == 0xA5).all()
    assert slab.unsafe_buffer_pointer() == pointer


def layers_step(slab, slots, rows):
    """Writes one row a token in every window layer; each layer reads before it writes."""
    for page in PRO.pages.values():
        if page.name.endswith("swa_cache"):
            seen = mosaic(kernels.gather_rows)(slab, page, slots)
            slab = mosaic(kernels.insert_rows)(slab, page, slots, rows + seen * 0)
    return slab


@pytest.mark.parametrize("loop", ["none", "fori_loop", "scan"])
def test_no_copy_of_the_slab(loop):
    slab = filled_slab(2 * GIB)
    slots, rows = jnp.arange(64, 128, dtype=jnp.int32), jnp.ones((64, 512), jnp.bfloat16)

    def program(slab, slots, rows):
        if loop == "none":
            return layers_step(slab, slots, rows)
        if loop == "fori_loop":
            return lax.fori_loop(0, 4, lambda i, slab: layers_step(slab, slots + i, rows), slab)
        return lax.scan(lambda slab, i: (layers_step(slab, slots + i, rows), i), slab, jnp.arange(4, dtype=jnp.int32))[
            0
        ]

    compiled = jax.jit(program, donate_argnums=0).lower(slab, slots, rows).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= slab.nbytes
    assert memory.temp_size_in_bytes < slab.nbytes // 20
    pointer = slab.unsafe_buffer_pointer()
    assert compiled(slab, slots, rows).unsafe_buffer_pointer() == pointer
