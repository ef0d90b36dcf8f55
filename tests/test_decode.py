"""Whole sequences through the paged layers: equal to the unpaged oracle, and the same bytes however they are cut."""

import jax.numpy as jnp
import layer_runner
import numpy as np
import oracle_model
import pytest
from layer_runner import RATIOS, Runner, in_chunks

LENGTHS = [1, 3, 4, 5, 7, 8, 127, 128, 129, 255, 256, 257, 300, 1000]
GOLDEN = {  # seed 0, 300 tokens, 2 heads, 4 index heads, top 16, bf16 queries; public reference numbers of the layout
    1: ([0.22472909, 0.23618594, 0.0620743], [5.505016, 5.2656813], (27635826, 0, 0)),
    4: ([0.17264326, 0.2363699, 0.0860173], [5.6188936, 5.4427743], (27646108, 6853693, 1592379)),
    128: ([0.21190976, 0.2916152, 0.09077805], [5.5310144, 5.2904005], (27646108, 181037, 0)),
}


@pytest.fixture(scope="module")
def runner():
    return Runner(layer_runner.draw(LENGTHS))


@pytest.fixture(scope="module")
def decoded(runner):
    """All requests token by token, three tokens of different requests a step, in one scan: (cache, results)."""
    return runner.run(in_chunks(LENGTHS, 1, 3), 3, scan=True)


@pytest.fixture(scope="module")
def expected(runner):
    """`[layer][request]` -> the oracle's rows."""
    return [[oracle_model.write(sequence) for sequence in of_ratio] for of_ratio in runner.sequences]


@pytest.mark.parametrize("ratio", RATIOS)
def test_oracle_meets_the_golden_numbers(ratio):
    sequence = oracle_model.Sequence.draw(ratio, 300)
    rows = oracle_model.write(sequence)
    out, lse = oracle_model.attend(sequence, rows, oracle_model.pick(sequence, rows, top_k=16))
    np.testing.assert_allclose(out[299, 0, :3], GOLDEN[ratio][0], rtol=2e-6)
    np.testing.assert_allclose(lse[299], GOLDEN[ratio][1], rtol=1e-6)
    assert (rows.window.sum(), rows.compressed.sum(), rows.keys.sum()) == GOLDEN[ratio][2]


@pytest.mark.parametrize("layer", range(3), ids=[f"ratio{ratio}" for ratio in RATIOS])
def test_decode_equals_one_shot(runner, decoded, expected, layer):
    """Over the rows as they are stored, so that only the arithmetic of the attention is compared."""
    cache, found = decoded
    for request, length in enumerate(LENGTHS):
        sequence, results = runner.sequences[layer][request], found[layer][request]
        rows = dict(zip(("window", "compressed", "keys"), runner.layer_rows(cache, layer, request), strict=True))
        picks = [np.zeros(0, int)] * length
        if RATIOS[layer] > 1:
            picks = [runner.entries(layer, request, results[p][2]) for p in range(length)]
        want, want_lse = oracle_model.attend(sequence, oracle_model.Rows(**rows), picks, query=lambda x: x)
        out = np.stack([results[p][0] for p in range(length)])
        assert np.linalg.norm(out - want) <= 1e-5 * np.linalg.norm(want), (RATIOS[layer], length)
        lse = np.stack([results[p][1] for p in range(length)])
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6)
        best = oracle_model.pick(sequence, expected[layer][request], top_k=16)
        assert [sorted(p) for p in picks] == [sorted(p) for p in best], (RATIOS[layer], length)


def test_rows_equal_the_oracle_but_for_counted_roundings(runner, decoded, expected):
    """A fused multiply-add or another exp can move a float32 sum across a rounding boundary: by one code, rarely."""
    differing = total = 0
    for layer in range(3):
        for request in range(len(LENGTHS)):
            want = expected[layer][request]
            wanted = (
                (want.window, "fp8_ds_mla", 512),
                (want.compressed, "fp8_ds_mla", 512),
                (want.keys, "indexer_fp8", 128),
            )
            for got, (rows, fmt, width) in zip(runner.layer_rows(decoded[0], layer, request), wanted, strict=True):
                assert len(got) == len(rows)
                if not len(rows):
                    continue
                differing += np.count_nonzero(got != rows)
                total += rows.size
                changed = (got != rows).any(axis=1)
                a, b = (oracle_model.decode(fmt, raw[changed], width) for raw in (got, rows))
                assert np.all(np.abs(a - b) <= np.maximum(np.abs(a), np.abs(b)) / 8)
    assert differing <= total / 10_000, f"{differing} of {total} bytes"


@pytest.mark.parametrize(
    ("chunk", "num_tokens", "chosen"),
    [
        (3, 128, [3, 5, 8, 128, 257]),
        (5, 128, [4, 7, 129, 256]),
        (64, 128, LENGTHS[:-1]),
        (127, 128, LENGTHS[:-1]),
        (300, sum(LENGTHS[:-1]), LENGTHS[:-1]),
    ],
    ids=["3", "5", "64", "127", "one_shot"],
)
def test_any_chunks_leave_the_same_bytes(runner, decoded, chunk, num_tokens, chosen):
    requests = {LENGTHS.index(length): length for length in chosen}
    cache, _ = runner.run(in_chunks(requests, chunk, num_tokens), num_tokens, attend=False)
    for request, length in requests.items():
        want = runner.all_rows(decoded[0], request)
        for name, rows in runner.all_rows(cache, request).items():
            np.testing.assert_array_equal(rows, want[name], err_msg=f"{name}, {length} tokens")


