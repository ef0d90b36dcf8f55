"""Triton kernels that do what vLLM 0.27.1's do for the DeepSeek-V4 cache, with its algorithms, for comparison only.

One program a token writes a row (quantising one block of 64 after another) or makes an index row; 128 programs a
request share the gather of its rows, each taking every 128th, block after block of 64, and the last 64 values in four
steps of 16. Addresses are 64-bit. Constants: the fp8_ds_mla page of 64 rows. vLLM leaves the number of warps to Triton,
which takes four; `warps=1` is the better choice, for comparison.
"""

import torch
import triton
import triton.language as tl

ROWS = 64
WORKERS = 128  # programs of one request


@triton.jit
def _insert(slab, slots, rows, offset, block_stride: tl.constexpr, PAGE: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    page = slab + (slot // PAGE).to(tl.int64) * block_stride + offset
    data = page + (slot % PAGE) * 576
    scales = page + PAGE * 576 + (slot % PAGE) * 8
    lane = tl.arange(0, 64)
    for block in tl.static_range(7):
        x = tl.load(rows + token * 512 + block * 64 + lane).to(tl.float32)
        exponent = tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(x)), 1e-4) / 448.0))
        scaled = tl.minimum(tl.maximum(x / tl.exp2(exponent), -448.0), 448.0)
        tl.store(data + block * 64 + lane, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
        tl.store(scales + block, (exponent + 127.0).to(tl.uint8))
    tl.store(scales + 7, tl.zeros((), tl.uint8))
    rope = (data + 448).to(tl.pointer_type(tl.bfloat16))
    for part in tl.static_range(4):
        column = part * 16 + tl.arange(0, 16)
        tl.store(rope + column, tl.load(rows + token * 512 + 448 + column))


def insert(slab, slots, rows, *, offset, warps=4):
    """slab uint8 [blocks, stride], slots int32 [T], rows bf16 [T, 512]."""
    _insert[(slots.shape[0],)](slab, slots, rows, offset, slab.stride(0), ROWS, num_warps=warps)


@triton.jit
def _gather(
    slab, table, lens, out, offset, block_stride: tl.constexpr, max_blocks: tl.constexpr, max_rows, PAGE: tl.constexpr
):
    request, worker = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + request)
    lane = tl.arange(0, 64)
    for row in range(worker, length, tl.num_programs(1)):
        block = tl.load(table + request * max_blocks + row // PAGE)
        page = slab + block.to(tl.int64) * block_stride + offset
        data = page + (row % PAGE) * 576
        scales = page + PAGE * 576 + (row % PAGE) * 8
        target = out + (request * max_rows + row).to(tl.int64) * 512
        for group in tl.static_range(7):
            code = tl.load(data + group * 64 + lane).to(tl.float8e4nv, bitcast=True)
            scale = tl.exp2(tl.load(scales + group).to(tl.float32) - 127.0)
            tl.store(target + group * 64 + lane, (code.to(tl.float32) * scale).to(tl.bfloat16))
        rope = (data + 448).to(tl.pointer_type(tl.bfloat16))
        for part in tl.static_range(4):
            column = part * 16 + tl.arange(0, 16)
            tl.store(target + 448 + column, tl.load(rope + column))


def gather(slab, table, lens, out, *, offset, warps=4):
    """slab uint8 [blocks, stride], table int32 [R, blocks], lens int32 [R], out bf16 [R, rows, 512]."""
    grid = (table.shape[0], WORKERS)
    _gather[grid](slab, table, lens, out, offset, slab.stride(0), table.shape[1], out.shape[1], ROWS, num_warps=warps)


@triton.jit
def _swa(table, starts, lens, requests, out, out_lens, max_blocks, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    request = tl.load(requests + token)
    start, end = tl.load(starts + request), tl.load(starts + request + 1)
    position = tl.load(lens + request) - (end - start) + token - start
    first = tl.maximum(position - WINDOW + 1, 0)
    length = position + 1 - first
    lane = tl.arange(0, WINDOW)
    where = first + lane
    entry = tl.load(table + request * max_blocks + where // BLOCK, mask=lane < length, other=0)
    tl.store(out + token * WINDOW + lane, tl.where(lane < length, entry * BLOCK + where % BLOCK, -1))
    tl.store(out_lens + token, length)


def swa_indices(table, starts, lens, requests, out, out_lens):
    """table int32 [R, blocks]; out int32 [T, 128], out_lens int32 [T]."""
    _swa[(out.shape[0],)](table, starts, lens, requests, out, out_lens, table.shape[1], 128, 64)


@triton.jit
def _topk(topk, requests, table, out, out_lens, max_blocks, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    request = tl.load(requests + token)
    lane = tl.arange(0, WIDTH)
    picked = tl.load(topk + token * WIDTH + lane)
    valid = picked >= 0
    entry = tl.load(table + request * max_blocks + picked // BLOCK, mask=valid, other=0)
    tl.store(out + token * WIDTH + lane, tl.where(valid, entry * BLOCK + picked % BLOCK, -1))
    tl.store(out_lens + token, tl.sum(valid.to(tl.int32)))


def topk_to_slots(topk, requests, table, out, out_lens):
    """topk int32 [T, width], width a power of two; out int32 [T, width], out_lens int32 [T]."""
    _topk[(topk.shape[0],)](topk, requests, table, out, out_lens, table.shape[1], topk.shape[1], 64)


def as_torch(array):
    """A JAX array's memory as a tensor, shared."""
    return torch.from_dlpack(array)
