"""The package as installed: public names, what importing it costs, and what the wheel holds."""

import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys

import pytest

import dsv4kv_jax
import dsv4kv_jax.interop
import dsv4kv_jax.kernels

ROOT = pathlib.Path(__file__).parent.parent

PUBLIC = [
    "BlockPool",
    "COMPILER_OPTIONS",
    "KVCache",
    "KVCacheGroup",
    "KVCacheManager",
    "KVCachePlan",
    "MLAAttentionSpec",
    "ModelConfig",
    "PackedLayout",
    "PageLayout",
    "PlanError",
    "Request",
    "SlidingWindowMLASpec",
    "StepMetadata",
    "group_layers",
    "layer_specs",
    "plan",
    "plan_from_specs",
]
KERNELS = [
    "c128a_indices",
    "combine_topk_swa",
    "compressed_slot_mapping",
    "copy_blocks",
    "flashinfer_indices",
    "gather_rows",
    "gather_sequence",
    "insert_rows",
    "slot_mapping",
    "sparse_attention",
    "swa_indices",
    "topk_to_slots",
    "zero_blocks",
]
INTEROP = ["SharedSlab", "bind", "flash_mla", "flashinfer", "lend", "vllm"]


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_public_names():
    assert sorted(dsv4kv_jax.__all__) == PUBLIC
    assert all(hasattr(dsv4kv_jax, name) for name in PUBLIC)


def test_kernel_and_interop_names():
    assert set(KERNELS) <= set(dsv4kv_jax.kernels.__all__)
    assert set(INTEROP) <= set(dsv4kv_jax.interop.__all__)
    for module in (dsv4kv_jax.kernels, dsv4kv_jax.interop):
        assert all(hasattr(module, name) for name in module.__all__)


def test_import_initialises_no_backend_and_needs_no_extra():
    code = (
        "import sys; blocked = ['torch', 'click', 'rich', 'matplotlib', 'chex', 'hypothesis']\n"
        "for name in blocked: sys.modules[name] = None\n"
        "import dsv4kv_jax, dsv4kv_jax.kernels, dsv4kv_jax.interop\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized(), 'jax.experimental.pallas' in sys.modules)"
    )
    assert run_python(code) == "False False"


def test_planning_makes_no_array():
    code = (
        "import dsv4kv_jax as d\n"
        "p = d.plan(d.ModelConfig.preset('deepseek-v4-pro'), 10 * 2**30)\n"
        "p = d.KVCachePlan.from_json(p.to_json()); p.explain(); d.KVCacheManager(p)\n"
        "from jax._src import xla_bridge\n"
        "print(p.num_blocks, xla_bridge.backends_are_initialized())"
    )
    assert run_python(code) == "7477 False"


def test_command_line_without_its_extra_says_what_to_install():
    code = (
        "import sys; sys.modules['click'] = None\n"
        "from dsv4kv_jax.cli import main\n"
        "try: main()\nexcept SystemExit as e: print(e)"
    )
    assert "pip install 'dsv4kv_jax[cli]'" in run_python(code)


@pytest.mark.parametrize("folder", ["kernels", "interop"])
def test_folders_are_not_importable_under_a_second_name(folder):
    """`import kernels` from the repository root would be a second copy of the module, with registries of its own."""
    if not (ROOT / folder).is_dir():
        pytest.skip("only in a checkout")
    spec = importlib.util.spec_from_file_location(folder, ROOT / folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=f"dsv4kv_jax.{folder}"):
        spec.loader.exec_module(module)


def test_installed_files_are_the_package_alone():
    files = importlib.metadata.files("dsv4kv_jax") or []
    tops = {file.parts[0] for file in files if ".." not in file.parts}
    allowed = {"dsv4kv_jax", f"dsv4kv_jax-{importlib.metadata.version('dsv4kv_jax')}.dist-info"}
    editable = {top for top in tops if top.endswith(".pth") or top.startswith(("_editable", "_dsv4kv_jax", "__"))}
    assert tops - editable <= allowed
    assert (pathlib.Path(dsv4kv_jax.__file__).parent / "py.typed").exists()
