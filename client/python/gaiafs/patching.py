"""Shared weights for programs that do not know gaiafs.

``patch`` replaces ``safetensors.safe_open``. ``safetensors.torch.load_file``, ``safetensors.numpy.load_file`` and
transformers read files through it. The replacement takes files of a mount, and leaves all others to the original.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import importlib.abc
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import opened, shelter
from .errors import CopiedWarning, Error
from .frameworks import framework_of
from .residency import status

_MODELS = "transformers.modeling_utils"
_FRAMEWORKS = ("pt", "torch", "pytorch", "np", "numpy")
_original: Any = None
_outcomes: dict[str, str] = {}  # by path: why it is not shared; "" if it is


class _Place(NamedTuple):
    """The device of a mount that a file is shared on, or None and why there is none."""

    device: Any
    why: str


def patch(*, report: bool = False) -> None:
    """Makes this process share the weights that it loads from a mount through safetensors or transformers.

    After this call, ``safetensors.safe_open`` and ``load_file`` return shared tensors if the file is on a mount and the
    program asks for a device of the mount: ``device="cuda:0"`` on a mount with GPUs, or ``"cpu"`` on a mount with
    emulated devices. So does transformers' ``from_pretrained``, on GPUs with a ``device_map`` of one GPU. Everything
    else is loaded the usual way. If sharing fails, the usual way is taken with a ``gaiafs.CopiedWarning``.

    The tensors are read-only: a store into one ends the process or, on a GPU, its CUDA context. Programs that train or
    change weights in place need copies. Call it before or after the program imports safetensors' functions: names that
    modules have imported already are replaced, too. A second call does nothing. ``python -m gaiafs run`` calls it.

    With report, the process prints on stderr at its end which files it shared, and which it did not, and why.
    """
    global _original
    if report:
        atexit.unregister(_report)
        atexit.register(_report)
    if _original is not None:
        return
    try:
        import safetensors
    except ImportError:
        return  # nothing can be loaded through it
    _original = safetensors.safe_open
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("safe_open") is _original:
            names["safe_open"] = _SafeOpen
    if _MODELS in sys.modules:
        _patch_models(sys.modules[_MODELS])
    else:
        sys.meta_path.insert(0, _WhenImported())


def _report() -> None:
    if not _outcomes:
        print("gaiafs: the program has loaded no weights through safetensors", file=sys.stderr)
    for path, why in _outcomes.items():
        print(f"gaiafs: {path}: {f'not shared: {why}' if why else 'shared'}", file=sys.stderr)


def _note(path: Any, why: str = "") -> None:
    with contextlib.suppress(TypeError):  # whatever takes the path says what is wrong with it
        _outcomes[os.fsdecode(path)] = why


class _SafeOpen:
    """Takes the place of ``safetensors.safe_open``, with the same arguments."""

    def __new__(cls, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
        on = _place_at(filename, device)
        if framework not in _FRAMEWORKS:
            on = _Place(None, f"the program asks for tensors of {framework}, and gaiafs has those of PyTorch and NumPy")
        if on.device is not None:
            try:
                made = opened.safe_open(filename, framework_of(framework), on.device)
                made._usual = functools.partial(_original, filename, framework, device, **options)
                _note(filename)
                return made
            except (Error, ImportError, ValueError) as e:
                _usual_way(filename, e, on)
        else:
            _note(filename, on.why)
        return _original(filename, framework, device, **options)


def _usual_way(path: Any, e: Exception, on: _Place) -> None:
    _note(path, str(e))
    if isinstance(e, Error) and e.errno == errno.ENODEV and on.why:  # there may be no such device
        return
    words = f"{os.fsdecode(path)} is loaded the usual way, into memory of this process alone: {e}"
    warnings.warn(words, CopiedWarning, stacklevel=4)


def _place_at(path: Any, device: Any) -> _Place:
    """Returns where a file that is asked for on a device is shared."""
    try:
        found = _Mount.of(shelter.run(lambda: os.stat(path).st_dev))
    except (OSError, TypeError, ValueError) as e:
        return _Place(None, str(e))
    if found is None:
        return _Place(None, "it is not on a gaiafs mount")
    cpu, gpu = str(device) == "cpu", re.fullmatch(r"(cuda(:\d+)?|\d+)", str(device))
    if found.kind is None:  # only the file is mounted here, so the mount cannot be asked
        tried = "emulated:0" if cpu else device if gpu else None
        return _Place(tried, found.why)
    if found.kind == "emulated" and cpu:
        return _Place(0, "")
    if found.kind == "cuda" and gpu:
        return _Place(device, "")
    asked = f"the program asks for it on {device}, and the mount has "
    return _Place(None, asked + {"cuda": "GPUs", "emulated": "emulated devices, which are used as the CPU"}[found.kind])


class _Mount(NamedTuple):
    """A mount. kind is that of its devices, "cuda" if it has several kinds. None: it does not say, and why."""

    kind: str | None
    why: str

    @staticmethod
    def of(number: int) -> _Mount | None:
        """Returns the mount with a device number (st_dev). None if there is none."""
        found = None
        for line in _lines_of(number):
            if line not in _known:
                try:
                    kinds = [d["kind"] for d in status(_mountpoint_in(line))["devices"]]
                except Error as e:  # not kept: the next call may be answered
                    found = _Mount(None, str(e))
                    continue
                if not kinds:
                    return None  # it has no devices, so nothing can be shared
                _known[line] = "cuda" if "cuda" in kinds else str(kinds[0])
            return _Mount(_known[line], "")
        return found


_known: dict[str, str] = {}  # kinds of devices, by lines of mountinfo, since numbers of devices are used again


def _lines_of(number: int) -> Iterator[str]:
    """Yields the lines of a gaiafs mount in mountinfo. A container may have only folders or files of the mount."""
    wanted = f"{os.major(number)}:{os.minor(number)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted and rest.startswith("fuse.gaiafs "):
                yield line


def _mountpoint_in(line: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), line.split()[4])


class _WhenImported(importlib.abc.MetaPathFinder):
    """Patches transformers when the program imports it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute: Callable[[Any], None] = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _patch_models(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_models(module: Any) -> None:
    """Makes models that are loaded onto one GPU take shared weights. transformers itself reads their files for the
    CPU."""
    original = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, path: Any = None, *arguments: Any, **options: Any) -> Any:
        device = options.get("device_map")
        if isinstance(device, dict) and list(device) == [""]:
            device = device[""]
        if device is not None and not arguments and not isinstance(device, dict):
            on = _place_at(path, device)
            if on.device is not None and str(device) != "cpu":
                from .transformers import from_pretrained as shared

                try:
                    model = shared(cls, path, on.device, **{k: v for k, v in options.items() if k != "device_map"})
                    _note(path)
                    return model
                except (Error, ImportError, ValueError) as e:
                    _usual_way(path, e, on)
        return original(cls, path, *arguments, **options)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
