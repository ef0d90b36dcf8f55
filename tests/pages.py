"""Small caches that have a page of every kind and format, and their slabs as bytes."""

import jax.numpy as jnp
import numpy as np

from dsv4kv_jax.config import ModelConfig
from dsv4kv_jax.groups import group_layers
from dsv4kv_jax.layout import PackedLayout
from dsv4kv_jax.specs import layer_specs

CONFIG = ModelConfig(name="small", num_hidden_layers=3, compress_ratios=(4, 128, 1))
SWA, C4A, C128A = "model.layers.2.attn.swa_cache", "model.layers.0.attn", "model.layers.1.attn"
KEYS = "model.layers.0.attn.indexer.k_cache"
STATES = ("model.layers.0.attn.compressor.state_cache", "model.layers.0.attn.indexer.compressor.state_cache")
STATES += ("model.layers.1.attn.compressor.state_cache",)


def layout_of(cache_dtype="fp8_ds_mla", **options):
    return PackedLayout.from_groups(group_layers(layer_specs(CONFIG, cache_dtype, **options)))


_FP8_DS_MLA = layout_of()
PAGES = {
    "swa": _FP8_DS_MLA.page(SWA),
    "c4a": _FP8_DS_MLA.page(C4A),
    "c128a": _FP8_DS_MLA.page(C128A),
    "keys_fp8": _FP8_DS_MLA.page(KEYS),
    "keys_ue8m0": layout_of(indexer="fp8_ue8m0").page(KEYS),
    "keys_mxfp4": layout_of(indexer="mxfp4").page(KEYS),
    "keys_fp8_in_512": layout_of("bf16").page(KEYS),
    "keys_mxfp4_in_512": layout_of("bf16", indexer="mxfp4").page(KEYS),
    "c4_state": _FP8_DS_MLA.page(STATES[0]),
    "c4_key_state": _FP8_DS_MLA.page(STATES[1]),
    "c128_state": _FP8_DS_MLA.page(STATES[2]),
    "swa_bf16": layout_of("bf16").page(SWA),
    "c128a_bf16": layout_of("bf16").page(C128A),
    "swa_fp8": layout_of("fp8").page(SWA),
    "c128a_fp8": layout_of("fp8").page(C128A),
}
"""Every kind of page, at offsets that are not 0 where its group has neighbours."""


def random_slab(page, num_blocks, seed=0):
    """A slab in which every word is random: what is not overwritten must stay so."""
    shape = (num_blocks, page.block_stride_bytes // page.spec.alignment, page.words_per_row)
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32))


def as_bytes(slab):
    """A copy of the slab as uint8 [num_blocks, block stride]."""
    return np.array(slab).view(np.uint8).reshape(slab.shape[0], -1)


def as_slab(raw, page):
    """The slab of such bytes."""
    return jnp.asarray(raw.view(np.uint32).reshape(len(raw), -1, page.words_per_row))


def section_bytes(page):
    return [section.row_bytes for section in page.format.sections]


def random_rows(page, count, seed=0):
    """Rows whose magnitudes span many powers of two, float32."""
    rng = np.random.default_rng(seed)
    shape = (count, page.format.num_values)
    rows = rng.standard_normal(shape) * np.exp2(rng.integers(-24, 12, (count, 1)) + rng.integers(-6, 7, shape))
    return rows.astype(np.float32)
