"""Times of the KV-cache manager on one core, against vLLM 0.27.1's manager on a machine of the same size (recorded).

Medians; the note of a row gives the 99th percentile (the largest of fewer than a hundred times) and the goal.
"""

import argparse
import statistics
import time

import numpy as np
from _results import Row, report

from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.plan import plan
from dsv4kv_jax.request import Request
from dsv4kv_jax.specs import layer_specs

PRESET = "deepseek-v4-pro"
MILLION = 1 << 20  # tokens
VOCABULARY = 129_280
VLLM_US = {
    "decode_256": 5_500,
    "decode_2048": 44_000,
    "prefill_1m_8192": 1_400_000,
    "prefill_1m_2048": 4_200_000,
    "hash_1m": 450_000,
    "lookup_1m": 10_000,  # 8 to 12 ms
}
GOAL_US = {
    "decode_256": 300,
    "decode_2048": 2_000,
    "prefill_1m_8192": 100_000,
    "prefill_1m_2048": 120_000,
    "hash_1m": 200_000,
    "lookup_1m": 3_000,
    "start_100k": 50_000,
}


def pro_manager(**options):
    return KVCacheManager(groups=group_layers(layer_specs(ModelConfig.preset(PRESET))), **options)


def new_request(manager, name, token_ids):
    request = Request(name, token_ids)
    manager.add_request(request)
    return request


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


def timed(function):
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


def compute(manager, request, chunk):
    """Prefills a request in chunks; the time of each."""
    times = []
    while request.num_computed_tokens < request.num_tokens:
        new = min(chunk, request.num_tokens - request.num_computed_tokens)

        def allocate(new=new):
            assert manager.allocate_slots(request, new) is not None

        times.append(timed(allocate))
        request.num_computed_tokens += new
        request.status = "running"
    return times


def decode(num_requests, steps, *, one_by_one=False):
    """Steps of running requests at staggered positions: one token each, tables kept current, full blocks cached."""
    manager = pro_manager(num_blocks=num_requests * 100, max_model_len=8192, max_requests=num_requests)
    requests = [new_request(manager, f"r{n}", tokens(512 + n * 37 % 509, seed=n)) for n in range(num_requests)]
    for request in requests:
        compute(manager, request, 128)

    def allocate():
        if one_by_one:
            assert all(manager.allocate_slots(request, 1) is not None for request in requests)
        else:
            assert not manager.allocate_batch(requests, 1).refused

    allocating, appending = [], []
    for step in range(steps):
        sampled = tokens(num_requests, seed=step).tolist()

        def append(sampled=sampled):
            for request, token in zip(requests, sampled, strict=True):
                request.append((token,))

        appending.append(timed(append))
        allocating.append(timed(allocate))
        for request in requests:
            request.num_computed_tokens += 1
        manager.take_new_block_ids_to_zero()
    manager.check()
    return allocating, appending


def prefill(chunk, *, hashed, num_blocks=16_384):
    """A 1M-token prompt in chunks, caching on, in a pool that must evict what the windows leave behind."""
    manager = pro_manager(num_blocks=num_blocks, max_model_len=MILLION, max_requests=1)
    request = new_request(manager, "long", tokens(MILLION))
    if hashed:
        request._keys.at(registered_ends(manager, request))
    times = compute(manager, request, chunk)
    manager.check()
    return manager, request, times


def registered_ends(manager, request):
    """Lengths of the prefixes that a prefill of the whole prompt registers."""
    ends = set()
    for rules in manager.rules:
        indices = rules.cacheable(0, request.num_tokens // rules.block_size, request)
        ends.update(((indices + 1) * rules.block_size).tolist())
    return sorted(ends)


def row(name, times, case):
    notes = [f"p99 {np.quantile(times, 0.99, method='higher'):,.0f} us of {len(times)}"]
    if name in GOAL_US:
        notes.append(f"goal {GOAL_US[name]:,} us")
    return Row(
        name=name,
        case=case,
        implementation="python",
        us=statistics.median(times),
        reference="vLLM 0.27.1, recorded" if name in VLLM_US else None,
        reference_us=VLLM_US.get(name),
        note=", ".join(notes),
    )


def decode_rows():
    for count, steps in ((256, 400), (2048, 200)):
        batch, appending = decode(count, steps)
        single, _ = decode(count, 40, one_by_one=True)
        yield row(f"decode_{count}", batch, "allocate_batch, tables included")
        yield row(f"decode_{count}_slots", single, "the same with allocate_slots")
        yield row(f"decode_{count}_append", appending, "append a sampled token to each")


def prefill_rows():
    for chunk in (8192, 2048):
        runs = [prefill(chunk, hashed=True)[2] for _ in range(5)]
        growth = statistics.median(sum(run[len(run) // 2 :]) / sum(run[: len(run) // 2]) for run in runs)
        yield row(f"prefill_1m_{chunk}", [sum(run) for run in runs], f"keys known; second/first half {growth:.2f}")
        cold = [sum(prefill(chunk, hashed=False)[2]) for _ in range(3)]
        yield row(f"prefill_1m_{chunk}_cold", cold, "hashing included")


def hash_rows():
    for name, what in (("hash_1m", "keys that a prefill needs"), ("hash_1m_all", "keys of all 4-token steps")):
        manager, times, count = pro_manager(num_blocks=2, max_model_len=MILLION, max_requests=1), [], 0
        for seed in range(5):
            request = new_request(manager, "long", tokens(MILLION, seed))
            step = manager.hash_block_size
            ends = registered_ends(manager, request) if name == "hash_1m" else range(step, MILLION + 1, step)
            count = len(ends)
            times.append(timed(lambda request=request, ends=ends: request._keys.at(ends)))
        yield row(name, times, f"{count:,} {what}")


def lookup_rows():
    manager, first, _ = prefill(8192, hashed=False, num_blocks=120_000)
    manager.free(first)
    times, cold, found = [], [], 0
    for _ in range(5):
        request = new_request(manager, "again", tokens(MILLION))
        cold.append(timed(lambda request=request: manager.get_computed_blocks(request)))
        times += [timed(lambda request=request: manager.get_computed_blocks(request)) for _ in range(20)]
        found = manager.get_computed_blocks(request).num_tokens
    yield row("lookup_1m", times, f"hit of {found:,} tokens, keys known")
    yield row("lookup_1m_cold", cold, "hashing included")


def start_rows():
    config = ModelConfig.preset(PRESET)

    def build():
        KVCacheManager(plan(config, 2**40, num_gpu_blocks_override=100_000))

    build()
    yield row("start_100k", [timed(build) for _ in range(20)], "plan and manager, 100,000 blocks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    args = parser.parse_args()
    rows = [line for make in (decode_rows, prefill_rows, hash_rows, lookup_rows, start_rows) for line in make()]
    report(rows, as_json=args.json, output=args.output)


if __name__ == "__main__":
    main()
