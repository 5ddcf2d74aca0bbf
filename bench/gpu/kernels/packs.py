"""Packs many small files on a device, and compares the device's bytes with those of the files.

    python3 packs.py MOUNTPOINT [FILES [LEAST MOST]]

It writes FILES (8000) files of LEAST to MOST bytes (20480 each) into a new directory of the mountpoint, and removes
them at the end. It needs the package gaiafs. It packs MAX_FILES files at a time, as gaiafs.Dataset does. Nothing else
may use the mount.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time

import gaiafs
from gaiafs.views import MAX_FILES

PER_DIRECTORY = 1000


def write_files(top: str, count: int, least: int, most: int) -> list[str]:
    sizes = random.Random(1)
    content = os.urandom(most)
    paths = []
    for i in range(count):
        directory = os.path.join(top, str(i // PER_DIRECTORY))
        if i % PER_DIRECTORY == 0:
            os.mkdir(directory)
        paths.append(os.path.join(directory, str(i)))
        with open(paths[-1], "wb") as f:
            f.write(content[: sizes.randint(least, most)])
    return paths


def used(mountpoint: str) -> int:
    """Returns how many bytes of device memory the mount reports as used."""
    return sum(d["used_bytes"] for d in gaiafs.status(mountpoint)["devices"])


def main() -> None:
    mountpoint, *numbers = sys.argv[1:]
    count, least, most = map(int, (*numbers, *("8000", "20480", "20480")[len(numbers) :]))
    top = tempfile.mkdtemp(prefix="packs.", dir=mountpoint)
    try:
        paths = write_files(top, count, least, most)
        size, before, begin = sum(map(os.path.getsize, paths)), used(mountpoint), time.perf_counter()
        packs = [gaiafs.pack(paths[at : at + MAX_FILES], framework="array") for at in range(0, count, MAX_FILES)]
        took, takes = time.perf_counter() - begin, used(mountpoint) - before
        for pack in packs:
            for name in random.Random(2).sample(list(pack), min(len(pack), 50)):
                with open(name, "rb") as f:
                    assert pack.tobytes(name) == f.read(), f"{name}: other bytes"
        print(f"{count} files of {size} bytes in {len(packs)} packs: {takes} bytes of device memory, ratio "
              f"{takes / size:.3f}; {count / took:.0f} files/s")
        for pack in packs:
            pack.close()
    finally:
        shutil.rmtree(top)


if __name__ == "__main__":
    main()