def test_prefill_in_chunks_attends_as_decode_does(runner, decoded):
    requests = {LENGTHS.index(length): length for length in (8, 129, 257)}
    _, found = runner.run(in_chunks(requests, 64, 128), 128)
    for layer in range(3):
        for request, length in requests.items():
            for position in range(length):
                for a, b in zip(
                    found[layer][request][position][:2], decoded[1][layer][request][position], strict=False
                ):
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


def test_boundary_positions_write_the_right_number_of_rows(runner, decoded):
    """GDzhu01/vllm-ascend-deepseekv4#76, #77: entries finished by lengths around 4, 8, 128 and 256."""
    expected = {1: (0, 0), 3: (0, 0), 4: (1, 0), 5: (1, 0), 7: (1, 0), 8: (2, 0), 127: (31, 0), 128: (32, 1)}
    expected |= {129: (32, 1), 255: (63, 1), 256: (64, 2), 257: (64, 2)}
    cache, _ = decoded
    for length, counts in expected.items():
        request = LENGTHS.index(length)
        for name, ratio, count in zip(("model.layers.1.attn", "model.layers.2.attn"), (4, 128), counts, strict=True):
            capacity = -(-length // 256) * 256 // ratio
            written = runner.rows(cache, name, request, capacity).any(axis=1)
            assert written.tolist() == [True] * count + [False] * (capacity - count), (name, length)


def test_rejected_tokens_need_no_rollback(runner, decoded):
    """Each step proposes up to 5 wrong tokens behind the right ones; all are rejected and overwritten later."""
    rng = np.random.default_rng(7)
    requests = [LENGTHS.index(length) for length in (8, 129, 257)]
    offset = int(runner.starts[-1])
    cache, done = runner.allocate(), dict.fromkeys(requests, 0)
    fixed = (runner.layers, False, runner.weights, runner.rope, tuple(map(jnp.asarray, runner.tables)), runner.inputs)
    while any(done[r] < LENGTHS[r] for r in requests):
        rows, counts, seq_lens = [], np.zeros(len(LENGTHS), int), np.zeros(len(LENGTHS), np.int32)
        for request in requests:
            length = LENGTHS[request]
            right = min(int(rng.integers(1, 11)), length - done[request])
            wrong = min(int(rng.integers(0, 6)), length - done[request] - right) if right else 0
            first = int(runner.starts[request]) + done[request]
            rows += [*range(first, first + right), *range(offset + first + right, offset + first + right + wrong)]
            done[request] += right
            counts[request], seq_lens[request] = right + wrong, done[request] + wrong
        padded = np.full(128, 2 * offset, np.int32)
        padded[: len(rows)] = rows
        query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        cache, _ = layer_runner.run_step(cache, *fixed, padded, query_start_loc, seq_lens)
    for request in requests:
        want = runner.all_rows(decoded[0], request)
        for name, rows in runner.all_rows(cache, request).items():
            np.testing.assert_array_equal(rows, want[name], err_msg=name)


def test_shared_prefix_is_read_as_it_was(runner):
    """ROCm/ATOM#1417: B reuses the first 256 tokens of A's blocks, after A went on to 512; neither sees the other."""
    drawn = layer_runner.draw([512, 300])
    for a, b in drawn:
        for name in ("q", "kv", "index_q", "index_weights"):
            if getattr(b, name) is not None:
                setattr(b, name, np.concatenate([getattr(a, name)[:256], getattr(b, name)[256:]]))
        for name in ("compressor", "index"):
            if getattr(b, name) is not None:
                for part in ("kv", "score"):
                    own, first = getattr(getattr(b, name), part), getattr(getattr(a, name), part)
                    setattr(getattr(b, name), part, np.concatenate([first[:256], own[256:]]))
    shared = Runner(drawn)
    alone, _ = shared.run(in_chunks([512, 300], 64, 128), 128, attend=False)
    tables = [table.copy() for table in shared.tables]
    for table, group in zip(tables, shared.layout.groups, strict=True):
        table[1, : 256 // group.block_size] = table[0, : 256 // group.block_size]
    steps = [[(0, first, 64)] for first in range(0, 512, 64)] + [[(1, 256, 44)]]
    cache, _ = shared.run(steps, 128, tables=tables, attend=False)
    for request in (0, 1):
        want = shared.all_rows(alone, request)
        for name, rows in shared.all_rows(cache, request, tables=tables).items():
            np.testing.assert_array_equal(rows, want[name], err_msg=name)


def test_steps_without_tokens_change_nothing(runner):
    cache = runner.allocate()
    cache = cache.with_slab(cache.slab + jnp.uint32(0xA5A5A5A5))
    before = np.asarray(cache.slab)
    cache, _ = runner.run([[], []], 128, cache=cache, attend=False)
    np.testing.assert_array_equal(np.asarray(cache.slab), before)
