"""The oracle against worked numbers of the published formats, so that it cannot share a mistake with the package."""

import numpy as np
import oracle
import pytest

NONE = -1


def test_e4m3_codes():
    values = [0.0, -0.0, 1.0, -1.0, 1.0625, 1.1875, 0.3, 448.0, 500.0, -1e9, 2.0**-9, 2.0**-10, 3 * 2.0**-10]
    codes = [0x00, 0x80, 0x38, 0xB8, 0x38, 0x3A, 0x2A, 0x7E, 0x7E, 0xFE, 0x01, 0x00, 0x02]
    assert oracle.e4m3(values).tolist() == codes
    assert oracle.e4m3_value([0x38, 0x3A, 0x2A, 0x7E, 0xFE]).tolist() == [1.0, 1.25, 0.3125, 448.0, -448.0]
    assert np.isnan(oracle.e4m3_value([0x7F, 0xFF])).all()


def test_e2m1_codes():
    values = [0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 7.0, -0.25, -2.5]
    assert oracle.e2m1(values).tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 7, 7, 8, 12]
    assert oracle.e2m1_value([0, 1, 4, 7, 12]).tolist() == [0.0, 0.5, 2.0, 6.0, -2.0]


@pytest.mark.parametrize(
    ("amax", "of_amax", "of_scale"),
    [
        (0.0, 105, 114),
        (1e-4, 105, 114),
        (1e-3, 109, 114),
        (0.01, 112, 114),
        (0.043701172, 114, 114),
        (0.5, 118, 118),
        (1.0, 119, 119),
        (1.75, 119, 119),
        (1.7578125, 120, 120),
        (7.0, 121, 121),
        (448.0, 127, 127),
        (450.0, 128, 128),
        (1000.0, 129, 129),
        (0.013671875, 112, 114),
        (0.0546875, 114, 114),
        (448.0 * 2**20, 147, 147),
    ],
)
def test_scale_bytes(amax, of_amax, of_scale):
    rounded = oracle.bf16([amax, -amax / 2])
    assert oracle.scale_byte(rounded, "amax") == of_amax
    assert oracle.scale_byte(rounded, "scale") == of_scale


def test_fp8_ds_mla_row():
    row = np.concatenate([(np.arange(448) - 224) / 64, np.arange(64) / 8 - 4]).astype(np.float32)
    data, scales = oracle.encode_row("fp8_ds_mla", row)
    assert scales.tolist() == [120, 120, 119, 118, 119, 120, 120, 0]
    assert data[:8].tolist() == [0xFE] * 8
    assert data[444:456].tobytes().hex() == "7e7e7e7e" + "80c078c070c068c0"
    back = oracle.decode_row("fp8_ds_mla", [data, scales])
    assert back[0] == -3.5
    assert np.abs(back[:448] - row[:448]).max() == 0.125


@pytest.mark.parametrize(("floor", "scale", "code"), [("amax", 105, 0x62), ("scale", 114, 0x1A)])
def test_tiny_row(floor, scale, code):
    row = np.append(np.full(448, 1e-5, np.float32), np.zeros(64, np.float32))
    data, scales = oracle.encode_row("fp8_ds_mla", row, floor)
    assert scales.tolist() == [scale] * 7 + [0]
    assert data[0] == code
    assert oracle.decode_row("fp8_ds_mla", [data, scales])[0] == np.float32(9.536743e-06)


def test_indexer_rows():
    row = np.sin(np.arange(128)).astype(np.float32)
    data, scale = oracle.encode_row("indexer_fp8", row)
    assert data[:8].tobytes().hex() == "00757761f4f7e972"
    assert scale.tobytes().hex() == "0000803b"  # 0.00390625
    same, scale = oracle.encode_row("indexer_fp8_ue8m0", row)
    assert (same == data).all()
    assert scale.tolist() == [119] * 4
    data, scale = oracle.encode_row("indexer_mxfp4", row)
    assert scale.tolist() == [125] * 4
    assert data[:8].tobytes().hex() == "5016ed5a36ec3c56"


def test_plain_rows():
    assert oracle.encode_row("float8_e4m3fn", np.float32([1.0, 448.0, 600.0, 0.3]))[0].tobytes().hex() == "387e7e2a"
    assert oracle.encode_row("float8_e4m3fn", np.float32([1.0]), kv_scale=2.0)[0].tolist() == [0x30]


