"""Saved caches: a safetensors file that holds the slabs, the plan, a schema version and a checksum."""

import hashlib
import os
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.plan import KVCachePlan

SCHEMA_VERSION = "1"
_KEYS = ("plan", "worker", "checksum")
_CHUNK_BLOCKS = 64  # blocks hashed at a time, so that no second copy of a large slab is made


def save(path: str | os.PathLike[str], slabs: tuple[np.ndarray, ...], plan: KVCachePlan, worker: int) -> None:
    """Writes the slabs of one worker of `plan`; replaces the file only when all of it is written.

    Raises:
      OSError: the file cannot be written.
    """
    metadata = {
        "dsv4kv_jax": SCHEMA_VERSION,
        "plan": plan.to_json(),
        "worker": str(worker),
        "checksum": checksum(slabs),
    }
    partial = f"{os.fspath(path)}.partial"
    tensors = {f"slab.{index}": slab for index, slab in enumerate(slabs)}
    try:
        safetensors.numpy.save_file(tensors, partial, metadata=metadata)
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {os.fspath(path)!r}: {error}") from None
    os.replace(partial, path)


def load(path: str | os.PathLike[str]) -> tuple[tuple[np.ndarray, ...], KVCachePlan, int]:
    """The slabs, the plan and the worker index of a saved cache, with the checksum verified.

    Raises:
      PlanError: not a saved cache, another schema version, slabs that the plan does not have, or changed bytes.
      FileNotFoundError: no such file.
    """
    name = os.fspath(path)
    if not os.path.exists(name):
        raise FileNotFoundError(f"no saved cache at {name!r}")
    try:
        with safetensors.safe_open(name, framework="numpy") as file:
            metadata: dict[str, Any] = file.metadata() or {}
            version = metadata.get("dsv4kv_jax")
            if version != SCHEMA_VERSION:
                raise PlanError(
                    f"{name!r} has schema version {version!r}; this version of the library reads {SCHEMA_VERSION!r}"
                )
            if missing := [key for key in _KEYS if key not in metadata]:
                raise PlanError(f"{name!r} is not a saved cache: its metadata lacks {', '.join(missing)}")
            slabs = tuple(file.get_tensor(f"slab.{index}") for index in range(len(file.keys())))
    except (safetensors.SafetensorError, OSError) as error:
        raise PlanError(f"{name!r} is not a saved cache: {error}") from None
    plan = KVCachePlan.from_json(metadata["plan"])
    if not metadata["worker"].isdecimal() or int(metadata["worker"]) >= len(plan.workers):
        raise PlanError(f"{name!r} names worker {metadata['worker']!r}; its plan has {len(plan.workers)}")
    worker = int(metadata["worker"])
    found = checksum(slabs)
    if found != metadata["checksum"]:
        raise PlanError(f"{name!r} is damaged: its bytes have checksum {found}, but {metadata['checksum']} was saved")
    buffers = plan.workers[worker].layout.buffers
    num_blocks = slabs[0].shape[0] if slabs else 0
    shapes = [(slab.shape, slab.dtype.name) for slab in slabs]
    if shapes != [(buffer.shape(num_blocks), "uint32") for buffer in buffers]:
        raise PlanError(f"{name!r} holds slabs {shapes}, which its plan does not describe")
    return slabs, plan, worker


def checksum(slabs: tuple[np.ndarray, ...]) -> str:
    """BLAKE2b-128 over the slabs' bytes, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for slab in slabs:
        for start in range(0, len(slab), _CHUNK_BLOCKS):
            digest.update(np.ascontiguousarray(slab[start : start + _CHUNK_BLOCKS]).data)
    return digest.hexdigest()
