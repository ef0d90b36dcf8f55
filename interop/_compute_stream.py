"""The CUDA stream on which XLA runs a device's programs, as XLA's foreign function interface gives it to a custom call.

JAX has no other way to tell. With it, ordering JAX behind PyTorch is an event that this stream waits for: no program,
no array. The custom call is a Python function, called once a device; its structures are those of XLA's C header
`xla/ffi/api/c_api.h`, whose fields keep their places from version to version.
"""

import ctypes
from typing import Any

import jax
import numpy as np

_NAME = "dsv4kv_jax_compute_stream"
_METADATA = 1  # XLA_FFI_Extension_Metadata

_found: list[int | None] = []  # what the last call of the handler saw


class _Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    ]


class _StreamGet(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


class _ErrorDestroy(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("error", ctypes.c_void_p)]


class _Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("error_create", ctypes.c_void_p),
        ("error_message", ctypes.c_void_p),
        ("error_destroy", ctypes.CFUNCTYPE(None, ctypes.POINTER(_ErrorDestroy))),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamGet))),
    ]


class _CallFrame(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
    ]


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _handler(frame: Any) -> None:
    """Answers what XLA asks when it registers the call; else notes the stream. Returns null: no error."""
    frame = frame.contents
    api = frame.api.contents
    if frame.extension and frame.extension.contents.type == _METADATA:
        version = frame.extension.contents.metadata.contents.version
        version.major, version.minor = api.version.major, api.version.minor
        return
    get = _StreamGet(ctypes.sizeof(_StreamGet), None, frame.context, None)
    error = api.stream_get(ctypes.byref(get))
    if error:  # a CPU has no stream
        api.error_destroy(ctypes.byref(_ErrorDestroy(ctypes.sizeof(_ErrorDestroy), None, error)))
    _found.append(None if error else get.stream)


def compute_stream_handle(device: Any) -> int | None:
    """The handle of the stream of a GPU's programs; None on a CPU, or if XLA does not give it. Waits for the device."""
    platform = "cpu" if device.platform == "cpu" else "CUDA"
    if platform not in _registered:
        jax.ffi.register_ffi_target(_NAME, jax.ffi.pycapsule(_handler), platform=platform)
        _registered.add(platform)
    call = jax.ffi.ffi_call(_NAME, jax.ShapeDtypeStruct((1,), np.int32), has_side_effect=True)
    _found.clear()
    with jax.ensure_compile_time_eval():  # should anybody ask while a function is traced
        jax.block_until_ready(jax.jit(call)(jax.device_put(np.zeros(1, np.int32), device)))
    return _found[-1] if _found else None


_registered: set[str] = set()
