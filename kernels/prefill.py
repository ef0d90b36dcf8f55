"""Prefill: the workspace that a chunk of requests gathers its rows into, and indices into it, as in vLLM 0.33."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv4kv_jax.kernels._arguments import as_int32, as_lengths, as_query_start_loc, check_count
from dsv4kv_jax.kernels._implementation import mosaic_kernel
from dsv4kv_jax.kernels.indices import INDEX_ALIGNMENT, visible_range
from dsv4kv_jax.kernels.slots import step_tokens, take
from dsv4kv_jax.specs import cdiv, round_up


def gather_lens(query_start_loc: Any, seq_lens: Any, *, window: int = 128) -> jax.Array:
    """Window rows that prefill gathers for each request, int32 `[R]`: its new tokens and those they look back at."""
    seq_lens = as_int32("seq_lens", seq_lens, ndim=1)
    query_start_loc = as_query_start_loc(query_start_loc, seq_lens.shape[0])
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    return query_lens + jnp.clip(seq_lens - query_lens, 0, window - 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """Requests `start` to `stop - 1`, which share one workspace of `workspace_rows` rows a request.

    The first `compressed_rows` of them hold compressed entries, the others the window's tokens.
    """

    start: int
    stop: int
    compressed_rows: int
    workspace_rows: int


def prefill_chunks(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    compress_ratio: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    window: int = 128,
    requests_per_chunk: int = 4,
) -> list[PrefillChunk]:
    """Groups the requests of a prefill, in order, so that no workspace grows out of bounds.

    A chunk takes requests as long as requests x rows per request stays within what `requests_per_chunk` requests of
    the longest kind need, `requests_per_chunk * (ceil(max_model_len / compress_ratio) + window +
    max_num_batched_tokens)`; layers without compression (ratio 1) gather no compressed rows, and none are counted. The
    first request of a chunk is always taken. Plain Python: run it while a step is put together.

    Raises:
      ValueError: lists of different lengths, or a query longer than its sequence.
    """
    if len(query_lens) != len(seq_lens):
        raise ValueError(f"query_lens has {len(query_lens)} entries, seq_lens {len(seq_lens)}; give one per request")
    longest_compressed = cdiv(max_model_len, compress_ratio) if compress_ratio > 1 else 0
    limit = requests_per_chunk * (longest_compressed + window + max_num_batched_tokens)
    chunks: list[PrefillChunk] = []
    for request, (query, seq) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if not 0 <= query <= seq:
            raise ValueError(f"request {request}: query_lens {query} must be from 0 to seq_lens {seq}")
        compressed = int(seq) // compress_ratio if compress_ratio > 1 else 0
        gathered = int(query) + min(int(seq) - int(query), window - 1)
        start = request
        if chunks:
            last = chunks[-1]
            widest = max(last.compressed_rows, compressed)
            rows = widest + max(last.workspace_rows - last.compressed_rows, gathered)
            if (request + 1 - last.start) * rows <= limit:
                start, compressed, gathered = last.start, widest, rows - widest
                chunks.pop()
        chunks.append(
            PrefillChunk(
                start=start, stop=request + 1, compressed_rows=compressed, workspace_rows=compressed + gathered
            )
        )
    return chunks


def combine_topk_swa(
    topk: Any,
    query_start_loc: Any,
    seq_lens: Any,
    gather_lens: Any,
    *,
    compress_ratio: int,
    compressed_rows: int,
    workspace_rows: int,
    window: int = 128,
    image_spans: Any = None,
    max_image_tokens: int = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Prefill indices into a workspace of gathered rows, `[R * workspace_rows, 512]`.

    Request r's part starts at row `r * workspace_rows`: first its compressed entries, then, from `compressed_rows` on,
    its last `gather_lens[r]` tokens. Each index row lists the token's picked entries, then its window.

    Args:
      topk: int32 `[T, k]`: picked entries of each token, counted within its request and packed to the left; `[T, 0]`
        for layers without compression. Only the first `(p + 1) // compress_ratio` are looked at.
      query_start_loc: int32 `[R + 1]`, of these requests; it may start above 0.
      seq_lens: int32 `[R]`, this step's tokens included.
      gather_lens: int32 `[R]`: window rows gathered for each request, as the function of this name gives.
      compress_ratio: tokens of an entry; 1 for none.
      compressed_rows, workspace_rows: the workspace's geometry, as `prefill_chunks` gives.
      window: tokens that a token sees, itself included.
      image_spans, max_image_tokens: as in `swa_indices`; the second one widens the rows.
      implementation: `"xla"`, `"mosaic_gpu"`, or None for the default.

    Returns:
      int32 `[T, round_up(k + window + max_image_tokens, 128)]` and int32 `[T]`, the lengths.

    Raises:
      ValueError: wrong dtypes, lengths or sizes, or an implementation that this operation does not have.
    """
    topk = as_int32("topk", topk, ndim=2)
    num_tokens, top_k = topk.shape
    for name, count in (("compressed_rows", compressed_rows), ("workspace_rows", workspace_rows)):
        check_count(name, count)
    check_count("compress_ratio", compress_ratio, at_least=1)
    seq_lens = as_int32("seq_lens", seq_lens, ndim=1)
    query_start_loc = as_query_start_loc(query_start_loc, seq_lens.shape[0])
    gathered = as_lengths("gather_lens", gather_lens, size=seq_lens.shape[0])
    check_count("max_image_tokens", max_image_tokens)
    width = round_up(top_k + check_count("window", window, at_least=1) + max_image_tokens, INDEX_ALIGNMENT)
    if kernel := mosaic_kernel("combine_topk_swa", implementation):
        if image_spans is not None:
            raise ValueError(f"implementation={implementation!r} takes no image_spans; use 'xla' or None")
        options = {
            "compressed_rows": compressed_rows,
            "workspace_rows": workspace_rows,
            "window": window,
            "width": width,
        }
        return kernel(topk, query_start_loc, seq_lens, gathered, compress_ratio=compress_ratio, **options)
    step = step_tokens(query_start_loc, seq_lens, num_tokens=num_tokens)
    first, last = visible_range(step, seq_lens, window, image_spans)
    oldest = take(seq_lens - gathered, step.token_to_req)
    first = jnp.maximum(first, oldest)
    num_picked = jnp.where(step.valid, jnp.minimum((step.positions + 1) // compress_ratio, top_k), 0)
    num_window = jnp.where(step.valid, jnp.clip(last + 1 - first, 0, width - top_k), 0)
    base = (step.token_to_req * workspace_rows)[:, None]
    column = lax.iota(jnp.int32, width)[None, :]
    picked = jnp.pad(topk, ((0, 0), (0, width - top_k)), constant_values=-1)
    picked = jnp.where(picked >= 0, picked + base, -1)
    behind = column - num_picked[:, None]
    in_window = base + compressed_rows + (first - oldest)[:, None] + behind
    indices = jnp.where(behind < num_window[:, None], in_window, -1)
    return jnp.where(behind < 0, picked, indices), num_picked + num_window
