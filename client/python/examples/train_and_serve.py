#!/usr/bin/env python3
"""Trains a small linear model in place, in a file of weights, while another process serves it.

The trainer (PyTorch on a GPU, NumPy on an emulated device) maps the file, steps down the gradient, and releases after
every epoch. The server maps the same file, acquires, and predicts. Nothing else connects them: the server sees the
weights get better, and stops when its error is small. At the end a plain read of the file returns the trainer's
weights.
"""

import argparse
import array
import os
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import gaiafs

FEATURES, SAMPLES = 64, 512


def library(m: gaiafs.Mapping):
    """Returns NumPy or PyTorch, whichever can use the mapping's memory, and the weights in it."""
    if m.kind == "cuda":
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gaiafs.ReadOnlyWarning)  # the server stores nothing
            return torch, m.tensor("float32", (FEATURES,))
    import numpy

    return numpy, m.numpy("float32", (FEATURES,))


def samples(lib, seed: int, like):
    """Makes inputs, and the outputs of the model that training has to find."""
    import random

    rng = random.Random(seed)
    x = [[rng.gauss(0, 1) for _ in range(FEATURES)] for _ in range(SAMPLES)]
    y = [sum(v * (i % 7 - 3) for i, v in enumerate(row)) for row in x]
    if lib.__name__ == "torch":
        return lib.tensor(x, device=like.device), lib.tensor(y, device=like.device)
    return lib.array(x, "float32"), lib.array(y, "float32")


def train(path: str, device: str) -> None:
    m = gaiafs.mmap(path, device, mode="r+")
    lib, w = library(m)
    x, y = samples(lib, 1, w)
    while True:
        with m.acquire():  # released at the end, after the GPU's work
            for _ in range(20):
                w -= (0.1 / SAMPLES) * (x.T @ (x @ w - y))
        loss = float((((x @ w) - y) ** 2).mean())
        if loss < 1e-6:
            break
        time.sleep(0.01)  # otherwise the server would see too few of the steps
    del w
    m.close()


def serve(path: str, device: str, patience: float, ready: Callable[[], None]) -> bool:
    m = gaiafs.mmap(path, device)
    lib, w = library(m)
    x, y = samples(lib, 2, w)
    seen: list[float] = []
    deadline = time.monotonic() + patience
    while not seen or time.monotonic() < deadline:
        m.acquire()
        loss = float((((x @ w) - y) ** 2).mean())
        if not seen:
            ready()
        if not seen or loss != seen[-1]:
            seen.append(loss)
        if loss < 1e-3:
            print(f"served {len(seen)} versions of the weights: error {seen[0]:.3g} at first, {seen[-1]:.3g} at last")
            return True
    print(f"FAIL: the error is {seen[-1]:.3g} after {patience:.0f} s")
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="directory on a mount")
    parser.add_argument("--device", default="0", help="device of the trainer (%(default)s)")
    parser.add_argument("--serve-device", help="device of the server (the trainer's)")
    parser.add_argument("--patience", type=float, default=120, metavar="SECONDS", help="how long to wait (%(default)s)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        train(arguments.directory, arguments.device)
        return 0
    path = pathlib.Path(arguments.directory) / f"weights-{os.getpid()}"
    path.write_bytes(bytes(4 * FEATURES))
    trainers: list[subprocess.Popen] = []

    def begin() -> None:
        trainers.append(subprocess.Popen([sys.executable, __file__, "--child", "--device", arguments.device, str(path)]))

    try:
        good = serve(str(path), arguments.serve_device or arguments.device, arguments.patience, begin)
        if good and trainers[0].wait(60) != 0:
            print("FAIL: the trainer failed")
            return 1

        weights = array.array("f", path.read_bytes())
        worst = max(abs(v - (i % 7 - 3)) for i, v in enumerate(weights))
        print(f"the file has the weights, the worst of them {worst:.2g} off")
        if not good or worst > 0.01:
            print("FAIL")
            return 1
        print("ok")
        return 0
    finally:
        for trainer in trainers:
            trainer.kill()  # if it did not end by itself
            trainer.wait()
        path.unlink()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ImportError as e:
        sys.exit(f"{e}: on a GPU this example needs PyTorch, on an emulated device NumPy")
    except gaiafs.Error as e:
        sys.exit(str(e))
