"""Sparse attention over cache rows: K and V are one row, listed by slot, in one softmax with a sink.

For query token t and head h, over the listed rows k (window rows, then compressed rows):

    l_k = q_h . k * scale          lse = log sum_k exp(l_k)
    out = sum_k exp(l_k) k / (sum_k exp(l_k) + exp(sink_h))

The sink takes part in the denominator only, and not in `lse`. Source: DeepSeek-V4's attention as FlashMLA's
`flash_mla_with_kvcache` defines it (`indices`, `topk_length`, `attn_sink`, `extra_*`).
"""

import jax
import jax.numpy as jnp

from dsv4kv_jax.kernels._chunks import map_chunks
from dsv4kv_jax.kernels._dots import einsum_f32
from dsv4kv_jax.kernels._implementation import Implementation, mosaic_kernel
from dsv4kv_jax.kernels.rows import gather_rows
from dsv4kv_jax.layout import PageLayout

_WORKSPACE_BYTES = 1 << 30  # dequantised rows and scores held at a time; more query tokens are done chunk by chunk


def sparse_attention(
    q: jax.Array,
    slab: jax.Array,
    swa_page: PageLayout,
    swa_indices: jax.Array,
    swa_lens: jax.Array,
    *,
    compressed_page: PageLayout | None = None,
    compressed_indices: jax.Array | None = None,
    compressed_lens: jax.Array | None = None,
    compressed_slab: jax.Array | None = None,
    sink: jax.Array | None = None,
    scale: float = 512**-0.5,
    kv_scale: float = 1.0,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends from each query token to its window rows and, where given, its compressed rows.

    Every query token has its own lists, so decode, speculative tokens and prefill are one case. An entry counts when
    its column is below the row's length and its slot exists; -1 and slots past the pool never do, and what they or
    unlisted rows hold (NaN included) cannot reach the result. The slab is only read.

    Args:
      q: `[T, H, 512]` float32 or bfloat16, already rotated. float32 queries are computed in float32 throughout,
        bfloat16 ones on bfloat16 rows and probabilities with float32 sums.
      slab: `uint32[num_blocks, rows, words]`, the buffer that holds the pages.
      swa_page: the window cache's page; static.
      swa_indices: int32 `[T, W]` slots.
      swa_lens: int32 `[T]`, entries of each row that count.
      compressed_page, compressed_indices, compressed_lens: the same for the C4A or C128A cache; all or none.
      compressed_slab: the buffer of `compressed_page` where it is another one than `slab`.
      sink: float32 `[H]`; -inf, the default, is no sink.
      scale: factor on the dot products.
      kv_scale: scale of plain fp8 rows; other formats carry their own.
      implementation: "xla" or "mosaic_gpu"; the fastest one that can do it by default. A named one never falls back.

    Returns:
      `out` `[T, H, 512]` in q's dtype, before the inverse rotation, and `lse` float32 `[T, H]`. A token without
      rows gets `out` 0 and `lse` +inf.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
    """
    parts = [(slab, swa_page, swa_indices, swa_lens)]
    compressed = (compressed_page, compressed_indices, compressed_lens)
    if compressed_page is not None and compressed_indices is not None and compressed_lens is not None:
        other = slab if compressed_slab is None else compressed_slab
        parts.append((other, compressed_page, compressed_indices, compressed_lens))
    elif any(value is not None for value in compressed):
        raise ValueError("give compressed_page, compressed_indices and compressed_lens together, or none of them")
    for name, (_, page, indices, lens) in zip(("swa", "compressed"), parts, strict=False):
        _check(q, sink, indices, lens, name, page.format.num_values)
    if kernel := mosaic_kernel("sparse_attention", implementation, given=(q, [part[1] for part in parts])):
        return kernel(q, slab, swa_page, swa_indices, swa_lens, *compressed, compressed_slab, sink=sink, scale=scale)

    def attend(q: jax.Array, *lists: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys, valid = [], []
        for (part_slab, page, *_), indices, lens in zip(parts, lists[::2], lists[1::2], strict=True):
            counts = _counted(indices, lens, part_slab.shape[0] * page.storage_block_size)
            slots = jnp.where(counts, indices, -1)
            keys.append(gather_rows(part_slab, page, slots, kv_scale=kv_scale, dtype=q.dtype, implementation="xla"))
            valid.append(counts)
        return _attend(q, jnp.concatenate(keys, axis=1), jnp.concatenate(valid, axis=1), sink, scale)

    lists = tuple(array for part in parts for array in part[2:])
    return map_chunks(attend, (q, *lists), _tokens_at_once(q, sum(part[2].shape[1] for part in parts)))


def workspace_attention(
    q: jax.Array,
    workspace: jax.Array,
    indices: jax.Array,
    lens: jax.Array,
    *,
    sink: jax.Array | None = None,
    scale: float = 512**-0.5,
) -> tuple[jax.Array, jax.Array]:
    """Prefill attention over rows that were gathered and dequantised beforehand.

    The reference for FlashMLA's prefill kernel: `workspace` holds, request by request, the compressed rows and then the
    window rows (`gather_sequence`), and `indices` are `combine_topk_swa`'s.

    Args:
      q: `[T, H, D]` float32 or bfloat16, already rotated.
      workspace: `[rows, D]`, float32 or bfloat16.
      indices: int32 `[T, W]` rows of the workspace; -1 and rows past the end are left out.
      lens: int32 `[T]`, entries of each row that count.
      sink, scale: as in `sparse_attention`.

    Returns:
      `out` and `lse` as `sparse_attention` returns them.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
    """
    _check(q, sink, indices, lens, "workspace", workspace.shape[-1])
    num_rows = workspace.shape[0]

    def attend(q: jax.Array, indices: jax.Array, lens: jax.Array) -> tuple[jax.Array, jax.Array]:
        valid = _counted(indices, lens, num_rows)
        rows = jnp.where(valid, indices, num_rows)  # past the end: filled, never wrapped
        keys = workspace.at[rows].get(mode="fill", fill_value=0).astype(q.dtype)
        return _attend(q, keys, valid, sink, scale)

    return map_chunks(attend, (q, indices, lens), _tokens_at_once(q, indices.shape[1]))


def _check(
    q: jax.Array, sink: jax.Array | None, indices: jax.Array, lens: jax.Array, name: str, num_values: int
) -> None:
    if q.ndim != 3 or q.shape[2] != num_values:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [tokens, heads, {num_values}], as {name} rows are")
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q has dtype {q.dtype}; use float32 or bfloat16")
    tokens, heads, _ = q.shape
    if indices.ndim != 2 or indices.shape[0] != tokens or lens.shape != (tokens,):
        raise ValueError(
            f"{name} indices {list(indices.shape)} and lens {list(lens.shape)} must be [{tokens}, width] and "
            f"[{tokens}], a row for each of q's tokens"
        )
    if indices.dtype != jnp.int32 or lens.dtype != jnp.int32:
        raise ValueError(f"{name} indices and lens are {indices.dtype} and {lens.dtype}; both must be int32")
    if sink is not None and (sink.shape != (heads,) or sink.dtype != jnp.float32):
        raise ValueError(f"sink is {sink.dtype}{list(sink.shape)}; it must be float32[{heads}], one value a head")


def _counted(indices: jax.Array, lens: jax.Array, num_rows: int) -> jax.Array:
    """bool `[T, W]`: the entries that take part."""
    columns = jnp.arange(indices.shape[1], dtype=jnp.int32)
    return (columns < lens[:, None]) & (indices >= 0) & (indices < num_rows)


def _tokens_at_once(q: jax.Array, num_keys: int) -> int:
    """Query tokens whose rows, scores and probabilities fit in the workspace."""
    _, heads, dim = q.shape
    return max(_WORKSPACE_BYTES // max(num_keys * (dim * q.dtype.itemsize + heads * 2 * 4), 1), 1)


def _attend(
    q: jax.Array, keys: jax.Array, valid: jax.Array, sink: jax.Array | None, scale: float
) -> tuple[jax.Array, jax.Array]:
    """q `[T, H, D]`, keys `[T, K, D]` of q's dtype, finite where not valid; valid bool `[T, K]`."""
    scores = einsum_f32("thd,tkd->thk", q, keys) * jnp.float32(scale)
    scores = jnp.where(valid[:, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, initial=-jnp.inf)
    top = jnp.where(top == -jnp.inf, jnp.float32(0), top)
    weights = jnp.exp(scores - top[:, :, None])
    total = jnp.sum(weights, axis=-1)
    empty = ~jnp.any(valid, axis=-1)[:, None]
    lse = jnp.where(empty, jnp.inf, top + jnp.log(total))
    denominator = total if sink is None else total + jnp.exp(sink - top)
    out = einsum_f32("thk,tkd->thd", weights.astype(keys.dtype), keys)
    out = jnp.where(empty[:, :, None], jnp.float32(0), out / denominator[:, :, None])
    return out.astype(q.dtype), lse
