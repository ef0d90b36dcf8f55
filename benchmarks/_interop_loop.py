"""A decode loop in which JAX writes and PyTorch attends, against a reference that never looks at the slab.

The reference has its own quantiser and counts positions, not slots, so that a wrong byte, slot or index shows.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

import dsv4kv_jax
from dsv4kv_jax import KVCache, kernels
from dsv4kv_jax.interop import SharedSlab, flash_mla, lend, reference
from dsv4kv_jax.specs import cdiv

FLASH = dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash")
LAYERS = {1: "model.layers.0.attn", 4: "model.layers.2.attn", 128: "model.layers.3.attn"}
TOP_K = FLASH.index_topk
HEADS = FLASH.num_attention_heads
# First sequence length of each request: empty ones, window and block boundaries, long ones.
STARTS = (0, 1, 2, 61, 62, 63, 100, 126, 127, 190, 255, 700, 1500, 4000)


class Loop:
    """Requests of one layer: what is written, where, and what attention over it must be."""

    def __init__(self, layout, ratio, steps, num_blocks):
        self.layout, self.ratio, self.name = layout, ratio, LAYERS[ratio]
        self.device = torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")
        self.max_len = max(STARTS) + steps
        count = len(STARTS)
        ids = np.random.default_rng(ratio).permutation(np.arange(1, num_blocks)).astype(np.int32)
        self.tables = {}
        for page in self.pages():
            columns = cdiv(self.max_len, page.spec.block_size)
            table, ids = ids[: count * columns].reshape(count, columns), ids[count * columns :]
            self.tables[page.name] = jnp.asarray(table)
        self.latents = {
            r: np.random.default_rng(100 + r).standard_normal((count, self.max_len // r + 1, 512), np.float32)
            for r in {1, ratio}
        }
        scales = np.exp2(np.linspace(-6, 3, 8)).astype(np.float32)[np.arange(512) // 64]
        self.latents = {r: rows * scales for r, rows in self.latents.items()}
        self.stored = {
            r: quantised(torch.from_numpy(rows).to(self.device), amax_floor=r == 1) for r, rows in self.latents.items()
        }
        self.rows = {r: jnp.asarray(rows) for r, rows in self.latents.items()}
        self.sink = torch.linspace(-1, 2, HEADS, device=self.device)

    def pages(self):
        names = [self.name + ".swa_cache"] + ([self.name] if self.ratio > 1 else [])
        return [self.layout.page(name) for name in names]

    def prefill(self, cache):
        """Writes the rows of everything before STARTS."""
        for page, per_entry in zip(self.pages(), (1, self.ratio), strict=False):
            counts = [start // per_entry for start in STARTS]
            request = np.repeat(np.arange(len(STARTS)), counts)
            entry = np.concatenate([np.arange(n) for n in counts]).astype(np.int32)
            size = page.storage_block_size
            slots = np.asarray(self.tables[page.name])[request, entry // size] * size + entry % size
            insert = jax.jit(lambda slab, slots, rows, page=page: kernels.insert_rows(slab, page, slots, rows))
            slab = insert(cache.slab, jnp.asarray(slots), self.rows[per_entry][request, entry])
            cache = cache.with_slab(slab)
        return cache

    def step(self):
        """The jitted, donated step: the cache, and indices and lengths of the window and the compressed rows."""
        window, *more = self.pages()
        count, ratio = len(STARTS), self.ratio
        requests = jnp.arange(count, dtype=jnp.int32)
        start_loc = jnp.arange(count + 1, dtype=jnp.int32)

        def run(cache, seq_lens, topk, rows):
            table = self.tables[window.name]
            slots = kernels.slot_mapping(table, start_loc, seq_lens, block_size=64, num_tokens=count)
            slab = kernels.insert_rows(cache.slab, window, slots, rows[1][requests, seq_lens - 1])
            swa = kernels.swa_indices(table, start_loc, seq_lens, block_size=64, num_tokens=count)
            extra = None
            for page in more:
                table = self.tables[page.name]
                slots = kernels.compressed_slot_mapping(
                    table, start_loc, seq_lens, block_size=256, compress_ratio=ratio, num_tokens=count
                )
                entry = (seq_lens - 1) // ratio
                slab = kernels.insert_rows(slab, page, slots, rows[ratio][requests, entry])
                if ratio == 4:
                    extra = kernels.topk_to_slots(topk, requests, table, storage_block_size=64)
                else:
                    extra = kernels.c128a_indices(table, start_loc, seq_lens, width=128, num_tokens=count)
            return cache.with_slab(slab), (swa, extra)

        return jax.jit(run, donate_argnums=0)

    def chosen(self, seq_lens, number):
        """The compressed entries that each request attends to: int64 [R, TOP_K], -1 behind them."""
        rng = np.random.default_rng(number)
        chosen = np.full((len(STARTS), TOP_K), -1, np.int64)
        for request, length in enumerate(seq_lens):
            visible = length // self.ratio if self.ratio > 1 else 0
            picked = rng.permutation(visible)[:TOP_K] if self.ratio == 4 else np.arange(visible)
            chosen[request, : len(picked)] = picked
        return chosen

    def reference(self, q, seq_lens, chosen):
        """float32 [R, H, 512] by positions, from rows that this file quantised itself."""
        window = np.arange(128)[None] + np.maximum(seq_lens[:, None] - 128, 0)
        window = np.where(window < seq_lens[:, None], window, -1)
        parts = [(self.stored[1], window)] + ([(self.stored[self.ratio], chosen)] if self.ratio > 1 else [])
        keys, masks = [], []
        for stored, entries in parts:
            entries = torch.from_numpy(entries).to(self.device)
            request = torch.arange(len(STARTS), device=self.device)[:, None]
            keys.append(stored[request, entries.clamp(min=0)])
            masks.append(entries >= 0)
        key, mask = torch.cat(keys, 1), torch.cat(masks, 1)
        logits = torch.einsum("rhd,rkd->rhk", q.float(), key) * 512**-0.5
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
        lse = torch.logsumexp(logits, -1, keepdim=True)
        out = torch.einsum("rhk,rkd->rhd", torch.exp(logits - lse), key)
        return out / (1 + torch.exp(self.sink[None, :, None] - lse))


def quantised(rows, *, amax_floor):
    """The values that the fp8_ds_mla format keeps of `rows` [..., 512]: float32."""
    rows = rows.to(torch.bfloat16).to(torch.float32)
    nope = rows[..., :448].unflatten(-1, (7, 64))
    amax = nope.abs().amax(-1, keepdim=True)
    scale = amax.clamp(min=1e-4) / 448 if amax_floor else (amax / 448).clamp(min=1e-4)
    mantissa, exponent = torch.frexp(scale)
    power = torch.exp2(torch.where(mantissa == 0.5, exponent - 1, exponent).to(torch.float32))
    codes = (nope / power).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)
    return torch.cat([(codes * power).flatten(-2), rows[..., 448:]], -1)


def flash_attention(views, layer, arguments):
    """Calls FlashMLA's operator, with a fresh schedule: the lengths change every step."""
    out, *_ = torch.ops._flashmla_C.sparse_decode_fwd(
        arguments["q"],
        arguments["k_cache"],
        arguments["indices"],
        arguments["topk_length"],
        arguments["attn_sink"],
        None,
        None,
        arguments.get("extra_k_cache"),
        arguments.get("extra_indices_in_kvcache"),
        arguments.get("extra_topk_length"),
        arguments["head_dim_v"],
        arguments["softmax_scale"],
        None,
    )
    return out[:, 0, :HEADS]


