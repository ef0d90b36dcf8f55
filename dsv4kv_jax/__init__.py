"""The DeepSeek-V4 KV cache for JAX: planned, owned, written, indexed, read back, and shared with PyTorch.

Importing this package initialises no JAX backend and needs neither PyTorch nor the command line's extras.
"""

from dsv4kv_jax.block_pool import BlockPool as BlockPool
from dsv4kv_jax.cache import COMPILER_OPTIONS as COMPILER_OPTIONS
from dsv4kv_jax.cache import KVCache as KVCache
from dsv4kv_jax.config import ModelConfig as ModelConfig
from dsv4kv_jax.errors import PlanError as PlanError
from dsv4kv_jax.groups import KVCacheGroup as KVCacheGroup
from dsv4kv_jax.groups import group_layers as group_layers
from dsv4kv_jax.layout import PackedLayout as PackedLayout
from dsv4kv_jax.layout import PageLayout as PageLayout
from dsv4kv_jax.manager import KVCacheManager as KVCacheManager
from dsv4kv_jax.metadata import StepMetadata as StepMetadata
from dsv4kv_jax.plan import KVCachePlan as KVCachePlan
from dsv4kv_jax.plan import plan as plan
from dsv4kv_jax.plan import plan_from_specs as plan_from_specs
from dsv4kv_jax.request import Request as Request
from dsv4kv_jax.specs import MLAAttentionSpec as MLAAttentionSpec
from dsv4kv_jax.specs import SlidingWindowMLASpec as SlidingWindowMLASpec
from dsv4kv_jax.specs import layer_specs as layer_specs

__all__ = [
    "COMPILER_OPTIONS",
    "BlockPool",
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
