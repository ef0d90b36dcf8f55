"""Giving an engine's attention modules their caches."""

import re
from collections.abc import Mapping
from typing import Any

_LAYER_INDEX = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def bind(views: Mapping[str, Any], modules: Mapping[str, Any], *, attribute: str = "kv_cache") -> list[Any]:
    """Sets `module.kv_cache` of every module to its layer's view, as vLLM's `bind_kv_cache` does.

    Args:
      views: layer name to tensor: a `SharedSlab`, a `Lease` (whose views end with it), or a dict.
      modules: layer name to module, such as vLLM's `static_forward_context`.
      attribute: what to set.

    Returns:
      The tensors ordered by the layer number in their names, the list that vLLM's runner keeps.

    Raises:
      ValueError: the two do not name the same layers, or a name has no number; nothing is set then.
    """
    if missing := [name for name in modules if name not in views]:
        raise ValueError(
            f"modules {missing} have no view; this cache holds {len(views)} layers, such as {list(views)[:3]}: bind "
            f"the modules of this worker only"
        )
    if unbound := [name for name in views if name not in modules]:
        raise ValueError(
            f"{len(unbound)} views have no module, such as {unbound[:3]}: to leave them out on purpose, pass "
            f"{{name: views[name] for name in modules}}"
        )
    tensors = [views[name] for name in sorted(views, key=_layer_index)]
    for name, module in modules.items():
        setattr(module, attribute, views[name])
    return tensors


def _layer_index(name: str) -> int:
    found = _LAYER_INDEX.search(name)
    if found is None:
        raise ValueError(f"layer name {name!r} has no layer number; vLLM's are like 'model.layers.2.attn'")
    return int(found[1])
