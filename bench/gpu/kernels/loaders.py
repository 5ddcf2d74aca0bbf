"""Compares how long it takes to load a sharded safetensors model into a GPU: gaiafs, other loaders, and the disk.

    python3 loaders.py --gaiafs BINARY [--size 8GiB] [--rows tmpfs,cache,cold] [--rounds 5] [--seconds 300]
                       [--device cuda:0] [--disk DIR] [--memory DIR] [--pin] [--json FILE]

Rows: tmpfs (the files are in memory), cache (on the disk and in the page cache), cold (only on the disk: all caches of
the machine are dropped before each side, which needs root). With --pin, the files are pinned on the host for gaiafs
first ('gaiafs pin --device host'), except in row cold. Each round runs all sides of a row, each in a separate
process. Before the measured time, the process loads PyTorch and makes a CUDA context; the table shows both separately.
The time ends when all tensors are on the device. Each side's tensors are compared with those of safetensors, by a
checksum that is computed on the device. The mount of gaiafs stays, but its device evicts the files before each round.

Loaders that are not installed, or do not work here, are left out, and the table says why. With --device emulated:0 it
runs without a GPU, as a trial: the other loaders load to the CPU, and the figures mean nothing.

It prints a table: GB/s (median, minimum and maximum), and the ratios gaiafs / other within rounds. Each loader is used
as its own documentation shows, once for each of its ways of reading that may be the fastest for a row.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import glob
import importlib
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from typing import Any

SHARDS = 4
# As many tensors of these shapes as fit, as in a model with layers: a few large ones have most of the bytes.
SHAPES = [(8192,), (5120, 4096), (4096, 5120), (1024, 4096), (8192,)]
DISK_READS, DISK_READ = 16, 4 << 20
RAW = "disk, "


def write_model(folder: str, size: int) -> int:
    """Writes a model of about size bytes into SHARDS files, and returns its exact size."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    noise = torch.randint(-(1 << 15), (1 << 15) - 1, (5120 * 4096 + 4096,), dtype=torch.int16)
    number, index = 0, {}
    for shard in range(SHARDS):
        tensors: dict[str, Any] = {}
        room = size // SHARDS
        while True:
            shape = SHAPES[number % len(SHAPES)]
            elements = torch.Size(shape).numel()
            if room < 2 * elements:
                break
            room -= 2 * elements
            begin = number % 4096  # so that tensors differ
            part = noise[begin : begin + elements].view(torch.bfloat16).reshape(shape)
            tensors[f"layers.{number}.weight"] = part.clone()
            number += 1
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(tensors, os.path.join(folder, name), {"format": "pt"})
        index.update(dict.fromkeys(tensors, name))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
        json.dump({"metadata": {}, "weight_map": index}, f)
    return sum(map(os.path.getsize, files_of(folder)))


def files_of(folder: str) -> list[str]:
    return sorted(glob.glob(os.path.join(folder, "*.safetensors")))


def checksum(tensors: dict[str, Any]) -> int:
    """Returns a checksum of names and bytes. It also changes if two bytes are swapped."""
    import torch

    weights: dict[int, Any] = {}
    total = 0
    for name, t in sorted(tensors.items()):
        words = t.detach().reshape(-1).view(torch.int16)
        n = words.numel()
        if n not in weights:
            weights[n] = torch.arange(n, device=words.device, dtype=torch.int64) % 65521 + 1
        total += int((words * weights[n]).sum()) * (zlib.crc32(name.encode()) | 1)
    return total & (1 << 64) - 1


# Loaders. Each returns a function that loads and returns an object that keeps the tensors. Imports are not timed.
Load = Callable[[], dict[str, Any]]


def load_gaiafs(folder: str, device: str) -> Load:
    import gaiafs

    return lambda: gaiafs.load_safetensors(folder, device=device, framework="torch")


def load_safetensors(folder: str, device: str) -> Load:
    from safetensors import safe_open

    def load() -> dict[str, Any]:
        tensors = {}
        for path in files_of(folder):
            with safe_open(path, framework="pt", device=device) as f:
                for name in f.keys():
                    tensors[name] = f.get_tensor(name)
        return tensors

    return load


