"""`dsv4kv capacity`, `dsv4kv picture` and the reports of `dsv4kv plan`."""

import functools
import json

import cli_inside
import pytest

from dsv4kv_jax.capacity import capacity
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.plan import plan

PRO = ModelConfig.preset("deepseek-v4-pro")
GIB = 2**30


@pytest.fixture
def run(capsys, monkeypatch):
    return functools.partial(cli_inside.run, capsys, monkeypatch)


@pytest.fixture
def pro(run):
    return functools.partial(run, "capacity", "--model", "deepseek-v4-pro", "--memory", "80GiB")


def test_json_holds_the_figures_of_capacity(pro):
    figures = pro("--json").json
    assert figures["block_bytes"] == 1_435_968
    assert figures["num_blocks"] == 59_819
    rows = {row["num_tokens"]: row for row in figures["rows"]}
    assert list(rows) == [1024 << i for i in range(11)]
    for num_tokens, row in rows.items():
        one = capacity(plan(PRO, 80 * GIB), num_tokens)
        assert row["num_requests"] == one.num_requests
        assert row["worst_case_blocks"] == list(one.worst_case)
        assert row["decoding_bytes"] == one.decoding_bytes
    assert rows[1 << 20]["peak_blocks"] == 7450
    assert rows[1 << 20]["bytes_read"]["indexer"] == 30 * 262_144 * 132


def test_text_is_a_table(pro):
    result = pro("--context", "2K,1M", "--requests", "100", "--mix", "2K:3,128K")
    assert result.code == 0
    assert "59,819 blocks of 1,435,968 bytes" in result.out
    line = next(line for line in result.out.splitlines() if line.strip().startswith("2K"))
    assert line.split() == ["2K", "1,735", "34", "26", "8", "46.6", "MiB", "840", "70.9"]
    assert "100 requests reach 137,728 tokens together" in result.out
    assert "of the mix, 353.1 requests run together" in result.out
    assert max(map(len, result.out.splitlines())) <= 120


def test_schedule_options_change_the_peak(pro):
    whole, chunked = (pro("--context", "8K", "--json", *options).json for options in ((), ("--chunk-tokens", "512")))
    assert whole["rows"][0]["prefilling_blocks"] == [32, 128, 128, 1024, 2048]
    assert chunked["rows"][0]["prefilling_blocks"] == [32, 10, 10, 80, 130]
    overlapped = pro("--context", "8K", "--json", "--chunk-tokens", "512", "--steps-in-flight", "2").json
    assert overlapped["rows"][0]["prefilling_blocks"] == [32, 18, 18, 144, 258]
    ahead = pro("--context", "8K", "--lookahead-tokens", "4", "--json").json
    assert sum(ahead["rows"][0]["decoding_blocks"]) > sum(whole["rows"][0]["decoding_blocks"])


@pytest.mark.parametrize(
    ("flags", "at_least", "pools"),
    [
        (["--compatible", "flashmla"], 1.2, 1),
        (["--compatible", "flashmla", "--several-pools"], 1.3, 5),
        (["--compatible", "vllm"], 1.0, 1),
        (["--free"], 1.2, 1),
    ],
)
def test_a_search_reports_its_gain(pro, flags, at_least, pools):
    found = pro("--context", "2K", *flags, "--json").json["optimized"]
    assert found["default_requests"] == 1735
    assert found["gain"] == found["num_requests"] / 1735 >= at_least
    assert len(found["pools"]) == pools
    assert sum(pool["num_blocks"] * pool["block_bytes"] for pool in found["pools"]) <= 80 * GIB


def test_a_search_is_proved_by_the_manager(run):
    arguments = ["capacity", "--model", "deepseek-v4-flash", "--memory", "6GiB", "--context", "2K"]
    result = run(*arguments, "--compatible", "flashmla", "--prove")
    assert result.code == 0
    assert "the plan: the manager admits" in result.out
    assert "the geometry found: the manager admits" in result.out
    assert result.out.count("as promised") == 2
    proof = run(*arguments, "--prove", "--json").json["proof"]
    assert [entry["admitted"] for entry in proof] == [entry["promised"] for entry in proof]


def test_a_search_without_a_gain_says_so(pro):
    assert "vLLM's geometry is kept" in pro("--context", "1M", "--compatible", "vllm").out


