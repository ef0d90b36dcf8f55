"""What importing costs, and what is said where PyTorch is missing."""

import subprocess
import sys
import textwrap

import pytest

from dsv4kv_jax import interop

PUBLIC = [
    "Lease",
    "LeaseError",
    "PageView",
    "Region",
    "SharedSlab",
    "bind",
    "blocks_from_host",
    "blocks_to_host",
    "blocks_to_resume",
    "check_donatable",
    "checked_step",
    "flash_mla",
    "flashinfer",
    "int32_array",
    "int32_tensor",
    "lend",
    "page_view",
    "regions",
    "vllm",
    "whole_block_view",
]


def run(code):
    code = textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names():
    assert interop.__all__ == PUBLIC
    assert all(hasattr(interop, name) for name in PUBLIC)


def test_importing_needs_no_torch_and_says_which_extra():
    out = run("""
        import sys
        sys.modules["torch"] = None  # as if it were not installed
        import dsv4kv_jax
        from dsv4kv_jax import interop
        from dsv4kv_jax.interop import flash_mla, flashinfer, reference, torch_kernels, vllm
        plan = dsv4kv_jax.plan(dsv4kv_jax.ModelConfig.preset("deepseek-v4-flash"), 3 * 1002240)
        cache = dsv4kv_jax.KVCache.allocate(plan)
        read = vllm.read_config(vllm.write_config(plan.layout, 3))  # plain Python
        assert read.layout == plan.layout
        for call in (lambda: interop.lend(cache), lambda: interop.SharedSlab.allocate(plan),
                     lambda: interop.int32_tensor("slots", [1]), lambda: vllm.adopt({}, None),
                     lambda: interop.int32_array("slots", [1]), lambda: interop.SharedSlab.from_cache(cache),
                     lambda: interop.PageView(dtype="uint8", shape=(1,), strides=(1,)).on(None),
                     lambda: interop.blocks_to_host(None, [1]), lambda: reference.read_rows(None, "", None),
                     lambda: interop.blocks_from_host(None, [1], None), lambda: flash_mla.check_cache_view(None),
                     lambda: flashinfer.decode_arguments(None, "", None, indices=None, lens=None),
                     lambda: torch_kernels.gather_rows(None, "", None)):
            try:
                call()
            except ImportError as error:
                print(error)
    """)
    lines = out.splitlines()
    assert len(lines) == 13 and all("pip install 'dsv4kv_jax[torch]'" in line for line in lines)


def test_torch_is_not_imported_before_it_is_needed():
    out = run("""
        import sys
        from dsv4kv_jax import interop
        print("torch" in sys.modules)
    """)
    assert out.strip() == "False"


def test_a_second_name_is_refused():
    with pytest.raises(ImportError, match="this package is dsv4kv_jax.interop, not interop"):
        import interop  # noqa: F401