@pytest.mark.parametrize(
    ("sizes", "rows", "row", "starts"),
    [
        ((576, 8), 64, 0, (0, 36864)),
        ((576, 8), 64, 1, (576, 36872)),
        ((576, 8), 64, 5, (2880, 36904)),
        ((576, 8), 64, 63, (36288, 37368)),
        ((576, 8), 2, 0, (0, 1152)),
        ((576, 8), 2, 1, (576, 1160)),
        ((128, 4), 64, 5, (640, 8212)),
        ((64, 4), 64, 5, (320, 4116)),
    ],
)
def test_places_in_a_page(sizes, rows, row, starts):
    assert tuple(where.start for where in oracle.section_ranges(sizes, rows, row)) == starts


@pytest.mark.parametrize(
    ("position", "token", "c4", "c128"),
    [
        (0, 1792, NONE, NONE),
        (2, 1794, NONE, NONE),
        (3, 1795, 448, NONE),
        (7, 1799, 449, NONE),
        (127, 1919, 479, 14),
        (255, 2047, 511, 15),
        (256, 768, NONE, NONE),
        (259, 771, 192, NONE),
        (383, 895, 223, 6),
        (511, 1023, 255, 7),
        (515, 2307, 576, NONE),
    ],
)
def test_slots(position, token, c4, c128):
    step = ([[7, 3, 9]], [0, 1], [position + 1])
    assert oracle.slot_mapping(*step, 256, 1) == [token]
    assert oracle.compressed_slot_mapping(*step, 256, 4, 1) == [c4]
    assert oracle.compressed_slot_mapping(*step, 256, 128, 1) == [c128]


def test_compressed_slots_of_a_batch():
    tables = [[7, 3, 9, 0], [5, 0, 0, 0]]
    ratio4 = oracle.compressed_slot_mapping(tables, [0, 5, 7], [262, 5], 256, 4, 9)
    assert ratio4.tolist() == [-1, -1, 192, -1, -1, 320, -1, -1, -1]
    ratio128 = oracle.compressed_slot_mapping(tables, [0, 5, 7], [384, 128], 256, 128, 9)
    assert ratio128.tolist() == [-1, -1, -1, -1, 6, -1, 10, -1, -1]


def test_state_slots():
    assert [oracle.row_slot([0, 0, 11, 12, 13, 14], p, 4) for p in (8, 11, 12, 15, 19, 23)] == [44, 47, 48, 51, 55, 59]
    table = list(range(100, 120))
    assert [oracle.row_slot(table, p, 8) for p in (0, 7, 8, 127)] == [800, 807, 808, 927]
    assert [oracle.row_slot([20, 21, 22], p, 4) for p in range(4, 12)] == list(range(84, 92))


@pytest.mark.parametrize(
    ("position", "length", "first", "last"),
    [
        (0, 1, 128, 128),
        (5, 6, 128, 133),
        (63, 64, 128, 191),
        (64, 65, 128, 256),
        (127, 128, 128, 319),
        (128, 128, 129, 384),
        (200, 128, 265, 520),
        (319, 128, 512, 703),
    ],
)
def test_window_rows(position, length, first, last):
    rows, lens = oracle.swa_indices([[2, 4, 6, 8, 10]], [0, 1], [position + 1], 64, 1)
    assert lens == [length]
    assert (rows[0, 0], rows[0, length - 1]) == (first, last)
    assert (rows[0, length:] == -1).all()


def test_small_window():
    rows, lens = oracle.swa_indices([[3]], [0, 2], [4], 64, 3, window=8)
    assert rows.tolist() == [[192, 193, 194] + [-1] * 5, [192, 193, 194, 195] + [-1] * 4, [-1] * 8]
    assert lens.tolist() == [3, 4, 0]


def test_topk_to_slots():
    tables = [[7, 3, 9, 0], [5, 0, 0, 0]]
    topk = [[0, 63, 64, 100, -1, -1], [2, -1, -1, -1, -1, -1]]
    slots, lens = oracle.topk_to_slots(topk, [0, 1], tables, 64)
    assert slots.tolist() == [[448, 511, 192, 228, -1, -1], [322, -1, -1, -1, -1, -1]]
    assert lens.tolist() == [4, 1]
    assert oracle.topk_to_slots(topk, [0, 1], tables, 64, valid=[True, False])[1].tolist() == [4, 0]


