"""What a DeepSeek-V4 layer writes and attends to, in numpy, one sequence at a time and without any paging.

The oracle of the compressor, indexer and attention tests: rows are quantised to bytes and read back, but lie in plain
arrays `[rows, bytes]` in order of position. Written for clarity; nothing is shared with the library.
"""

import dataclasses
import math

import numpy as np
import oracle
from oracle import bf16, e4m3, e4m3_value

F32 = np.float32
WINDOW = 128


def encode(fmt, rows, floor="amax"):
    """Rows of a format as bytes, uint8 `[n, row bytes]`, the sections of each row one after another."""
    encoded = [np.concatenate(oracle.encode_row(fmt, row, floor)) for row in np.asarray(rows, F32)]
    return np.stack(encoded) if encoded else np.zeros((0, 0), np.uint8)


def decode(fmt, raw, num_values):
    """The values of encoded rows, float32 `[n, num_values]`."""
    ends = np.cumsum(oracle.SECTION_BYTES.get(fmt, (raw.shape[1],)))[:-1]
    rows = [oracle.decode_row(fmt, np.split(row, ends)) for row in raw]
    return np.stack(rows).astype(F32) if rows else np.zeros((0, num_values), F32)


# --- rotation ---


def rope_angles(num_positions, ratio):
    """float32 `[num_positions, 32]`: theta 10000, or 160000 stretched by YaRN (factor 16) for layers that compress."""
    theta = 10_000.0 if ratio == 1 else 160_000.0
    turn = 1.0 / (theta ** (np.arange(0, 64, 2, dtype=F32) / F32(64)))
    if ratio > 1:
        low, high = (64 * math.log(65536 / (b * 2 * math.pi)) / (2 * math.log(theta)) for b in (32, 1))
        low, high = math.floor(low), math.ceil(high)
        stretched = np.clip((np.arange(32, dtype=F32) - low) / F32(high - low), 0, 1)
        keep = 1 - stretched
        turn = turn / 16 * (1 - keep) + turn * keep
    return np.arange(num_positions, dtype=F32)[:, None] * turn.astype(F32)


def rotate(x, angles, sign=1):
    """Turns the pairs (448, 449), ... of `[..., 512]`, or of the last 64 of any row; angles `[..., 32]`."""
    x = np.array(x, F32)
    cos, sin = np.cos(angles), np.sin(angles) * F32(sign)
    even, odd = x[..., -64::2].copy(), x[..., -63::2].copy()
    x[..., -64::2] = even * cos - odd * sin
    x[..., -63::2] = odd * cos + even * sin
    return x


# --- compression and selection ---


def compress(kv, score, ape, norm, angles, ratio, eps=1e-6):
    """All entries of a sequence, float32 `[T // ratio, d]`. kv, score `[T, W]`."""
    dim = len(norm)
    score = score + ape[np.arange(len(score)) % ratio]
    rows = []
    for last in range(ratio - 1, len(kv), ratio):
        own = slice(last - ratio + 1, last + 1)
        if ratio == 4:
            before = slice(max(last - 7, 0), max(last - 3, 0))
            k = np.concatenate([kv[before, :dim], kv[own, dim:]])
            s = np.concatenate([score[before, :dim], score[own, dim:]])
        else:
            k, s = kv[own], score[own]
        weight = np.exp(s - s.max(axis=0))
        mean = (weight / weight.sum(axis=0) * k).sum(axis=0)
        row = mean * (1.0 / np.sqrt(np.mean(mean * mean) + F32(eps))) * norm
        rows.append(rotate(row.astype(F32), angles[last + 1 - ratio]))
    return np.array(rows, F32).reshape(-1, dim)


def hadamard(x):
    matrix = np.ones((1, 1))
    while len(matrix) < x.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.astype(np.float64) @ matrix * x.shape[-1] ** -0.5).astype(F32)


def index_scores(q, weights, keys, angles, use_hadamard=False):
    """Score of every key for one token: q `[H, 128]`, weights `[H]`, keys `[n, 128]`, angles `[32]`."""
    q = rotate(q, angles)
    q = bf16(hadamard(q) if use_hadamard else q)
    scale = oracle.ue8m0_value([oracle.scale_byte(head) for head in q]).astype(F32)
    codes = e4m3_value(e4m3(q / scale[:, None]))
    folded = weights * scale * F32(128**-0.5) * F32(len(q) ** -0.5)
    return (np.maximum(codes @ keys.T, 0) * folded[:, None]).sum(axis=0)


def attention(q, keys, sink, scale=512**-0.5):
    """One token: q `[H, 512]`, keys `[n, 512]`, sink `[H]`, all in float64. Returns (out, lse)."""
    if not len(keys):
        return np.zeros(q.shape), np.full(len(q), np.inf)
    q, keys, sink = (np.asarray(x, np.float64) for x in (q, keys, sink))
    scores = q @ keys.T * scale
    top = scores.max(axis=1, keepdims=True)
    weight = np.exp(scores - top)
    total = weight.sum(axis=1)
    lse = top[:, 0] + np.log(total)
    return weight @ keys / (total + np.exp(sink - top[:, 0]))[:, None], lse


