"""Which parameters of a loaded model are shared with other processes, and which stay the engine's own copies.

An engine fills its own parameters from the tensors of the files. It fuses some (q, k and v), stacks some (experts),
takes a rank's part of some, and processes quantized ones after loading. It does not report which ones are the same as
in the files. So the rule looks at the result. The engine loads copies, which it may store into. When it is done, a
parameter is replaced by the shared tensor of a file, or by shared tensors of files one below the other, if

- it has two dimensions, of 16 or 32 bit floating-point numbers. Experts, which engines rearrange while they serve, have
three. Scales and biases mostly have one, and are small;
- its layer is not quantized: the layer has no ``quant_method``, or one whose class is called ``Unquantized…``;
- it is contiguous, on the tensors' device, and has their shape, their type, and the same bits.

All other parameters and all buffers stay copies. Rejected: giving the shared tensor to the engine's own weight loaders,
which copy it; and sharing before the engine processes weights, which may store into them.

After that, new weights cannot be loaded into the model: the store would end the process's CUDA context. So the model's
``load_weights`` raises an error.
"""

from __future__ import annotations

import errno
import importlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import gaiafs
from gaiafs import fusing, weights

_FLOATS = ("bfloat16", "float16", "float32")
_SAMPLES = 64
_COMPARED_AT_ONCE = 64 << 20  # bytes; a comparison needs as much memory again

_ELSEWHERE = (
    "{0} is not on a gaiafs mount, and load format gaiafs needs it there. Mount the directory that has the model "
    "(gaiafs mount DIRECTORY MOUNTPOINT) and pass the model's path below MOUNTPOINT, or use load format auto"
)


class Outcome(NamedTuple):
    """How many bytes of a model's parameters on this device are shared, and how many are copies."""

    shared: int
    copied: int


class _Seen(NamedTuple):
    file: str
    name: str
    rows: int


