"""Real loops: JAX writes, PyTorch attends, step by step, on both forms of ownership; and no stale byte."""

import functools
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4kv_jax
from dsv4kv_jax import KVCache, kernels
from dsv4kv_jax.interop import SharedSlab, flash_mla, lend
from dsv4kv_jax.specs import layer_specs

torch = pytest.importorskip("torch")

from interop_reference import attend, relative_error, rows_of  # noqa: E402

FLASH = dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash")
LAYERS = {1: "model.layers.0.attn", 4: "model.layers.2.attn", 128: "model.layers.3.attn"}
SPECS = layer_specs(FLASH, layers=(0, 2, 3))
STRIDE = dsv4kv_jax.plan_from_specs(SPECS, 1 << 30).layout.block_stride_bytes
HEADS = 2

# First sequence length of each request: empty, before a block ends, before the window fills and a C128A entry ends.
STARTS = (0, 62, 121, 250)
STEPS = 12
TABLE_LEN = 8
NUM_BLOCKS = 80
LATENTS = {  # the row that is written for entry c of a request: [request, c]
    ratio: np.random.default_rng(ratio).standard_normal((len(STARTS), max(STARTS) + STEPS, 512), np.float32)
    for ratio in (1, 4, 128)
}


def make_plan():
    return dsv4kv_jax.plan_from_specs(SPECS, NUM_BLOCKS * STRIDE)


