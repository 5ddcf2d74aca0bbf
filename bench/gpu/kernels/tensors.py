"""Compares kernels on shared tensors of load_safetensors with the same kernels on private copies, in turn.

    python3 tensors.py MOUNTPOINT [--device 0] [--processes 8] [--quick]

The table has the time of one call on shared and on private tensors, the median of the ratios shared / private over the
rounds, which should be at most 1.02, and whether the results are identical bit by bit. The exit status is 1 if bits
differ, if a kernel fails only on shared tensors, or if processes have more than one copy. Kernels that PyTorch does not
support here are skipped, with its message.

On an emulated device (--quick) it only checks the script; its times mean nothing. It needs PyTorch and the package
gaiafs; the Llama row needs transformers, and the Triton row a GPU. It writes files of 3 GiB (16 MiB with --quick) into
the mountpoint and removes them at the end.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gaiafs

Tensors = dict[str, torch.Tensor]
Kernel = Callable[[Tensors], torch.Tensor]
ROUNDS = 5  # 1 with --quick
MOST = 1.02

LOAD = """
import sys, time, gaiafs, torch
device = int(sys.argv[2])
if torch.cuda.is_available():
    torch.zeros(1, device=f"cuda:{device}")
print("ready", flush=True)
sys.stdin.readline()
begin = time.monotonic()
tensors = gaiafs.load_safetensors(sys.argv[1], device=device, framework="torch")
if torch.cuda.is_available():
    torch.cuda.synchronize()
print(f"{1000 * (time.monotonic() - begin):.2f}", flush=True)
sys.stdin.readline()
"""


class Bench:
    """The kernels, and their failures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.ordinal: int = options.device
        self.gpu = torch.cuda.is_available() and not options.quick
        self.device = f"cuda:{options.device}" if self.gpu else "cpu"
        self.calls, self.rounds = (20, ROUNDS) if self.gpu else (1, 1)
        self.n = 8192 if self.gpu else 256  # width of the weights, which are square
        self.wrong = 0

    def say(self, name: str, *cells: str) -> None:
        print(f"{name:44} " + " ".join(f"{c:>12}" for c in cells), flush=True)

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """Returns the time of one call, measured over several calls."""
        if not self.gpu:
            began = time.perf_counter()
            for _ in range(self.calls):
                call()
            return (time.perf_counter() - began) * 1000 / self.calls
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(self.calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / self.calls

    def row(self, name: str, kernel: Callable[[Any], torch.Tensor], shared: Any, private: Any) -> None:
        """Compares one kernel. Failing on private tensors skips it; failing only on shared ones is an error."""
        try:
            expected = kernel(private)
        except Exception as e:
            self.say(name, f"skipped: {type(e).__name__}: {str(e).strip().splitlines()[0][:60] if str(e) else ''}")
            return
        try:
            same = torch.equal(kernel(shared), expected)
            times = []
            for turn in range(self.rounds):
                sides = [("shared", shared), ("private", private)]
                took = {side: self.milliseconds(lambda t=t: kernel(t)) for side, t in sides[:: 1 - 2 * (turn % 2)]}
                times.append((took["shared"], took["private"]))
        except Exception as e:
            self.wrong += 1
            self.say(name, f"FAILS ON SHARED TENSORS: {e}")
            return
        ratio = statistics.median(s / p for s, p in times)
        self.wrong += not same
        self.say(
            name,
            f"{statistics.median(s for s, _ in times):.4f} ms",
            f"{statistics.median(p for _, p in times):.4f} ms",
            f"{ratio:.3f}",
            "the same" if same else "OTHER BITS",
            "" if ratio <= MOST or not self.gpu else "slower",
        )


def weights(b: Bench) -> Tensors:
    """Returns the tensors of the file. After "a", none of them is aligned."""
    n, heads = b.n, 32 if b.gpu else 2
    words, length = (32000, 2048) if b.gpu else (500, 64)
    square = torch.randn(n, n) / n**0.5
    return {
        "a": torch.zeros(3, dtype=torch.uint8),
        "bf16": square.to(torch.bfloat16),
        "fp16": square.to(torch.float16),
        "fp8": square.to(torch.float8_e4m3fn),
        "int8": torch.randint(-128, 128, (n, n), dtype=torch.int8),
        "embedding": torch.randn(words, 4096 if b.gpu else 64).to(torch.float16),
        "filter": torch.randn(256, 256, 3, 3).to(torch.float16) if b.gpu else torch.randn(8, 8, 3, 3),
        "keys": torch.randn(4, heads, length, 128).to(torch.bfloat16),
        "norm": torch.randn(n).to(torch.bfloat16),
    }


@functools.cache
def triton_kernel() -> Kernel:
    import triton
    import triton.language as tl

    @triton.jit
    def scale(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n).to(tl.float32) * 2 + 1, mask=at < n)

    def call(t: Tensors) -> torch.Tensor:
        x = t["bf16"]
        y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        scale[(triton.cdiv(x.numel(), 4096),)](x, y, x.numel(), BLOCK=4096)
        return y

    return call