class Loading:
    """Loads one model onto one device. framework is "torch", or "numpy" for a model of NumPy arrays."""

    def __init__(self, device: Any, logger: logging.Logger, framework: str = "torch") -> None:
        self._device, self._logger, self._framework = device, logger, framework
        self._library = importlib.import_module(framework)
        self._seen: dict[tuple[object, ...], list[_Seen]] = {}
        self._begins: dict[tuple[object, ...], list[_Seen]] = {}  # by the first row

    def tensors(self, files: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yields the tensors of safetensors files with their names: copies that the engine may store into.

        It holds one file at a time on the device, and lets it go afterwards. Raises RuntimeError for a file that is on
        no mount, and what ``gaiafs.safe_open`` raises.
        """
        for file in files:
            try:
                opened = gaiafs.safe_open(file, self._framework, self._device)
            except gaiafs.Error as e:
                if e.errno != errno.ENOTTY:
                    raise
                raise RuntimeError(_ELSEWHERE.format(file)) from None
            with opened:
                tensors = opened.get_tensors()
                opened._let_go()  # the engine then uses other views
            for name in list(tensors):
                tensor = tensors.pop(name)
                if _may_be_shared(tensor):
                    seen = _Seen(file, name, tensor.shape[0])
                    self._seen.setdefault(_key(tensor), []).append(seen)
                    self._begins.setdefault(_key(tensor[0]), []).append(seen)
                copy = self._library.clone(tensor) if self._framework == "torch" else tensor.copy()
                del tensor
                yield name, copy

    def share(self, model: Any) -> Outcome:
        """Shares parameters of a loaded model, by the rule above, and logs how many bytes it shared.

        If the device has no room for a shared tensor, the parameter stays a copy.
        """
        wanted: dict[tuple[_Seen, ...], list[Any]] = {}
        for name, parameter in _unquantized(model):
            # An offloaded parameter is in host memory, although it says that it is on the GPU.
            offloaded = getattr(parameter, "_vllm_is_uva_offloaded", False)
            if _may_be_shared(parameter.data) and parameter.is_contiguous() and not offloaded:
                found = self._seen.get(_key(parameter.data))
                best = (
                    (next((s for s in found if s.name == name), found[0]),) if found else self._pieces(parameter.data)
                )
                if best:
                    wanted.setdefault(best, []).append(parameter)
        total = sum(map(_bytes, {id(p): p.data for p in model.parameters()}.values()))
        # Parameters that are one tensor come before those that consist of several. A tensor goes into one view only.
        taken: set[_Seen] = set()
        by_files: dict[tuple[str, ...], dict[tuple[_Seen, ...], list[Any]]] = {}
        for pieces, parameters in sorted(wanted.items(), key=lambda item: len(item[0])):
            if taken.isdisjoint(pieces) and len(set(pieces)) == len(pieces):
                taken.update(pieces)
                by_files.setdefault(tuple(sorted({s.file for s in pieces})), {})[pieces] = parameters
        shared = sum(self._share_files(files, those) for files, those in by_files.items())
        self._seen.clear()
        self._begins.clear()
        self._logger.info(
            "gaiafs: %d bytes of parameters are shared with other processes, %d are copies of this process alone",
            shared,
            total - shared,
        )
        if shared:
            model.load_weights = _refuse
        return Outcome(shared, total - shared)

    def _pieces(self, data: Any) -> tuple[_Seen, ...]:
        """Returns tensors that may be the parameter's rows, one below the other, or an empty tuple."""
        pieces: list[_Seen] = []
        row, rows = 0, data.shape[0]
        while row < rows:
            found = self._begins.get(_key(data[row]), [])
            seen = next((s for s in found if s not in pieces and s.rows <= rows - row), None)
            if seen is None:
                return ()
            pieces.append(seen)
            row += seen.rows
        return tuple(pieces)

    def _share_files(self, files: tuple[str, ...], wanted: dict[tuple[_Seen, ...], list[Any]]) -> int:
        names: dict[str, list[str] | None] = {f: [s.name for p in wanted for s in p if s.file == f] for f in files}
        targets = {pieces: pieces[0].name if len(pieces) == 1 else f"{pieces[0].name} and others" for pieces in wanted}
        groups = {t: fusing.Group([[s.name for s in p]], stacked=False) for p, t in targets.items() if len(p) > 1}
        try:
            found = weights.load(names, self._device, self._framework, group=lambda parts: groups)
        except (gaiafs.Error, gaiafs.FormatError, ValueError) as e:
            self._logger.warning(
                "gaiafs: parameters from %s stay copies of this process alone: %s", ", ".join(files), e
            )
            return 0
        shared = 0
        for pieces, parameters in wanted.items():
            tensor = found[targets[pieces]]
            for parameter in parameters:
                if parameter.data.device == tensor.device and self._same(parameter.data, tensor):
                    parameter.data = tensor
                    shared += _bytes(tensor)
        if self._framework == "torch" and self._library.cuda.is_available():
            self._library.cuda.empty_cache()  # the next file's tensors need memory outside of PyTorch
        return shared

    def _same(self, a: Any, b: Any) -> bool:
        if a.shape != b.shape:
            return False
        left, right = (t.reshape(-1).view(self._library.uint8) for t in (a, b))
        steps = range(0, len(left), _COMPARED_AT_ONCE)
        return all(bool((left[i : i + _COMPARED_AT_ONCE] == right[i : i + _COMPARED_AT_ONCE]).all()) for i in steps)


def _unquantized(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields each parameter of layers that are not quantized once, with its name. Layers may share a parameter."""
    quantized: set[int] = set()
    found: dict[int, tuple[str, Any]] = {}
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        plain = method is None or type(method).__name__.startswith("Unquantized")
        for name, parameter in module.named_parameters(recurse=False):
            if not plain:
                quantized.add(id(parameter))
            found.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter))
    yield from (pair for i, pair in found.items() if i not in quantized)


def _may_be_shared(tensor: Any) -> bool:
    return len(tensor.shape) == 2 and 0 not in tensor.shape and str(tensor.dtype).rpartition(".")[2] in _FLOATS


def _key(tensor: Any) -> tuple[object, ...]:
    """Returns a key that is equal for tensors with the same bits, and rarely for others: shape, type and a sample."""
    flat = tensor.reshape(-1)
    sample = flat[:: -(-len(flat) // _SAMPLES)].tolist()
    return tuple(tensor.shape), str(tensor.dtype), str(sample)


def _bytes(tensor: Any) -> int:
    return int(tensor.nbytes)


def _refuse(*arguments: object, **options: object) -> None:
    raise RuntimeError(
        "the model shares its weights with other processes, so new weights cannot be loaded into it: "
        "restart the engine, or use another load format than gaiafs"
    )