# --- a layer ---


@dataclasses.dataclass
class CompressorInputs:
    """kv, score float32 `[T, W]` of every token; ape `[ratio, W]`; norm `[d]`."""

    kv: np.ndarray
    score: np.ndarray
    ape: np.ndarray
    norm: np.ndarray

    @classmethod
    def draw(cls, rng, tokens, ratio, dim):
        width = dim * (2 if ratio == 4 else 1)
        kv, score = (rng.standard_normal((tokens, width)).astype(F32) for _ in range(2))
        ape = rng.standard_normal((ratio, width)).astype(F32)
        return cls(kv, score, ape, (1 + 0.1 * rng.standard_normal(dim)).astype(F32))


@dataclasses.dataclass
class Sequence:
    """Random inputs of one layer for one sequence, before rotation; drawn in a fixed order from the seed."""

    ratio: int
    q: np.ndarray
    kv: np.ndarray
    sink: np.ndarray
    compressor: CompressorInputs | None = None
    index: CompressorInputs | None = None
    index_q: np.ndarray | None = None
    index_weights: np.ndarray | None = None

    @classmethod
    def draw(cls, ratio, tokens, *, heads=2, index_heads=4, seed=0):
        rng = np.random.default_rng(seed)
        seq = cls(
            ratio=ratio,
            q=bf16(rng.standard_normal((tokens, heads, 512))),
            kv=bf16(rng.standard_normal((tokens, 512))),
            sink=rng.standard_normal(heads).astype(F32),
        )
        if ratio > 1:
            seq.compressor = CompressorInputs.draw(rng, tokens, ratio, 512)
        if ratio == 4:
            seq.index = CompressorInputs.draw(rng, tokens, ratio, 128)
            seq.index_q = bf16(rng.standard_normal((tokens, index_heads, 128)))
            seq.index_weights = rng.standard_normal((tokens, index_heads)).astype(F32)
        return seq

    @property
    def tokens(self):
        return len(self.kv)


@dataclasses.dataclass
class Rows:
    """What a sequence leaves in the caches, uint8 `[rows, row bytes]`, in order of position or entry."""

    window: np.ndarray
    compressed: np.ndarray
    keys: np.ndarray


def write(seq, *, latent="fp8_ds_mla", key="indexer_fp8", floor="scale", use_hadamard=False):
    """All rows of a sequence; `latent` and `key` are row formats, `floor` is the compressed rows' scale floor."""
    angles = rope_angles(seq.tokens, seq.ratio)
    window = encode(latent, rotate(seq.kv, angles))
    compressed = keys = np.zeros((0, 0), np.uint8)
    if seq.ratio > 1:
        c = seq.compressor
        compressed = encode(latent, bf16(compress(c.kv, c.score, c.ape, c.norm, angles, seq.ratio)), floor)
    if seq.ratio == 4:
        c = seq.index
        rows = compress(c.kv, c.score, c.ape, c.norm, angles, 4)
        keys = encode(key, bf16(hadamard(rows) if use_hadamard else rows))
    return Rows(window, compressed, keys)


def pick(seq, rows, top_k, *, key="indexer_fp8", use_hadamard=False):
    """For each token, the compressed entries that it attends to."""
    angles, keys = rope_angles(seq.tokens, seq.ratio), decode(key, rows.keys, 128)
    picks = []
    for p in range(seq.tokens):
        visible = (p + 1) // seq.ratio if seq.ratio > 1 else 0
        picked = np.arange(visible)
        if seq.ratio == 4 and visible > top_k:
            scores = index_scores(seq.index_q[p], seq.index_weights[p], keys[:visible], angles[p], use_hadamard)
            picked = np.argsort(-scores, kind="stable")[:top_k]
        picks.append(picked)
    return picks


def attend(seq, rows, picks, *, query=bf16, latent="fp8_ds_mla"):
    """(out, lse) of every token over stored rows, `[T, heads, 512]` rotated back and `[T, heads]`.

    `query` rounds the rotated queries: bf16 as bf16 models do, the identity for float32 ones.
    """
    angles = rope_angles(seq.tokens, seq.ratio)
    window, entries = (decode(latent, raw, 512) for raw in (rows.window, rows.compressed))
    results = []
    for p in range(seq.tokens):
        keys = np.concatenate([window[max(p - WINDOW + 1, 0) : p + 1], entries[picks[p]]])
        out, lse = attention(query(rotate(seq.q[p], angles[p])), keys, seq.sink)
        results.append((rotate(out, angles[p], sign=-1), lse))
    out, lse = zip(*results, strict=True)
    return np.stack(out), np.stack(lse)
