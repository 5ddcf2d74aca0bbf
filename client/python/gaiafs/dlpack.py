"""DLPack's structures, made without a compiler.

A consumer ends its use of an export by calling a C function. It may do that from any thread: without the interpreter's
lock, in the middle of an exception, or after the interpreter is gone. Python code must not run then. So the deleter is
the C library's sigemptyset, which only stores zeros over the structure that it is given. ``sweep`` finds the structures
that became zero and ends their exports. It runs at every export, when a mapping is closed, and with garbage collection.

Ownership: a structure is ours until its capsule is taken (its name changes). Then it is the consumer's until it is
zero.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

from . import shelter
from .dtypes import DType

CPU, CUDA = 1, 2
READ_ONLY = 1

_libc = ctypes.CDLL(None)
_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.strdup.restype = ctypes.c_void_p
_libc.strdup.argtypes = (ctypes.c_char_p,)
_DELETER = ctypes.cast(_libc.sigemptyset, ctypes.c_void_p).value
_ROOM = 128  # how much sigemptyset clears: more than the size of a structure

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)

# Capsules keep the address of their name, and may outlive this module.
_NAMES = {name: _libc.strdup(name) for name in (b"dltensor", b"dltensor_versioned")}


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class _Export:
    """A structure that is not zero yet, and the object that it keeps alive."""

    __slots__ = ("block", "name", "capsule", "keep", "ended", "__weakref__")

    def __init__(self, block: int, name: bytes, keep: object) -> None:
        self.block, self.name, self.keep = block, name, keep
        self.capsule: Any = None
        self.ended: list[int] = []  # the structure, once it has no consumer: it outlives the interpreter until then
        # Not freed in sweep, because another thread's sweep may be looking at the structure.
        shelter.at_end(self, map(_libc.free, self.ended))

    def over(self) -> bool:
        """Whether nobody uses the structure any more."""
        # The first 8 bytes of both structures are not zero until the deleter is called.
        if ctypes.c_uint64.from_address(self.block).value == 0:
            return True
        if self.capsule is None:
            return False
        if not _is_valid(self.capsule, self.name):  # it was taken, and the capsule no longer matters
            self.capsule = None
            return False
        # Nobody took it. Is this object the only one that has it, besides the call?
        return sys.getrefcount(self.capsule) <= 2


_exports: set[_Export] = set()


def sweep() -> None:
    """Ends the exports whose consumers are done. It takes no lock: the steps that matter are single operations."""
    for e in list(_exports):
        if e.over():
            try:
                _exports.remove(e)
            except KeyError:
                continue  # another thread removed it
            e.keep = e.capsule = None
            e.ended.append(e.block)


def _with_collection(phase: str, info: object) -> None:
    if phase == "stop" and _exports:
        sweep()


def export(
    keep: object,
    address: int,
    device: tuple[int, int],
    dtype: DType,
    shape: tuple[int, ...],
    readonly: bool,
    versioned: bool,
) -> Any:
    """Makes a capsule for contiguous elements at an address. keep stays alive until the consumer is done."""
    sweep()
    if _with_collection not in gc.callbacks:
        gc.callbacks.append(_with_collection)
    ndim = len(shape)
    block = _libc.calloc(1, _ROOM + 16 * max(ndim, 1))
    if not block:
        raise MemoryError
    sizes = (ctypes.c_int64 * (2 * ndim)).from_address(block + _ROOM)
    stride = 1
    for i in reversed(range(ndim)):
        sizes[i], sizes[ndim + i] = shape[i], stride
        stride *= max(shape[i], 1)
    if versioned:
        v = _Versioned.from_address(block)
        v.major, v.minor, v.flags = 1, 0, READ_ONLY if readonly else 0
    m: Any = v if versioned else _Managed.from_address(block)
    m.deleter = _DELETER
    t = m.tensor
    t.data, t.ndim, t.byte_offset = address, ndim, 0
    t.device_type, t.device_id = device
    t.code, t.bits, t.lanes = dtype.code, dtype.bits, 1
    t.shape, t.strides = block + _ROOM, block + _ROOM + 8 * ndim
    name = b"dltensor_versioned" if versioned else b"dltensor"
    e = _Export(block, name, keep)
    capsule = _new_capsule(block, _NAMES[name], None)
    e.capsule = capsule
    _exports.add(e)
    return capsule
