#!/usr/bin/env python3
"""Two language models, used in turn, whose weights together exceed the cache's budget.

    two_models.py FOLDER MOUNT [--device cuda:0]

FOLDER is the source of MOUNT; the program keeps two models of random weights there while it runs. Ways: "resident" has
both models in PyTorch's own device memory; "reload" reads a model's file into it for each turn; "offload" moves a model
there from the host and back; "pinned" copies it there from pinned memory; "gaiafs" maps the files with movable=True,
and runs each turn in ``with m.use():``. For each way it prints the median of a turn in milliseconds. It compares the
logits with those of "resident".
"""

import argparse
import statistics
import time
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import gaiafs

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("mount", type=Path)
parser.add_argument("--device", default="cuda:0")
parser.add_argument("--hidden", type=int, default=2048)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--turns", type=int, default=12)
parser.add_argument("--forwards", default="1,16", help="numbers of forward passes per turn")
options = parser.parse_args()
cuda = options.device.startswith("cuda")
where = options.device if cuda else "cpu"
dtype = torch.float16 if cuda else torch.float32
config = LlamaConfig(
    hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4, num_hidden_layers=options.layers,
    num_attention_heads=options.hidden // 64, vocab_size=8192, tie_word_embeddings=False, dtype=dtype,
)
warnings.filterwarnings("ignore", category=gaiafs.ReadOnlyWarning)
tokens = torch.randint(0, 8192, (4, 256), generator=torch.Generator().manual_seed(1)).to(where)


def wait() -> None:
    if cuda:
        torch.cuda.synchronize()


def empty() -> LlamaForCausalLM:
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    with torch.device(where):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # it has no weights
    return model.eval()


def with_weights(weights: dict) -> LlamaForCausalLM:
    model = empty()
    model.load_state_dict(weights, assign=True)
    return model


def made(i: int) -> str:
    """Writes a model twice, as safetensors and as plain bytes, and returns its name."""
    torch.manual_seed(i)
    weights = {
        k: torch.empty(v.shape, dtype=dtype, device=where).normal_(0, 0.02).cpu()
        for k, v in empty().state_dict().items()
    }
    save_file(weights, options.folder / f"{i}.safetensors")
    with open(options.folder / f"{i}.bytes", "wb") as f:
        for t in weights.values():
            f.write(t.numpy().tobytes())
            f.write(bytes(-f.tell() % 256))
    return str(i)


class Resident:
    def __init__(self, name: str) -> None:
        self.model = with_weights(load_file(options.folder / f"{name}.safetensors", where))

    def turn(self, n: int) -> torch.Tensor:
        for _ in range(n):
            logits = self.model(tokens, use_cache=False).logits
        return logits[:, -1]


class Reload(Resident):
    def __init__(self, name: str) -> None:
        self.name = name

    def turn(self, n: int) -> torch.Tensor:
        super().__init__(self.name)
        try:
            return super().turn(n)
        finally:
            del self.model


class Offload(Resident):
    def __init__(self, name: str) -> None:
        self.model = with_weights(load_file(options.folder / f"{name}.safetensors", "cpu"))

    def turn(self, n: int) -> torch.Tensor:
        rotary = self.model.model.rotary_emb
        self.model.to(where)
        logits = super().turn(n)
        self.model.to("cpu")
        self.model.model.rotary_emb = rotary
        return logits


class Pinned(Resident):
    def __init__(self, name: str) -> None:
        self.weights = load_file(options.folder / f"{name}.safetensors", "cpu")
        if cuda:
            self.weights = {k: v.pin_memory() for k, v in self.weights.items()}

    def turn(self, n: int) -> torch.Tensor:
        self.model = with_weights({k: v.to(where, non_blocking=True) for k, v in self.weights.items()})
        try:
            return super().turn(n)
        finally:
            del self.model


class Gaiafs(Resident):
    def __init__(self, name: str) -> None:
        self.m = gaiafs.mmap(options.mount / f"{name}.bytes", options.device, movable=True)
        weights, at = {}, 0
        for k, v in empty().state_dict().items():
            weights[k] = self.m.tensor(dtype, tuple(v.shape), at)
            at += -(-v.numel() * dtype.itemsize // 256) * 256
        self.model = with_weights(weights)

    def turn(self, n: int) -> torch.Tensor:
        with self.m.use(stream=torch.cuda.current_stream() if cuda else None):
            return super().turn(n)


@torch.inference_mode()
def main() -> int:
    names, wrong, right = [made(1), made(2)], 0, {}
    size = (options.folder / "1.bytes").stat().st_size
    print(f"two models of {size / 2**20:.0f} MiB")
    try:
        for kind in (Resident, Reload, Offload, Pinned, Gaiafs):
            both = [kind(name) for name in names]
            for forwards in map(int, options.forwards.split(",")):
                times = []
                for turn in range(options.turns):
                    wait()
                    begin = time.perf_counter()
                    logits = both[turn % 2].turn(forwards)
                    wait()
                    times.append(time.perf_counter() - begin)
                    wrong += not torch.equal(right.setdefault(turn % 2, logits), logits)
                took = statistics.median(times[2:]) * 1e3
                print(f"{kind.__name__.lower():8} {forwards:3} forwards per turn: {took:8.1f} ms", flush=True)
            del both, logits
            if cuda:
                torch.cuda.empty_cache()
    finally:
        for name in names:
            for suffix in ("safetensors", "bytes"):
                (options.folder / f"{name}.{suffix}").unlink(missing_ok=True)
    print("logits differ in", wrong, "turns" if wrong else "turns: right")
    return wrong != 0


if __name__ == "__main__":
    raise SystemExit(main())
