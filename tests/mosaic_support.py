"""Running Mosaic GPU kernels in tests: on a GPU as they are, elsewhere in Pallas' interpreter."""

import contextlib

import jax
import numpy as np
import pytest

from dsv4kv_jax.kernels import _compat

ON_GPU = _compat.why_no_mosaic() is None and jax.default_backend() == "gpu"
pytestmark = [
    pytest.mark.mosaic,
    pytest.mark.skipif(_compat.why_no_mosaic() is not None, reason=str(_compat.why_no_mosaic())),
]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU that JAX can use")]
INT32_MAX = 2**31 - 1


def examples(on_cpu, on_gpu):
    """How many hypothesis examples: the interpreter is slow."""
    return on_gpu if ON_GPU else on_cpu


def mosaic(function, *args, **options):
    """`function` with its Mosaic GPU kernel."""
    if ON_GPU:
        return function(*args, implementation="mosaic_gpu", **options)
    from dsv4kv_jax.kernels import mosaic_lanes

    with mosaic_lanes.interpreted():
        return function(*args, implementation="mosaic_gpu", **options)


def lower(function, *args):
    """Lowers a jitted function for a GPU, which needs none, and returns the text of the module.

    The interpreter accepts shapes and layouts that lowering refuses.
    """
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "mosaic_gpu" in text
    return text


@contextlib.contextmanager
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def assert_same(got, want):
    """Equal trees of arrays: structure, dtypes, shapes and bytes; a NaN equals a NaN."""
    got_leaves, got_tree = jax.tree.flatten(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    assert got_tree == want_tree
    for a, b in zip(got_leaves, want_leaves, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind not in "iub":
            a, b = a.astype(np.float32), b.astype(np.float32)
        np.testing.assert_array_equal(a, b)
