"""vLLM's KVCacheConfig, in the shapes of 0.27 and 0.33, and its backing tensor."""

import copy
import dataclasses
import functools
import json
import operator
import types

import jax
import jax.numpy as jnp
import pages
import pytest

import dsv4kv_jax
from dsv4kv_jax import interop
from dsv4kv_jax.interop import vllm
from dsv4kv_jax.specs import MLAAttentionSpec, SlidingWindowMLASpec

torch = pytest.importorskip("torch")

PRESETS = ("deepseek-v4-flash", "deepseek-v4-pro")
fill = jax.jit(lambda cache, value: cache.with_slab(cache.slab.at[1].set(value)), donate_argnums=0)


def plan_of(preset="deepseek-v4-flash", cache_dtype="fp8_ds_mla", num_blocks=3, **options):
    config = dsv4kv_jax.ModelConfig.preset(preset)
    stride = dsv4kv_jax.plan(config, 1 << 34, cache_dtype=cache_dtype, **options).layout.block_stride_bytes
    return dsv4kv_jax.plan(config, num_blocks * stride, cache_dtype=cache_dtype, **options)


def as_objects(config):
    """A config as attributes instead of JSON, its specs of classes with vLLM's names and torch dtypes."""

    def record(values, name="Record"):
        return type(name, (types.SimpleNamespace,), {})(**values)

    def spec(values):
        values = dict(values)
        kind = values.pop("type")
        if "kv_cache_specs" in values:
            values["kv_cache_specs"] = {name: spec(each) for name, each in values["kv_cache_specs"].items()}
        else:
            values["dtype"] = getattr(torch, values["dtype"].removeprefix("torch."))
        return record(values, kind)

    groups = [record(group | {"kv_cache_spec": spec(group["kv_cache_spec"])}) for group in config["kv_cache_groups"]]
    tensors = [record(tensor) for tensor in config["kv_cache_tensors"]]
    return record(config | {"kv_cache_groups": groups, "kv_cache_tensors": tensors}, "KVCacheConfig")


def as_vllm_033(layout, num_blocks):
    """The config as 0.33 lays it out: in every group, layers of one spec side by side, in one entry."""
    config = vllm.write_config(layout, num_blocks, version="0.33")
    stride, tensors = layout.block_stride_bytes, []
    for group in layout.groups:
        by_spec = {}
        for name, spec in zip(group.layers, group.specs, strict=True):
            by_spec.setdefault(spec, []).append(name)
        offset = 0
        for spec, names in by_spec.items():
            entry = {"layers": names, "layer_stride": spec.page_size_bytes, "block_stride": stride, "offset": offset}
            tensors.append(entry | {"size": stride * num_blocks})
            offset += len(names) * spec.page_size_bytes
    return config | {"kv_cache_tensors": tensors}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "bf16", "fp8"])
@pytest.mark.parametrize("version", ["0.27", "0.33"])
def test_a_config_read_back_is_the_plan(preset, cache_dtype, version):
    plan = plan_of(preset, cache_dtype, draft="mtp")
    config = vllm.write_config(plan.layout, plan.num_blocks, version=version)
    for form in (config, json.dumps(config), as_objects(config)):
        read = vllm.read_config(form)
        assert read.layout == plan.layout and read.num_blocks == plan.num_blocks
        assert read.starts == (0,)
        assert [group.is_draft for group in read.layout.groups] == [group.is_draft for group in plan.groups]


def test_the_027_config_has_vllms_offsets():
    plan = plan_of("deepseek-v4-pro", num_blocks=2)
    tensors = vllm.write_config(plan.layout, 2)["kv_cache_tensors"]
    assert tensors[0]["shared_by"] == [
        "model.layers.0.attn",
        "model.layers.0.attn.swa_cache",
        "model.layers.1.attn.swa_cache",
        "model.layers.0.attn.compressor.state_cache",
        "model.layers.2.attn.indexer.compressor.state_cache",
    ]
    assert [(t["offset"], t["shared_by"][0]) for t in tensors[1:3]] == [
        (1728, "model.layers.1.attn"),
        (3456, "model.layers.2.attn.indexer.k_cache"),
    ]
    assert {(t["size"], t["block_stride"]) for t in tensors} == {(2 * 1435968, 1435968)}


