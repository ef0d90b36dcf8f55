"""The planner's own properties: layouts never overlap, inputs are refused by name, plans are static data."""

import dataclasses
import json
import pathlib

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.groups import explicit_groups, group_block_sizes, group_layers
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.plan import KVCachePlan, pipeline_partition, plan, plan_from_specs
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec, layer_specs

GIB = 2**30
PRO = ModelConfig.preset("deepseek-v4-pro")
FLASH = ModelConfig.preset("deepseek-v4-flash")
MODELS = pathlib.Path(__file__).parent / "golden" / "models"


def model(ratios, **kwargs):
    return ModelConfig(name="test", num_hidden_layers=len(ratios), compress_ratios=tuple(ratios), **kwargs)


def mla(page_bytes=1024, **kwargs):
    fields = {"block_size": 16, "head_size": page_bytes // 16, "dtype": "uint8", "alignment": 64}
    return MLAAttentionSpec(**(fields | kwargs))


def sliding(page_bytes=1024, **kwargs):
    fields = {"block_size": 16, "head_size": page_bytes // 16, "dtype": "uint8", "alignment": 64, "sliding_window": 32}
    return SlidingWindowMLASpec(**(fields | kwargs))


@pytest.mark.parametrize(
    ("config", "options", "blocks", "stride"),
    [
        (PRO, {}, 7_477, 1_435_968),
        (PRO, {"cache_dtype": "bf16"}, 4_687, 2_290_688),
        (PRO, {"cache_dtype": "fp8"}, 8_415, 1_275_904),
        (PRO, {"indexer": "mxfp4"}, 8_165, 1_315_008),
        (FLASH, {}, 10_713, 1_002_240),
        (FLASH, {"cache_dtype": "bf16"}, 6_710, 1_600_000),
    ],
)
def test_published_models_at_10_gib(config, options, blocks, stride):
    result = plan(config, 10 * GIB, **options)
    assert (result.num_blocks, result.block_stride_bytes) == (blocks, stride)
    if config is PRO and not options:
        assert [len(group.layers) for group in result.groups] == [91, 31, 30, 31, 60]


def test_two_group_form_given_as_explicit_groups():
    specs = layer_specs(PRO)
    names = {"hca": [], "csa": [], "swa": []}
    mla_names = []
    for layer, ratio in enumerate(PRO.compress_ratios):
        prefix = f"model.layers.{layer}.attn"
        mla_names += [prefix] if ratio == 128 else [prefix, f"{prefix}.indexer.k_cache"]
        names["swa"].append(f"{prefix}.swa_cache")
    chosen = {name: specs[name] for name in mla_names + names["swa"]}
    result = plan_from_specs(chosen, 10 * GIB, groups=[mla_names, names["swa"]])
    assert (result.block_stride_bytes, result.num_blocks) == (2_283_840, 4_701)
    offsets = [result.layout.pages[name].offset_bytes for name in mla_names[:7]]
    assert offsets == [0, 1_728, 3_456, 40_896, 49_536, 51_264, 88_704]
    assert result.layout.pages["model.layers.1.attn.swa_cache"].offset_bytes == 37_440


def test_general_pools_share_buffers_between_groups():
    specs = {"full.0": mla(), "full.1": mla(), "sw.0": sliding(), "sw.1": sliding(), "sw.2": sliding()}
    groups = [["full.0", "full.1"], ["sw.0", "sw.2"], ["sw.1"]]
    result = plan_from_specs(specs, 1_000_000, groups=groups)
    assert result.num_blocks == 1_000_000 // 1024 // 2
    assert result.layout.form == "pools"
    assert result.block_stride_bytes == 0
    shared = [[n for n, page in result.layout.pages.items() if page.buffer == buffer] for buffer in (0, 1)]
    assert shared == [["full.0", "sw.0", "sw.1"], ["full.1", "sw.2"]]


def test_no_layers():
    result = plan(model([]), 10 * GIB)
    assert (result.num_blocks, result.layout.form, result.layout.pages) == (1, "none", {})
    assert KVCachePlan.from_json(result.to_json()) == result
    assert "0 blocks" not in result.explain()


def test_layer_that_shares_a_cache():
    specs = {"a": mla(), "b": sliding(2048)}
    result = plan_from_specs(specs, 100_000, shares_with={"c": "a"})
    assert result.layout.page("c") is result.layout.page("a")
    assert result.layout.pages.keys() == {"a", "b"}
    assert result.num_blocks == plan_from_specs(specs, 100_000).num_blocks
    restored = KVCachePlan.from_json(result.to_json())
    assert restored == result
    with pytest.raises(PlanError, match="'c' shares the cache of 'd', which has no spec"):
        plan_from_specs(specs, 100_000, shares_with={"c": "d"})
    with pytest.raises(PlanError, match="has a spec of its own"):
        plan_from_specs(specs, 100_000, shares_with={"b": "a"})
    with pytest.raises(PlanError, match="name the owner of the pages"):
        plan_from_specs(specs, 100_000, shares_with={"c": "a", "d": "c"})


ratios = st.lists(st.sampled_from([1, 4, 128]), max_size=200)
modes = st.sampled_from(["fp8_ds_mla", "bf16", "fp8"])


@settings(deadline=None, max_examples=60)
@given(ratios, modes, st.sampled_from(["none", "mtp", "dspark"]), st.sampled_from([128, 256, 512]), st.integers(1, 4))
def test_layout_properties(layer_ratios, mode, draft, block_size, stages):
    """Pages of a group never overlap, offsets are aligned, the stride is the largest group, layers are conserved."""
    if 0 < len(layer_ratios) < stages:
        stages = len(layer_ratios)
    if not layer_ratios:
        stages, draft = 1, "none"
    config = model(layer_ratios)
    specs = layer_specs(config, mode, draft=draft, block_size=block_size)
    result = plan(config, 100 * GIB, cache_dtype=mode, draft=draft, block_size=block_size, pipeline_stages=stages)
    assert {n for w in result.workers for n in w.layout.pages} == specs.keys()
    assert sum(len(group.layers) for group in result.groups) == len(specs)
    for worker in result.workers:
        layout = worker.layout
        assert len(layout.groups) == len(result.groups)
        for index, group in enumerate(layout.groups):
            end = [0] * len(layout.buffers)
            for name in group.layers:
                page = layout.pages[name]
                assert page.spec == specs[name]
                assert page.group == index
                assert page.offset_bytes == end[page.buffer]
                assert page.offset_bytes % page.spec.alignment == 0
                assert page.first_row + page.num_rows <= layout.buffers[page.buffer].shape(1)[1]
                end[page.buffer] += page.spec.page_size_bytes
            assert all(e <= b.block_stride_bytes for e, b in zip(end, layout.buffers, strict=True))
        if layout.form == "packed":
            assert layout.block_stride_bytes == max(group.page_size_bytes for group in layout.groups)
        assert result.num_blocks * layout.bytes_per_block <= worker.memory_bytes or not layout.buffers
    counts = [len(group.layers) for group in result.groups if group.kind == "sliding_window_mla"]
    assert all(counts)
    assert sum(group.is_draft for group in result.groups) <= 1
    assert KVCachePlan.from_json(result.to_json()) == result


@given(st.integers(0, 200), st.integers(1, 16))
def test_pipeline_partition(layers, stages):
    counts = pipeline_partition(layers, stages)
    assert sum(counts) == layers
    assert len(counts) == stages
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == layers // stages  # a spare layer never goes to the last stage


def test_pipeline_partition_of_pro_and_by_hand():
    assert pipeline_partition(61, 8) == (7, 7, 8, 8, 8, 8, 8, 7)
    assert pipeline_partition(61, [1, 60]) == (1, 60)
    with pytest.raises(PlanError, match="adds up to 60 layers, but the model has 61"):
        pipeline_partition(61, [30, 30])


def test_workers_take_the_smallest_pool():
    memories = [10 * GIB, 9 * GIB + 7, 11 * GIB, int(9.5 * GIB)]
    assert plan(PRO, memories).num_blocks == 6_729
    with pytest.raises(PlanError, match="memory_bytes has 3 sizes for 4 workers"):
        plan(PRO, memories[:3], tensor_parallel=4)


def test_override_replaces_the_memory():
    result = plan(PRO, 0, num_gpu_blocks_override=1_000)
    assert result.num_blocks == 1_000
    assert result.workers[0].memory_bytes == 1_435_968_000
    with pytest.raises(PlanError, match="num_gpu_blocks_override"):
        plan(PRO, 10 * GIB, num_gpu_blocks_override=0)


def test_equal_plans_cause_no_second_trace():
    traces = []

    @jax.jit
    def step(x, tag):
        traces.append(tag)
        return x + tag.num_blocks

    for _ in range(3):
        step(1, plan(PRO, 10 * GIB))
    assert len(traces) == 1
    step(1, plan(PRO, 11 * GIB))
    assert len(traces) == 2
    assert hash(plan(PRO, GIB)) == hash(plan(PRO, GIB))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan(PRO, GIB).num_blocks = 3


def test_json_round_trip_notices_edits():
    text = plan(PRO, [10 * GIB] * 4, pipeline_stages=2, draft="mtp", max_model_len=131_072).to_json()
    assert KVCachePlan.from_json(text).to_json() == text
    data = json.loads(text)
    with pytest.raises(PlanError, match="figures num_blocks, workers do not follow"):
        KVCachePlan.from_json(json.dumps(data | {"num_blocks": 5, "workers": []}))
    with pytest.raises(PlanError, match="schema_version=99 is not supported"):
        KVCachePlan.from_json(json.dumps(data | {"schema_version": 99}))
    with pytest.raises(PlanError, match="not a plan"):
        KVCachePlan.from_json("{")
    with pytest.raises(PlanError, match="not a plan: KeyError 'specs'"):
        KVCachePlan.from_json(json.dumps(data | {"inputs": {}}))
    for text in ("[]", "3", "null"):
        with pytest.raises(PlanError, match="schema_version=None"):
            KVCachePlan.from_json(text)


def test_config_spellings_agree():
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    for name, preset in (("deepseek-v4-pro", PRO), ("deepseek-v4-flash", FLASH)):
        path = MODELS / f"{name}.json"
        assert ModelConfig.from_hf(path) == preset
        data = json.loads(path.read_text())
        data["layer_types"] = [kinds[ratio] for ratio in data.pop("compress_ratios")]
        data["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
        assert ModelConfig.from_hf(data, name) == preset
        data["rope_parameters"] = {
            "main": {"rope_theta": data.pop("rope_theta")},
            "compress": {"rope_theta": data.pop("compress_rope_theta"), **data.pop("rope_scaling")},
        }
        assert ModelConfig.from_hf(data, name) == preset


def test_config_from_a_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text((MODELS / "deepseek-v4-pro.json").read_text())
    assert ModelConfig.from_hf(folder).name == "my-model"
    assert ModelConfig.from_hf(str(folder / "config.json")).name == "my-model"


BASE = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [0, 4]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v41"}, "model_type='deepseek_v41' is not supported .*supported: 'deepseek_v4'"),
        ({"model_type": "llama"}, "model_type='llama' is not supported"),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"compress_ratios": [0, 3]}, r"compress_ratios\[1\]=3 is not supported; use 0 or 1 \(window only\), 4 or 128"),
        ({"compress_ratios": [0, "4"]}, r"compress_ratios\[1\]='4' must be an integer"),
        ({"compress_ratios": [0, True]}, r"compress_ratios\[1\]=True must be an integer"),
        ({"compress_ratios": [0]}, "compress_ratios has 1 entries for num_hidden_layers=2"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must be an integer of at least 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers=2.0 must be an integer"),
        ({"head_dim": 576}, "head_dim=576 with qk_rope_head_dim=64 is not supported"),
        ({"sliding_window": 0}, "sliding_window=0 must be an integer of at least 1"),
        ({"index_head_dim": 64}, "index_head_dim=64 is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling type 'linear' is not supported"),
        ({"n_mtp_layers": -2}, "n_mtp_layers=-2 must be an integer of at least 0"),
    ],
)
def test_config_refusals(change, message):
    with pytest.raises(PlanError, match=message):
        ModelConfig.from_hf(BASE | change)


