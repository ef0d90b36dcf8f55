"""Replays recorded decisions of vLLM 0.27.1's manager: ids, hits, refusals and the free queue after every operation."""

import gzip
import json
import pathlib
import zlib

import pytest

from dsv4kv_jax.groups import KVCacheGroup
from dsv4kv_jax.manager import KVCacheManager
from dsv4kv_jax.request import Request
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec

GOLDEN = json.loads(gzip.decompress((pathlib.Path(__file__).parent / "golden" / "allocator.json.gz").read_bytes()))
TRACES = {trace["id"]: trace for trace in GOLDEN["traces"]}


def token(seed, i):
    return (seed * 7919 + i * 104729 + (i * i) % 9973) % 50000


def tokens(seed, start, stop):
    return [token(seed, i) for i in range(start, stop)]


def groups_of(config):
    groups = []
    for group in config["groups"]:
        common = {"block_size": group["block_size"], "head_size": 512, "dtype": "bfloat16", "alignment": 512}
        window = group["sliding_window"]
        spec = MLAAttentionSpec(**common) if window is None else SlidingWindowMLASpec(sliding_window=window, **common)
        groups.append(KVCacheGroup(layers=(), specs=(), spec=spec, is_draft=group["is_eagle_group"]))
    return groups


def manager_of(config, **options):
    return KVCacheManager(
        groups=groups_of(config),
        num_blocks=config["num_blocks"],
        max_model_len=config["max_model_len"],
        max_in_flight_tokens=config["max_in_flight_tokens"],
        max_requests=8,
        enable_caching=config["enable_caching"],
        use_drafts=config["use_eagle"],
        watermark=config["watermark"],
        retention_interval=config["retention_interval"],
        needs_zeroing=config["needs_kv_cache_zeroing"],
        **options,
    )


class Replay:
    """One method per recorded operation; each compares what the manager returns."""

    def __init__(self, config, allocate_batch=False):
        self.manager = manager_of(config)
        self.allocate_batch = allocate_batch
        self.requests = {}
        self.out_seeds = {}
        self.hits = {}

    def add(self, op):
        prompt = [t for seed, length in op["segments"] for t in tokens(seed, 0, length)]
        request = Request(op["req"], prompt, skip_reading_prefix_cache=op["skip_reading"])
        self.manager.add_request(request)
        self.requests[op["req"]] = request
        self.out_seeds[op["req"]] = op["out_seed"]
        if self.manager.enable_caching:
            assert len(prompt) // self.manager.hash_block_size == op["num_block_hashes"]

    def append(self, op):
        request = self.requests[op["req"]]
        made = request.num_tokens - request.num_prompt_tokens
        request.append(tokens(self.out_seeds[op["req"]], made, made + op["n"]))
        assert request.num_tokens == op["num_tokens"]

    def get_computed(self, op):
        request = self.requests[op["req"]]
        found = self.hits[op["req"]] = self.manager.get_computed_blocks(request)
        assert found.num_tokens == op["hit_tokens"]
        assert [blocks.tolist() for blocks in found.block_ids] == op["hit_block_ids"]
        assert found.shared_prefix_boundary == request.shared_prefix_boundary == op["shared_prefix_boundary"]

    def allocate(self, op):
        request = self.requests[op["req"]]
        before = op["pre"]
        assert (request.num_tokens, request.num_prompt_tokens) == (before["num_tokens"], before["num_prompt_tokens"])
        request.num_computed_tokens = before["num_computed_tokens"]
        request.num_in_flight_tokens = before["num_in_flight_tokens"]
        request.status = before["status"].lower()
        hits = self.hits.pop(op["req"]) if op["use_computed"] else None
        arguments = {
            "num_lookahead_tokens": op["num_lookahead_tokens"],
            "num_external_computed_tokens": op["num_external_computed_tokens"],
            "delay_cache_blocks": op["delay_cache_blocks"],
            "full_sequence_must_fit": op["full_sequence_must_fit"],
            "reserved_blocks": op["reserved_blocks"],
            "has_scheduled_reqs": op["has_scheduled_reqs"],
        }
        if "raised" in op:
            with pytest.raises(ValueError, match="num_new_tokens"):
                self.manager.allocate_slots(request, op["num_new_tokens"], new_computed_blocks=hits, **arguments)
        elif self.allocate_batch and self.is_plain(op):
            batch = self.manager.allocate_batch(
                [request], op["num_new_tokens"], num_lookahead_tokens=op["num_lookahead_tokens"]
            )
            assert as_lists(batch.new_blocks(0)) == op["result"]
        else:
            result = self.manager.allocate_slots(request, op["num_new_tokens"], new_computed_blocks=hits, **arguments)
            assert as_lists(result) == op["result"]
        assert list(self.manager.get_block_ids(request)) == (op["block_ids"] or [[]] * len(self.manager.rules))

    def is_plain(self, op):
        return not (op["num_external_computed_tokens"] or op["use_computed"] or op["full_sequence_must_fit"])

    def remove_skipped(self, op):
        request = self.requests[op["req"]]
        self.manager.remove_skipped_blocks(request, op["processed_computed_tokens"])
        assert list(self.manager.get_block_ids(request)) == op["block_ids"]

    def free(self, op):
        self.manager.free(self.requests[op["req"]])

    def free_deferred(self, op):
        popped = self.manager.pop_blocks_for_free(self.requests[op["req"]])
        assert popped.tolist() == op["popped_block_ids"]
        self.manager.check()
        self.manager.free_popped_blocks(popped)

    def step_end(self, op):
        assert self.manager.take_new_block_ids_to_zero().tolist() == op["new_block_ids_to_zero"]
        assert self.manager.take_cow_copies() == op["cow_copies"]

    def evict_blocks(self, op):
        self.manager.evict_blocks(op["block_ids"])

    def reset_prefix_cache(self, op):
        assert self.manager.reset_prefix_cache() == op["result"]

    def common_prefix_blocks(self, op):
        assert self.manager.get_num_common_prefix_blocks(self.requests[op["req"]]) == op["result"]

    def usage(self, op):
        assert self.manager.usage == pytest.approx(op["result"])

    def end(self, op):
        pass

    def compare_state(self, state):
        pool = self.manager.pool
        queue = pool.free_queue().tolist()
        if "free_queue" in state:
            assert queue == state["free_queue"]
        assert (pool.num_free_blocks, pool.num_cached_keys) == (state["free"], state["cached"])
        assert zlib.crc32(",".join(map(str, queue)).encode()) == state["fq_crc"]


def as_lists(blocks):
    return None if blocks is None else [ids.tolist() for ids in blocks]


def test_there_are_32_traces():
    assert GOLDEN["format"] == "dsv4-alloc-golden-1"
    assert len(TRACES) == 32


@pytest.mark.parametrize("allocate_batch", [False, True], ids=["slots", "batch"])
@pytest.mark.parametrize("name", TRACES)
def test_trace(name, allocate_batch):
    trace = TRACES[name]
    replay = Replay(trace["config"], allocate_batch)
    for number, op in enumerate(trace["ops"]):
        try:
            getattr(replay, op["op"])(op)
            replay.compare_state(op["state"])
            if number % 8 == 0 or number > len(trace["ops"]) - 4:
                replay.manager.check()
        except AssertionError as error:
            error.add_note(f"operation {number}: {op['op']} {op.get('req', '')}")
            raise
