"""Attention on a layer's strided views, in plain PyTorch and independent of the library's kernels.

Nothing here imports the package: it stands for somebody else's attention code, which knows the tensor that it was given
(base pointer, stride(0), 584) and DeepSeek-V4's page format, and nothing else.
"""

import numpy as np
import torch

DATA_BYTES, SCALE_BYTES, NOPE = 576, 8, 448


def rows_of(view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 [..., 512] rows of an fp8_ds_mla view [num_blocks, rows, 584]; slots must be valid."""
    num_blocks, rows, width = view.shape
    assert width == 584 and view.stride()[1:] == (584, 1)
    pages = torch.as_strided(view, (num_blocks, rows * width), (view.stride(0), 1), view.storage_offset())
    block, row = slots // rows, slots % rows
    data = pages[block[..., None], row[..., None] * DATA_BYTES + torch.arange(DATA_BYTES, device=view.device)]
    scale_at = rows * DATA_BYTES + row[..., None] * SCALE_BYTES
    scales = pages[block[..., None], scale_at + torch.arange(7, device=view.device)]
    nope = data[..., :NOPE].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    powers = torch.exp2(scales.to(torch.float32) - 127)
    nope = nope.unflatten(-1, (7, 64)) * powers[..., None]
    rope = data[..., NOPE:].contiguous().view(torch.bfloat16).to(torch.float32)
    return torch.cat([nope.flatten(-2), rope], dim=-1)


def attend(
    q: torch.Tensor, sources: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], sink: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [T, H, 512]: each token attends to the union of its rows in all `sources` (view, indices, lengths)."""
    keys, masks = [], []
    for view, indices, lengths in sources:
        indices = indices.to(torch.int64)
        column = torch.arange(indices.shape[-1], device=view.device)
        valid = (indices >= 0) & (column < lengths[:, None])
        rows = rows_of(view, torch.where(valid, indices, 0))
        keys.append(torch.where(valid[..., None], rows, 0.0))
        masks.append(valid)
    key, mask = torch.cat(keys, dim=1), torch.cat(masks, dim=1)
    logits = torch.einsum("thd,tkd->thk", q.to(torch.float32), key) * 512**-0.5
    logits = logits.masked_fill(~mask[:, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.where(torch.isfinite(lse)[..., None], torch.exp(logits - lse[..., None]), 0.0)
    out = torch.einsum("thk,tkd->thd", weights, key)
    if sink is not None:
        out = out / (1 + torch.exp(sink[None, :, None] - lse[..., None]))
    return out


def relative_error(a: object, b: object) -> float:
    """||a - b|| / ||b|| in float64; 0 where both are zero."""
    x, y = (np.asarray(torch.as_tensor(v).cpu(), np.float64) for v in (a, b))
    norm = float(np.linalg.norm(y))
    return float(np.linalg.norm(x - y)) / norm if norm else float(np.linalg.norm(x))