@pytest.mark.parametrize("preset", PRESETS)
def test_033_puts_layers_of_one_spec_side_by_side(preset):
    plan = plan_of(preset)
    config = as_vllm_033(plan.layout, plan.num_blocks)
    read = vllm.read_config(config)
    assert read.layout != plan.layout and read.layout.block_stride_bytes == plan.layout.block_stride_bytes
    for tensor in config["kv_cache_tensors"]:
        for index, name in enumerate(tensor["layers"]):
            page = read.layout.page(name)
            assert page.offset_bytes == tensor["offset"] + index * tensor["layer_stride"]
            assert page.spec == plan.layout.page(name).spec


@pytest.mark.parametrize("shape", ["0.27", "0.33"])
def test_vllms_memory_becomes_our_slab(shape):
    plan = plan_of()
    config = vllm.write_config(plan.layout, 3) if shape == "0.27" else as_vllm_033(plan.layout, 3)
    backing = torch.zeros(3 * plan.layout.block_stride_bytes, dtype=torch.int8)
    shared = vllm.adopt(as_objects(config), backing, copy_on_cpu=True)
    places = {}
    for tensor in config["kv_cache_tensors"]:
        for index, name in enumerate(tensor.get("layers") or tensor["shared_by"]):
            places[name] = tensor["offset"] + index * tensor.get("layer_stride", 0)
    assert set(places) == set(shared)
    for name, offset in places.items():
        view, spec = shared[name], shared.layout.page(name).spec
        width = spec.format.view_width
        # vLLM 0.27's own way to the same tensor.
        raw = backing.view(-1, plan.layout.block_stride_bytes)[:, offset : offset + spec.real_page_size_bytes]
        theirs = raw.view(view.dtype).view(3, spec.storage_block_size, width)
        assert theirs.data_ptr() == view.data_ptr()
        assert (theirs.shape, theirs.stride(), theirs.dtype) == (view.shape, view.stride(), view.dtype)
    shared.step(fill, jnp.uint32(0x01010101))
    assert bool((backing.view(3, -1)[1] == 1).all()) and not bool(backing.view(3, -1)[0].any())


def test_bind_gives_every_module_its_view():
    plan = plan_of()
    shared = vllm.adopt(
        vllm.write_config(plan.layout, 3),
        torch.zeros(3 * plan.layout.block_stride_bytes, dtype=torch.int8),
        copy_on_cpu=True,
    )
    modules = {name: types.SimpleNamespace() for name in shared}
    runner = interop.bind(shared, modules)
    assert all(modules[name].kv_cache is shared[name] for name in modules)
    assert len(runner) == len(modules) and runner[0] is shared["model.layers.0.attn.swa_cache"]
    layer = [name for name in shared if ".2." in name]
    assert {id(view) for view in runner[2 : 2 + len(layer)]} == {id(shared[name]) for name in layer}


def test_bind_sets_nothing_unless_both_sides_agree():
    views = {"layers.0": 1, "layers.1": 2}
    module = types.SimpleNamespace()
    with pytest.raises(ValueError, match=r"modules \['layers.2'\] have no view"):
        interop.bind(views, {"layers.0": module, "layers.2": module})
    with pytest.raises(ValueError, match=r"1 views have no module, such as \['layers.1'\]"):
        interop.bind(views, {"layers.0": module})
    with pytest.raises(ValueError, match="has no layer number"):
        interop.bind({"attn": 1, "layers.0": 2}, {"attn": module, "layers.0": module})
    assert not vars(module)
    assert interop.bind({"layers.0": 1}, {"layers.0": module}, attribute="cache") == [1] and module.cache == 1


