"""The main job, in every combination of formats, and its contract on the command line."""

import json
import subprocess
import sys

import pytest

from dsv4kv_jax import KVCache, ModelConfig, PlanError, demo, plan

pytest.importorskip("torch", reason="the demo's second opinion is PyTorch's")

FLASH = ModelConfig.preset("deepseek-v4-flash")


def run_cli(*args):
    command = [sys.executable, "-c", "from dsv4kv_jax.cli import main; main()", "demo", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_default_run():
    result = run_cli("--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    data = json.loads(result.stdout)
    assert data["passed"] is True
    assert data["max_rel_diff"] <= data["bound"]
    assert (data["slab_copies"], data["same_pointer"], data["steps"]) == (0, True, 64)
    assert data["prompt_lens"] == [5, 131, 300, 64]
    assert data["slab_bytes"] == data["num_blocks"] * data["block_stride_bytes"] <= 256 * 2**20
    assert {check["compress_ratio"] for check in data["layers"]} == {1, 4, 128}
    assert all(check["window_rows"] > 0 for check in data["layers"])
    assert all(check["compressed_rows"] > 0 for check in data["layers"] if check["compress_ratio"] > 1)


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "bf16", "fp8"])
@pytest.mark.parametrize("indexer", ["fp8", "mxfp4"])
def test_every_format(cache_dtype, indexer):
    options = {"num_layers": 3, "memory_bytes": 64 * 2**20, "steps": 3, "num_requests": 3}
    result = demo.run(FLASH, cache_dtype=cache_dtype, indexer=indexer, **options)
    assert result.passed, result.to_dict()
    assert {check.compress_ratio for check in result.layers} == {1, 4, 128}


def test_bfloat16_model():
    options = {"num_layers": 1, "memory_bytes": 2**24, "steps": 2, "num_requests": 1}
    result = demo.run(FLASH, dtype="bfloat16", **options)
    assert result.passed
    assert 1e-4 < result.max_rel_diff < result.bound == 5e-3
    with pytest.raises(PlanError, match="dtype='float16' is not supported; use one of float32, bfloat16"):
        demo.run(FLASH, dtype="float16", **options)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--memory", "1KiB"], "too little memory"),
        (["--memory", "8MiB"], "requests do not fit"),
        (["--memory", "much"], "memory size 'much' is not a size"),
        (["--layers", "0"], "layers=0 must be at least 1"),
        (["--layers", "99"], "num_layers=99 must be from 1 to the model's 43"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--requests", "-1"], "requests=-1 must be at least 1"),
        (["--model", "nope"], "neither a preset"),
        (["--cache-dtype", "int4"], "is not one of"),
    ],
)
def test_errors_are_one_line(args, message):
    result = run_cli(*args, "--json")
    assert result.returncode == 2, result.stdout
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_a_failed_check_exits_1(monkeypatch, capsys):
    from click.testing import CliRunner

    from dsv4kv_jax.cli.demo import command

    monkeypatch.setattr(demo, "BOUNDS", {"float32": -1.0})
    args = ["--layers", "1", "--steps", "1", "--requests", "1", "--memory", "16MiB", "--json"]
    outcome = CliRunner().invoke(command, args, standalone_mode=False)
    assert outcome.return_value == 1
    assert json.loads(outcome.stdout)["passed"] is False


def test_slab_copies_are_found():
    cache = KVCache.allocate(plan(FLASH, 0, num_gpu_blocks_override=3))
    shape = ",".join(map(str, cache.slab.shape))
    text = f"%c.1 = u32[{shape}]{{2,1,0}} copy(%p)\n%d = u32[5,6]{{1,0}} copy(%p)\n"
    text += f"%e = u32[{shape}]{{2,1,0}} fusion(%p)"
    assert demo.count_slab_copies(text, cache) == 1
    assert demo.count_slab_copies(text.replace("copy(", "copy-start("), cache) == 1


def test_prompt_lengths_differ():
    assert len(set(demo.prompt_lengths(8))) == 8
    assert demo.prompt_lengths(9)[8] == demo.prompt_lengths(1)[0]
    with pytest.raises(PlanError, match="requests=0"):
        demo.run(FLASH, num_layers=1, memory_bytes=10**8, steps=1, num_requests=0)