def test_a_trace_is_replayed_and_searched_for(pro, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt,output\n" + "2000,48\n" * 30 + "30000,100\n" * 2)
    figures = pro("--context", "2K", "--trace", trace, "--compatible", "flashmla", "--json").json
    assert figures["trace"]["num_requests"] == 32
    assert figures["trace"]["preemptions"] == 0
    assert sum(figures["optimized"]["workload"].values()) == 32
    assert "of the trace's 32 requests" in pro("--context", "2K", "--trace", trace).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "2X"], "'2X' is not a number of tokens"),
        (["--context", "0"], "'0' is not a number of tokens"),
        (["--mix", "2K:x"], "weight 'x' is not a number"),
        (["--mix", "2K:0"], "must all be positive"),
        (["--requests", "0"], "num_requests=0"),
        (["--trace", "/none"], "cannot read trace"),
        (["--compatible", "flashmla"], "a search needs a workload"),
        (["--compatible", "flashmla", "--free", "--context", "2K"], "one of --compatible and --free"),
        (["--several-pools"], "--several-pools belongs to a search"),
        (["--free", "--context", "2K", "--block-size", "512"], "leave out --block-size"),
        (["--free", "--context", "2K", "--memory", "80GiB,80GiB"], "plans one worker"),
        (
            ["--compatible", "flashmla", "--context", "2K", "--cache-dtype", "bf16"],
            "needs latents stored as fp8_ds_mla",
        ),
        (
            ["--chunk-tokens", "9000"],
            "chunk_tokens=9000 in each of steps_in_flight=1 are more than in_flight_tokens=8192",
        ),
        (["--context", "2K", "--max-model-len", "1024"], "num_tokens=2048 is more than max_model_len=1024"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(pro, arguments, message):
    for extra in ([], ["--json"]):
        result = pro(*arguments, *extra)
        assert (result.code, result.out) == (2, "")
        assert message in result.err
        assert result.err.count("\n") == 1


def test_picture_in_characters_and_files(run, tmp_path):
    text = run("picture", "--model", "deepseek-v4-pro", "--layer", "model.layers.2.attn", "--token", "1000")
    assert text.code == 0
    assert "token 1000 of model.layers.2.attn is in row 58 of the block at entry 3" in text.out
    for ending in ("png", "svg"):
        path = tmp_path / f"slab.{ending}"
        assert run("picture", "--model", "deepseek-v4-pro", "--output", path).out == f"wrote {path}\n"
        assert path.stat().st_size > 5000


def test_picture_json_is_the_address(run):
    figures = run(
        "picture", "--model", "deepseek-v4-pro", "--layer", "model.layers.2.attn", "--token", "1000", "--json"
    ).json
    assert figures["block_bytes"] == 1_435_968
    page = plan(PRO, 10 * GIB).layout.page("model.layers.2.attn")
    assert figures["address"]["row"] == (1000 % 256) // 4
    assert figures["address"]["parts"][0]["offset_bytes"] == page.offset_bytes + 576 * 58
    assert [len(band) for band in figures["bands"]][1:4] == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "slab.gif"], "must end in .png or .svg"),
        (["--output", "/no/such/folder/slab.png"], "No such file"),
        (["--layer", "model.layers.99.attn"], "no layer 'model.layers.99.attn'"),
        (["--worker", "3"], "worker=3 does not exist"),
    ],
)
def test_bad_pictures_are_refused(run, arguments, message):
    result = run("picture", "--model", "deepseek-v4-pro", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_plan_explains_itself(run):
    arguments = ("plan", "--model", "deepseek-v4-pro", "--memory", "80GiB")
    plain, explained = run(*arguments), run(*arguments, "--explain")
    assert explained.out.startswith(plain.out)
    for words in ("the size of the largest group, 0", "groups 1, 2 share these layers", "below 6,656 tokens"):
        assert words in explained.out
        assert words not in plain.out
    assert "105.00 such requests fit" in plain.out


def test_plan_writes_a_report(run, tmp_path):
    path = tmp_path / "report.html"
    result = run("plan", "--model", "deepseek-v4-flash", "--memory", "40GiB", "--html", path, "--json")
    assert result.json["num_blocks"] == 40 * GIB // 1_002_240
    page = path.read_text()
    assert "tuned for 2K: one slab" in page
    path.unlink()
    run("plan", "--model", "deepseek-v4-flash", "--memory", "40GiB,40GiB", "--html", path)
    assert "tuned for" not in path.read_text()  # a search plans one worker


def test_specs_have_a_capacity_too(run, tmp_path):
    spec = {"kind": "mla", "block_size": 64, "head_size": 512, "dtype": "bfloat16", "alignment": 512}
    window = spec | {"name": "w", "kind": "sliding_window_mla", "sliding_window": 128}
    path = tmp_path / "specs.json"
    path.write_text(json.dumps([spec | {"name": "full"}, window]))
    figures = run("capacity", "--specs", path, "--memory", "1GiB", "--context", "4K", "--json").json
    assert figures["rows"][0]["bytes_read"] is None
    assert figures["rows"][0]["fixed_blocks"] == 3
    refused = run("capacity", "--specs", path, "--memory", "1GiB", "--context", "4K", "--free")
    assert (refused.code, "a search needs a model" in refused.err) == (2, True)


@pytest.mark.parametrize(
    "options",
    [
        ["--context", str(2**63)],
        ["--context", "9" * 5000],
        ["--context", "١K"],
        ["--context", ""],
        ["--mix", str(2**31)],
        ["--mix", ""],
        ["--trace", ""],
        ["--lookahead-tokens", "9" * 30],
        ["--steps-in-flight", str(2**63)],
        ["--memory", "9" * 5000],
        ["--memory", "１GiB"],
        ["--pipeline-stages", str(2**31)],
        ["--tensor-parallel", str(10**9)],
    ],
)
def test_absurd_numbers_and_empty_options_end_at_once(run, options):
    outcome = run("capacity", "--model", "deepseek-v4-flash", "--memory", "1GiB", "--json", *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("dsv4kv: error: ")
    assert outcome.err.count("\n") == 1
