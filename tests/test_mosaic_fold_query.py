"""The kernel that folds the indexer's queries: the codes and weights of the XLA version, lowering, and refusals."""

import jax
import jax.numpy as jnp
import mosaic_support
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mosaic_support import mosaic

from dsv4kv_jax.config import RopeConfig
from dsv4kv_jax.indexer import fold_query
from dsv4kv_jax.rope import rope_table

pytestmark = mosaic_support.pytestmark
ANGLES = rope_table(RopeConfig(), 4, 4096)


@pytest.fixture(autouse=True)
def _strict():
    with mosaic_support.strict():
        yield


def inputs(tokens, heads, seed, exponent=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, heads, 128)) * np.exp2(rng.integers(-exponent, exponent + 1, (tokens, heads, 1)))
    weights = rng.standard_normal((tokens, heads)).astype(np.float32)
    cos_sin = ANGLES[rng.integers(0, len(ANGLES), tokens)]
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(weights), jnp.asarray(cos_sin)


def assert_alike(got, want):
    """Equal, but where the last bit of a rotated value decides a rounding: then one code apart, 1 in 10,000 at most."""
    (codes, weights), (want_codes, want_weights) = ([np.asarray(x, np.float32) for x in pair] for pair in (got, want))
    assert codes.shape == want_codes.shape
    same = (weights == want_weights) | (np.isnan(weights) & np.isnan(want_weights))  # else another scale
    assert (~same).sum() <= max(same.size // 10_000, 1)
    np.testing.assert_allclose(weights[~same], want_weights[~same] * 2, rtol=1)
    a, b = codes[same], want_codes[same]
    differs = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    assert differs.sum() <= max(a.size // 10_000, 1)
    np.testing.assert_allclose(a[differs], b[differs], rtol=2**-3, atol=2.0**-9)


@settings(max_examples=mosaic_support.examples(12, 60), deadline=None)
@given(
    tokens=st.integers(1, 9),
    heads=st.sampled_from([1, 4, 5, 16, 24, 64]),
    exponent=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_any_queries(tokens, heads, exponent, seed):
    if tokens * heads < 16:
        heads = 16
    args = inputs(tokens, heads, seed, exponent)
    assert_alike(mosaic(fold_query, *args), fold_query(*args, implementation="xla"))


def test_extreme_values():
    q, weights, cos_sin = inputs(3, 16, 0)
    q = q.at[0, 0].set(0).at[0, 1, 5].set(jnp.inf).at[0, 2, 100].set(jnp.nan).at[1, 3].set(3e38).at[2, 4].set(1e-38)
    args = q, weights.at[2, 5].set(jnp.inf), cos_sin
    assert_alike(mosaic(fold_query, *args), fold_query(*args, implementation="xla"))


@pytest.mark.parametrize("tokens", [1, 256])
def test_lowers_for_a_gpu(tokens):
    args = inputs(tokens, 64, 0)
    mosaic_support.lower(lambda *args: fold_query(*args, implementation="mosaic_gpu"), *args)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda q, w, c: (q.astype(jnp.float32), w, c), {}, "q has dtype float32; the kernel reads bfloat16"),
        (lambda q, w, c: (q, w, c[:, :32]), {}, "heads have 128 values, 32 of them rotated"),
        (lambda q, w, c: (q[:1, :8], w[:1, :8], c[:1]), {}, "q has 8 heads in all; the kernel takes 16 or more"),
        (lambda q, w, c: (q, w, c), {"use_hadamard": True}, "no Hadamard transform"),
    ],
)
def test_what_the_kernel_does_not_take(change, options, message):
    """A named kernel is refused, and the default goes to XLA."""
    args = change(*inputs(2, 16, 0))
    with pytest.raises(ValueError, match=f"implementation='mosaic_gpu': .*{message}.*; use 'xla' or None"):
        fold_query(*args, **options, implementation="mosaic_gpu")
    for got, want in zip(fold_query(*args, **options), fold_query(*args, **options, implementation="xla"), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic_support.ON_GPU, reason="needs a GPU that JAX can use")
@pytest.mark.parametrize("tokens", [1, 17, 256, 8192])
def test_many_queries_on_a_gpu(tokens):
    args = inputs(tokens, 64, tokens, 10)
    assert_alike(jax.jit(fold_query)(*args), jax.jit(lambda *args: fold_query(*args, implementation="xla"))(*args))
