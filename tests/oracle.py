"""What rows, slots and indices must be, in plain numpy and Python: the reference that the tests compare with.

Written for clarity from the published layouts and formulas, one value or token at a time, and independent of the
package: no JAX, no import from it, its own tables and constants. Number formats are tables of all their values, and
rounding is a search in them; scale exponents come from `frexp`. `test_oracle.py` checks it against worked numbers.

Formats are called by the package's names; a row is encoded as a list of uint8 arrays, one per section.
"""

import math

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
INT32_MAX = 2**31 - 1
FLOOR = float(np.float32(1e-4))

# --- number formats ---


def bf16(x):
    """float32 values rounded to bfloat16, as float32."""
    return np.asarray(x, np.float32).astype(BF16).astype(np.float32)


def _e4m3_magnitudes():
    """The magnitude of codes 0..126: exponent bias 7, three mantissa bits, subnormals below 2**-6."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.array(values)


E4M3 = _e4m3_magnitudes()
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(magnitudes, x):
    """Code of the value nearest to |x|, the even code at a tie, the last one past the end."""
    a = np.minimum(np.abs(np.asarray(x, np.float64)), magnitudes[-1])
    above = np.clip(np.searchsorted(magnitudes, a), 1, len(magnitudes) - 1)
    below = above - 1
    down, up = a - magnitudes[below], magnitudes[above] - a
    even = np.where(below % 2 == 0, below, above)
    return np.where(down < up, below, np.where(up < down, above, even)).astype(np.uint8)


def e4m3(x):
    """e4m3fn bytes; NaN is 0x7F."""
    x = np.asarray(x, np.float32)
    code = nearest(E4M3, np.nan_to_num(x, nan=0.0)) | (np.signbit(x).astype(np.uint8) << 7)
    return np.where(np.isnan(x), np.uint8(0x7F), code)


def e4m3_value(byte):
    byte = np.asarray(byte, np.uint8)
    value = np.append(E4M3, np.nan)[byte & 0x7F]
    return np.where(byte & 0x80, -value, value).astype(np.float32)


def e2m1(x):
    """4-bit e2m1 codes; NaN is +6."""
    x = np.asarray(x, np.float32)
    code = nearest(E2M1, np.nan_to_num(x, nan=0.0)) | (np.signbit(x).astype(np.uint8) << 3)
    return np.where(np.isnan(x), np.uint8(7), code)


def e2m1_value(code):
    code = np.asarray(code, np.uint8)
    return np.where(code & 8, -E2M1[code & 7], E2M1[code & 7]).astype(np.float32)


def ue8m0_value(byte):
    """2**(byte - 127) as float64; 255 is NaN."""
    byte = np.asarray(byte, np.uint8)
    return np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(np.int64) - 127))


def ceil_log2_ratio(amax, largest):
    """The least integer e with amax <= largest * 2**e, for positive finite floats."""
    m, k = math.frexp(amax)
    m_largest, k_largest = math.frexp(largest)
    return k - k_largest + (1 if m > m_largest else 0)


def scale_byte(block, floor="amax", largest=448.0):
    """UE8M0 byte of a block: of its finite maximum, with infinities as the largest bf16 and NaNs left out."""
    magnitudes = np.abs(np.asarray(block, np.float64))
    magnitudes = magnitudes[~np.isnan(magnitudes)]
    amax = float(magnitudes.max(initial=0.0))
    amax = min(amax, float(ml_dtypes.finfo(BF16).max))
    if floor == "amax":
        return ceil_log2_ratio(max(amax, FLOOR), largest) + 127
    if floor == "mxfp4":
        return ceil_log2_ratio(max(amax, 6 * 2.0**-126), largest) + 127
    assert floor == "scale"
    smallest = ceil_log2_ratio(FLOOR, 1.0)
    return max(ceil_log2_ratio(amax, largest) if amax else smallest, smallest) + 127


# --- rows ---

SECTION_BYTES = {
    "fp8_ds_mla": (576, 8),
    "indexer_fp8": (128, 4),
    "indexer_fp8_ue8m0": (128, 4),
    "indexer_mxfp4": (64, 4),
}


def _quantise(x, num_blocks, encode, floor, largest):
    blocks = bf16(x).reshape(num_blocks, -1)
    scales = np.array([scale_byte(block, floor, largest) for block in blocks], np.uint8)
    scaled = blocks.astype(np.float64) * (1.0 / ue8m0_value(scales))[:, None]
    return encode(scaled).reshape(-1), scales


@np.errstate(over="ignore", invalid="ignore")
def encode_row(fmt, row, floor="amax", kv_scale=1.0):
    """The sections of one row, each a uint8 array; `fmt` is a format's name, for plain rows their dtype's."""
    row = np.asarray(row)
    if fmt == "fp8_ds_mla":
        codes, scales = _quantise(row[:448], 7, e4m3, floor, 448.0)
        rope = row[448:].astype(np.float32).astype(BF16).view(np.uint8)
        return [np.concatenate([codes, rope]), np.append(scales, np.uint8(0))]
    if fmt == "indexer_fp8":
        codes, scales = _quantise(row, 1, e4m3, "amax", 448.0)
        return [codes, ue8m0_value(scales).astype(np.float32).view(np.uint8)]
    if fmt == "indexer_fp8_ue8m0":
        codes, scales = _quantise(row, 1, e4m3, "amax", 448.0)
        return [codes, np.repeat(scales, 4)]
    if fmt == "indexer_mxfp4":
        codes, scales = _quantise(row, 4, e2m1, "mxfp4", 6.0)
        return [codes[0::2] | (codes[1::2] << 4), scales]
    if fmt == "float8_e4m3fn":
        return [e4m3(row.astype(np.float32) * np.float32(1.0 / kv_scale))]
    if fmt == "bfloat16":
        return [row.astype(np.float32).astype(BF16).view(np.uint8)]
    if fmt == "float32":
        return [row.astype(np.float32).view(np.uint8)]
    assert fmt == "uint8", fmt
    return [row.astype(np.uint8)]


@np.errstate(over="ignore", invalid="ignore")
def decode_row(fmt, sections, kv_scale=1.0):
    """The values of one row as float32 (uint8 for plain bytes); fp8_ds_mla rows are bf16 values."""
    data = np.ascontiguousarray(sections[0])
    if fmt == "fp8_ds_mla":
        nope = e4m3_value(data[:448]).reshape(7, 64) * ue8m0_value(sections[1][:7])[:, None]
        return np.concatenate([bf16(nope.reshape(-1)), data[448:].view(BF16).astype(np.float32)])
    if fmt == "indexer_fp8":
        return e4m3_value(data) * np.ascontiguousarray(sections[1]).view(np.float32)[0]
    if fmt == "indexer_fp8_ue8m0":
        return (e4m3_value(data).reshape(4, 32) * ue8m0_value(sections[1])[:, None]).reshape(-1).astype(np.float32)
    if fmt == "indexer_mxfp4":
        codes = np.stack([data & 15, data >> 4], axis=1).reshape(4, 32)
        return (e2m1_value(codes) * ue8m0_value(sections[1])[:, None]).reshape(-1).astype(np.float32)
    if fmt == "float8_e4m3fn":
        return e4m3_value(data) * np.float32(kv_scale)
    if fmt == "bfloat16":
        return data.view(BF16).astype(np.float32)
    if fmt == "float32":
        return data.view(np.float32)
    assert fmt == "uint8", fmt
    return data


def section_ranges(section_bytes, num_rows, row):
    """Byte ranges, relative to the page, of one row's sections: all rows of a section lie together."""
    start, ranges = 0, []
    for size in section_bytes:
        ranges.append(slice(start + row * size, start + (row + 1) * size))
        start += num_rows * size
    return ranges


