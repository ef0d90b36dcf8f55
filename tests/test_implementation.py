"""The choice of implementation: a named one runs or is refused, and never becomes another."""

import importlib
import importlib.util
import sys

import numpy as np
import pages
import pytest

from dsv4kv_jax import kernels
from dsv4kv_jax.kernels import _compat, _implementation


def test_default_and_xla():
    for op in (*_implementation.MOSAIC_MODULES, "insert_rows", "no_such_op"):
        assert _implementation.choose("xla", op) == "xla"
        assert _implementation.mosaic_kernel(op, "xla") is None
    assert _implementation.choose(None, "no_such_op") == "xla"


def test_unknown_name():
    for name in ("triton", "XLA", "", "cuda"):
        with pytest.raises(ValueError, match=f"implementation='{name}' is not known; use one of 'xla', 'mosaic_gpu'"):
            _implementation.choose(name, "insert_rows")


def test_operation_without_a_kernel():
    with pytest.raises(ValueError, match="implementation='mosaic_gpu': gather_lens has no such kernel; use 'xla'"):
        _implementation.choose("mosaic_gpu", "gather_lens")


def test_jax_that_is_too_old(monkeypatch):
    monkeypatch.setattr(_compat, "JAX_VERSION", (0, 11, 1))
    slab = pages.random_slab(pages.PAGES["swa"], 2)
    with pytest.raises(ValueError, match=r"'mosaic_gpu': the Mosaic GPU kernels need JAX 0\.11\.2 or newer"):
        kernels.gather_rows(slab, pages.PAGES["swa"], np.int32([64]), implementation="mosaic_gpu")


def test_each_kernel_has_its_operation_s_name():
    for op, module in _implementation.MOSAIC_MODULES.items():
        assert importlib.util.find_spec(f"dsv4kv_jax.kernels.{module}"), (op, module)
        if _compat.why_no_mosaic() is None:
            assert callable(_implementation.mosaic_kernel(op, "mosaic_gpu"))


def test_public_names():
    assert sorted(kernels.__all__) == kernels.__all__
    assert all(callable(getattr(kernels, name)) for name in kernels.__all__)


def test_one_copy_of_the_package(monkeypatch):
    """Under another name the registries would exist twice."""
    spec = importlib.util.spec_from_file_location("kernels", kernels.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels", module)
    with pytest.raises(ImportError, match=r"this package is dsv4kv_jax\.kernels, not kernels"):
        spec.loader.exec_module(module)