NOT_SIZES = [None, True, "4", 1.5, -1, [], [1], {}, 2**70, float("nan"), float("inf")]
NOT_NUMBERS = [True, "4", 0, -1.5, [], [1], {"a": 1}, 2**200, float("nan"), float("inf")]
NOT_OBJECTS = [True, 1, 1.5, "x", [], [1]]


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        (("hidden_size", "num_attention_heads", "sliding_window", "q_lora_rank", "index_topk"), NOT_SIZES),
        (("num_hidden_layers", "num_nextn_predict_layers"), NOT_SIZES),
        (("n_mtp_layers",), NOT_SIZES[1:]),
        (("rms_norm_eps", "rope_theta", "compress_rope_theta"), NOT_NUMBERS),
        (("compress_ratios", "layer_types"), [None, True, 3, 1.5, "x", {}]),
        (("compress_rates", "rope_scaling", "rope_parameters"), NOT_OBJECTS),
    ],
)
def test_config_fields_of_a_wrong_type_are_named(fields, values):
    """A field that is there is of its type, or is refused by its name: no TypeError, and no endless planning."""
    for field in fields:
        for value in values:
            config = BASE | {field: value}
            if field in ("layer_types", "compress_rates"):
                del config["compress_ratios"]
                config.setdefault("layer_types", ["sliding_attention"] * 2)
            with pytest.raises(PlanError, match=field):
                ModelConfig.from_hf(config)


