"""Element types: their names in NumPy, PyTorch, DLPack and safetensors."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


def library(name: str) -> Any:
    """Imports NumPy or PyTorch. Raises ImportError, which says what to do, if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name != name:
            raise
    others = "tensor()" if name == "numpy" else "on an emulated device numpy()"
    raise ImportError(f"{name} is not installed: pip install {name}, or use array(), which needs no library, or {others}")


@dataclass(frozen=True)
class DType:
    """An element type. If it is smaller than a byte, PyTorch and DLPack may have another element for it, or none."""

    name: str  # in NumPy and ml_dtypes
    bits: int
    code: int  # in DLPack
    typestr: str | None  # in the array interfaces; None: they lack the type
    torch: str | None  # attribute of torch

    @property
    def itemsize(self) -> int:
        """Bytes of an element, or 0 for elements smaller than a byte."""
        return self.bits // 8

    def __str__(self) -> str:
        return self.name


def _plain(name: str, bits: int, code: int, typestr: str) -> DType:
    return DType(name, bits, code, typestr, name)


UINT8 = _plain("uint8", 8, 1, "|u1")

_ALL = [
    DType("bool", 8, 6, "|b1", "bool"),
    UINT8,
    _plain("uint16", 16, 1, "<u2"),
    _plain("uint32", 32, 1, "<u4"),
    _plain("uint64", 64, 1, "<u8"),
    _plain("int8", 8, 0, "|i1"),
    _plain("int16", 16, 0, "<i2"),
    _plain("int32", 32, 0, "<i4"),
    _plain("int64", 64, 0, "<i8"),
    _plain("float16", 16, 2, "<f2"),
    _plain("float32", 32, 2, "<f4"),
    _plain("float64", 64, 2, "<f8"),
    _plain("complex64", 64, 5, "<c8"),
    _plain("complex128", 128, 5, "<c16"),
    DType("bfloat16", 16, 4, None, "bfloat16"),
    DType("float8_e4m3fn", 8, 10, None, "float8_e4m3fn"),
    DType("float8_e4m3fnuz", 8, 11, None, "float8_e4m3fnuz"),
    DType("float8_e5m2", 8, 12, None, "float8_e5m2"),
    DType("float8_e5m2fnuz", 8, 13, None, "float8_e5m2fnuz"),
    DType("float8_e8m0fnu", 8, 14, None, "float8_e8m0fnu"),
    # PyTorch has two of them in one element.
    DType("float4_e2m1fn", 4, 17, None, "float4_e2m1fn_x2"),
    DType("float6_e2m3fn", 6, 15, None, None),
    DType("float6_e3m2fn", 6, 16, None, None),
]

_BY_NAME = {d.name: d for d in _ALL}
_BY_SHORT = {d.typestr[1:]: d for d in _ALL if d.typestr}
_BY_TORCH = {d.torch: d for d in _ALL if d.torch}

# The names in the safetensors format.
SAFETENSORS = {
    "BOOL": _BY_NAME["bool"],
    "F4": _BY_NAME["float4_e2m1fn"],
    "F6_E2M3": _BY_NAME["float6_e2m3fn"],
    "F6_E3M2": _BY_NAME["float6_e3m2fn"],
    "U8": UINT8,
    "I8": _BY_NAME["int8"],
    "F8_E4M3": _BY_NAME["float8_e4m3fn"],
    "F8_E5M2": _BY_NAME["float8_e5m2"],
    "F8_E4M3FNUZ": _BY_NAME["float8_e4m3fnuz"],
    "F8_E5M2FNUZ": _BY_NAME["float8_e5m2fnuz"],
    "F8_E8M0": _BY_NAME["float8_e8m0fnu"],
    "I16": _BY_NAME["int16"],
    "U16": _BY_NAME["uint16"],
    "F16": _BY_NAME["float16"],
    "BF16": _BY_NAME["bfloat16"],
    "I32": _BY_NAME["int32"],
    "U32": _BY_NAME["uint32"],
    "F32": _BY_NAME["float32"],
    "C64": _BY_NAME["complex64"],
    "I64": _BY_NAME["int64"],
    "U64": _BY_NAME["uint64"],
    "F64": _BY_NAME["float64"],
}


def dtype_of(of: Any) -> DType:
    """Finds a type by name, by a dtype of NumPy or PyTorch, or by a scalar type such as ``numpy.float32``."""
    if of is None:
        return UINT8
    if isinstance(of, DType):
        return of
    if isinstance(of, str):
        name = of
        if name.startswith("torch.") and name[6:] in _BY_TORCH:
            name = name[6:]
    elif type(of).__module__.partition(".")[0] == "torch":
        name = str(of).removeprefix("torch.")
    else:
        name = str(getattr(of, "name", None) or getattr(of, "__name__", None) or of)
    if getattr(of, "byteorder", "=") == ">" or (name[:1] == ">" and name[1:] in _BY_SHORT):
        raise TypeError(f"{of!r} has its bytes in the other order: use Mapping.numpy, which takes any dtype of NumPy")
    found = _BY_NAME.get(name) or SAFETENSORS.get(name) or _BY_SHORT.get(name.lstrip("<=|")) or _BY_TORCH.get(name)
    if found is None:
        raise TypeError(f"{of!r} is no type of elements that can be shared; there are {', '.join(_BY_NAME)}")
    return found


def numpy_dtype(dtype: DType) -> Any:
    """Returns NumPy's dtype, or the one of ml_dtypes if NumPy has none. Raises TypeError if neither has one."""
    import numpy

    if dtype.typestr is not None:
        return numpy.dtype(dtype.typestr)
    if dtype.bits >= 8:
        try:
            import ml_dtypes

            return numpy.dtype(getattr(ml_dtypes, dtype.name))
        except (ImportError, AttributeError):
            pass
        raise TypeError(f"NumPy has no {dtype.name}: install ml_dtypes (gaiafs[numpy] does), or use framework='torch' or 'array'")
    raise TypeError(f"NumPy has no elements of {dtype.bits} bits ({dtype.name}): use framework='torch' or 'array'")


def torch_dtype(dtype: DType) -> Any:
    """Returns PyTorch's dtype. Raises TypeError if this PyTorch has none."""
    import torch

    found = getattr(torch, dtype.torch, None) if dtype.torch else None
    if found is None:
        raise TypeError(f"PyTorch {torch.__version__} has no {dtype.name}: use framework='array'")
    return found