def plain_attention(views, layer, arguments):
    """The same from the same arguments in plain PyTorch."""
    window = (arguments["indices"][:, 0], arguments["topk_length"])
    compressed = None
    if "extra_k_cache" in arguments:
        compressed = (arguments["extra_indices_in_kvcache"][:, 0], arguments["extra_topk_length"])
    q, sink = arguments["q"][:, 0], arguments["attn_sink"]
    return reference.attention(views, layer, q, window, compressed, sink=sink)[0][:, :HEADS]


def relative_error(a, b):
    a, b = a.double(), b.double()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def decode_loop(plan, ratio, form, attention, steps):
    """(largest relative error, median host time of a step in us) over a loop."""
    loop = Loop(plan.layout, ratio, steps, plan.num_blocks)
    step = loop.step()
    cache = loop.prefill(KVCache.allocate(plan))
    shared = None
    if form == "SharedSlab":
        with lend(cache) as views:
            memory = views.whole_blocks().reshape(-1).clone()
        shared = SharedSlab(memory, plan.layout, copy_on_cpu=True)
        del cache, memory
    elif form == "SharedSlab.from_cache":
        shared = SharedSlab.from_cache(cache)
    address = shared.whole_blocks().data_ptr() if shared else cache.slab.unsafe_buffer_pointer()
    worst, times = 0.0, []
    for number in range(steps):
        seq_lens = np.array(STARTS, np.int64) + number + 1
        chosen = loop.chosen(seq_lens, number)
        topk, lens = jnp.asarray(chosen.astype(np.int32)), jnp.asarray(seq_lens.astype(np.int32))
        generator = torch.Generator(loop.device).manual_seed(number)
        q = torch.randn(len(STARTS), HEADS, 512, generator=generator, device=loop.device).to(torch.bfloat16)
        begin = time.perf_counter()
        if shared:
            indices = shared.step(step, lens, topk, loop.rows)
            out = attend_layer(shared, loop, q, indices, attention)
        else:
            cache, indices = step(cache, lens, topk, loop.rows)
            with lend(cache) as views:
                out = attend_layer(views, loop, q, indices, attention)
        times.append((time.perf_counter() - begin) * 1e6)
        worst = max(worst, relative_error(out, loop.reference(q, seq_lens, chosen)))
        if not shared and cache.slab.unsafe_buffer_pointer() != address:
            raise RuntimeError("the slab moved")
    if shared:
        shared.close()
    return worst, statistics.median(times)


def attend_layer(views, loop, q, indices, attention):
    (swa, swa_lens), extra = indices
    more = {} if extra is None else {"compressed_indices": extra[0], "compressed_lens": extra[1]}
    arguments = flash_mla.decode_arguments(
        views, loop.name, q, swa_indices=swa, swa_lens=swa_lens, sink=loop.sink, **more
    )
    return attention(views, loop.name, arguments)
