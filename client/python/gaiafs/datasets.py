"""Data sets for PyTorch's DataLoader, with items in the memory of a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from .arguments import PathLike, sizes_of
from .array import Array
from .dtypes import dtype_of
from .frameworks import framework_of, tensor_of
from .packs import files_of, pack
from .views import MAX_FILES, size_of, view


class Dataset:
    """A data set with a length and numbered items, for ``torch.utils.data.DataLoader``. Make one with ``files`` or
    ``rows``.

    ::

        data = gaiafs.Dataset.files("/mnt/data/train", device=0, transform=lambda name, item: decode(item))
        for batch in torch.utils.data.DataLoader(data, batch_size=32, num_workers=4):
            ...

    The bytes are in a view that all workers and all other processes of a user share. Each process makes the view when
    it takes its first item, whether the worker was forked or spawned. A forked worker cannot use a GPU, as always with
    CUDA. For a GPU, pass ``multiprocessing_context="spawn"`` to the DataLoader, or take all items in one process.
    """

    _opened: list[Any] | None = None
    _pid = 0

    def __init__(self, framework: str | None, device: Any, transform: Callable[..., Any] | None) -> None:
        self.framework = framework_of(framework)
        self.device, self.transform = device, transform

    @staticmethod
    def files(
        files: PathLike | Iterable[PathLike],
        device: Any = 0,
        *,
        transform: Callable[[str, Any], Any] | None = None,
        framework: str | None = None,
    ) -> FileDataset:
        """Returns a data set with an item for each file: the result of transform for its name and its bytes.

        files are those of ``gaiafs.pack``, in any number, and they have the same names. The bytes are a read-only
        tensor of uint8; without a transform, that tensor is the item. The list of files is made now.
        """
        return FileDataset(files_of(files), framework, device, transform)

    @staticmethod
    def rows(
        file: PathLike,
        dtype: Any,
        shape: Any = (),
        *,
        offset: int = 0,
        count: int | None = None,
        device: Any = 0,
        transform: Callable[[Any], Any] | None = None,
        framework: str | None = None,
    ) -> RowDataset:
        """Returns a data set with an item for each row of a file: count rows of a shape, after offset bytes.

        dtype and shape are those of ``Mapping.array``, for one row. Without a count the rows go to the end of the file
        as it is now. An item is the result of transform for a row, which is read-only. Raises ValueError if the file
        has no row.
        """
        return RowDataset(os.fsdecode(file), dtype, sizes_of(shape), offset, count, framework, device, transform)

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def acquire(self) -> int:
        """Brings this process's memory of the files up to date, and returns how many pages had changed."""
        return sum(part.acquire() for part in self._parts())

    def _parts(self) -> list[Any]:
        """Returns this process's packs or view. It makes them if this process has none."""
        if self._opened is None or self._pid != os.getpid():
            self._opened, self._pid = self._open(), os.getpid()
        return self._opened

    def _open(self) -> list[Any]:
        raise NotImplementedError

    def _number(self, index: int) -> int:
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"there is no item {index}: there are {n}")
        return index % n


class FileDataset(Dataset):
    """Whole files, from ``Dataset.files``."""

    def __init__(
        self, paths: dict[str, str], framework: str | None, device: Any, transform: Callable[[str, Any], Any] | None
    ) -> None:
        super().__init__(framework, device, transform)
        self.names = list(paths)  #: by item number
        self._paths = [os.path.abspath(p) for p in paths.values()]

    def __len__(self) -> int:
        return len(self.names)

    def _open(self) -> list[Any]:
        return [
            pack(self._paths[at : at + MAX_FILES], self.device, framework=self.framework)
            for at in range(0, len(self), MAX_FILES)
        ]

    def __getitem__(self, index: int) -> Any:
        i = self._number(index)
        item = self._parts()[i // MAX_FILES][self._paths[i]]
        return item if self.transform is None else self.transform(self.names[i], item)


class RowDataset(Dataset):
    """Rows of one file, from ``Dataset.rows``."""

    def __init__(
        self,
        path: str,
        dtype: Any,
        shape: tuple[int, ...],
        offset: int,
        count: int | None,
        framework: str | None,
        device: Any,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(framework, device, transform)
        self.dtype, self.shape = dtype_of(dtype), shape
        self._path, self._offset = os.path.abspath(path), offset
        bits = self.dtype.bits
        for n in shape:
            bits *= n
        if bits % 8 or not bits:
            raise ValueError(f"a row of {self.dtype} elements of shape {list(shape)} is not made of whole bytes")
        self._bytes = bits // 8
        size = size_of(path)
        there = max(size - offset, 0) // self._bytes if offset >= 0 else 0
        self._count = there if count is None else count
        if not 0 < self._count <= there:
            raise ValueError(
                f"{path} has {size} bytes: {there} rows of {self._bytes} bytes from byte {offset} on, and "
                + (f"{count} were asked for" if count is not None else "a data set needs one")
            )

    def __len__(self) -> int:
        return self._count

    def _open(self) -> list[Any]:
        return [_Rows(view(self._path, [(self._offset, self._count * self._bytes)], self.device))]

    def __getitem__(self, index: int) -> Any:
        i = self._number(index)
        lease = self._parts()[0].all._lease
        ptr = self._parts()[0].all.ptr + i * self._bytes
        item = tensor_of(Array(lease, ptr, self.dtype, self.shape, readonly=True), self.framework)
        return item if self.transform is None else self.transform(item)


class _Rows:
    def __init__(self, made: Any) -> None:
        self._view, self.all = made, made.array(0)

    def acquire(self) -> int:
        return int(self._view.acquire().pages)
