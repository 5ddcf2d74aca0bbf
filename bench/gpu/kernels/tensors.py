"""Compares kernels on shared tensors of load_safetensors with the same kernels on private copies, in turns, on cuda:0.

    python3 tensors.py MOUNTPOINT

It writes a file of 380 MiB into the mountpoint and removes it. PyTorch, safetensors and the package gaiafs must be there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import gaiafs
import torch
from safetensors.torch import save_file
from torch.nn import functional

ROUNDS = 3
CALLS = 20

SECOND = """
import sys, time, gaiafs, torch
torch.zeros(1, device="cuda")
begin = time.monotonic()
gaiafs.load_safetensors(sys.argv[1], device=0)
torch.cuda.synchronize()
print(f"a second process loads them in {1000 * (time.monotonic() - begin):.1f} ms")
"""


def milliseconds(call: Callable[[], torch.Tensor]) -> float:
    """The median of five times CALLS calls, of one call."""
    for _ in range(5):
        call()
    times = []
    for _ in range(5):
        begin, end = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return sorted(times)[2]


def main() -> None:
    path = os.path.join(sys.argv[1], f"tensors-{os.getpid()}.safetensors")
    torch.manual_seed(0)
    save_file(
        {
            "weights": torch.randn(8192, 8192, dtype=torch.bfloat16),
            "embedding": torch.randn(32000, 4096, dtype=torch.float16),
            "keys": torch.randn(4, 32, 2048, 128, dtype=torch.bfloat16),
            "odd": torch.zeros(3, dtype=torch.uint8),  # what lies behind it is not aligned in the file
        },
        path,
    )
    try:
        compare(path)
        subprocess.run([sys.executable, "-c", SECOND, path], check=True)
    finally:
        os.unlink(path)


def compare(path: str) -> None:
    shared = gaiafs.load_safetensors(path, device=0)
    private = {name: tensor.clone() for name, tensor in shared.items()}
    x = torch.randn(4096, 8192, dtype=torch.bfloat16, device="cuda")
    few = x[:16].contiguous()
    words = torch.randint(0, 32000, (65536,), device="cuda")
    queries = torch.randn(4, 32, 2048, 128, dtype=torch.bfloat16, device="cuda")
    kernels: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {
        "product of 4096 x 8192 x 8192, bf16": lambda t: x @ t["weights"].T,
        "product of 16 x 8192 x 8192, bf16": lambda t: few @ t["weights"].T,
        "embedding": lambda t: functional.embedding(words, t["embedding"]),
        "attention, default backend": lambda t: functional.scaled_dot_product_attention(queries, t["keys"], t["keys"]),
        "layer norm": lambda t: functional.layer_norm(t["weights"], (8192,)),
    }
    for name, kernel in kernels.items():
        times: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            times.append(
                (
                    milliseconds(lambda k=kernel: k(shared)),
                    milliseconds(lambda k=kernel: k(private)),
                )
            )  # type: ignore[misc]
        ratios = sorted(s / p for s, p in times)
        same = "the same bits" if torch.equal(kernel(shared), kernel(private)) else "OTHER BITS"
        ratio = ratios[len(ratios) // 2]
        print(f"{name}: {times[0][0]:.4f} ms shared, {times[0][1]:.4f} ms private, ratio {ratio:.3f}, {same}")


if __name__ == "__main__":
    main()
