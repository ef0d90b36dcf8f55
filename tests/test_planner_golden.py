"""The planner against cases recorded from vLLM 0.27.1's own planner."""

import gzip
import json
import pathlib

import pytest

from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.groups import approximate_gcd, group_block_sizes
from dsv4kv_jax.plan import KVCachePlan, plan

GOLDEN = json.loads(gzip.decompress((pathlib.Path(__file__).parent / "golden" / "planner.json.gz").read_bytes()))
CASES = {case["id"]: case for case in GOLDEN["cases"]}
MODES = {"fp8_ds_mla": "fp8_ds_mla", "bf16": "bf16", "fp8_plain": "fp8"}


def plan_case(inputs: dict) -> KVCachePlan:
    config = ModelConfig(
        name=inputs["model_name"],
        num_hidden_layers=inputs["num_hidden_layers"],
        compress_ratios=tuple(max(1, r) for r in inputs["compress_ratios"][: inputs["num_hidden_layers"]]),
    )
    return plan(
        config,
        inputs["available_memory"],
        cache_dtype=MODES[inputs["mode"]],
        indexer="mxfp4" if inputs["use_fp4_indexer"] else "fp8",
        draft=inputs["spec"]["method"] if inputs["spec"] else "none",
        block_size=inputs["block_size"],
        max_in_flight_tokens=inputs["max_in_flight_tokens"],
        num_gpu_blocks_override=inputs["num_gpu_blocks_override"],
        pipeline_stages=inputs["pp"],
        tensor_parallel=inputs["tp"],
        hybrid=not inputs["disable_hybrid"],
    )


@pytest.mark.parametrize("case_id", [k for k, case in CASES.items() if "error" not in case["expect"]])
def test_plan_equals_vllm(case_id):
    case = CASES[case_id]
    inputs, expect = case["inputs"], case["expect"]
    names = inputs["layer_names"]
    result = plan_case(inputs)

    assert result.num_blocks == expect["num_blocks"]
    assert [w.layout.bytes_per_block for w in result.workers] == expect["pool_bytes_per_block"]
    assert [list(g.layers) for g in result.groups] == [[names[i] for i in g["layers"]] for g in expect["global_groups"]]
    assert [w.stage for w in result.workers] == inputs["worker_pp_rank"]
    for group, want in zip(result.layout.groups, expect["scheduler_groups"], strict=True):
        assert (group.block_size, group.sliding_window, group.is_draft) == (
            want["block_size"],
            want["sliding_window"],
            want["is_eagle_group"],
        )
    sizes = group_block_sizes(result.layout.groups, enable_caching=inputs["enable_prefix_caching"])
    assert sizes == (expect["scheduler_block_size"], expect["hash_block_size"])
    for worker, index in zip(result.workers, expect["worker_config_index"], strict=True):
        check_worker(result, worker, expect["worker_configs"][index], inputs)


def check_worker(result, worker, want, inputs):
    names, layout = inputs["layer_names"], worker.layout
    assert result.num_blocks == want["num_blocks"]
    assert layout.block_stride_bytes == want["block_stride"]
    assert len(layout.groups) == len(want["groups"])
    for group, expected in zip(layout.groups, want["groups"], strict=True):
        assert list(group.layers) == [names[i] for i in expected["layers"]]
        assert group.kind == expected["kind"]
        assert group.block_size == expected["block_size"]
        assert group.sliding_window == expected["sliding_window"]
        assert group.is_draft == expected["is_eagle_group"]
        if group.layers:
            assert group.page_size_bytes == expected["sum_page_bytes"]
            assert group.real_page_size_bytes == expected["sum_real_page_bytes"]
    offsets = [layout.pages[name].offset_bytes if name in layout.pages else None for name in names]
    assert offsets == want["layer_offset"]
    assert tensors_of(layout, result.num_blocks) == [
        (t["size"], t["offset"], t["block_stride"], [names[i] for i in t["shared_by"]]) for t in want["tensors"]
    ]
    assert layout.needs_zeroing == want["needs_kv_cache_zeroing"]


def tensors_of(layout, num_blocks):
    """Our pages in the form of vLLM's tensor list: one entry per distinct (buffer, offset)."""
    shared: dict[tuple[int, int], list[str]] = {}
    for name, page in layout.pages.items():
        shared.setdefault((page.buffer, page.offset_bytes), []).append(name)
    return [
        (
            layout.buffers[buffer].block_stride_bytes * num_blocks,
            offset,
            layout.block_stride_bytes,
            layers,
        )
        for (buffer, offset), layers in sorted(shared.items())
    ]


@pytest.mark.parametrize("case_id", [k for k, case in CASES.items() if "error" in case["expect"]])
def test_refusals(case_id):
    """vLLM's need estimate is wrong in places, so only plans of fewer than two blocks must be refused."""
    inputs = CASES[case_id]["inputs"]
    try:
        result = plan_case(inputs)
    except PlanError:
        return
    assert result.num_blocks >= 2
    assert min(inputs["available_memory"]) >= 2 * result.layout.bytes_per_block


def test_specs_equal_vllm():
    """Every spec field and size that vLLM recorded, in registration order, on every pipeline stage."""
    for case in CASES.values():
        inputs = case["inputs"]
        if "error" in case["expect"]:
            continue
        result = plan_case(inputs | {"disable_hybrid": False})
        merged = {}
        for stage in inputs["layers_per_pp_rank"]:
            merged |= {inputs["layer_names"][n]: s for n, s in stage}
        ours = {name: page.spec for w in result.workers for name, page in w.layout.pages.items()}
        assert sorted(ours) == sorted(merged)
        for name, index in merged.items():
            spec, want, sizes = ours[name], inputs["spec_table"][index], case["spec_sizes"][index]
            assert spec.kind.removesuffix("_attention") == want["kind"]
            for field in ("block_size", "num_kv_heads", "head_size", "dtype", "compress_ratio", "alignment"):
                assert getattr(spec, field) == want[field], (name, field)
            assert spec.window == want["sliding_window"]
            assert spec.cache_dtype_str == want["cache_dtype_str"]
            assert spec.model_version == want["model_version"]
            assert spec.real_page_size_bytes == sizes["real_page_size_bytes"]
            assert spec.page_size_bytes == sizes["page_size_bytes"]
            assert spec.storage_block_size == sizes["storage_block_size"]


@pytest.mark.parametrize("vector", GOLDEN["approximate_gcd"], ids=str)
def test_approximate_gcd_equals_vllm(vector):
    bound = vector["lower_bound"] or 1
    if "error" in vector:
        with pytest.raises(PlanError, match="approximate_gcd needs positive values"):
            approximate_gcd(vector["values"], bound)
    else:
        assert approximate_gcd(vector["values"], bound) == vector["result"]
