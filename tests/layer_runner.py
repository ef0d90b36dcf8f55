"""Feeds `oracle_model.Sequence`s through the library's attention layers, cut into steps in any way.

One cache holds one layer of each ratio (1, 4, 128), so every step exercises all three. A step is a list of
`(request, first position, number of tokens)`; the tokens of all steps are padded to one length, so that a run compiles
once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_model as oracle

import dsv4kv_jax as dsv4
from dsv4kv_jax.attention import (
    AttentionLayer,
    CompressorInputs,
    IndexerInputs,
    LayerInputs,
    cached_attention,
    update_cache,
)
from dsv4kv_jax.decode import allocate_block_tables
from dsv4kv_jax.rope import RopeTables, rotate
from dsv4kv_jax.step import Step
from dsv4kv_jax.weights import CompressorWeights, IndexerWeights, LayerWeights

RATIOS = (1, 4, 128)
CONFIG = dataclasses.replace(dsv4.ModelConfig.preset("deepseek-v4-flash"), num_hidden_layers=3, compress_ratios=RATIOS)


def layers(top_k=16, **options):
    return tuple(
        AttentionLayer(name=f"model.layers.{i}.attn", compress_ratio=ratio, top_k=top_k, **options)
        for i, ratio in enumerate(RATIOS)
    )


def draw(lengths, seed=0):
    """`[ratio][request]` sequences; all requests of a ratio share the layer's weights."""
    drawn = []
    for ratio in RATIOS:
        sequences = [oracle.Sequence.draw(ratio, n, seed=seed + i) for i, n in enumerate(lengths)]
        for sequence in sequences[1:]:
            sequence.sink = sequences[0].sink
            for name in ("compressor", "index"):
                own, first = getattr(sequence, name), getattr(sequences[0], name)
                if own is not None:
                    own.ape, own.norm = first.ape, first.norm
        drawn.append(sequences)
    return drawn


def weights_of(sequence):
    def compressor(inputs):
        if inputs is None:
            return None
        return CompressorWeights(wkv=None, wgate=None, ape=jnp.asarray(inputs.ape), norm=jnp.asarray(inputs.norm))

    unused = dict.fromkeys(("norm", "wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b"))
    index = compressor(sequence.index)
    return LayerWeights(
        **unused,
        sink=jnp.asarray(sequence.sink),
        compressor=compressor(sequence.compressor),
        indexer=None if index is None else IndexerWeights(wq=None, weights_proj=None, compressor=index),
    )


def inputs_of(sequence):
    def compressor(inputs):
        return None if inputs is None else CompressorInputs(kv=inputs.kv, score=inputs.score)

    index = None
    if sequence.index is not None:
        index = IndexerInputs(q=sequence.index_q, weights=sequence.index_weights, compressor=compressor(sequence.index))
    return LayerInputs(q=sequence.q, kv=sequence.kv, compressor=compressor(sequence.compressor), index=index)


@functools.partial(jax.jit, static_argnames=("layers", "attend"), donate_argnames="cache")
def run_step(cache, layers, attend, weights, rope, tables, inputs, rows, query_start_loc, seq_lens):
    """One step of all layers, or only what it writes; `rows` int32 `[T]` picks the tokens from `inputs`."""
    step = Step.build(cache.layout, rope, tables, query_start_loc, seq_lens, num_tokens=rows.shape[0])
    outs = []
    for layer, layer_weights, layer_inputs in zip(layers, weights, inputs, strict=True):
        picked = jax.tree.map(lambda x: x.at[rows].get(mode="fill", fill_value=0), layer_inputs)
        if not attend:
            cache = update_cache(cache, layer, layer_weights, step, picked)
            continue
        cache, captured = cached_attention(cache, layer, layer_weights, step, picked)
        out = rotate(captured.out, captured.cos_sin[:, None], inverse=True)
        outs.append((out, captured.lse, captured.compressed))
    return cache, tuple(outs)


@functools.partial(jax.jit, static_argnames=("layers", "attend"), donate_argnames="cache")
def run_scan(cache, layers, attend, weights, rope, tables, inputs, rows, query_start_loc, seq_lens):
    """All steps in one program; the last three arguments have a leading dimension of steps."""

    def body(cache, step):
        return run_step.__wrapped__(cache, layers, attend, weights, rope, tables, inputs, *step)

    return jax.lax.scan(body, cache, (rows, query_start_loc, seq_lens))


