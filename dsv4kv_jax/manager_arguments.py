"""Checks of what callers hand to the KV-cache manager, all made before anything changes."""

from typing import TYPE_CHECKING

import numpy as np

from dsv4kv_jax.prefix_lookup import ComputedBlocks
from dsv4kv_jax.request import NO_ROW, Request

if TYPE_CHECKING:
    from dsv4kv_jax.manager import KVCacheManager


def check_options(*, watermark: float, hash_secret: bytes | None, **counts: int) -> None:
    """Raises ValueError for impossible options of a manager; `counts` are sizes of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of at least 1")
    if not 0 <= watermark < 1:
        raise ValueError(f"watermark={watermark!r} must be a share of the pool, at least 0 and below 1")
    if hash_secret is not None and not 16 <= len(hash_secret) <= 64:
        raise ValueError(f"hash_secret has {len(hash_secret)} bytes; give 16 to 64")


def check_allocation(
    manager: "KVCacheManager",
    request: Request,
    num_new_tokens: int,
    num_lookahead_tokens: int,
    num_external_computed_tokens: int = 0,
    reserved_blocks: int = 0,
    hits: ComputedBlocks | None = None,
) -> ComputedBlocks | None:
    """Checks the arguments of `allocate_slots` for a known request.

    Returns:
      The hits to take over, None where there are none.

    Raises:
      ValueError: see `KVCacheManager.allocate_slots`.
    """
    row, computed, name = request._row, request.num_computed_tokens, f"request {request.request_id!r}"
    for field, value in (
        ("num_new_tokens", num_new_tokens),
        ("num_lookahead_tokens", num_lookahead_tokens),
        ("num_external_computed_tokens", num_external_computed_tokens),
        ("reserved_blocks", reserved_blocks),
        ("num_computed_tokens", computed),
        ("num_in_flight_tokens", request.num_in_flight_tokens),
    ):
        if value < 0:
            raise ValueError(f"{name}: {field}={value} must not be negative")
    if not num_new_tokens and not num_external_computed_tokens:
        raise ValueError(f"{name}: num_new_tokens=0 is nothing to do, unless num_external_computed_tokens are above 0")
    hit_tokens = hits.num_tokens if hits is not None else 0
    if row == NO_ROW:
        _check_first(manager, request, name)
    elif hit_tokens:
        raise ValueError(f"{name} holds blocks already; pass new_computed_blocks only on its first allocation")
    elif computed > (held := manager.tables.holds[row]):
        raise ValueError(f"{name}: num_computed_tokens={computed}, but its blocks hold only {held} tokens")
    total = computed + hit_tokens + num_external_computed_tokens + num_new_tokens
    if total > manager.max_model_len:
        raise ValueError(f"{name} would have {total} tokens, more than max_model_len={manager.max_model_len}")
    if hits is None or not hit_tokens:
        return None
    if hits.request is not request:
        raise ValueError(f"{name}: new_computed_blocks is the look-up of request {hits.request.request_id!r}")
    if hits.evictions != manager.pool.num_evictions:
        _, blocks, _ = manager.find_prefix(request, hits.num_tokens)
        if not all(np.array_equal(new, old) for new, old in zip(blocks, hits.block_ids, strict=True)):
            raise ValueError(f"{name}: new_computed_blocks were evicted since; call get_computed_blocks again")
    return hits


def _check_first(manager: "KVCacheManager", request: Request, name: str) -> None:
    if request.num_computed_tokens:
        raise ValueError(f"{name} holds no blocks, so num_computed_tokens={request.num_computed_tokens} must be 0")
    if not manager.tables.num_free_rows:
        raise ValueError(
            f"{name}: all max_requests={manager.tables.max_requests} rows are in use; free a request first"
        )
    if request.request_id in manager.active:
        raise ValueError(f"another {name} holds blocks; give requests that live together different ids")