def test_c128a():
    widths = [(100, 4096), (20000, 131072), (131072, 131072), (1048576, 1048576), (700, 2136)]
    assert [oracle.c128a_width(*lens) for lens in widths] == [128, 256, 1024, 8192, 128]
    for position, row in [(126, []), (127, [14]), (255, [14, 15]), (639, [14, 15, 6, 7, 18])]:
        rows, lens = oracle.c128a_indices([[7, 3, 9, 0]], [0, 1], [position + 1], 1, 128)
        assert rows[0, : lens[0]].tolist() == row
    for position, row in [(254, [0]), (255, [0, 1]), (383, [0, 1, 2])]:
        rows, lens = oracle.c128a_indices([[7, 3, 9, 0]], [0, 1], [position + 1], 1, 128, local=True)
        assert rows[0, : lens[0]].tolist() == row


def test_gather_len():
    cases = [(10, 0), (10, 50), (10, 127), (10, 5000), (1, 300)]
    assert [oracle.gather_len(*case) for case in cases] == [10, 60, 137, 137, 128]


def test_combined_prefill_indices():
    topk = [[0, -1, -1], [0, -1, -1], [1, 0, -1], [0, 1, 2], [2, 0, 1]]
    rows, lens = oracle.combine_topk_swa(topk, [10, 13, 15], [4, 8], [4, 5], 2, 4, 20, window=4)
    expected = [[0, 4, 5], [0, 4, 5, 6], [1, 0, 4, 5, 6, 7], [20, 21, 22, 24, 25, 26, 27], [22, 20, 21, 25, 26, 27, 28]]
    assert [row[:n].tolist() for row, n in zip(rows, lens, strict=True)] == expected
    assert rows.shape == (5, 128)


def test_combined_prefill_indices_of_real_size():
    topk = np.full((300, 512), -1)
    for p in range(300):
        topk[p, : (p + 1) // 4] = np.arange((p + 1) // 4)
    rows, lens = oracle.combine_topk_swa(topk, [0, 300], [300], [300], 4, 75, 375)
    assert rows.shape == (300, 640)
    for p, length, compressed, first, last in [
        (0, 1, 0, 75, 75),
        (3, 5, 1, 75, 78),
        (127, 160, 32, 75, 202),
        (128, 160, 32, 76, 203),
        (299, 203, 75, 247, 374),
    ]:
        assert lens[p] == length
        assert rows[p, :compressed].tolist() == list(range(compressed))
        assert (rows[p, compressed], rows[p, length - 1]) == (first, last)
    topk = np.tile(np.arange(512), (10, 1))
    rows, lens = oracle.combine_topk_swa(topk, [0, 10], [5000], [137], 4, 1250, 1387)
    assert (lens[0], rows[0, 512], rows[0, 639]) == (640, 1250, 1377)
    assert (lens[9], rows[9, 512], rows[9, 639]) == (640, 1259, 1386)


def test_flashinfer_indices():
    assert [oracle.storage_offset(slot, 64, 1957) for slot in (0, 63, 64, 130, -1)] == [0, 63, 1957, 3916, -1]
    rows, lens = oracle.flashinfer_indices([[5, 6, -1, -1]], [[9, 70, -1]], [2], 64, 64, 64, 100, top_k=3)
    assert rows.tolist() == [[5, 6, -1, -1, 9, 106, -1, -1]]
    assert lens.tolist() == [6]


ENTRIES = {3: (0, 0), 4: (1, 0), 5: (1, 0), 7: (1, 0), 8: (2, 0), 127: (31, 0), 128: (32, 1), 129: (32, 1)}
ENTRIES |= {255: (63, 1), 256: (64, 2), 257: (64, 2)}


@pytest.mark.parametrize(("length", "entries"), list(ENTRIES.items()))
def test_entries_of_a_prompt(length, entries):
    step = ([[1, 2]], [0, length], [length])
    assert (oracle.compressed_slot_mapping(*step, 256, 4, length) >= 0).sum() == entries[0]
    assert (oracle.compressed_slot_mapping(*step, 256, 128, length) >= 0).sum() == entries[1]
