"""The command line's contract: flags, JSON, exit codes, one-line errors."""

import json
import pathlib
import subprocess
import sys

import pytest

from dsv4kv_jax import ModelConfig, PlanError, plan
from dsv4kv_jax.cli._options import parse_size
from dsv4kv_jax.plan import KVCachePlan
from dsv4kv_jax.plan_json import spec_to_dict

MODELS = pathlib.Path(__file__).parent / "golden" / "models"
PRO = str(MODELS / "deepseek-v4-pro.json")


def run(*args):
    command = [sys.executable, "-c", "from dsv4kv_jax.cli import main; main()", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def run_json(*args):
    result = run(*args, "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("1KiB", 1024),
        ("2MiB", 2 * 2**20),
        ("10GiB", 10 * 2**30),
        ("1TiB", 2**40),
        ("1KB", 1000),
        ("3MB", 3_000_000),
        ("80GB", 80_000_000_000),
        (" 10 gib ", 10 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 100_000_000),
        ("-1", -1),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1.5", "ten", "1 GiB 2", "1XB", "1e3", "0x10", "1,5GiB", "nan", "1.2.3MB"])
def test_sizes_refused(text):
    with pytest.raises(PlanError, match="memory size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("options", "blocks", "stride"),
    [
        ([], 7_477, 1_435_968),
        (["--cache-dtype", "bf16"], 4_687, 2_290_688),
        (["--cache-dtype", "fp8"], 8_415, 1_275_904),
        (["--indexer", "mxfp4"], 8_165, 1_315_008),
    ],
)
def test_plan_json(options, blocks, stride):
    data = run_json("plan", "--model", PRO, "--memory", "10GiB", *options)
    assert (data["num_blocks"], data["block_stride_bytes"]) == (blocks, stride)
    assert data["schema_version"] == 1
    assert data["model"] == "deepseek-v4-pro"
    assert data["memory_bytes"] == 10 * 2**30
    assert "workers" not in data
    assert [len(group["layers"]) for group in data["groups"]] == [91, 31, 30, 31, 60]
    assert [group["kind"] for group in data["groups"]] == ["mla_attention"] + ["sliding_window_mla"] * 4
    assert [group["block_size"] for group in data["groups"]] == [256, 64, 64, 8, 4]
    assert [group["sliding_window"] for group in data["groups"]] == [None, 128, 128, 128, 8]
    for index, group in enumerate(data["groups"]):
        pages = [data["layers"][name] for name in group["layers"]]
        assert group["used_bytes"] == sum(page["page_size_bytes"] for page in pages)
        assert group["padding_bytes"] == sum(p["page_size_bytes"] - p["real_page_size_bytes"] for p in pages)
        assert group["slack_bytes"] == stride - group["used_bytes"]
        assert {page["group"] for page in pages} == {index}
    assert KVCachePlan.from_json(json.dumps(data)).num_blocks == blocks


def test_plan_json_shapes_are_the_torch_views():
    layers = run_json("plan", "--model", "deepseek-v4-pro", "--memory", "10GiB")["layers"]
    prefix = "model.layers.2.attn"
    assert layers[f"{prefix}.swa_cache"] | {"offset_bytes": 0} == {
        "offset_bytes": 0,
        "page_size_bytes": 37_440,
        "real_page_size_bytes": 37_376,
        "group": 1,
        "buffer": 0,
        "shape": [7_477, 64, 584],
        "dtype": "uint8",
    }
    assert layers[prefix]["shape"] == [7_477, 64, 584]
    assert layers["model.layers.0.attn"]["shape"] == [7_477, 2, 584]
    assert layers[f"{prefix}.indexer.k_cache"]["shape"] == [7_477, 64, 132]
    state = layers[f"{prefix}.compressor.state_cache"]
    assert (state["shape"], state["dtype"]) == ([7_477, 4, 2_048], "float32")


def test_plan_of_several_workers():
    sizes = "10GiB,9GiB,11GiB,10GiB"
    data = run_json(
        "plan", "--model", PRO, "--memory", sizes, "--pipeline-stages", 2, "--tensor-parallel", 2, "--draft", "mtp"
    )
    assert len(data["workers"]) == 4
    first = data["workers"][0]
    assert {key: data[key] for key in first} == first
    assert [w["memory_bytes"] >> 30 for w in data["workers"]] == [10, 9, 11, 10]
    assert {w["num_blocks"] for w in data["workers"]} == {data["num_blocks"]}
    assert data["workers"][0]["layers"] == data["workers"][1]["layers"]
    assert not data["workers"][0]["layers"].keys() & data["workers"][2]["layers"].keys()
    assert "model.layers.61.attn.swa_cache" in data["workers"][3]["layers"]


def test_groups_that_are_empty_on_a_stage_stay(tmp_path):
    config = json.loads(pathlib.Path(PRO).read_text()) | {"num_hidden_layers": 3, "compress_ratios": [4, 128, 0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = run_json("plan", "--model", tmp_path, "--memory", "10GiB", "--pipeline-stages", 3)
    sizes = [len(group["layers"]) for group in data["workers"][2]["groups"]]
    assert len(sizes) == 6
    assert sum(sizes) == 1
    assert data["workers"][2]["groups"][0] | {"slack_bytes": 0} == {
        "kind": "mla_attention",
        "block_size": 256,
        "sliding_window": None,
        "is_draft": False,
        "layers": [],
        "used_bytes": 0,
        "padding_bytes": 0,
        "slack_bytes": 0,
    }


def test_one_uniform_group():
    data = run_json("plan", "--model", PRO, "--memory", "100GiB", "--no-hybrid")
    assert data["block_stride_bytes"] == 0
    assert len(data["groups"]) == 1
    assert {layer["offset_bytes"] for layer in data["layers"].values()} == {0}
    assert data["groups"][0]["slack_bytes"] == 0


def test_num_gpu_blocks_override_needs_no_memory():
    assert run_json("plan", "--model", "deepseek-v4-flash", "--num-gpu-blocks-override", 77)["num_blocks"] == 77


def specs_of(stages=1):
    planned = plan(ModelConfig.preset("deepseek-v4-flash"), 10 * 2**30, pipeline_stages=stages)
    return planned, [[spec_to_dict(n, p.spec) for n, p in w.layout.pages.items()] for w in planned.workers]


@pytest.mark.parametrize("stages", [1, 2])
def test_specs_file(tmp_path, stages):
    planned, specs = specs_of(stages)
    order = list(json.loads(planned.to_json())["layers"])
    assert order
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(specs[0] if stages == 1 else specs))
    data = run_json("plan", "--specs", path, "--memory", "10GiB")
    assert (data["num_blocks"], data["block_stride_bytes"]) == (planned.num_blocks, planned.block_stride_bytes)
    assert (data["model"], data["cache_dtype"]) == ("mine", "custom")


def test_specs_file_with_a_shared_cache_and_a_draft(tmp_path):
    _, [specs] = specs_of()
    owner = next(entry for entry in specs if entry["name"] == "model.layers.0.attn.swa_cache")
    sharer = owner | {"name": "reuser", "shares_with": owner["name"]}
    draft = owner | {"name": "draft", "is_draft": True}
    path = tmp_path / "specs.json"
    path.write_text(json.dumps([*specs, sharer, draft]))
    data = run_json("plan", "--specs", path, "--memory", "10GiB")
    assert data["layers"]["reuser"] == data["layers"][owner["name"]] | {"shares_with": owner["name"]}
    assert [group["is_draft"] for group in data["groups"] if "draft" in group["layers"]] == [True]
    assert sum(group["is_draft"] for group in data["groups"]) == 1
    assert not any("reuser" in group["layers"] for group in data["groups"])


GOOD = {"name": "a", "kind": "mla", "block_size": 16, "head_size": 64, "dtype": "uint8", "alignment": 64}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({}, "a spec file holds a JSON list of objects, not dict"),
        ([3], "specs[0] is a JSON int"),
        ([{**GOOD, "colour": 1}], "specs[0] has unknown keys 'colour'"),
        ([{"name": "a"}], "specs[0] lacks kind, block_size, head_size, dtype, alignment"),
        ([GOOD, GOOD], "specs[1]: a second layer called 'a'"),
        ([{**GOOD, "kind": "mamba"}], "kind='mamba' is not supported; use one of mla, sliding_window_mla"),
        ([{**GOOD, "kind": "sliding_window_mla"}], "a cache of kind 'sliding_window_mla' needs sliding_window"),
        ([{**GOOD, "sliding_window": 4}], "a cache of kind 'mla' has no sliding_window"),
        ([{**GOOD, "compress_ratio": 3}], "compress_ratio=3 is not one of (1, 4, 128)"),
        ([{**GOOD, "block_size": 0}], "block_size=0 must be an integer of at least 1"),
        ([{**GOOD, "block_size": 66, "compress_ratio": 4}], "block_size=66 is not a multiple of compress_ratio=4"),
        ([{**GOOD, "dtype": "int3"}], "dtype='int3' is not a cache dtype"),
        ([{**GOOD, "name": ""}], "name='' must be a non-empty string"),
        ([{**GOOD, "is_draft": 1}], "is_draft=1 must be true or false"),
        ([{**GOOD, "shares_with": "b"}], "shares_with='b' names a layer that has no pages on the same stage"),
        ([GOOD, {**GOOD, "name": "b", "head_size": 32, "shares_with": "a"}], "but has another spec"),
        ([[GOOD], []], "pipeline stages [1] of 2 hold no layer"),
        ([{**GOOD, "kind": ["mla"]}], "kind=['mla'] is not supported"),
        ([{**GOOD, "block_size": None}], "lacks block_size"),
        ([{**GOOD, "dtype": {}}], "dtype={} must be a string"),
        ([{**GOOD, "cache_dtype_str": []}], "cache_dtype_str=[] must be a string"),
        ([{**GOOD, "compress_ratio": False}], "compress_ratio=False must be an integer"),
        ([GOOD, {**GOOD, "name": "b", "shares_with": ["a"]}], "shares_with=['a'] must be the name of a layer"),
        ([{**GOOD, "shares_with": ""}], "shares_with='' names a layer that has no pages"),
    ],
)
def test_specs_file_refusals(tmp_path, specs, message):
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(specs))
    from dsv4kv_jax.plan import plan_from_specs
    from dsv4kv_jax.plan_json import specs_from_json

    with pytest.raises(PlanError) as info:
        arguments = specs_from_json(json.loads(path.read_text()))
        plan_from_specs(arguments.pop("specs"), 10**6, **arguments)
    assert message in str(info.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan"], "give one of --model PRESET|PATH and --specs FILE"),
        (["plan", "--model", PRO, "--specs", PRO], "give one of --model"),
        (["plan", "--model", PRO], "give --memory SIZE"),
        (
            ["plan", "--model", "nope", "--memory", "1GiB"],
            "neither a preset (deepseek-v4-flash, deepseek-v4-pro) nor a file",
        ),
        (["plan", "--model", PRO, "--memory", "lots"], "memory size 'lots' is not a size"),
        (["plan", "--model", PRO, "--memory", "-5GiB"], "leaves worker 0 no memory"),
        (["plan", "--model", PRO, "--memory", "1MiB"], "give at least 2871936 bytes"),
        (["plan", "--model", PRO, "--memory", "1GiB,1GiB", "--tensor-parallel", "3"], "2 sizes for 3 workers"),
        (["plan", "--model", PRO, "--memory", "10GiB", "--cache-dtype", "int8"], "is not one of"),
        (["plan", "--model", PRO, "--memory", "10GiB", "--block-size", "0"], "block_size=0"),
        (["plan", "--model", PRO, "--memory", "10GiB", "--max-model-len", "x"], "not a valid integer"),
        (["plan", "--model", PRO, "--memory", "5GiB", "--max-model-len", "1048576"], "the longest context that fits"),
        (["plan", "--specs", "nothing.json", "--memory", "1GiB"], "cannot read --specs 'nothing.json'"),
        (["plan", "--wrong"], "No such option"),
        (["fly"], "No such command"),
    ],
)
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_errors_are_one_line_and_exit_2(args, message, json_flag):
    if json_flag and args[0] == "fly":
        json_flag = []
    result = run(*args, *json_flag)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("dsv4kv: error: ")
    assert message in result.stderr


def test_help_names_every_command():
    result = run("--help")
    assert result.returncode == 0
    for command in ("plan", "capacity", "picture", "demo", "check"):
        assert command in result.stdout


def test_plan_initialises_no_backend():
    code = (
        "import sys; from dsv4kv_jax.cli import main\n"
        "sys.argv = ['dsv4kv', 'plan', '--model', 'deepseek-v4-pro', '--memory', '1GiB']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized(), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "False False"