class Runner:
    """A cache with one layer a ratio, block tables for `lengths`, and the inputs of all sequences on the device."""

    def __init__(self, sequences, *, cache_dtype="fp8_ds_mla", indexer="fp8", seed=1, extra_blocks=0, **layer_options):
        self.sequences = sequences
        self.lengths = [sequence.tokens for sequence in sequences[0]]
        self.layers = layers(**layer_options)
        plan = dsv4.plan(CONFIG, 1 << 30, cache_dtype=cache_dtype, indexer=indexer)
        self.layout = plan.layout
        need = sum(-(-n // group.block_size) for group in self.layout.groups for n in self.lengths)
        self.num_blocks = need + 1 + extra_blocks
        self.plan = plan
        rng = np.random.default_rng(seed)
        self.tables = allocate_block_tables(self.layout, self.lengths, self.num_blocks, rng=rng)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.weights = tuple(weights_of(of_ratio[0]) for of_ratio in sequences)
        # Behind the inputs of all tokens lie as many wrong ones, for speculative tokens that are rejected.
        self.inputs = tuple(
            jax.tree.map(lambda *parts: jnp.asarray(np.concatenate([*parts, *parts[::-1]])), *map(inputs_of, of_ratio))
            for of_ratio in sequences
        )
        self.rope = RopeTables.make(CONFIG.rope, max(self.lengths))

    def allocate(self):
        return dsv4.KVCache.allocate(self.plan, num_blocks=self.num_blocks)

    def arrays(self, step, num_tokens):
        """rows, query_start_loc and seq_lens of a step; requests that bring no token have length 0."""
        rows, counts, seq_lens = [], np.zeros(len(self.lengths), int), np.zeros(len(self.lengths), np.int32)
        for request, first, count in sorted(step):
            rows += range(self.starts[request] + first, self.starts[request] + first + count)
            counts[request], seq_lens[request] = count, first + count
        padded = np.full(num_tokens, 2 * self.starts[-1], np.int32)
        padded[: len(rows)] = rows
        return padded, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), seq_lens

    def run(self, steps, num_tokens, *, scan=False, attend=True, cache=None, tables=None):
        """Runs the steps, as one program (`scan`) or one call each; with `attend` False only the writes.

        Returns:
          The cache, and `[layer][request]` -> position -> (out, lse, picked slots).
        """
        tables = tuple(map(jnp.asarray, tables or self.tables))
        fixed = (self.layers, attend, self.weights, self.rope, tables, self.inputs)
        cache = cache or self.allocate()
        arrays = [self.arrays(step, num_tokens) for step in steps]
        if scan:
            cache, outs = run_scan(cache, *fixed, *(np.stack(part) for part in zip(*arrays, strict=True)))
            outs = jax.tree.map(np.asarray, outs)
            per_step = [jax.tree.map(lambda x, i=i: x[i], outs) for i in range(len(steps))]
        else:
            per_step = []
            for step in arrays:
                cache, outs = run_step(cache, *fixed, *step)
                per_step.append(jax.tree.map(np.asarray, outs))
        return cache, self._by_request(steps, per_step)

    def entries(self, layer, request, slots):
        """The entries of a request that lie at `slots` of its compressed cache."""
        page = self.layout.page(self.layers[layer].name)
        block, row = np.divmod(slots, page.storage_block_size)
        table = self.tables[page.group][request]
        index = np.array([np.flatnonzero(table == b)[0] for b in block], int)
        return index * page.storage_block_size + row

    def _by_request(self, steps, per_step):
        found = [[{} for _ in self.lengths] for _ in self.layers]
        for step, outs in zip(steps, per_step, strict=True):
            token = 0
            for request, first, count in sorted(step):
                for position in range(first, first + count):
                    for index, (out, lse, picked) in enumerate(outs):
                        slots = None if picked is None else picked.indices[token][: picked.lens[token]]
                        found[index][request][position] = (out[token], lse[token], slots)
                    token += 1
        return found

    def rows(self, cache, name, request, count, tables=None):
        """The first `count` rows of a request in a cache, as bytes `[count, row bytes]`."""
        page = cache.page(name)
        if not count:
            return np.zeros((0, page.format.row_bytes), np.uint8)
        size, entry = page.storage_block_size, np.arange(count)
        blocks = np.asarray((tables or self.tables)[page.group])[request][: -(-count // size)]
        words = np.asarray(cache.slab_of(name))[blocks, page.first_row : page.first_row + page.num_rows]
        pages = words.reshape(len(blocks), -1).view(np.uint8)
        parts = []
        for index, section in enumerate(page.format.sections):
            start, width = page.format.section_start(index, size), section.row_bytes
            area = pages[:, start : start + size * width].reshape(-1, size, width)
            parts.append(area[entry // size, entry % size])
        return np.concatenate(parts, axis=1)

    def layer_rows(self, cache, layer, request, tables=None):
        """(window, compressed, key) bytes that a request leaves in a layer; empty where it has no such cache."""
        names, length = self.layers[layer], self.lengths[request]
        ratio, none = names.compress_ratio, np.zeros((0, 0), np.uint8)
        window = self.rows(cache, names.window_cache, request, length, tables)
        compressed = self.rows(cache, names.name, request, length // ratio, tables) if ratio > 1 else none
        keys = self.rows(cache, names.key_cache, request, length // ratio, tables) if ratio == 4 else none
        return window, compressed, keys

    def all_rows(self, cache, request, tables=None):
        """(layer, kind) -> bytes of everything that a request leaves in the caches that outlive it."""
        return {
            (layer, kind): rows
            for layer in range(len(self.layers))
            for kind, rows in enumerate(self.layer_rows(cache, layer, request, tables))
        }


def in_chunks(lengths, chunk, num_tokens):
    """Steps of at most `num_tokens` tokens to which requests bring up to `chunk` each, those with most left first.

    `lengths` maps requests to their tokens, or lists them.
    """
    left = dict(lengths if isinstance(lengths, dict) else enumerate(lengths))
    done, steps = dict.fromkeys(left, 0), []
    while any(left.values()):
        step, room = [], num_tokens
        for request in sorted(left, key=left.get, reverse=True):
            count = min(chunk, left[request])
            if 0 < count <= room:
                step.append((request, done[request], count))
                done[request] += count
                left[request] -= count
                room -= count
        steps.append(step)
    return steps