def uniform_and_pools():
    spec = MLAAttentionSpec(block_size=64, head_size=512, dtype="uint8", alignment=576, cache_dtype_str="fp8_ds_mla",
                            model_version="deepseek_v4")  # fmt: skip
    window = SlidingWindowMLASpec(block_size=64, head_size=512, dtype="uint8", alignment=576, sliding_window=128,
                                  cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4")  # fmt: skip
    uniform = dsv4kv_jax.plan_from_specs({f"layers.{i}": spec for i in range(3)}, 3 * 4 * 37440)
    pools = dsv4kv_jax.plan_from_specs(
        {"full.0": spec, "full.1": spec, "sw.0": window, "sw.1": window, "sw.2": window},
        2 * 4 * 37440,
        groups=[["full.0", "full.1"], ["sw.0", "sw.2"], ["sw.1"]],
    )
    return uniform, pools


@pytest.mark.parametrize("version", ["0.27", "0.33"])
@pytest.mark.parametrize("index", [0, 1], ids=["uniform", "pools"])
def test_other_allocation_forms(index, version):
    plan = uniform_and_pools()[index]
    config = vllm.write_config(plan.layout, plan.num_blocks, version=version)
    read = vllm.read_config(config)
    assert read.layout == plan.layout and len(read.owners) == len(plan.layout.buffers)
    size = 37440 * 4
    if version == "0.27":
        backing = {name: torch.zeros(size, dtype=torch.int8) for name in read.owners}
        starts = [backing[name].data_ptr() for name in read.owners]
    else:
        backing = torch.zeros(size * len(read.owners), dtype=torch.int8)
        starts = [backing.data_ptr() + size * i for i in range(len(read.owners))]
    shared = vllm.adopt(config, backing, copy_on_cpu=True)
    for name, page in plan.layout.pages.items():
        assert shared[name].data_ptr() == starts[page.buffer]
    shared.step(jax.jit(lambda c: c.with_slab(c.slabs[1] + 1, 1), donate_argnums=0))
    assert int(shared.whole_blocks(1).count_nonzero()) == size // 4 and not bool(shared.whole_blocks(0).any())


def test_layers_that_share_anothers_cache():
    plan = plan_of()
    config = vllm.write_config(plan.layout, 3)
    config["kv_cache_groups"][0]["layer_names"].append("draft.0.attn")
    with pytest.raises(ValueError, match=r"layers \['draft.0.attn'\] have no cache tensor; name whose cache"):
        vllm.read_config(config)
    read = vllm.read_config(config, shared={"draft.0.attn": "model.layers.2.attn"})
    assert read.layout.page("draft.0.attn") == plan.layout.page("model.layers.2.attn")


def test_the_indexers_scales_are_the_callers_to_say():
    plan = plan_of()
    read = vllm.read_config(vllm.write_config(plan.layout, 3), indexer="fp8_ue8m0")
    assert read.layout.page("model.layers.2.attn.indexer.k_cache").format.name == "indexer_fp8_ue8m0"
    assert read.layout.page("model.layers.2.attn").format.name == "fp8_ds_mla"


def test_a_stage_without_layers_of_a_group_keeps_it():
    config = dsv4kv_jax.ModelConfig.from_hf(
        json.loads('{"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [128, 0]}')
    )
    plan = dsv4kv_jax.plan(config, [1 << 20, 1 << 20], pipeline_stages=2)
    layout = plan.workers[1].layout
    assert any(not group.layers for group in layout.groups)
    for version in ("0.27", "0.33"):
        read = vllm.read_config(vllm.write_config(layout, 3, version=version))
        assert [group.block_size for group in read.layout.groups] == [group.block_size for group in layout.groups]
        assert set(read.layout.pages) == set(layout.pages)


@dataclasses.dataclass
class MambaSpec:
    block_size: int = 16


def edited(**changes):
    """A 0.27 config with changes: `tensor.offset`, say, in the second entry."""
    config = vllm.write_config(plan_of().layout, 3)
    for key, value in changes.items():
        place, field = key.split("_", 1)
        if place == "tensor":
            config["kv_cache_tensors"][1][field] = value
        elif place == "spec":
            config["kv_cache_groups"][1]["kv_cache_spec"][field] = value
        else:
            config[field] = value
    return config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: edited(spec_type="MambaSpec"),
            "a MambaSpec is not supported: DeepSeek-V4 caches are MLAAttentionSpec",
        ),
        (lambda: edited(spec_type="HiddenStateCacheSpec"), "a HiddenStateCacheSpec is not supported"),
        (lambda: edited(spec_alignment=None), "alignment=None"),
        (lambda: edited(spec_page_size_bytes=42048), "has pages of 42048 B in vLLM and 37440 B here"),
        (lambda: edited(spec_dtype="torch.float16"), "dtype='float16' is not a cache dtype"),
        (lambda: edited(spec_dtype="torch.float32"), "dtype='float32' does not fit cache_dtype_str='fp8_ds_mla'"),
        (lambda: edited(tensor_offset=4), "the config puts it at byte 4 of a block; packed without gaps it is at"),
        (lambda: edited(tensor_block_stride=1_002_816), "pages 1002816 B apart"),
        (lambda: edited(tensor_size=1_002_240), "3 blocks pass the end of its tensor of 1002240 B"),
        (lambda: edited(tensor_host_resident=True), "host_resident"),
        *(
            (lambda number=number: edited(config_num_blocks=number), "num_blocks=.* must be an integer of at least 1")
            for number in (0, -1, 1.5, True, "3", None)
        ),
        (lambda: edited(tensor_size=1.5), "size=1.5 of a dict must be a number of bytes"),
        (lambda: edited(tensor_offset=-576), "offset=-576"),
        (lambda: {"num_blocks": 3}, "has no 'kv_cache_tensors'; is it a KVCacheConfig of vLLM"),
        (lambda: types.SimpleNamespace(), "this SimpleNamespace has no 'num_blocks'"),
    ],
)
def test_configs_that_are_not_ours_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        vllm.read_config(make())


