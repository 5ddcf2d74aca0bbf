"""Many small files in one buffer of a device."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as AbstractMapping
from types import TracebackType
from typing import Any

from . import _core, shelter
from .arguments import PathLike, device_of
from .array import Array
from .dtypes import UINT8
from .errors import Error, plain
from .frameworks import framework_of, tensor_of
from .views import ALIGN, MAX_FILES, Plan, View, make_view, open_sized


class Pack(AbstractMapping[str, Any]):
    """Whole files, by name, in one read-only buffer of a device, from ``gaiafs.pack``.

    A pack is a Python mapping. ``pack["cat.jpg"]`` returns the file's bytes as a tensor of uint8, and ``pack.items()``
    returns all files in the order of the buffer. Each file begins at a multiple of the alignment. A tensor keeps the
    buffer alive. Packs can be pickled; unpickling makes them again.
    """

    def __init__(self, view: View, numbers: dict[str, int | None], framework: str) -> None:
        self._numbers, self._framework = numbers, framework  # a file's segment number; None: the file is empty
        self.view = view  #: the buffer; its segments are the non-empty files

    def __repr__(self) -> str:
        return f"<gaiafs.Pack of {len(self)} files in {self.view!r}>"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Pack, (self.view, self._numbers, self._framework)

    def __getitem__(self, name: str) -> Any:
        return tensor_of(self.array(name), self._framework)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def offsets(self) -> dict[str, int]:
        """The position of each file in the buffer; 0 for an empty one."""
        return {name: 0 if i is None else self.view.offsets[i] for name, i in self._numbers.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file in bytes when the pack was made."""
        return {name: 0 if i is None else self.view.sizes[i] for name, i in self._numbers.items()}

    def array(self, name: str, dtype: Any = None, shape: Any = None) -> Array:
        """Returns a file as an array, for every library that supports DLPack or an array interface; see
        ``View.array``."""
        i = self._numbers[name]
        if i is not None:
            return self.view.array(i, dtype, shape, misaligned=True)
        empty = self.view.array(0, UINT8, (0,), misaligned=True)
        return Array(empty._lease, empty.ptr, UINT8, (0,), readonly=True)

    def tobytes(self, name: str) -> bytes:
        """Copies a file's bytes, also from a GPU."""
        return self.array(name).tobytes()

    def acquire(self, *, stream: Any = None) -> int:
        """Brings all files up to date, and returns how many pages had changed. Only these are copied.

        A file that grew keeps its old size here, and one that was replaced (renamed over) its old bytes: make a new
        pack.
        """
        return self.view.acquire(stream=stream).pages

    @property
    def closed(self) -> bool:
        return self.view.closed

    def close(self) -> None:
        """Gives the buffer back. Raises BufferError while tensors of it exist."""
        self.view.close()

    def __enter__(self) -> Pack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.view.__exit__(kind, value, trace)


@plain
def pack(
    files: PathLike | Iterable[PathLike],
    device: Any = 0,
    *,
    framework: str | None = None,
    align: int = ALIGN,
    lazy: bool = False,
) -> Pack:
    """Brings many files to a device, one after the other in one buffer, which all processes of a user share.

    files is a directory of a mount, or paths. A directory stands for all files in it and below it, in the order of
    their names; a name is the file's path relative to the directory. Paths are used as names unchanged. A pack has at
    most 16384 non-empty files. framework is that of ``load_safetensors``, or "array". Each file begins at a multiple of
    align, a power of two. 1 wastes no memory, but kernels may need 16. With lazy, nothing is fetched before
    ``acquire``.

    The process opens all files at once. If necessary, its limit of open files is raised for that time, as far as
    allowed.

    Raises Error ENOENT if there is no file, EMFILE if the process may not open so many, and what ``gaiafs.view``
    raises.
    """
    paths = files_of(files)
    whole = next(iter(paths)) if len(paths) == 1 else None
    if _is_path(files):
        whole = os.fsdecode(files)  # type: ignore[arg-type]
    if not paths:
        raise Error(errno.ENOENT, "there is no file to pack", whole)
    chosen, on = framework_of(framework), device_of(device)
    numbers: dict[str, int | None] = {}

    def opened(fds: list[int]) -> tuple[str | None, Plan]:
        p = Plan(array("Q"), array("I"), [], align)
        for name, path in paths.items():
            before = len(fds)
            size = open_sized(path, fds)[1]
            numbers[name] = len(p.sizes) if size else None
            if not size and len(fds) > before:
                shelter.close(fds.pop())
                continue
            p.segments.extend((0, size, size, 1))
            p.files.append(len(fds) - 1)
            p.sizes.append(size)
            if len(fds) > MAX_FILES:
                raise Error(errno.EINVAL, f"there are more than {MAX_FILES} files: make several packs")
        if not fds:  # all files are empty: take a byte past the end of the first one, so that there is a buffer
            open_sized(next(iter(paths.values())), fds)
            p.segments.extend((0, 1, 1, 1))
            p.files.append(0)
            p.sizes.append(1)
        return whole, p

    view = make_view(opened, min(len(paths), MAX_FILES), on, _core.LAZY if lazy else 0)
    return Pack(view, numbers, chosen)


@shelter.sheltered
def files_of(files: PathLike | Iterable[PathLike]) -> dict[str, str]:
    """Returns the paths of files, by their names in a pack. Raises ValueError for a path that is given twice."""
    if not _is_path(files):
        paths = [os.fsdecode(f) for f in files]  # type: ignore[union-attr, arg-type]
        found = {path: path for path in paths}
        if len(found) < len(paths):
            raise ValueError("a path is given twice")
        return found
    top = os.fsdecode(files)  # type: ignore[arg-type]
    if not os.path.isdir(top):
        return {os.path.basename(top): top}
    found = {}
    for directory, directories, names in os.walk(top, onerror=_refuse):
        directories.sort()
        for name in sorted(names):
            path = os.path.join(directory, name)
            if os.path.isfile(path):
                found[os.path.relpath(path, top)] = path
    return found


def _is_path(files: Any) -> bool:
    return isinstance(files, (str, bytes, os.PathLike))


def _refuse(e: OSError) -> None:
    raise Error(e.errno or errno.EIO, e.strerror or "", e.filename)