def block_tables(layout):
    """Disjoint shuffled blocks for each request and group: int32 [R, TABLE_LEN] a group."""
    ids = np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS))
    tables = []
    for group in layout.groups:
        count = -(-(max(STARTS) + STEPS) // group.block_size)
        table = np.zeros((len(STARTS), TABLE_LEN), np.int32)
        if group.block_size >= 64:
            table[:, :count] = ids[: count * len(STARTS)].reshape(len(STARTS), count)
            ids = ids[count * len(STARTS) :]
        tables.append(jnp.asarray(table))
    return tables


def step_of(layout, ratio, tables):
    """A jitted, donated step of one layer: writes this step's rows, returns the indices to attend to."""
    name = LAYERS[ratio]
    window = layout.page(name + ".swa_cache")
    compressed = layout.page(name) if ratio > 1 else None
    requests = jnp.arange(len(STARTS), dtype=jnp.int32)
    start_loc = jnp.arange(len(STARTS) + 1, dtype=jnp.int32)

    def step(cache, seq_lens):
        count = len(STARTS)
        table = tables[window.group]
        position = seq_lens - 1
        rows = jnp.asarray(LATENTS[1])[requests, position]
        slots = kernels.slot_mapping(table, start_loc, seq_lens, block_size=64, num_tokens=count)
        slab = kernels.insert_rows(cache.slab, window, slots, rows)
        swa = kernels.swa_indices(table, start_loc, seq_lens, block_size=64, num_tokens=count)
        extra = None
        if compressed is not None:
            table = tables[compressed.group]
            slots = kernels.compressed_slot_mapping(
                table, start_loc, seq_lens, block_size=256, compress_ratio=ratio, num_tokens=count
            )
            rows = jnp.asarray(LATENTS[ratio])[requests, position // ratio]
            slab = kernels.insert_rows(slab, compressed, slots, rows)
            if ratio == 4:
                entries = jnp.arange(128, dtype=jnp.int32)
                topk = jnp.where(entries < (position[:, None] + 1) // 4, entries, -1)
                extra = kernels.topk_to_slots(topk, requests, table, storage_block_size=64)
            else:
                extra = kernels.c128a_indices(table, start_loc, seq_lens, width=128, num_tokens=count)
        return cache.with_slab(slab), (swa, extra)

    return jax.jit(step, donate_argnums=0)


@functools.partial(jax.jit, static_argnames="page")
def insert(slab, slots, rows, page):
    return kernels.insert_rows(slab, page, slots, rows)


@functools.partial(jax.jit, static_argnames="page")
def gather(slab, slots, page):
    return kernels.gather_rows(slab, page, slots, dtype=jnp.float32)


def prefill(cache, layout, ratio, tables):
    """Writes the rows of everything before STARTS."""
    name = LAYERS[ratio]
    caches = {name + ".swa_cache": 1} | ({name: ratio} if ratio > 1 else {})
    for cache_name, per_entry in caches.items():
        page = layout.page(cache_name)
        size = page.storage_block_size
        table = np.asarray(tables[page.group])
        request = np.repeat(np.arange(len(STARTS)), [start // per_entry for start in STARTS])
        entry = np.concatenate([np.arange(start // per_entry) for start in STARTS])
        slots = jnp.asarray((table[request, entry // size] * size + entry % size).astype(np.int32))
        rows = jnp.asarray(LATENTS[per_entry][request, entry])
        cache = cache.with_slab(insert(cache.slab, slots, rows, page=page))
    return cache


def expected(ratio, seq_lens, q, sink):
    """float32 attention over the unquantised latents, from the definition."""
    outs = []
    for request, length in enumerate(seq_lens):
        keys = LATENTS[1][request, max(length - 128, 0) : length]
        if ratio > 1:
            keys = np.concatenate([keys, LATENTS[ratio][request, : length // ratio]])
        keys = keys.astype(np.float64)
        logits = np.einsum("hd,kd->hk", np.asarray(q[request], np.float64), keys) * 512**-0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        denominator = weights.sum(-1) + np.exp(np.asarray(sink, np.float64) - logits.max(-1))
        outs.append(np.einsum("hk,kd->hd", weights, keys) / denominator[:, None])
    return np.stack(outs)


def torch_attend(views, ratio, q, swa, extra, sink):
    """What an engine does with the tensors it was given, through the arguments for FlashMLA."""
    name = LAYERS[ratio]
    more = {} if extra is None else {"compressed_indices": extra[0], "compressed_lens": extra[1]}
    arguments = flash_mla.decode_arguments(
        views, name, q.to(torch.bfloat16), swa_indices=swa[0], swa_lens=swa[1], sink=sink, check_values=True, **more
    )
    sources = [(arguments["k_cache"][:, :, 0], arguments["indices"][:, 0], arguments["topk_length"])]
    if extra is not None:
        compressed = arguments["extra_k_cache"][:, :, 0]
        sources.append((compressed, arguments["extra_indices_in_kvcache"][:, 0], arguments["extra_topk_length"]))
    return attend(arguments["q"][:, 0], sources, arguments["attn_sink"])[:, :HEADS]


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("owner", ["jax", "torch"])
def test_decode_loop(owner, ratio):
    plan = make_plan()
    layout, tables = plan.layout, block_tables(plan.layout)
    cache = prefill(KVCache.allocate(plan), layout, ratio, tables)
    step = step_of(layout, ratio, tables)
    sink = torch.tensor([0.0, 0.5])
    if owner == "torch":
        with lend(cache) as views:
            memory = views.whole_blocks().reshape(-1).clone()
        shared = SharedSlab(memory, layout, copy_on_cpu=True)
    worst, address = 0.0, None
    for number in range(STEPS):
        seq_lens = np.array(STARTS, np.int32) + number + 1
        q = torch.randn(len(STARTS), HEADS, 512, generator=torch.Generator().manual_seed(number))
        q = q.to(torch.bfloat16).to(torch.float32)
        if owner == "jax":
            cache, (swa, extra) = step(cache, jnp.asarray(seq_lens))
            address = address or cache.slab.unsafe_buffer_pointer()
            assert cache.slab.unsafe_buffer_pointer() == address
            with lend(cache) as views:
                out = torch_attend(views, ratio, q, swa, extra, sink)
        else:
            swa, extra = shared.step(step, jnp.asarray(seq_lens))
            out = torch_attend(shared, ratio, q, swa, extra, sink)
        # Quantised keys differ from the exact ones by up to 1/16 each; attention averages that.
        worst = max(worst, relative_error(out, expected(ratio, seq_lens, q.numpy(), sink)))
    assert worst < 0.04


def test_decode_loop_agrees_with_what_is_stored():
    """The same loop against the dequantised rows: no tolerance for a wrong row, only for float32 sums."""
    plan = make_plan()
    tables = block_tables(plan.layout)
    cache = prefill(KVCache.allocate(plan), plan.layout, 4, tables)
    step = step_of(plan.layout, 4, tables)
    for number in range(STEPS):
        seq_lens = jnp.asarray(np.array(STARTS, np.int32) + number + 1)
        cache, (swa, extra) = step(cache, seq_lens)
        q = torch.randn(len(STARTS), HEADS, 512, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
        window = gather(cache.slab, swa[0], page=cache.page(LAYERS[4] + ".swa_cache"))
        more = gather(cache.slab, extra[0], page=cache.page(LAYERS[4]))
        keys = np.concatenate([np.asarray(window), np.asarray(more)], axis=1)
        valid = np.concatenate([np.asarray(swa[0]), np.asarray(extra[0])], axis=1) >= 0
        logits = np.einsum("thd,tkd->thk", q.float().numpy(), keys) * 512**-0.5
        logits = np.where(valid[:, None], logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        wanted = np.einsum("thk,tkd->thd", weights / weights.sum(-1, keepdims=True), keys)
        with lend(cache) as views:
            out = torch_attend(views, 4, q, swa, extra, None)
        assert relative_error(out, wanted) < 1e-6


def test_a_thousand_alternations_without_a_stale_byte():
    """JAX and PyTorch write by turns, after random delays, and read what the other wrote last."""
    plan = dsv4kv_jax.plan_from_specs(SPECS, 3 * STRIDE)
    cache = KVCache.allocate(plan)
    name = LAYERS[4]
    first_row = plan.layout.page(name).first_row
    chance = random.Random(0)

    @jax.jit
    def slow(seed, rounds):
        return jax.lax.fori_loop(0, rounds, lambda _, x: jnp.cos(x @ x), jnp.full((24, 24), seed))[0, 0]

    def write(cache, value, rounds):
        late = (slow(jnp.float32(1.0), rounds) * 0).astype(jnp.uint32)  # the bytes depend on the slow program
        return cache.with_slab(cache.slab.at[2, first_row].set(value + late))

    write = jax.jit(write, donate_argnums=0)
    read = jax.jit(lambda cache: cache.slab[1, first_row, 0])
    address = cache.slab.unsafe_buffer_pointer()
    pending = 0
    for turn in range(1, 1001):
        cache = write(cache, jnp.uint32(turn), chance.randrange(0, 200))
        if chance.random() < 0.2:
            time.sleep(chance.random() * 2e-3)
        pending += not cache.slab.is_ready()
        with lend(cache) as views:
            seen = views[name][2].reshape(-1)[:576].view(torch.int32)
            assert bool((seen == turn).all()), turn
            views[name][1].reshape(-1)[:4].view(torch.int32).fill_(-turn)
            del seen
        assert int(read(cache)) == 2**32 - turn
    assert cache.slab.unsafe_buffer_pointer() == address
    assert pending > 100  # JAX was often still writing when PyTorch asked


def test_a_shared_slab_shows_every_write_of_both_sides():
    plan = dsv4kv_jax.plan_from_specs(SPECS, 3 * STRIDE)
    shared = SharedSlab.allocate(plan, device="cpu", copy_on_cpu=True)
    name, page = LAYERS[4], plan.layout.page(LAYERS[4])
    view = shared[name]
    write = jax.jit(lambda cache, value: cache.with_slab(cache.slab.at[2].add(value)), donate_argnums=0)
    read = jax.jit(lambda cache: cache.slab[2, page.first_row, 0])
    total = 0
    for turn in range(200):
        shared.step(write, jnp.uint32(turn))
        total += turn
        assert int(view[2].reshape(-1)[:4].view(torch.int32)) == total
        view[2].reshape(-1).view(torch.int32).add_(1)
        total += 1
        assert int(shared.read(read)) == total


def test_the_oracle_reads_rows_as_the_library_does():
    plan = make_plan()
    cache = KVCache.allocate(plan)
    for name in (LAYERS[4], LAYERS[128]):
        page = cache.page(name)
        slots = jnp.arange(page.storage_block_size, 3 * page.storage_block_size, dtype=jnp.int32)
        rows = jax.random.normal(jax.random.key(1), (slots.size, 512)) * jnp.exp2(jnp.arange(512) / 64 - 4)
        cache = cache.with_slab(insert(cache.slab, slots, rows, page=page))
        wanted = np.asarray(gather(cache.slab, slots, page=page))
        with lend(cache) as views:
            seen = rows_of(views[name], torch.from_numpy(np.array(slots)).long()).numpy()
        assert np.array_equal(seen, wanted)