def load_fastsafetensors(folder: str, device: str, nogds: bool = True) -> Load:
    from fastsafetensors import SafeTensorsFileLoader

    def load() -> dict[str, Any]:
        loader = SafeTensorsFileLoader(None, device=device, nogds=nogds)
        loader.add_filenames({0: files_of(folder)})
        buffer = loader.copy_files_to_device()
        tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
        tensors["keeps"] = (loader, buffer)
        return tensors

    return load


def load_instanttensor(folder: str, device: str, policy: str | None = None) -> Load:
    import instanttensor

    def load() -> dict[str, Any]:
        backend = instanttensor.BackendPolicy[policy] if policy else None
        with instanttensor.safe_open(files_of(folder), framework="pt", device=device, backend=backend) as f:
            return dict(f.tensors())

    return load


def load_runai(folder: str, device: str) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> dict[str, Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files_of(folder), device=device)
            if device == "cpu":  # it reuses its buffers
                return {name: t.clone() for name, t in streamer.get_tensors()}
            return dict(streamer.get_tensors())

    return load


def load_torch(folder: str, device: str) -> Load:
    """Maps the files and copies each tensor, as torch.load does with mmap=True."""
    import torch

    def load() -> dict[str, Any]:
        tensors = {}
        for path in files_of(folder):
            whole = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)
            header = int.from_bytes(bytes(whole[:8].tolist()), "little")
            with open(path, "rb") as f:
                names = json.loads(f.read(8 + header)[8:])
            names.pop("__metadata__", None)
            for name, about in names.items():
                begin, end = (8 + header + at for at in about["data_offsets"])
                part = whole[begin:end].to(device, copy=True)
                tensors[name] = part.view(torch.bfloat16).reshape(about["shape"])
        return tensors

    return load


def read_disk(folder: str, flags: int) -> Load:
    """Reads the files into host memory. This is not a loader: it shows the speed of the disk."""

    def load() -> dict[str, Any]:
        for path in files_of(folder):
            read_file(path, flags)
        return {}

    return load


