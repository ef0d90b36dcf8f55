"""Checks of what callers hand to the KV-cache manager, all made before anything changes."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dsv4kv_jax._integers import as_count
from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.prefix_lookup import ComputedBlocks
from dsv4kv_jax.request import NO_ROW, Request

if TYPE_CHECKING:
    from dsv4kv_jax.manager import KVCacheManager


_COUNTERS = ("num_computed_tokens", "num_in_flight_tokens")
_COUNTS = ("num_new_tokens", "num_lookahead_tokens", "num_external_computed_tokens", "reserved_blocks", *_COUNTERS)


def check_options(
    groups: Sequence[KVCacheGroup],
    *,
    watermark: float,
    retention_interval: int | None,
    prefix_match_unit: int | None,
    hash_secret: bytes | None,
) -> None:
    """Raises ValueError for impossible options of a manager."""
    if not isinstance(watermark, int | float) or not 0 <= watermark < 1:
        raise ValueError(f"watermark={watermark!r} must be a share of the pool, at least 0 and below 1")
    if retention_interval is not None:
        as_count("retention_interval", retention_interval)
    if prefix_match_unit is not None:
        as_count("prefix_match_unit", prefix_match_unit, at_least=1)
        sizes = [group.block_size for group in groups]
        if any(size % prefix_match_unit for size in sizes):
            raise ValueError(
                f"prefix_match_unit={prefix_match_unit} must divide the block size of every group, {sizes}; use a "
                f"divisor of {math.gcd(*sizes)}"
            )
    if hash_secret is not None and (not isinstance(hash_secret, bytes) or not 16 <= len(hash_secret) <= 64):
        found = f"has {len(hash_secret)} bytes" if isinstance(hash_secret, bytes) else f"is {hash_secret!r}"
        raise ValueError(f"hash_secret {found}; give 16 to 64 bytes")


def plain_counts(request: Request, *given: int) -> tuple[int, ...]:
    """The counts that `allocate_slots` was given, then the request's counters, as plain integers.

    Raises:
      ValueError: one is no integer, or negative; names the request and the count.
    """
    counts = (*given, request.num_computed_tokens, request.num_in_flight_tokens)
    for count in counts:
        if type(count) is not int or count < 0:
            break
    else:
        return counts
    names = _COUNTS if given else _COUNTERS
    return tuple(
        as_count(f"request {request.request_id!r}: {name}", count) for name, count in zip(names, counts, strict=True)
    )


def check_allocation(
    manager: "KVCacheManager", request: Request, counts: tuple[int, ...], hits: ComputedBlocks | None = None
) -> ComputedBlocks | None:
    """Checks the arguments of `allocate_slots` for a known request.

    Args:
      manager: knows the request.
      request: the request.
      counts: from `plain_counts`.
      hits: its look-up.

    Returns:
      The hits to take over, None where there are none.

    Raises:
      ValueError: see `KVCacheManager.allocate_slots`.
    """
    num_new_tokens, _, external, _, computed, _ = counts
    row, name = request._row, f"request {request.request_id!r}"
    if not num_new_tokens and not external:
        raise ValueError(f"{name}: num_new_tokens=0 is nothing to do, unless num_external_computed_tokens are above 0")
    if hits is not None and not isinstance(hits, ComputedBlocks):
        raise ValueError(f"{name}: new_computed_blocks={hits!r} must be what get_computed_blocks returned")
    hit_tokens = hits.num_tokens if hits is not None else 0
    if row == NO_ROW:
        _check_first(manager, request, name)
    elif hit_tokens:
        raise ValueError(f"{name} holds blocks already; pass new_computed_blocks only on its first allocation")
    elif computed > (held := manager.tables.holds[row]):
        raise ValueError(f"{name}: num_computed_tokens={computed}, but its blocks hold only {held} tokens")
    elif computed < manager.tables.slid_to[row] and computed < (least := manager.tables.resumes_at(row)):
        raise ValueError(
            f"{name}: num_computed_tokens={computed} went back too far: what a query before token {least} sees was let "
            f"go of when later tokens were settled; preempt the request to start it over"
        )
    total = computed + hit_tokens + external + num_new_tokens
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