def paths(node, path=()):
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from paths(child, (*path, key))


@pytest.mark.parametrize("version", ["0.27", "0.33"])
@pytest.mark.parametrize("damage", ["delete", None, -1, 1.5, True, "x", [], {}, {"a": 1}], ids=repr)
def test_a_damaged_config_is_read_or_refused(version, damage):
    """Whatever stands where a number, a name or a list belongs: no other error, and never blocks that are none."""
    whole = vllm.write_config(pages.layout_of(), 3, version=version)
    for *above, last in paths(whole):
        config = copy.deepcopy(whole)
        parent = functools.reduce(operator.getitem, above, config)
        if damage == "delete":
            del parent[last]
        else:
            parent[last] = damage
        try:
            read = vllm.read_config(config)
        except ValueError:
            continue
        assert read.num_blocks == 3 and set(read.layout.layers) == set(pages.layout_of().layers)


def test_a_state_space_layer_is_refused_by_name():
    config = as_objects(edited())
    config.kv_cache_groups[1].kv_cache_spec = MambaSpec()
    with pytest.raises(ValueError, match="a MambaSpec is not supported"):
        vllm.read_config(config)


def test_backing_memory_that_does_not_fit_is_refused():
    plan = plan_of()
    config = vllm.write_config(plan.layout, 3)
    with pytest.raises(ValueError, match="the config places pages up to byte 3006720"):
        vllm.adopt(config, torch.zeros(3006719, dtype=torch.int8), copy_on_cpu=True)
    with pytest.raises(ValueError, match="pass that one tensor, not a dict"):
        vllm.adopt(config, {}, copy_on_cpu=True)
    with pytest.raises(ValueError, match="compact int8 tensor"):
        vllm.adopt(config, torch.zeros(2, 3006720, dtype=torch.int8).t(), copy_on_cpu=True)
    uniform = vllm.write_config(uniform_and_pools()[0].layout, 4)
    with pytest.raises(ValueError, match=r"pass the dict of raw tensors, with \['layers.0', 'layers.1', 'layers.2'\]"):
        vllm.adopt(uniform, torch.zeros(3 * 4 * 37440, dtype=torch.int8), copy_on_cpu=True)
    with pytest.raises(ValueError, match="version='0.30'"):
        vllm.write_config(plan.layout, 3, version="0.30")


def test_more_memory_than_the_config_needs_is_left_alone():
    plan = plan_of()
    backing = torch.full((3_006_720 + 4096,), 7, dtype=torch.int8)
    shared = vllm.adopt(vllm.write_config(plan.layout, 3), backing, copy_on_cpu=True)
    shared.step(fill, jnp.uint32(0))
    assert bool((backing[3_006_720:] == 7).all())
