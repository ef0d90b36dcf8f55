"""Which implementation of an operation runs: one rule for all of them, in one place."""

import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from dsv4kv_jax.kernels import _compat
from dsv4kv_jax.layout import PageLayout

Implementation = Literal["xla", "mosaic_gpu"]

# Operations that have a Mosaic GPU kernel, and the module of `dsv4kv_jax.kernels` that holds it under the same name.
# Such a kernel gets the arguments that the public function has checked and completed.
MOSAIC_MODULES: Mapping[str, str] = types.MappingProxyType(
    {
        "insert_rows": "mosaic_insert",
        "insert_many": "mosaic_insert",
        "gather_rows": "mosaic_gather",
        "window_means": "mosaic_states",
        "copy_blocks": "mosaic_blocks",
        "zero_blocks": "mosaic_blocks",
        "slot_mapping": "mosaic_indices",
        "compressed_slot_mapping": "mosaic_indices",
        "swa_indices": "mosaic_indices",
        "c128a_indices": "mosaic_indices",
        "topk_to_slots": "mosaic_indices",
        "combine_topk_swa": "mosaic_indices",
        "flashinfer_indices": "mosaic_indices",
        "step_indices": "mosaic_indices",
        "sparse_attention": "mosaic_attention",
        "fold_query": "mosaic_fold_query",
        "index_scores": "mosaic_index_scores",
        "top_k_indices": "mosaic_top_k",
    }
)


def choose(implementation: str | None, op: str) -> Implementation:
    """The implementation of operation `op` that runs.

    Args:
      implementation: a name, which is used or refused and never replaced by another; None for the default: the Mosaic
        GPU kernel on a Hopper GPU, where all were measured to be faster than XLA (`benchmarks/results`), else `"xla"`.
      op: the public function's name.

    Raises:
      ValueError: an unknown name, or one that `op` or the installed JAX does not have; the message says why.
    """
    if implementation is None:
        suits = op in MOSAIC_MODULES and _compat.why_no_mosaic() is None and _compat.is_hopper()
        return "mosaic_gpu" if suits else "xla"
    if implementation == "xla":
        return "xla"
    if implementation not in get_args(Implementation):
        legal = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation={implementation!r} is not known; use one of {legal}, or None for the default")
    if op not in MOSAIC_MODULES:
        raise ValueError(f"implementation={implementation!r}: {op} has no such kernel; use 'xla' or None")
    if reason := _compat.why_no_mosaic():
        raise ValueError(f"implementation={implementation!r}: {reason}; use 'xla' or None")
    return "mosaic_gpu"


def mosaic_kernel(
    op: str, implementation: str | None, *pages: PageLayout, given: tuple[Any, ...] | None = None
) -> Callable[..., Any] | None:
    """The Mosaic GPU kernel of `op` where that is the implementation that runs, else None. Raises as `choose` does.

    For `pages` that the row kernels cannot take, and for arguments `given` for which `why_not` of the kernel's module
    has a reason, the default is None, too, and a name is refused.

    Pallas takes a second to import, so its modules are imported here, when the first kernel is asked for.
    """
    if choose(implementation, op) == "xla":
        return None
    module = importlib.import_module(f"dsv4kv_jax.kernels.{MOSAIC_MODULES[op]}")
    reasons: list[str | None] = []
    if pages:
        mosaic_pages = importlib.import_module("dsv4kv_jax.kernels.mosaic_pages")
        reasons += map(mosaic_pages.why_not, pages)
    if given is not None:
        reasons.append(module.why_not(*given))
    if reason := next(filter(None, reasons), None):
        if implementation is None:
            return None
        raise ValueError(f"implementation={implementation!r}: {reason}; use 'xla' or None")
    return getattr(module, op)