def write_row(slab, offset, num_rows, slot, sections):
    """Writes an encoded row at `slot` of the pages at byte `offset` of each block; `slab` is uint8 [blocks, stride].

    Slots that are negative or past the pool write nothing.
    """
    if not 0 <= slot < len(slab) * num_rows:
        return
    block, row = divmod(int(slot), num_rows)
    page = slab[block, offset:]
    for where, content in zip(section_ranges([len(s) for s in sections], num_rows, row), sections, strict=True):
        page[where] = content


def read_row(slab, offset, num_rows, slot, section_bytes):
    """The encoded row at `slot`, or None where there is none."""
    if not 0 <= slot < len(slab) * num_rows:
        return None
    block, row = divmod(int(slot), num_rows)
    page = slab[block, offset:]
    return [page[where].copy() for where in section_ranges(section_bytes, num_rows, row)]


# --- slots and indices ---


def round_up(value, multiple):
    return -(-value // multiple) * multiple


def row_slot(table, index, rows_per_block):
    """Slot of row `index` of a request with block table `table`, or -1."""
    column = index // rows_per_block
    if index < 0 or column >= len(table):
        return -1
    block = int(table[column])
    if block <= 0 or (block + 1) * rows_per_block - 1 > INT32_MAX:
        return -1
    return block * rows_per_block + index % rows_per_block


def tokens(query_start_loc, seq_lens, num_tokens):
    """(request, position) of each token, None for padding; the first token is the first of request 0."""
    out = []
    for r, seq_len in enumerate(seq_lens):
        query_len = int(query_start_loc[r + 1]) - int(query_start_loc[r])
        out += [(r, int(seq_len) - query_len + i) for i in range(query_len)]
    out = [None if token[1] < 0 else token for token in out]
    return (out + [None] * num_tokens)[:num_tokens]


def slot_mapping(tables, query_start_loc, seq_lens, block_size, num_tokens):
    step = tokens(query_start_loc, seq_lens, num_tokens)
    return np.array([-1 if t is None else row_slot(tables[t[0]], t[1], block_size) for t in step], np.int32)


def compressed_slot_mapping(tables, query_start_loc, seq_lens, block_size, ratio, num_tokens):
    out = np.full(num_tokens, -1, np.int32)
    for t, token in enumerate(tokens(query_start_loc, seq_lens, num_tokens)):
        if token is None:
            continue
        r, p = token
        if (p + 1) % ratio == 0:  # an entry lies in the block of its last token, which has a slot if the entry has
            out[t] = row_slot(tables[r], p // ratio, block_size // ratio)
    return out


def range_rows(ranges, tables, step, block_size, width):
    """Slot rows of position ranges (first, last), the newest `width` of each, and their lengths."""
    rows = np.full((len(step), width), -1, np.int32)
    lens = np.zeros(len(step), np.int32)
    for t, token in enumerate(step):
        if token is None:
            continue
        first, last = ranges[t]
        positions = list(range(first, last + 1))[-width:] if width else []
        lens[t] = len(positions)
        rows[t, : len(positions)] = [row_slot(tables[token[0]], p, block_size) for p in positions]
    return rows, lens


def swa_indices(tables, query_start_loc, seq_lens, block_size, num_tokens, window=128, width=None, image_spans=None):
    step = tokens(query_start_loc, seq_lens, num_tokens)
    ranges = [
        token and window_range(token, seq_lens, window, None if image_spans is None else image_spans[t])
        for t, token in enumerate(step)
    ]
    return range_rows(ranges, tables, step, block_size, window if width is None else width)


def window_range(token, seq_lens, window, span):
    """(first, last) position that a token sees; `span` is the image it is part of, or None or (-1, -1)."""
    r, p = token
    first, last = max(p - window + 1, 0), p
    if span is not None and 0 <= span[0] <= p <= span[1]:
        first, last = min(first, int(span[0])), min(int(span[1]), int(seq_lens[r]) - 1)
    return first, last


def draft_indices(tables, query_start_loc, seq_lens, block_size, num_tokens, window=128, draft_tokens=5):
    step = tokens(query_start_loc, seq_lens, num_tokens)
    ranges = []
    for token in step:
        if token is None:
            ranges.append(None)
            continue
        r = token[0]
        context = int(seq_lens[r]) - (int(query_start_loc[r + 1]) - int(query_start_loc[r]))
        ranges.append((max(context - window, 0), int(seq_lens[r]) - 1))
    return range_rows(ranges, tables, step, block_size, round_up(window + draft_tokens, 128))


def topk_to_slots(topk, token_to_req, tables, rows_per_block, valid=None):
    slots = np.full(np.shape(topk), -1, np.int32)
    lens = np.zeros(len(topk), np.int32)
    for t, picked in enumerate(topk):
        r = int(token_to_req[t])
        if (valid is not None and not valid[t]) or not 0 <= r < len(tables):
            continue
        slots[t] = [row_slot(tables[r], int(c), rows_per_block) for c in picked]
        lens[t] = sum(int(c) >= 0 for c in picked)
    return slots, lens


def c128a_width(max_seq_len, max_model_len):
    cap = round_up(max_model_len, 128 * 128) // 128
    width = 128
    while width < max_seq_len // 128:
        width *= 2
    return min(width, cap)


def c128a_indices(tables, query_start_loc, seq_lens, num_tokens, width, block_size=256, ratio=128, local=False):
    rows = np.full((num_tokens, width), -1, np.int32)
    lens = np.zeros(num_tokens, np.int32)
    for t, token in enumerate(tokens(query_start_loc, seq_lens, num_tokens)):
        if token is None:
            continue
        r, p = token
        if not local and row_slot(tables[r], p, block_size) < 0:
            continue
        lens[t] = min((p + 1) // ratio, width)
        for c in range(lens[t]):
            rows[t, c] = c if local else row_slot(tables[r], c, block_size // ratio)
    return rows, lens


def gather_len(query_len, prefix_len, window=128):
    return query_len + min(prefix_len, window - 1)


def combine_topk_swa(
    topk,
    query_start_loc,
    seq_lens,
    gather_lens,
    ratio,
    compressed_rows,
    workspace_rows,
    window=128,
    image_spans=None,
    max_image_tokens=0,
):
    num_tokens, top_k = np.shape(topk)
    width = round_up(top_k + window + max_image_tokens, 128)
    rows = np.full((num_tokens, width), -1, np.int32)
    lens = np.zeros(num_tokens, np.int32)
    for t, token in enumerate(tokens(query_start_loc, seq_lens, num_tokens)):
        if token is None:
            continue
        r, p = token
        oldest = int(seq_lens[r]) - int(gather_lens[r])
        first, last = window_range(token, seq_lens, window, None if image_spans is None else image_spans[t])
        first = max(first, oldest)
        picked = [r * workspace_rows + int(c) if c >= 0 else -1 for c in topk[t][: min((p + 1) // ratio, top_k)]]
        seen = [r * workspace_rows + compressed_rows + q - oldest for q in range(first, last + 1)]
        row = picked + seen
        lens[t] = len(row)
        rows[t, : len(row)] = row
    return rows, lens


def prefill_chunks(query_lens, seq_lens, ratio, max_model_len, max_num_batched_tokens, window=128):
    """(start, stop, compressed rows, workspace rows) of each chunk."""
    limit = 4 * ((-(-max_model_len // ratio) if ratio > 1 else 0) + window + max_num_batched_tokens)

    def size(start, stop):
        compressed = max(seq_lens[r] // ratio if ratio > 1 else 0 for r in range(start, stop))
        gathered = max(gather_len(query_lens[r], seq_lens[r] - query_lens[r], window) for r in range(start, stop))
        return compressed, compressed + gathered

    chunks, start = [], 0
    while start < len(seq_lens):
        stop = start + 1
        while stop < len(seq_lens) and (stop + 1 - start) * size(start, stop + 1)[1] <= limit:
            stop += 1
        chunks.append((start, stop, *size(start, stop)))
        start = stop
    return chunks


def storage_offset(slot, rows_per_block, span):
    return slot // rows_per_block * span + slot % rows_per_block if slot >= 0 else -1


def flashinfer_indices(swa, compressed, lens, swa_block, swa_span, rows, span, top_k=0):
    """FlashInfer's mixed matrix and its lengths; `compressed` is [T, k]."""
    width = round_up(max(top_k, np.shape(compressed)[1]), 4)
    out = np.full((len(swa), np.shape(swa)[1] + width), -1, np.int32)
    for t in range(len(swa)):
        left = [storage_offset(int(s), swa_block, swa_span) for s in swa[t]]
        right = [storage_offset(int(s), rows, span) for s in compressed[t]]
        out[t, : len(left) + len(right)] = left + right
    return out, np.asarray(lens, np.int32) + np.shape(swa)[1]
