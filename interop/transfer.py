"""Whole blocks for transfer engines: what to register, which blocks a request needs, and copies to the host and back.

All groups overlay the same blocks, so the unit of a transfer is the whole block of `block_stride_bytes`, never a
layer's page: pages of different groups start at the same address and differ in size, and a region chosen by base
pointer would cut the longer ones.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from dsv4kv_jax._integers import as_count, as_ids
from dsv4kv_jax.cache import KVCache
from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.interop._torch import require_torch
from dsv4kv_jax.interop.lease import TensorViews
from dsv4kv_jax.specs import cdiv


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Memory to register with a transfer engine: block i is the `block_bytes` bytes at `address + i * block_bytes`."""

    address: int
    num_blocks: int
    block_bytes: int


def whole_block_view(views: TensorViews, buffer: int = 0) -> Any:
    """`uint8[num_blocks, block_stride_bytes]` over a whole buffer, from its first byte.

    Args:
      views: a `Lease` or a `SharedSlab`.
      buffer: which of the layout's buffers; a packed layout has one.

    Raises:
      ValueError: a bare `KVCache`, or no such buffer.
    """
    if isinstance(views, KVCache):
        raise ValueError(
            "a KVCache is JAX's: use `with lend(cache) as views: whole_block_view(views)`, or a SharedSlab"
        )
    return views.whole_blocks(buffer)


def regions(views: TensorViews) -> list[Region]:
    """One region a buffer: exactly one for a packed cache, however many layers and groups lie in it."""
    return [
        Region(
            address=whole_block_view(views, index).data_ptr(),
            num_blocks=views.num_blocks,
            block_bytes=buffer.block_stride_bytes,
        )
        for index, buffer in enumerate(views.layout.buffers)
    ]


def blocks_to_host(views: TensorViews, block_ids: Sequence[int], *, out: Any = None, wait: bool = True) -> Any:
    """Copies blocks to the host.

    Args:
      views: a `Lease` or a `SharedSlab`.
      block_ids: Python integers.
      out: `uint8[len(block_ids), bytes_per_block]` on the host to copy into; by default a new one, pinned on a GPU.
      wait: wait until the copy is complete; without, synchronise PyTorch's current stream before reading it.

    Returns:
      `out`: for each block, its bytes in every buffer, one buffer after the other.

    Raises:
      ValueError: a block id that is no block of this cache, or an `out` of another shape, dtype or device.
    """
    torch = require_torch()
    ids = _check_ids(views, block_ids)
    shape = (len(ids), views.layout.bytes_per_block)
    if out is None:
        pinned = any(whole_block_view(views, index).is_cuda for index in range(len(views.layout.buffers)))
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
    _check_host(out, shape)
    for host, device in _pieces(views, ids, out):
        host.copy_(device, non_blocking=True)
    _wait(views, wait)
    return out


def blocks_from_host(views: TensorViews, block_ids: Sequence[int], host: Any, *, wait: bool = True) -> None:
    """Copies blocks back: `host` as `blocks_to_host` gives it. Other blocks keep their bytes.

    Raises:
      ValueError: a block id that is no block of this cache or appears twice, or a `host` of another shape or dtype;
        nothing is written then.
    """
    require_torch()
    ids = _check_ids(views, block_ids)
    if len(set(ids)) != len(ids):
        raise ValueError(f"block_ids={ids} name a block twice; which bytes it should get is not defined")
    _check_host(host, (len(ids), views.layout.bytes_per_block))
    for source, device in _pieces(views, ids, host):
        device.copy_(source, non_blocking=True)
    _wait(views, wait)


def blocks_to_resume(
    groups: Sequence[KVCacheGroup], block_tables: Sequence[Sequence[int]], position: int
) -> list[list[int]]:
    """The block ids, group by group, that a request needs to go on at `position`.

    A group that keeps every block needs all that hold positions 0 to `position - 1`; a sliding one those that the token
    at `position` still looks back at, `position - window + 1` to `position - 1`. Transfer these and no others: blocks
    before the window may be another request's by now.

    Args:
      groups: the plan's groups.
      block_tables: one row a group: the request's block ids in order.
      position: tokens already computed.

    Raises:
      ValueError: a needed block is missing from a table or was freed (an id of 0 or less).
    """
    if len(block_tables) != len(groups):
        raise ValueError(f"{len(block_tables)} block tables were given for {len(groups)} groups; pass one row a group")
    position = as_count("position", position)
    needed = []
    for index, (group, row) in enumerate(zip(groups, block_tables, strict=True)):
        table = as_ids("resume from", row)
        oldest = 0 if group.sliding_window is None else max(position - group.sliding_window + 1, 0)
        columns = range(oldest // group.block_size, cdiv(position, group.block_size)) if oldest < position else range(0)
        if columns and columns[-1] >= len(table):
            raise ValueError(
                f"group {index} holds {len(table)} blocks of {group.block_size} tokens; position {position} needs "
                f"{columns[-1] + 1}"
            )
        if freed := [column for column in columns if table[column] <= 0]:
            raise ValueError(
                f"group {index}: the blocks of columns {freed} were freed, and position {position} still needs them; "
                f"resume at an earlier boundary whose window is whole"
            )
        needed.append([int(table[column]) for column in columns])
    return needed


def _check_ids(views: TensorViews, block_ids: Sequence[int]) -> list[int]:
    ids = as_ids("transfer", block_ids).tolist()
    if bad := [block for block in ids if not 0 < block < views.num_blocks]:
        raise ValueError(f"block ids {bad} are not from 1 to {views.num_blocks - 1}; block 0 is the null block")
    return ids


def _check_host(host: Any, shape: tuple[int, int]) -> None:
    torch = require_torch()
    if not isinstance(host, torch.Tensor) or host.dtype != torch.uint8 or host.is_cuda or tuple(host.shape) != shape:
        found = f"{host.dtype}{tuple(host.shape)}" if isinstance(host, torch.Tensor) else type(host).__name__
        raise ValueError(f"the host copy is {found}; it must be a torch.uint8 tensor of shape {shape} on the CPU")


def _pieces(views: TensorViews, ids: list[int], host: Any) -> Iterator[tuple[Any, Any]]:
    """(host rows, device blocks) for each buffer and each run of consecutive blocks."""
    start = 0
    for index, buffer in enumerate(views.layout.buffers):
        blocks = whole_block_view(views, index)
        columns = host[:, start : start + buffer.block_stride_bytes]
        start += buffer.block_stride_bytes
        for first, length in _runs(ids):
            yield columns[first : first + length], blocks[ids[first] : ids[first] + length]


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """(index of the first, length) of each run of consecutive ids."""
    first = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or ids[index] != ids[index - 1] + 1:
            yield first, index - first
            first = index


def _wait(views: TensorViews, wait: bool) -> None:
    if wait and views.layout.buffers and (blocks := whole_block_view(views)).is_cuda:
        require_torch().cuda.current_stream(blocks.device).synchronize()
