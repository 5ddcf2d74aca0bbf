"""Accepted types of paths. TestSource checks this file with mypy; test_paths calls the same functions."""

from __future__ import annotations

import os
import pathlib

import gaiafs


class OfBytes(os.PathLike[bytes]):
    def __init__(self, path: str) -> None:
        self._path = os.fsencode(path)

    def __fspath__(self) -> bytes:
        return self._path


def ways(path: str) -> list[str | bytes | os.PathLike[str] | os.PathLike[bytes]]:
    return [path, os.fsencode(path), pathlib.Path(path), OfBytes(path)]


def use(file: str, mountpoint: str) -> None:
    for path in ways(file):
        with gaiafs.mmap(path) as m:
            assert m.nbytes
        assert gaiafs.load_safetensors(path, framework="array")
        assert gaiafs.warm(path)
        assert gaiafs.info(path)["path"] == file
    for path in ways(mountpoint):
        assert gaiafs.status(path)["version"] == 1
        assert gaiafs.info(path)["mountpoint"] == mountpoint
