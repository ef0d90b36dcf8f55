"""`dsv4kv check`: sound plans and caches pass, and every kind of damage is named."""

import copy
import functools
import json

import cli_inside
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from dsv4kv_jax import KVCache, storage
from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.invariants import check_cache, check_plan
from dsv4kv_jax.optimize import optimize
from dsv4kv_jax.plan import plan, plan_from_specs
from dsv4kv_jax.specs import layer_specs

PRO = ModelConfig.preset("deepseek-v4-pro")
SMALL = ModelConfig(name="small", num_hidden_layers=3, compress_ratios=(1, 4, 128))
GIB = 2**30


@pytest.fixture
def run(capsys, monkeypatch):
    return functools.partial(cli_inside.run, capsys, monkeypatch)


@pytest.fixture
def saved(tmp_path):
    """A small plan as data, and a function that checks a changed copy of it."""
    data = json.loads(plan(SMALL, 64 * 2**20).to_json())

    def check(change) -> list[str]:
        changed = copy.deepcopy(data)
        change(changed)
        return check_plan(json.dumps(changed))

    return check


def sharing():
    specs = layer_specs(SMALL)
    return plan_from_specs(specs, GIB, shares_with={"model.layers.9.attn": "model.layers.1.attn"})


SOUND = {
    "pro": lambda: plan(PRO, 10 * GIB),
    "bf16": lambda: plan(PRO, 20 * GIB, cache_dtype="bf16", draft="mtp"),
    "workers": lambda: plan(PRO, [10 * GIB, 9 * GIB, 11 * GIB, 12 * GIB], pipeline_stages=2),
    "no hybrid": lambda: plan(PRO, 10 * GIB, hybrid=False),
    "window only": lambda: plan(ModelConfig(name="w", num_hidden_layers=2, compress_ratios=(1, 1)), GIB),
    "sharing": sharing,
    "optimized": lambda: optimize(PRO, 20 * GIB, 2048).plan,
    "empty": lambda: plan(ModelConfig(name="none", num_hidden_layers=0, compress_ratios=()), 1),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_plans_pass(name):
    assert check_plan(SOUND[name]().to_json()) == []


PAGE = "model.layers.1.attn"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["layers"][PAGE].update(offset_bytes=577),
            f"layer {PAGE}: its offset of 577 bytes is not a multiple",
        ),
        (lambda d: d["layers"][PAGE].update(offset_bytes=0), "their pages overlap at byte 0"),
        (lambda d: d["layers"][PAGE].update(offset_bytes=10**6 // 576 * 576), f"layer {PAGE}: its page ends at byte"),
        (lambda d: d["layers"][PAGE].update(page_size_bytes=576), "its rows take 37376 bytes of a page of 576"),
        (lambda d: d["layers"][PAGE].update(group=1), f"layer {PAGE}: names group 1, which does not list it"),
        (lambda d: d["layers"][PAGE]["shape"].__setitem__(1, 32), "its pages have 32 rows, but its spec gives 64"),
        (lambda d: d["layers"].pop(PAGE), f"layer {PAGE}: is in a group but has no pages"),
        (lambda d: d["groups"][0]["layers"].remove(PAGE), f"layer {PAGE}: has pages but is in no group"),
        (lambda d: d["groups"][1]["layers"].append(PAGE), f"layer {PAGE}: is in 2 groups"),
        (lambda d: d["groups"][0].update(used_bytes=1), "group 0: used_bytes is 1, but its pages make"),
        (lambda d: d["groups"][1].update(padding_bytes=7), "group 1: padding_bytes is 7"),
        (lambda d: d["groups"][1].update(slack_bytes=7), "group 1: slack_bytes is 7"),
        (lambda d: d.update(block_stride_bytes=576_000), "block_stride_bytes is 576000, but the largest group uses"),
        (lambda d: d.update(num_blocks=d["num_blocks"] + 1), "do not fit memory_bytes=67108864"),
        (lambda d: d.update(num_blocks=d["num_blocks"] - 1), "but the memory of the smallest worker holds"),
        (lambda d: d.update(num_blocks=1), "num_blocks is 1; a pool needs 2"),
        (lambda d: d.update(num_blocks=2**24), "more than the 2147483648 that int32 indices can hold"),
        (lambda d: d["inputs"]["specs"][0].pop(), "has pages but no spec"),
        (lambda d: d["groups"][0].update(is_draft=True), "do not follow from the plan's inputs"),
        (lambda d: d.update(schema_version=99), "schema_version is 99, not 1"),
        (lambda d: d.pop("groups"), "the plan is incomplete: KeyError 'groups'"),
        (lambda d: d["layers"].update({PAGE: 3}), "the plan is incomplete"),
        *(
            (lambda d, field=field: [spec.update({field: 0}) for spec in d["inputs"]["specs"][0]], "ZeroDivisionError")
            for field in ("alignment", "compress_ratio")
        ),
    ],
)
def test_every_damage_of_a_plan_is_named(saved, change, message):
    assert saved(lambda data: None) == []
    found = saved(change)
    assert any(message in line for line in found), found


