"""Greedy tokens of a small float32 model, and what the same model in bfloat16 would have chosen at each of them.

    python benchmarks/check_precision.py --output benchmarks/results/precision-h200.json

The float32 model decodes; the bfloat16 model then reads the same tokens one by one, so that all steps can be compared,
not only those before the two first part. Where it prefers another token, float32 must tell the two apart by no more
than bfloat16's logits are off at that step: then the two were a near tie. Anything else is a fault, and the exit status
says so.
"""

import argparse
import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _results import Row, report

import dsv4kv_jax as dsv4
from dsv4kv_jax.decode import allocate_block_tables, prefill
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.model import Model, forward, miniature
from dsv4kv_jax.specs import cdiv, layer_specs
from dsv4kv_jax.step import Step

PROMPTS, VOCABULARY = (300, 129, 7, 64), 512
START = time.monotonic()


def log(text: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {text}", file=sys.stderr, flush=True)


class Pair:
    """A bfloat16 model and its float32 twin, and what both need to run."""

    def __init__(self, longest: int) -> None:
        config = miniature(dsv4.ModelConfig.preset("deepseek-v4-flash"), 4, hidden_size=1024, num_attention_heads=16)
        config = dataclasses.replace(config, index_topk=64)
        options = {"vocab_size": VOCABULARY, "max_positions": longest}
        rounded = Model.random(config, jax.random.key(0), **options)
        exact = Model.build(config, jax.tree.map(lambda x: x.astype(jnp.float32), rounded.weights), **options)
        self.models = {"float32": exact, "bfloat16": rounded}
        self.layout = PackedLayout.from_groups(group_layers(layer_specs(config)))
        lengths = [longest] * len(PROMPTS)
        self.num_blocks = 1 + sum(cdiv(n, group.block_size) for group in self.layout.groups for n in lengths)
        self.tables = allocate_block_tables(self.layout, lengths, self.num_blocks)

    def read(self, name: str, texts: list[np.ndarray], steps: int, tokens: np.ndarray | None = None) -> np.ndarray:
        """float32 `[steps, R, vocabulary]`: the logits of the next `steps` tokens of each text.

        Args:
          name: of the model.
          texts: the prompts.
          steps: at least 2.
          tokens: int32 `[steps, R]`, the tokens to go on with; by default the model's own choice.
        """
        model, lengths = self.models[name], [len(text) for text in texts]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        slab = jnp.zeros(self.layout.buffers[0].shape(self.num_blocks), jnp.uint32)
        cache = dsv4.KVCache(slabs=(slab,), layout=self.layout)
        cache, first, _ = prefill(model, cache, np.concatenate(texts), starts, lengths, self.tables)
        log(f"{name}: prefilled {lengths}")
        given = np.full((steps, len(texts)), -1, np.int32) if tokens is None else tokens
        tables = tuple(map(jnp.asarray, self.tables))
        rest = _go_on(model, cache, first, jnp.asarray(lengths, jnp.int32), tables, jnp.asarray(given[:-1]))
        logits = np.concatenate([np.asarray(first)[None], np.asarray(rest)])
        log(f"{name}: decoded {steps} tokens of each")
        return logits


@functools.partial(jax.jit, donate_argnames="cache", compiler_options=dict(dsv4.COMPILER_OPTIONS))
def _go_on(
    model: Model, cache: Any, logits: jax.Array, seq_lens: jax.Array, tables: Any, given: jax.Array
) -> jax.Array:
    """Logits after each of the `given` tokens; where one is -1, after the best token instead."""
    query_start_loc = jnp.arange(len(PROMPTS) + 1, dtype=jnp.int32)

    def step(carry: Any, given: jax.Array) -> tuple[Any, jax.Array]:
        cache, logits, seq_lens = carry
        tokens = jnp.where(given >= 0, given, jnp.argmax(logits, axis=1).astype(jnp.int32))
        seq_lens = seq_lens + 1
        plan = Step.build(cache.layout, model.rope, tables, query_start_loc, seq_lens, num_tokens=len(PROMPTS))
        cache, logits, _ = forward(model, cache, tokens, plan)
        return (cache, logits, seq_lens), logits

    return jax.lax.scan(step, (cache, logits, seq_lens), given)[1]


def compare(steps: int) -> tuple[list[Row], int]:
    """A row a request, and at how many steps bfloat16 chose another token without a near tie."""
    pair = Pair(max(PROMPTS) + steps)
    texts = [np.random.default_rng(i).integers(0, VOCABULARY, n).astype(np.int32) for i, n in enumerate(PROMPTS)]
    exact = pair.read("float32", texts, steps)
    tokens = exact.argmax(axis=2).astype(np.int32)
    rounded = pair.read("bfloat16", texts, steps, tokens)
    chosen = rounded.argmax(axis=2)
    error = np.abs(exact - rounded).max(axis=2)
    step, request = np.ogrid[:steps, : len(texts)]
    margin = exact[step, request, tokens] - exact[step, request, chosen]
    unexplained = ~(margin <= 2 * error)  # also where a logit is no number
    rows = []
    for i, text in enumerate(texts):
        differs = np.flatnonzero(chosen[:, i] != tokens[:, i])
        note = f"all {steps} tokens equal, {len(set(tokens[:, i].tolist()))} distinct"
        if len(differs):
            at = differs[0]
            note = (
                f"{steps - len(differs)} of {steps} tokens equal; the first other one at step {at}, {tokens[at, i]} or "
                f"{chosen[at, i]}: float32 tells them apart by {margin[at, i]:.4f}, bfloat16 is off by up to "
                f"{error[at, i]:.4f}; widest such margin {margin[differs, i].max():.4f}; "
                f"{int(unexplained[:, i].sum())} steps that are no near tie"
            )
        log(f"request {i}: {note}")
        case = f"prompt of {len(text)} tokens, {steps} decoded"
        rows.append(Row(name="bfloat16_tokens", case=case, implementation="small model", us=None, note=note))
    return rows, int(unexplained.sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000, help="tokens to decode, at least 2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    args = parser.parse_args()
    rows, unexplained = compare(args.steps)
    report(rows, as_json=args.json, output=args.output)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
