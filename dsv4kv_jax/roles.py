"""What a cache is for, told from its spec alone: reports, pictures and the optimizer sort caches by it."""

from typing import Literal

from dsv4kv_jax import formats
from dsv4kv_jax.specs import KVCacheSpec

Role = Literal["window", "compressed", "indexer", "state"]

# Tokens that a compressor looks back over for one row, by its state's window (C4 groups overlap, so it sees two).
_RATIO_OF_STATE_WINDOW = {8: 4, 128: 128}


def role_of(spec: KVCacheSpec) -> Role:
    """The role of a cache: the latents of the window, compressed latents, indexer keys, or a compressor's state."""
    if spec.window is None:
        is_key = spec.format.name.startswith("indexer_")
        return "indexer" if is_key else "compressed"
    return "state" if spec.format == formats.plain_format("float32", spec.head_size) else "window"


def state_ratio(spec: KVCacheSpec) -> int | None:
    """Tokens that a compressor turns into one row, for a state cache of DeepSeek-V4; None for any other cache."""
    return _RATIO_OF_STATE_WINDOW.get(spec.window or 0) if role_of(spec) == "state" else None


def describe(spec: KVCacheSpec) -> str:
    """A short name for people: `"C4A latent"`, `"indexer key"`, `"window"`, `"C128 state"`."""
    role = role_of(spec)
    if role == "compressed":
        return f"C{spec.compress_ratio}A latent" if spec.compress_ratio > 1 else "full latent"
    if role == "state":
        ratio = state_ratio(spec)
        return f"C{ratio} state" if ratio else "state"
    return {"indexer": "indexer key", "window": "window latent"}[role]
