"""The compressor, the indexer and a whole step's cache work at the sizes of DeepSeek-V4-Pro, against a measured copy.

    python benchmarks/bench_model.py --json --output benchmarks/results/model-h200.json

The reference of every row is the time that the bytes it must move take at the rate of a plain copy of 1 GiB, measured
in the same run. `plot_step.py` draws the steps.
"""

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # the 1M cache takes half of an H200

import jax
import jax.numpy as jnp
import numpy as np
from _results import Row, report
from _timing import Time, jax_time, jax_us

import dsv4kv_jax as dsv4
from dsv4kv_jax.attention import (
    AttentionLayer,
    CompressorInputs,
    IndexerInputs,
    LayerInputs,
    select_compressed,
    update_cache,
    update_compressed,
)
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.indexer import fold_query, select_top_k
from dsv4kv_jax.kernels._implementation import Implementation, choose
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.rope import RopeTables
from dsv4kv_jax.specs import cdiv, layer_specs
from dsv4kv_jax.step import Step
from dsv4kv_jax.weights import CompressorWeights, IndexerWeights, LayerWeights

PRO = dsv4.ModelConfig.preset("deepseek-v4-pro")
LATENT, KEY = 584, 132  # bytes of a stored row
STATE = {4: 8192, 128: 4096}  # bytes of a state row
KEY_STATE = 2048
STEPS = {"8k": (256, 8192), "128k": (32, 131_072), "1m": (8, 1_048_576)}  # requests, tokens each
TOP_K = {"256 requests at 8k": (256, 8192), "16 requests at 1M": (16, 1_048_576)}


def layout_of(ratios: tuple[int, ...]) -> PackedLayout:
    config = dataclasses.replace(PRO, num_hidden_layers=len(ratios), compress_ratios=ratios)
    return PackedLayout.from_groups(group_layers(layer_specs(config)))


def layers_of(ratios: tuple[int, ...]) -> list[AttentionLayer]:
    return [
        AttentionLayer(name=f"model.layers.{i}.attn", compress_ratio=ratio, top_k=PRO.index_topk)
        for i, ratio in enumerate(ratios)
    ]


def make_cache(layout: PackedLayout, num_blocks: int) -> dsv4.KVCache:
    """Random indexer keys of scale 2**-7, zeros elsewhere."""
    rows, words = layout.buffers[0].shape(1)[1:]
    is_code, is_scale = np.zeros((2, rows * words), bool)
    for page in layout.pages.values():
        if page.name.endswith("k_cache"):
            codes = page.first_row * words
            scales = codes + page.storage_block_size * 32
            is_code[codes:scales] = True
            is_scale[scales : scales + page.storage_block_size] = True
    is_code, is_scale = (jnp.asarray(mask.reshape(rows, words)) for mask in (is_code, is_scale))

    def build() -> jax.Array:
        shape = layout.buffers[0].shape(num_blocks)
        block, row, word = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
        bits = block * jnp.uint32(2654435761) ^ row * jnp.uint32(2246822519) ^ word * jnp.uint32(3266489917)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
        bits = (bits ^ (bits >> 13)) & jnp.uint32(0xB7B7B7B7)
        return jnp.where(is_code, bits, jnp.where(is_scale, jnp.uint32(0x3C000000), jnp.uint32(0)))

    return dsv4.KVCache(slabs=(jax.block_until_ready(jax.jit(build)()),), layout=layout)


