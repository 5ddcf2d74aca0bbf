#!/usr/bin/env python3
"""Makes a NumPy program on the CPU and a program on a GPU work on one array, in one file.

The CPU's half is plain numpy.memmap and does not know gaiafs. The GPU's half maps the file with PyTorch (NumPy on an
emulated device). They take turns. Each doubles and adds to every other row, and each must see what the other did.
"""

import argparse
import os
import pathlib
import sys

import gaiafs

try:
    import numpy
except ImportError:
    sys.exit("this example needs NumPy: pip install numpy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="directory on a mount")
    parser.add_argument("--device", default="0", help="device (%(default)s)")
    parser.add_argument("--rows", type=int, default=512, help="rows of 1000 numbers (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each takes (%(default)s)")
    arguments = parser.parse_args()
    shape = (arguments.rows, 1000)
    path = pathlib.Path(arguments.directory) / f"array-{os.getpid()}"
    want = numpy.zeros(shape, "float32")
    want.tofile(path)
    try:
        cpu = numpy.memmap(path, "float32", "r+", shape=shape)
        with gaiafs.mmap(path, arguments.device, mode="r+") as m:
            gpu = m.tensor("float32", shape) if m.kind == "cuda" else m.numpy("float32", shape)
            for i in range(arguments.rounds):
                cpu[0::2] = 2 * cpu[1::2] + i
                want[0::2] = 2 * want[1::2] + i
                with m.acquire():  # sees the CPU's rows
                    gpu[1::2] = gpu[0::2] * 2 + 1
                # released: the CPU sees the GPU's rows at once
                want[1::2] = want[0::2] * 2 + 1
                if not (numpy.array(cpu) == want).all():
                    print(f"FAIL: round {i} is wrong in {(numpy.array(cpu) != want).sum()} places")
                    return 1
            print(f"{arguments.rounds} rounds of {want.nbytes >> 10} KiB on {m.kind} device {m.device}, sum {want.sum():.6g}")
            del gpu
        if not (numpy.fromfile(path, "float32").reshape(shape) == want).all():
            print("FAIL: the file differs from what was computed")
            return 1
        print("ok")
        return 0
    finally:
        path.unlink()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ImportError as e:
        sys.exit(f"{e}: on a GPU this example needs PyTorch")
    except gaiafs.Error as e:
        sys.exit(str(e))