@pytest.mark.parametrize("field", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_rope_fields_of_a_wrong_type_are_named(field):
    for value in NOT_NUMBERS:
        for config in ({"rope_scaling": {field: value}}, {"rope_parameters": {"compress": {field: value}}}):
            with pytest.raises(PlanError, match=field):
                ModelConfig.from_hf(BASE | config)
    for part in ("main", "compress"):
        for value in NOT_OBJECTS:
            with pytest.raises(PlanError, match=rf"rope_parameters\.{part}"):
                ModelConfig.from_hf(BASE | {"rope_parameters": {part: value}})


@pytest.mark.parametrize("edit", [{"groups": []}, {"drafts": [1, 2]}, {"groups": 3}, {"specs": [[3]]}, {"specs": {}}])
def test_a_plan_with_broken_inputs_is_refused(edit):
    data = json.loads(plan(FLASH, GIB).to_json())
    with pytest.raises(PlanError):
        KVCachePlan.from_json(json.dumps(data | {"inputs": data["inputs"] | edit}))


def test_config_refuses_files(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(PlanError, match="nested too deeply"):
        ModelConfig.from_hf(tmp_path / "deep.json")
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    with pytest.raises(PlanError, match="is not text"):
        ModelConfig.from_hf(tmp_path / "binary.json")
    with pytest.raises(PlanError, match=r"cannot read model config .*nothing.json"):
        ModelConfig.from_hf(tmp_path / "nothing.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="holds a JSON list"):
        ModelConfig.from_hf(tmp_path)
    missing = {key: value for key, value in BASE.items() if key != "compress_ratios"}
    with pytest.raises(PlanError, match="neither 'compress_ratios' nor 'layer_types'"):
        ModelConfig.from_hf(missing)
    with pytest.raises(PlanError, match=r"layer_types\[0\]='linear_attention' is not one of"):
        ModelConfig.from_hf(missing | {"layer_types": ["linear_attention"] * 2})
    with pytest.raises(PlanError, match="no preset called 'v5'"):
        ModelConfig.preset("v5")


@pytest.mark.parametrize(
    ("block_size", "ratio", "rows"),
    [(256, 4, 64), (256, 128, 2), (128, 128, 1), (64, 4, 16), (64, 128, None), (0, 4, None), (256, 3, None)],
)
def test_storage_block_size(block_size, ratio, rows):
    """vllm-project/vllm#43988, NVIDIA/TensorRT-LLM#16219: dividing by the wrong number, or silently storing no row."""
    fields = {"block_size": block_size, "head_size": 512, "dtype": "bfloat16", "alignment": 512}
    if rows is None:
        with pytest.raises(PlanError, match="block_size|compress_ratio"):
            MLAAttentionSpec(compress_ratio=ratio, **fields)
    else:
        assert MLAAttentionSpec(compress_ratio=ratio, **fields).storage_block_size == rows


@given(st.integers(-4, 2048), st.integers(-4, 300))
def test_a_spec_never_stores_zero_rows(block_size, ratio):
    try:
        spec = MLAAttentionSpec(
            block_size=block_size, compress_ratio=ratio, head_size=512, dtype="bfloat16", alignment=512
        )
    except PlanError:
        return
    assert spec.storage_block_size * ratio == block_size
    assert spec.storage_block_size >= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_size": 0}, "head_size=0 must be an integer of at least 1"),
        ({"dtype": "float16"}, "dtype='float16' is not a cache dtype"),
        ({"alignment": 6}, "alignment=6 must be a multiple of 4"),
        ({"cache_dtype_str": "fp8_ds_mla"}, "head_size=64 with num_kv_heads=1 does not fit"),
        ({"sliding_window": 0}, "sliding_window=0 must be"),
        ({"block_size": True}, "block_size=True must be"),
        ({"head_size": 2**31}, "head_size=2147483648 is too large"),
        ({"num_kv_heads": 8, "head_size": 512, "cache_dtype_str": "fp8_ds_mla"}, "num_kv_heads=8 does not fit"),
        ({"dtype": "int3", "head_size": 512, "cache_dtype_str": "fp8_ds_mla"}, "dtype='int3' is not a cache dtype"),
        ({"dtype": None}, "dtype=None must be a string"),
        ({"dtype": ["uint8"]}, r"dtype=\['uint8'\] must be a string"),
        ({"cache_dtype_str": {}}, "cache_dtype_str={} must be a string or left out"),
        ({"model_version": 4}, "model_version=4 must be a string or left out"),
        ({"head_size": 66, "compress_ratio": 4}, None),
        ({"head_size": 66}, "66 bytes a row; it must be a positive multiple of 4"),
    ],
)
def test_spec_refusals(change, message):
    if message is None:
        change = {**change, "head_size": 68}
        assert sliding(**change).format.name == "indexer_mxfp4"
        return
    with pytest.raises(PlanError, match=message):
        sliding(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cache_dtype_str": "fp8_ds_mlaa"},
            "cache_dtype_str='fp8_ds_mlaa' is not known; use one of auto, bfloat16, fp8",
        ),
        ({"cache_dtype_str": ""}, "cache_dtype_str='' is not known"),
        ({"cache_dtype_str": "fp8_ds_mla", "dtype": "float32"}, "dtype='float32' does not fit .*stored as uint8"),
        ({"cache_dtype_str": "indexer_mxfp4", "dtype": "bfloat16"}, "dtype='bfloat16' does not fit"),
    ],
)
def test_cache_strings_are_known_and_fit_the_dtype(change, message):
    """A misspelt cache string must not plan plain rows of other bytes."""
    with pytest.raises(PlanError, match=message):
        sliding(512 * 16, **change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_dtype": "int8"}, "cache_dtype='int8' is not supported; use one of fp8_ds_mla, bf16, fp8"),
        ({"indexer": "fp4"}, "indexer='fp4' is not supported"),
        ({"draft": "eagle"}, "draft='eagle' is not supported"),
        ({"block_size": 64}, "block_size=64 is not a multiple of compress_ratio=128"),
        ({"block_size": -256}, "block_size=-256 must be an integer of at least 1"),
        ({"max_model_len": 0}, "max_model_len=0 must be an integer of at least 1"),
        ({"max_in_flight_tokens": 0}, "max_in_flight_tokens=0 must be"),
        ({"pipeline_stages": 0}, "pipeline_stages=0 must be"),
        ({"pipeline_stages": 2**31}, "pipeline_stages=2147483648 is too large; at most 4096"),
        ({"pipeline_stages": 1.0}, "pipeline_stages=1.0 must be an integer"),
        ({"pipeline_stages": "2"}, "pipeline_stages='2' must be an integer"),
        ({"pipeline_stages": [-1, 62]}, "pipeline_stages=-1 must be an integer of at least 0"),
        ({"pipeline_stages": [60.0, 1]}, "pipeline_stages=60.0 must be an integer"),
        ({"tensor_parallel": 10**9}, "tensor_parallel=1000000000 is too large"),
        ({"tensor_parallel": 2.0}, "tensor_parallel=2.0 must be an integer"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override=0 must be an integer of at least 1"),
        ({"num_gpu_blocks_override": 9.0}, "num_gpu_blocks_override=9.0 must be an integer"),
        ({"max_model_len": 2**31}, "max_model_len=2147483648 is too large"),
        ({"max_in_flight_tokens": 2**63}, "max_in_flight_tokens=9223372036854775808 is too large"),
        ({"block_size": "256"}, "block_size='256' must be an integer"),
        ({"block_size": 256.0}, "block_size=256.0 must be an integer"),
        ({"pipeline_stages": 62}, r"pipeline stages \[.*\] of 62 hold no layer"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be"),
    ],
)
def test_plan_refusals(options, message):
    with pytest.raises(PlanError, match=message):
        plan(PRO, 10 * GIB, **options)


@pytest.mark.parametrize("memory", [-1, 0, 1, 1_435_967, 1_435_968, 2 * 1_435_968 - 1])
def test_too_little_memory_says_what_would_do(memory):
    with pytest.raises(PlanError, match="memory_bytes=") as info:
        plan(PRO, memory)
    assert info.value.required_bytes == 2 * 1_435_968
    assert info.value.available_bytes == memory
    assert info.value.min_blocks == 2
    assert plan(PRO, info.value.required_bytes).num_blocks == 2


def test_memory_must_be_whole_bytes():
    for memory in (1e10, "10GiB", None, True, [1e10]):
        with pytest.raises(PlanError, match="for worker 0 must be an integer number of bytes"):
            plan(PRO, memory)


def test_max_model_len_is_admitted_or_refused_with_the_longest_that_fits():
    blocks = 4_096 + 2 * 131 + 2_051 + 1_041 + 1
    assert plan(PRO, blocks * 1_435_968, max_model_len=1_048_576).num_blocks == blocks
    with pytest.raises(PlanError, match="max_model_len=1048576") as info:
        plan(PRO, (blocks - 1) * 1_435_968, max_model_len=1_048_576)
    error = info.value
    assert (error.required_bytes, error.min_blocks) == (blocks * 1_435_968, blocks)
    fits = error.max_context_that_fits
    assert plan(PRO, (blocks - 1) * 1_435_968, max_model_len=fits)
    with pytest.raises(PlanError):
        plan(PRO, (blocks - 1) * 1_435_968, max_model_len=fits + 1)


def test_every_slot_fits_int32():
    """A pool whose slots pass 2^31 is refused: device indices are int32 (ROCm/aiter#4427)."""
    config = model([4])
    assert plan(config, 0, num_gpu_blocks_override=2**31 // 256)
    with pytest.raises(PlanError, match="int32 slot indices cannot hold"):
        plan(config, 0, num_gpu_blocks_override=2**31 // 256 + 1)


@pytest.mark.parametrize(
    ("stride_blocks", "block"), [(1_435_968, 1_496), (1_002_240, 2_143), (1_315_008, 1_634), (149_760, 14_340)]
)
def test_addresses_are_exact_beyond_31_bits(stride_blocks, block):
    """ROCm/aiter#4427: block_id * block_stride in 32 bits. (block, row) never multiplies, so it cannot overflow."""
    assert (block - 1) * stride_blocks < 2**31 <= block * stride_blocks
    rows = stride_blocks // 576
    for row in (0, rows - 1):
        assert max(block, row) < 2**31
        assert block * stride_blocks + row * 576 == (block * rows + row) * 576


def test_group_refusals():
    specs = {"a": mla(), "b": sliding()}
    for names, message in [
        ([["a"]], r"layers \['b'\] are in no group"),
        ([["a"], ["b"], ["c"]], r"unknown layers \['c'\]"),
        ([["a"], ["b", "a"]], "in more than one place"),
        ([["a", "b"]], r"groups\[0\] mixes"),
        ([["a"], [], ["b"]], r"groups\[1\] is empty"),
    ]:
        with pytest.raises(PlanError, match=message):
            explicit_groups(specs, names)
    mixed = {"a": mla(), "w": sliding(), "b": mla(block_size=32)}
    for layers, options in [(mixed, {}), ({"a": mla(), "b": mla(block_size=32)}, {}), (specs, {"block_size": 32})]:
        with pytest.raises(PlanError, match=r"block sizes 16 \('a'\), 32 \('b'\), but share one block table"):
            group_layers(layers, hybrid="block_size" not in options, **options)
    with pytest.raises(PlanError, match=r"draft layers \['x'\]"):
        group_layers(specs, draft_layers=["x"])
    with pytest.raises(PlanError, match="alignments"):
        plan_from_specs({"a": mla(), "b": sliding(alignment=32)}, 100_000)
    with pytest.raises(PlanError, match="prefix_match_unit=3 must divide"):
        group_block_sizes(group_layers(layer_specs(PRO)), prefix_match_unit=3)
    with pytest.raises(PlanError, match="has two specs"):
        plan_from_specs([{"a": mla()}, {"a": mla(2048)}], 100_000)
    with pytest.raises(PlanError, match="no layer 'q'"):
        PackedLayout.from_groups(group_layers(specs)).page("q")


def test_hybrid_disabled_keeps_everything_in_one_group():
    result = plan(PRO, 100 * GIB, hybrid=False)
    assert [g.kind for g in result.groups] == ["mla_attention"]
    assert result.layout.bytes_per_block == 121_745_664
    assert result.block_stride_bytes == 0


def test_explain_names_every_group_and_capacity():
    text = plan(PRO, [10 * GIB] * 2, pipeline_stages=2, draft="mtp").explain()
    for part in ("pipeline stage 0", "pipeline stage 1", "mla_attention", "draft", "blocks on 2 workers", "null block"):
        assert part in text