def live_tables(layout: PackedLayout, lengths: list[int], new_tokens: int) -> tuple[list[jax.Array], int]:
    """Block tables as a manager keeps them, blocks behind every window freed; and the blocks of the whole cache."""
    tables, first = [], 1
    for group in layout.groups:
        width = max(cdiv(n, group.block_size) for n in lengths)
        table = np.zeros((len(lengths), width), np.int32)
        for request, length in enumerate(lengths):
            oldest = 0 if group.sliding_window is None else max(length - new_tokens - group.sliding_window + 1, 0)
            columns = np.arange(oldest // group.block_size, cdiv(length, group.block_size))
            table[request, columns] = first + np.arange(len(columns))
            first += len(columns)
        tables.append(jnp.asarray(table))
    return tables, first


def random_weights(key: jax.Array, ratio: int) -> LayerWeights:
    def compressor(key: jax.Array, dim: int) -> CompressorWeights:
        ape = jax.random.normal(key, (ratio, dim * (2 if ratio == 4 else 1)), jnp.float32)
        return CompressorWeights(wkv=None, wgate=None, ape=ape, norm=jnp.ones(dim, jnp.float32))

    unused = dict.fromkeys(("norm", "wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "sink", "wo_a", "wo_b"))
    indexer = None
    if ratio == 4:
        indexer = IndexerWeights(wq=None, weights_proj=None, compressor=compressor(key, 128))
    return LayerWeights(**unused, compressor=compressor(key, 512), indexer=indexer)


def random_inputs(key: jax.Array, tokens: int, ratio: int) -> LayerInputs:
    def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, hash(shape) & 0xFFFF), shape, dtype)

    index = None
    if ratio == 4:
        index = IndexerInputs(
            q=normal(tokens, PRO.index_n_heads, 128, dtype=jnp.bfloat16),
            weights=normal(tokens, PRO.index_n_heads),
            compressor=CompressorInputs(kv=normal(tokens, 256), score=normal(tokens, 256)),
        )
    width = 1024 if ratio == 4 else 512
    main = CompressorInputs(kv=normal(tokens, width), score=normal(tokens, width))
    return LayerInputs(q=None, kv=normal(tokens, 512, dtype=jnp.bfloat16), compressor=main, index=index)


class Bench:
    """Rows, and the copy rate that they are judged by."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows, self.failed = args, [], {}
        self.start = time.monotonic()
        size = args.copy_bytes
        x = jnp.zeros(size // 4, jnp.uint32)
        us = jax_us(jax.jit(lambda x: x + jnp.uint32(1)), x, calls=1)
        self.bytes_per_us = 2 * size / us
        self.add(
            Row(
                name="copy",
                case=f"{size >> 20} MiB, read and written",
                implementation="xla",
                us=us,
                bytes=2 * size,
                in_readme=False,
            )
        )

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"[{time.monotonic() - self.start:5.0f} s] {row}", file=sys.stderr, flush=True)

    def measured(self, name: str, case: str, time: Time, size: int, *notes: str, implementation: str = "") -> Row:
        reference_us = size / self.bytes_per_us
        return Row(
            name=name, case=case, implementation=implementation or choose(None, "window_means"), us=time.us, bytes=size,
            reference="its bytes at copy rate", reference_us=reference_us, note="; ".join((*notes, time.note)),
        )  # fmt: skip

    def run(self, name: str, rows: Callable[["Bench"], Iterator[Row]]) -> None:
        if self.args.only and name not in self.args.only:
            return
        try:
            for row in rows(self):
                self.add(row)
        except Exception as error:
            if self.args.debug:
                raise
            self.failed[name] = f"{type(error).__name__}: {error}"[:2000]
            print(f"{name} failed: {self.failed[name]}", file=sys.stderr, flush=True)


def compress_c4(bench: Bench) -> Iterator[Row]:
    """A prefill chunk of one request, behind as many tokens: states, compressed rows and indexer keys of 3 layers."""
    ratios, tokens = (4, 4, 4), bench.args.chunk
    layout, layers = layout_of(ratios), layers_of(ratios)
    tables, num_blocks = live_tables(layout, [2 * tokens], tokens)
    rope = RopeTables.make(PRO.rope, 2 * tokens)
    loc, seq_lens = jnp.asarray([0, tokens], jnp.int32), jnp.asarray([2 * tokens], jnp.int32)
    step = jax.jit(lambda: Step.build(layout, rope, tables, loc, seq_lens, num_tokens=tokens))()
    weights, inputs = random_weights(jax.random.key(0), 4), random_inputs(jax.random.key(1), tokens, 4)

    def program(cache: dsv4.KVCache, step: Step, weights: LayerWeights, inputs: LayerInputs) -> dsv4.KVCache:
        for layer in layers:
            cache = update_compressed(cache, layer, weights, step, inputs)
        return cache

    state_bytes = tokens * (STATE[4] + KEY_STATE)
    size = 3 * state_bytes + tokens // 4 * (LATENT + KEY)  # read the projections, write the states, read them
    taken = jax_time(
        jax.jit(program, donate_argnums=0), make_cache(layout, num_blocks), step, weights, inputs,
        calls=len(layers), donated=True,
    )  # fmt: skip
    yield bench.measured("compress_c4", f"{tokens} tokens", taken, size)


def index_topk(bench: Bench) -> Iterator[Row]:
    """Folding, scoring and exact top-k of one decode step of one layer; the keys do not fit in the L2 cache."""
    layout, (layer,) = layout_of((4,)), layers_of((4,))
    for case, (requests, length) in TOP_K.items():
        length //= bench.args.shrink
        tables, num_blocks = live_tables(layout, [length] * requests, 1)
        cache = make_cache(layout, num_blocks)
        table = tables[layout.page(layer.key_cache).group]
        loc, visible = jnp.arange(requests + 1, dtype=jnp.int32), jnp.full(requests, length // 4, jnp.int32)
        inputs = [random_inputs(jax.random.key(seed), requests, 4).index for seed in (2, 3)]
        cos_sin = jnp.ones((requests, 64), jnp.float32)

        def program(
            implementation: Implementation, cache: dsv4.KVCache, table: jax.Array, inputs: list[IndexerInputs],
            loc: Any = loc, visible: Any = visible, cos_sin: Any = cos_sin,
        ) -> list[jax.Array]:  # fmt: skip
            picked, nudge = [], jnp.float32(0)
            for each in inputs:
                codes, folded = fold_query(each.q, each.weights + nudge, cos_sin, implementation=implementation)
                picked.append(
                    select_top_k(
                        cache, layer.key_cache, table, loc, codes, folded, visible, top_k=layer.top_k,
                        implementation=implementation,
                    )
                )  # fmt: skip
                nudge = (picked[-1][:, :1] % 3).astype(jnp.float32)  # the next one's scores depend on these picks
            return picked

        for implementation in dict.fromkeys(("xla", choose(None, "top_k_indices"))):
            taken = jax_time(jax.jit(functools.partial(program, implementation)), cache, table, inputs, calls=2)
            size = requests * (length // 4) * KEY
            yield bench.measured("index_topk", case, taken, size, implementation=implementation)
        del cache


def step_all_layers(bench: Bench, name: str) -> Iterator[Row]:
    """One decode step of all layers: everything that touches the cache except the attention's reads."""
    requests, length = STEPS[name]
    length //= bench.args.shrink
    ratios = PRO.compress_ratios[: bench.args.layers]
    layout, layers = layout_of(ratios), layers_of(ratios)
    lengths = [length - 5 * request % 128 for request in range(requests)]  # a mix of boundaries
    tables, num_blocks = live_tables(layout, lengths, 1)
    rope = RopeTables.make(PRO.rope, length)
    loc, seq_lens = jnp.arange(requests + 1, dtype=jnp.int32), jnp.asarray(lengths, jnp.int32)
    weights = {ratio: random_weights(jax.random.key(0), ratio) for ratio in set(ratios)}
    inputs = {ratio: random_inputs(jax.random.key(1), requests, ratio) for ratio in set(ratios)}

    def program(
        cache: dsv4.KVCache, rope: Any, tables: Any, weights: Any, inputs: Any
    ) -> tuple[dsv4.KVCache, jax.Array]:
        step = Step.build(layout, rope, tables, loc, seq_lens, num_tokens=requests)
        nudge = jnp.zeros((), jnp.bfloat16)
        for layer in layers:
            given = inputs[layer.compress_ratio]
            # As in a model, after what the layer before read; and so that nothing is computed once for several layers.
            given = dataclasses.replace(given, kv=given.kv + nudge)
            if given.index is not None:
                given = dataclasses.replace(given, index=dataclasses.replace(given.index, q=given.index.q + nudge))
            cache = update_cache(cache, layer, weights[layer.compress_ratio], step, given)
            picked = select_compressed(cache, layer, step, given)
            if picked is not None and layer.compress_ratio == 4:
                nudge = (jnp.sum(picked.indices) % 3).astype(jnp.bfloat16)
        return cache, nudge

    cache = make_cache(layout, num_blocks)
    arguments = (rope, tables, weights, inputs)
    begin = time.monotonic()
    lowered = jax.jit(program, donate_argnums=0).lower(cache, *arguments)
    traced = time.monotonic()
    compiled = lowered.compile(compiler_options=dict(dsv4.COMPILER_OPTIONS))
    note = f"{num_blocks} blocks, traced in {traced - begin:.1f} s, compiled in {time.monotonic() - traced:.1f} s"
    if memory := compiled.memory_analysis():
        note += f", temporary {memory.temp_size_in_bytes >> 20} MiB of a {cache.nbytes >> 20} MiB slab"
    measured = jax_time(compiled, cache, *arguments, calls=1, donated=True)
    yield bench.measured(
        f"step_all_layers_{name}", f"{requests} requests at {length}, {len(layers)} layers", measured,
        sum(step_bytes(requests, lengths, ratio) for ratio in ratios), note,
    )  # fmt: skip


def step_bytes(requests: int, lengths: list[int], ratio: int) -> int:
    """What one layer must move: written rows and states, the windows of completed groups, and all keys."""
    completed = sum(length % ratio == 0 for length in lengths)
    size = requests * (LATENT + 2 * STATE[ratio])  # projections read, states written
    size += completed * ((8 if ratio == 4 else 128) * STATE[ratio] // (2 if ratio == 4 else 1) + LATENT)
    if ratio == 4:
        size += requests * 2 * KEY_STATE + completed * (8 * KEY_STATE // 2 + KEY)
        size += sum(length // 4 for length in lengths) * KEY
    return size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = ["compress_c4", "index_topk", *(f"step_all_layers_{name}" for name in STEPS)]
    parser.add_argument("--only", nargs="+", choices=names, help="rows to measure; all by default")
    parser.add_argument("--layers", type=int, default=61, help="of the steps")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of compress_c4")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide all contexts by this, for a try on a small machine"
    )
    parser.add_argument("--copy-bytes", type=int, default=1 << 30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    parser.add_argument("--debug", action="store_true", help="stop at the first error")
    args = parser.parse_args()
    bench = Bench(args)
    bench.run("compress_c4", compress_c4)
    bench.run("index_topk", index_topk)
    for name in STEPS:
        bench.run(f"step_all_layers_{name}", lambda bench, name=name: step_all_layers(bench, name))
    report(bench.rows, as_json=args.json, output=args.output, failed=bench.failed)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