def test_sharing_layers_must_be_where_their_owner_is():
    data = json.loads(sharing().to_json())
    data["layers"]["model.layers.9.attn"]["offset_bytes"] += 576
    assert any("shares the pages of model.layers.1.attn, but is not" in line for line in check_plan(json.dumps(data)))


def test_plans_through_the_command_line(run, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan(SMALL, 64 * 2**20).to_json())
    assert run("check", path) == (0, f"{path}: a plan, every invariant holds\n", "")
    data = json.loads(path.read_text())
    data["layers"][PAGE]["offset_bytes"] = 577
    data["num_blocks"] += 1
    path.write_text(json.dumps(data))
    result = run("check", path)
    assert result.code == 1
    assert result.err == ""
    assert len(result.out.splitlines()) >= 3
    assert all(line.startswith(f"{path}: ") for line in result.out.splitlines())
    figures = run("check", path, "--json")
    assert figures.code == 1
    assert json.loads(figures.out)["passed"] is False
    path.write_text("[1, 2")
    assert run("check", path).code == 1


def test_a_missing_file_is_bad_input(run, tmp_path):
    result = run("check", tmp_path / "none")
    assert (result.code, result.out) == (2, "")
    assert "cannot read" in result.err


class TestSavedCaches:
    @pytest.fixture
    def path(self, tmp_path):
        planned = plan(SMALL, 4 * 2**20)
        cache = KVCache.allocate(planned, num_blocks=5)
        path = tmp_path / "cache.safetensors"
        cache.save(path, planned)
        return path

    def rewrite(self, path, change=lambda tensors, metadata: None, *, checksum=True):
        """Saves the file again after `change`, with a checksum that fits unless told otherwise."""
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata())
            tensors = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
        change(tensors, metadata)
        if checksum:
            metadata["checksum"] = storage.checksum(tuple(tensors.values()))
        safetensors.numpy.save_file(tensors, path, metadata=metadata)
        return check_cache(str(path))

    def test_a_sound_cache_passes(self, path, run):
        assert run("check", path) == (0, f"{path}: a saved cache, every invariant holds\n", "")
        assert self.rewrite(path) == []

    def test_changed_bytes(self, path):
        found = self.rewrite(path, lambda t, m: t["slab.0"].__setitem__((3, 2, 1), 7), checksum=False)
        assert len(found) == 1
        assert "bytes were changed" in found[0]

    def test_a_written_null_block(self, path):
        found = self.rewrite(path, lambda t, m: t["slab.0"].__setitem__((0, 2, 1), 7))
        assert found == [
            "slab 0: block 0, the null block, is not zero; something wrote to a block that no request owns"
        ]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t, m: t.update({"slab.0": t["slab.0"][:, :-1].copy()}), "but the plan makes it uint32"),
            (lambda t, m: t.update({"slab.0": t["slab.0"].astype(np.int32)}), "slab 0 is int32"),
            (lambda t, m: t.update({"slab.0": t["slab.0"][:1].copy()}), "slab 0 has 1 blocks; the plan allows 2 to"),
            (lambda t, m: t.update({"slab.1": t["slab.0"]}), "there are 2 slabs, but the plan has 1 buffers"),
            (lambda t, m: t.update({"other": t["slab.0"]}), "tensor 'other' is no slab"),
            (lambda t, m: m.update(worker="3"), "worker '3' does not exist"),
            (lambda t, m: m.pop("plan"), "its metadata lacks plan"),
            (lambda t, m: m.update(plan="{}"), "plan: schema_version is None"),
            (lambda t, m: m.update(dsv4kv_jax="99"), "schema version '99'"),
        ],
    )
    def test_every_damage_of_a_cache_is_named(self, path, change, message):
        found = self.rewrite(path, change)
        assert any(message in line for line in found), found

    def test_a_truncated_file(self, path, run):
        path.write_bytes(path.read_bytes()[:-100])
        result = run("check", path)
        assert result.code == 1
        assert "neither a plan nor a saved cache" in result.out