def read_file(path: str, flags: int) -> None:
    """Reads a file with DISK_READS threads."""
    fd = os.open(path, os.O_RDONLY | flags)
    size = os.fstat(fd).st_size
    pieces = iter(range(0, size, DISK_READ))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        buffer = mmap.mmap(-1, DISK_READ)
        try:
            while True:
                with lock:
                    at = next(pieces, None)
                if at is None:
                    return
                if os.preadv(fd, [buffer], at) < min(DISK_READ, size - at):
                    raise OSError("a short read")
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(DISK_READS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    os.close(fd)
    if errors:
        raise errors[0]


Side = tuple[str, Callable[[str, str], Load], set[str]]

SIDES: list[Side] = [
    ("safetensors", load_safetensors, {"tmpfs", "cache", "cold"}),
    ("gaiafs", load_gaiafs, {"tmpfs", "cache", "cold"}),
    ("InstantTensor", load_instanttensor, {"tmpfs", "cache", "cold"}),
    ("InstantTensor, buffered", lambda f, d: load_instanttensor(f, d, "BUFFERED"), {"cache", "cold"}),
    ("fastsafetensors", load_fastsafetensors, {"tmpfs", "cache", "cold"}),
    ("fastsafetensors, GDS", lambda f, d: load_fastsafetensors(f, d, False), {"cache", "cold"}),
    ("Run:ai", load_runai, {"tmpfs", "cache", "cold"}),
    ("torch", load_torch, {"tmpfs", "cache", "cold"}),
    (RAW + "O_DIRECT", lambda f, d: read_disk(f, os.O_DIRECT), {"cold"}),
    (RAW + "page cache", lambda f, d: read_disk(f, 0), {"cold"}),
]


def apart(what: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """Returns the answer of a forked process or, as err, why there is none.

    This process has imported PyTorch, but has no threads of it and no CUDA context: neither would survive a fork.
    """
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(there)
        libc = ctypes.CDLL(None)
        libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        try:
            answer = what()
        except BaseException as e:
            traceback.print_exc()
            answer = {"err": f"{type(e).__name__}: {e}"[:300]}
        os.write(here, json.dumps(answer).encode())
        os._exit(0)  # do not wait for libraries to shut down
    os.close(here)
    over = threading.Timer(limit, os.kill, (child, 9))
    over.start()
    with os.fdopen(there, "rb") as f:
        text = f.read()
    os.waitpid(child, 0)
    over.cancel()
    return json.loads(text) if text else {"err": f"it died, or was not done within {limit:.0f} s"}


def measure(side: Side, folder: str, device: str) -> dict[str, Any]:
    import torch

    name, prepare, _ = side
    load = prepare(folder, device)
    begin = time.perf_counter()
    gpu = device.startswith("cuda")
    if gpu and not name.startswith(RAW):
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    ready = time.perf_counter()
    tensors = load()
    if gpu and not name.startswith(RAW):
        torch.cuda.synchronize()
    done = time.perf_counter()
    tensors.pop("keeps", None)
    bad = [n for n, t in tensors.items() if gpu and t.device.type != "cuda"]
    if bad:
        return {"err": f"{bad[0]} is not on the GPU"}
    got = sum(t.numel() * t.element_size() for t in tensors.values())
    return {"context": ready - begin, "took": done - ready, "bytes": got, "sum": checksum(tensors) if tensors else None}


class Mount:
    def __init__(self, program: str, source: str, at: str, gpus: str) -> None:
        self.program, self.at = program, at
        os.mkdir(at)
        begin = time.perf_counter()
        arguments = ["mount", "--config", os.devnull, "--log-level", "warn", "--gpus", gpus, "--read-only", source, at]
        self.daemon = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE)
        assert self.daemon.stdout is not None
        if not self.daemon.stdout.readline():
            raise SystemExit("gaiafs did not mount")
        self.took = time.perf_counter() - begin

    def pin(self) -> None:
        """Pins the files on the host. The pins are in SOURCE, which is removed in the end."""
        subprocess.run([self.program, "pin", "--device", "host", self.at], check=True, stdout=subprocess.DEVNULL)

    def forget(self) -> None:
        """Evicts the files from the device."""
        subprocess.run([self.program, "evict", "--recursive", self.at], check=True, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        self.daemon.terminate()
        self.daemon.wait(60)
        os.rmdir(self.at)


def drop_caches() -> None:
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as f:
        f.write("3")


def run_row(row: str, folder: str, o: argparse.Namespace, until: float) -> dict[str, Any]:
    gpus = "emulated:1" if o.device.startswith("emulated") else o.device
    mount = Mount(o.gaiafs, folder, f"{folder}.mnt", gpus)
    sides = [s for s in SIDES if row in s[2] and (not o.sides or s[0] in o.sides or s[0] == "gaiafs")]
    if o.device.startswith("emulated"):
        sides = [s for s in sides if "GDS" not in s[0]]
    results: dict[str, list[float]] = {s[0]: [] for s in sides}
    out: dict[str, str] = {}
    contexts: list[float] = []
    known: int | None = None
    try:
        if o.pin and row != "cold":
            mount.pin()
        for round_ in range(o.rounds):
            begin = time.monotonic()
            if row == "cache":
                read_disk(folder, 0)()
            for side in sides[round_ % len(sides) :] + sides[: round_ % len(sides)]:
                name = side[0]
                if name in out:
                    continue
                if time.monotonic() > until:
                    break
                mount.forget()
                if row == "cold":
                    drop_caches()
                ours = name == "gaiafs"
                device = "cpu" if o.device.startswith("emulated") and not ours else o.device
                where = mount.at if ours else folder
                a = apart(functools.partial(measure, side, where, device), 60)
                if "err" in a:
                    out[name] = a["err"]
                    continue
                if a["sum"] is not None:
                    known = a["sum"] if known is None else known
                    if a["sum"] != known:
                        out[name] = "WRONG BYTES: another checksum than what came first"
                        continue
                results[name].append((a["bytes"] or o.bytes) / 1e9 / a["took"])
                contexts.append(a["context"])
            if time.monotonic() + (time.monotonic() - begin) > until:
                break
    finally:
        mount.close()
    return {"row": row, "mount": mount.took, "contexts": contexts, "results": results, "out": out}


def median(values: list[float]) -> float:
    v = sorted(values)
    return (v[(len(v) - 1) // 2] + v[len(v) // 2]) / 2


def show(r: dict[str, Any]) -> None:
    ours = r["results"]["gaiafs"]
    context = f", a CUDA context {median(r['contexts']):.2f} s" if r["contexts"] else ""
    print(f"\n{r['row']}: {len(ours)} rounds; the mount took {r['mount']:.2f} s{context}")
    print(f"{'':26}{'GB/s':>8}  {'(least-most)':18}{'gaiafs / it':>12}  (least-most)")
    for name, rates in r["results"].items():
        if not rates:
            print(f"{name:26}    left out: {r['out'].get(name, 'the time was over')}")
            continue
        line = f"{name:26}{median(rates):8.2f}  {f'({min(rates):.2f}-{max(rates):.2f})':18}"
        if name != "gaiafs" and ours:
            ratios = [a / b for a, b in zip(ours, rates, strict=False)]
            line += f"{median(ratios):12.2f}  ({min(ratios):.2f}-{max(ratios):.2f})"
        print(line + (f"  {r['out'][name]}" if name in r["out"] else ""))
    others = [rates for name, rates in r["results"].items() if name != "gaiafs"]
    best = [max((rates[i] for rates in others if len(rates) > i), default=0.0) for i in range(len(ours))]
    best = [rate for rate in best if rate]
    if best:
        ratios = [a / b for a, b in zip(ours, best, strict=False)]
        print("against the best other loader, round by round: " + " ".join(f"{x:.2f}" for x in ratios), flush=True)


def size_of(text: str) -> int:
    units = {"MiB": 1 << 20, "GiB": 1 << 30}
    for unit, n in units.items():
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * n)
    raise argparse.ArgumentTypeError("write a size such as 512MiB or 8GiB")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gaiafs", required=True)
    p.add_argument("--size", type=size_of, default=size_of("8GiB"))
    p.add_argument("--rows", default="tmpfs,cache,cold")
    p.add_argument("--sides", type=lambda s: s.split("+"), help="only these sides besides gaiafs, separated by +")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=300)
    p.add_argument("--device", default="cuda:0")
    p.add_argument("--disk", default=tempfile.gettempdir())
    p.add_argument("--memory", default="/dev/shm")
    p.add_argument("--pin", action="store_true")
    p.add_argument("--json")
    o = p.parse_args()
    importlib.import_module("torch")  # before processes are forked
    began = time.monotonic()
    rows = o.rows.split(",")
    left, results = len(rows), []
    work = tempfile.mkdtemp(prefix="loaders.", dir=o.disk)
    memory = tempfile.mkdtemp(prefix="loaders.", dir=o.memory)
    try:
        folder = os.path.join(memory if rows == ["tmpfs"] else work, "model")
        os.mkdir(folder)
        wrote = apart(lambda: {"bytes": write_model(folder, o.size)}, 300)
        if "err" in wrote:
            raise SystemExit(wrote["err"])
        o.bytes = wrote["bytes"]
        print(f"{o.bytes / 1e9:.2f} GB in {SHARDS} files, written in {time.monotonic() - began:.0f} s", flush=True)
        for row in rows:
            at = folder
            if row == "tmpfs" and rows != ["tmpfs"]:
                at = shutil.copytree(folder, os.path.join(memory, "model"))
            now = time.monotonic()
            r = run_row(row, at, o, now + (began + o.seconds - now) / left)
            left -= 1
            if at != folder:
                shutil.rmtree(at)
            results.append(r)
            show(r)
            if o.json:
                with open(o.json, "w", encoding="utf-8") as f:
                    json.dump(results, f, indent=1)
    finally:
        shutil.rmtree(work)
        shutil.rmtree(memory)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