def kernels(b: Bench) -> dict[str, Kernel]:
    n, d = b.n, b.device
    half = torch.randn(n // 2, n, device=d)
    few = {x: half[:16].to(x) for x in (torch.bfloat16, torch.float16)}
    many = {x: half.to(x) for x in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)}
    bytes_ = torch.randint(-128, 128, (n // 2, n), dtype=torch.int8, device=d)
    one = torch.ones((), device=d)
    words = torch.randint(0, 32000 if b.gpu else 500, (65536 if b.gpu else 100,), device=d)
    image = torch.randn(32, 256, 56, 56, device=d).half() if b.gpu else torch.randn(2, 8, 16, 16)
    queries = torch.randn(4, 32 if b.gpu else 2, 2048 if b.gpu else 64, 128, device=d).to(torch.bfloat16)
    compiler = "inductor" if b.gpu else "eager"  # eager compiles nothing
    compiled = torch.compile(lambda x, w: functional.silu(functional.layer_norm(x, (n,), w)) * 2, backend=compiler)

    def attention(t: Tensors, backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(queries, t["keys"], t["keys"])

    table: dict[str, Kernel] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        table[f"product of {n // 2} rows, {name}"] = lambda t, k=name, x=dtype: many[x] @ t[k].T
        table[f"product of 16 rows, {name}"] = lambda t, k=name, x=dtype: few[x] @ t[k].T
    table |= {
        f"product of {n // 2} rows, fp8": lambda t: torch._scaled_mm(
            many[torch.float8_e4m3fn], t["fp8"].T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        ),
        f"product of {n // 2} rows, int8": lambda t: torch._int_mm(bytes_, t["int8"].T),
        "convolution": lambda t: functional.conv2d(image, t["filter"], padding=1),
        "embedding": lambda t: functional.embedding(words, t["embedding"]),
        "layer norm": lambda t: functional.layer_norm(t["bf16"], (n,), t["norm"]),
        "attention, default": lambda t: functional.scaled_dot_product_attention(queries, t["keys"], t["keys"]),
    }
    for backend in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ):
        table[f"attention, {backend.name}"] = lambda t, k=backend: attention(t, k)
    table["torch.compile: norm and activation"] = lambda t: compiled(t["bf16"], t["norm"])
    table["Triton: scale"] = lambda t: triton_kernel()(t)
    return table


def llama(b: Bench, directory: str) -> None:
    """Measures the time of some tokens of a small Llama."""
    try:
        import accelerate  # noqa: F401  # transformers needs it to load to a device
        from transformers import LlamaConfig, LlamaForCausalLM

        from gaiafs import transformers as shared_transformers
    except ImportError as e:
        b.say("Llama", f"skipped: {e}")
        return
    width, layers, tokens = (2048, 16, 64) if b.gpu else (64, 2, 4)
    config = LlamaConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
                         num_attention_heads=width // 32, num_key_value_heads=width // 64,
                         vocab_size=32000)  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    shared = shared_transformers.from_pretrained(LlamaForCausalLM, directory, b.ordinal)
    private = copy.deepcopy(shared)
    prompt = torch.arange(1, 33, device=b.device)[None]

    @torch.no_grad()
    def generate(model: Any) -> torch.Tensor:
        return model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

    calls, b.calls = b.calls, 1
    b.row(f"a Llama of {layers} layers, {tokens} tokens", generate, shared, private)
    b.row("its logits", torch.no_grad()(lambda model: model(prompt).logits), shared, private)
    b.calls = calls


def taken(mountpoint: str) -> int:
    """Returns how many bytes of device memory views use."""
    return sum(v["device_bytes"] for f in gaiafs.status(mountpoint)["files"] for v in f.get("views") or ())


def loads(b: Bench, mountpoint: str, path: str, processes: int) -> None:
    """Measures how long the first process takes to load the file, the second, and the others at once, and how much
    device memory they all use.
    """
    running: list[subprocess.Popen[str]] = []
    try:
        for _ in range(processes):
            p = subprocess.Popen([sys.executable, "-c", LOAD, path, str(b.ordinal)], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True)  # fmt: skip
            running.append(p)
        for p in running:
            if told(p) != "ready":
                raise RuntimeError("a process ended before it loaded the file")
        held = []
        for group in (running[:1], running[1:2], running[2:]):
            for p in group:
                go_on(p)
            times = [float(told(p)) for p in group]
            held.append(taken(mountpoint))
            if times:
                name = {1: "the first process", 2: "the second process"}.get(len(held), f"{len(times)} more at once")
                b.say(f"{name} after", f"{max(times):.1f} ms", "", "", f"{held[-1] >> 20} MiB")
        if held[-1] != held[0]:
            b.wrong += 1
            b.say("MORE THAN ONE COPY", f"{held}")
    finally:
        for p in running:
            p.communicate("\n")


def told(p: subprocess.Popen[str]) -> str:
    assert p.stdout is not None
    return p.stdout.readline().strip()


def go_on(p: subprocess.Popen[str]) -> None:
    assert p.stdin is not None
    p.stdin.write("\n")
    p.stdin.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mountpoint")
    parser.add_argument("--device", type=int, default=0, help="number of the device in the mount, and of its GPU")
    parser.add_argument("--processes", type=int, default=8, help="number of processes that load the file (default 8)")
    parser.add_argument("--quick", action="store_true", help="small tensors, on the CPU: for emulated devices")
    options = parser.parse_args()
    torch.manual_seed(0)
    b = Bench(options)
    directory = tempfile.mkdtemp(prefix="tensors-", dir=options.mountpoint)
    try:
        path = os.path.join(directory, "tensors.safetensors")
        gaiafs.save_file(weights(b), path)
        loads(b, options.mountpoint, path, options.processes)
        b.say("", "shared", "private", "ratio", "bits")
        shared = gaiafs.load_safetensors(path, device=b.ordinal, framework="torch")
        private = {name: tensor.clone() for name, tensor in shared.items()}
        for name, kernel in kernels(b).items():
            b.row(name, kernel, shared, private)
        llama(b, os.path.join(directory, "llama"))
    finally:
        shutil.rmtree(directory)
    return int(b.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
