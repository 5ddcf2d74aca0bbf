#!/usr/bin/env python3
"""Tests of the package on a real GPU, with PyTorch and without pytest.

    GAIAFS=build/gaiafs client/python/tests/gpu/run_gpu.py [--size MIB] [NAME...]

It mounts a directory of its own with --gpus cuda:0 and runs each test, or those named, prints a line for each and a
count at the end, and exits with 1 if one failed. pytest runs the same functions where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(HERE.parents[1]))

import torch  # noqa: E402

import gaiafs  # noqa: E402

SIZE = 256 << 20  # of the weights
PAGE = 4096


class Mount:
    """A mount of a fresh directory on the first GPU."""

    def __init__(self, gpus: str = "cuda:0", *options: str) -> None:
        self.gaiafs = os.path.abspath(os.environ.get("GAIAFS", ROOT / "build" / "gaiafs"))
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="gaiafs-python-"))
        self.source, self.point = self.dir / "source", self.dir / "mnt"
        self.source.mkdir(), self.point.mkdir()
        command = [self.gaiafs, "mount", "--daemon", "--gpus", gpus, "--log-file", str(self.dir / "log"), *options]
        try:
            subprocess.run([*command, str(self.source), str(self.point)], check=True, timeout=120)
        except BaseException:
            shutil.rmtree(self.dir, ignore_errors=True)
            raise

    def close(self) -> None:
        done = subprocess.run([self.gaiafs, "umount", str(self.point)], timeout=120)
        if done.returncode == 0:
            shutil.rmtree(self.dir)
        else:
            print((self.dir / "log").read_text()[-4000:], file=sys.stderr)
            raise RuntimeError(f"umount failed with {done.returncode}")


_mount: Mount | None = None


def mnt() -> pathlib.Path:
    global _mount
    if _mount is None:
        _mount = Mount()
    return _mount.point


def teardown_module() -> None:
    global _mount
    gc.collect()
    if _mount is not None:
        m, _mount = _mount, None
        m.close()


@contextlib.contextmanager
def raises(kind: type[BaseException], words: str = ""):
    try:
        yield
    except kind as e:
        assert words in str(e), f"{e} does not say {words!r}"
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def make(name: str, content: bytes) -> pathlib.Path:
    path = mnt() / name
    path.write_bytes(content)
    return path


def save(name: str, tensors: dict[str, torch.Tensor]) -> pathlib.Path:
    """Writes safetensors, with the safetensors package if it is installed."""
    path = mnt() / name
    path.unlink(missing_ok=True)
    write(path, tensors)
    return path


def write(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    try:
        from safetensors.torch import save_file

        save_file(tensors, path)
        return
    except ImportError:
        pass
    words = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8",
             torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}  # fmt: skip
    header, data = {}, b""
    for key, t in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        raw = t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        header[key] = {"dtype": words[t.dtype], "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def shift(path: pathlib.Path, residue: int) -> pathlib.Path:
    """Makes a header longer, so that the data begins at that residue of 16."""
    content = bytearray(path.read_bytes())
    (n,) = struct.unpack_from("<Q", content)
    more = (residue - 8 - n) % 16
    content[:8] = struct.pack("<Q", n + more)
    content[8 + n : 8 + n] = b" " * more
    path.write_bytes(content)
    return path


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bit by bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.to(a.device).contiguous().reshape(-1).view(torch.uint8)
    )


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    n = 1024
    found = {f"layers.{i}": torch.randn(n, n, generator=g).to(torch.bfloat16) for i in range(4)}
    found["half"] = torch.randn(33, 65, generator=g).to(torch.float16)
    found["single"] = torch.randn(1000, generator=g)
    found["ids"] = torch.randint(-(1 << 60), 1 << 60, (77,), generator=g)
    found["mask"] = torch.randint(0, 2, (99,), generator=g).to(torch.bool)
    found["bytes"] = torch.randint(0, 256, (101,), generator=g).to(torch.uint8)
    found["e4m3"] = torch.randn(64, generator=g).to(torch.float8_e4m3fn)
    found["e5m2"] = torch.randn(64, generator=g).to(torch.float8_e5m2)
    return found


def test_zero_copy() -> None:
    path = make("zero-copy", os.urandom(5 << 20))
    content = path.read_bytes()
    for offset, length in [(0, 5 << 20), (PAGE, 10000), (2 << 20, 1 << 20), (3 * PAGE, 4 << 20)]:
        with gaiafs.mmap(path, "cuda:0", offset=offset, length=length) as m:
            assert m.kind == "cuda" and m.device == 0
            t = m.tensor()
            assert t.device == torch.device("cuda", 0) and t.data_ptr() == m.ptr and t.numel() == length
            assert bytes(t.cpu().numpy()) == m[:] == content[offset : offset + length]
            del t


def test_tensors_see_stores_of_others() -> None:
    path = make("others", bytes(1 << 20))
    with gaiafs.mmap(path, mode="r+") as a, gaiafs.mmap(path) as b:
        s, t = a.tensor("float32"), b.tensor("float32")
        assert s.data_ptr() != t.data_ptr()
        s.fill_(3)
        torch.cuda.synchronize()
        assert (t == 3).all()  # it is the same memory
        del s, t


def test_matmul() -> None:
    g = torch.Generator().manual_seed(1)
    w, x = torch.randn(512, 256, generator=g), torch.randn(256, 64, generator=g)
    path = make("matmul", w.numpy().tobytes())
    with gaiafs.mmap(path, torch.device("cuda", 0)) as m:
        t = m.tensor(torch.float32, (512, 256))
        torch.testing.assert_close((t @ x.cuda()).cpu(), w @ x, rtol=1e-2, atol=1e-2)
        del t


def test_from_dlpack() -> None:
    path = make("dlpack", bytes(range(256)) * 64)
    for mode in ("r", "r+"):
        m = gaiafs.mmap(path, mode=mode)
        a = m.array("int32", (4, 5), 16)
        try:
            t = torch.from_dlpack(a)
        except BufferError as e:  # a PyTorch with an older DLPack
            assert mode == "r" and "DLPack before 1.0" in str(e)
            del a
            m.close()
            continue
        assert t.data_ptr() == m.ptr + 16 and t.shape == (4, 5) and t.dtype is torch.int32 and t.device.index == 0
        del a
        with raises(BufferError):
            m.close()
        del t
        m.close()
    b = torch.from_dlpack(gaiafs.mmap(path, mode="r+").array("BF16", (8,)))
    gc.collect()
    assert b.dtype is torch.bfloat16 and bytes(b.view(torch.uint8).cpu().numpy()) == bytes(range(16))


def test_cuda_array_interface() -> None:
    path = make("interface", bytes(range(256)))
    assert gaiafs.mmap(path).array("float64", (0, 3)).__cuda_array_interface__["data"] == (0, True)
    m = gaiafs.mmap(path, mode="r+")
    t = torch.as_tensor(m.array("float64", (2, 3), 16), device="cuda:0")
    assert t.data_ptr() == m.ptr + 16 and t.dtype is torch.float64
    del t
    m.close()


def test_cupy() -> str | None:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    path = make("cupy", bytes(range(256)) * 16)
    m = gaiafs.mmap(path, mode="r+")
    for make_array in (cupy.asarray, cupy.from_dlpack):
        c = make_array(m.array("uint32", (16, 64)))
        assert c.data.ptr == m.ptr
        c += 1
        m.release(stream=cupy.cuda.get_current_stream())
        del c
    assert path.read_bytes()[:1] == b"\2"
    m.close()
    return None


def test_training_in_place_is_seen_by_the_cpu() -> None:
    n = 4096
    path = make("training", bytes(4 * n))
    with gaiafs.mmap(path, mode="r+") as m:
        w = m.tensor("float32", (n,))
        want = torch.arange(n, dtype=torch.float32, device="cuda")
        parameter = torch.nn.Parameter(w)
        assert parameter.data_ptr() == m.ptr
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        for i in range(60):
            with m.acquire():
                optimizer.zero_grad()
                ((parameter - want) ** 2 / 2).sum().backward()
                optimizer.step()
            if i % 20 == 0:  # released: a plain read sees it without any call of gaiafs
                got = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
                assert torch.equal(got, parameter.detach().cpu())
        got = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
        assert torch.allclose(got, torch.arange(n, dtype=torch.float32))
        del w, parameter, optimizer


def test_writes_of_the_cpu_are_seen_after_acquire() -> None:
    path = make("cpu", bytes(8 << 20))
    with gaiafs.mmap(path) as m:
        t = m.tensor()
        with open(path, "r+b") as f:
            f.seek(3 << 20)
            f.write(b"\7" * 10000)
        assert m.acquire().pages == 3
        assert int(t.sum()) == 70000
        del t


def test_release_waits_for_streams() -> None:
    path = make("streams", bytes(16 << 20))
    with gaiafs.mmap(path, mode="r+") as m:
        t = m.tensor("float32")
        s = torch.cuda.Stream()
        a = torch.randn(4096, 4096, device="cuda")
        for stream in (s, None):
            with torch.cuda.stream(s):
                b = a
                for _ in range(20):
                    b = b @ a  # keeps the stream busy for a while
                t.fill_(9 if stream else 8)
            m.release(stream=stream)
            want = struct.pack("<f", 9 if stream else 8)
            assert path.read_bytes() == want * (4 << 20)
        del t


def test_kernels_get_aligned_tensors() -> None:
    """Kernels that take 16-byte alignment for granted return the same as with copies that PyTorch allocated."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    g = torch.Generator().manual_seed(9)
    attention = torch.nn.functional.scaled_dot_product_attention
    tensors = {name: torch.randn(2, 8, 512, 64, generator=g).to(torch.bfloat16) for name in "qkv"}
    tensors["a"], tensors["b"] = (torch.randn(512, 1024, generator=g).to(torch.bfloat16) for _ in range(2))
    tensors["a8"], tensors["b8"] = (torch.randn(256, 512, generator=g).to(torch.float8_e4m3fn) for _ in range(2))
    tensors["ai"], tensors["bi"] = (torch.randint(-9, 9, (256, 512), generator=g).to(torch.int8) for _ in range(2))
    one = torch.ones((), device="cuda")

    def attend(w: dict[str, torch.Tensor], *backends: SDPBackend) -> torch.Tensor:
        if not backends:
            return attention(w["q"], w["k"], w["v"])
        with sdpa_kernel(list(backends)):
            return attention(w["q"], w["k"], w["v"])

    kernels = {
        "attention": attend,
        "flash attention": lambda w: attend(w, SDPBackend.FLASH_ATTENTION),
        "memory-efficient attention": lambda w: attend(w, SDPBackend.EFFICIENT_ATTENTION),
        "bf16 product": lambda w: w["a"] @ w["b"].t(),
        "fp8 product": lambda w: torch._scaled_mm(w["a8"], w["b8"].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        "int8 product": lambda w: torch._int_mm(w["ai"], w["bi"].t()),
    }
    for residue in (0, 1, 2, 4, 8, 12):
        w = gaiafs.load_safetensors(shift(save(f"kernels-{residue}.safetensors", tensors), residue), "cuda:0")
        assert all(t.data_ptr() % 256 == 0 and same(t, tensors[name]) for name, t in w.items())
        clones = {name: t.clone() for name, t in w.items()}
        for name, kernel in kernels.items():
            try:
                want = kernel(clones)
            except RuntimeError as e:  # this GPU or PyTorch has no such kernel
                print(f"    {name}: {str(e).splitlines()[0]}")
                torch.cuda.synchronize()
                continue
            assert same(kernel(w), want), f"{name}, with a file at {residue} modulo 16"
        del w, clones


def test_misaligned_memory_is_refused() -> None:
    m = gaiafs.mmap(make("misaligned", bytes(range(256))), mode="r+")
    for offset in range(1, 16):
        with raises(ValueError, "multiple of 16"):
            m.tensor("uint8", (4,), offset)
        with raises(ValueError, "multiple of 16"):
            m.array("uint8", (4,), offset)
    t = m.tensor("uint8", (4,), 3, misaligned=True)
    assert t.tolist() == [3, 4, 5, 6]
    del t


def test_views() -> None:
    content = os.urandom(5 << 20)
    path = make("views", content)
    segments = [(3, 1 << 20), (4097, 640, 4096, 700), (5 << 20, 16), ((5 << 20) - 3, 8)]
    v = gaiafs.view(path, segments, "cuda:0")
    for i, s in enumerate(segments):
        at, n, stride, count = (*s, 0, 1) if len(s) == 2 else s
        want = b"".join(content[at + k * stride : at + k * stride + n].ljust(n, b"\0") for k in range(count))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gaiafs.ReadOnlyWarning)
            t = v.tensor(i)
        assert t.data_ptr() == v.ptr + v.offsets[i] and t.data_ptr() % 256 == 0
        assert bytes(t.cpu().numpy()) == want == v.array(i).tobytes()
    with open(path, "r+b") as f:
        f.seek(4097)
        f.write(b"changed")
    v.acquire(stream=torch.cuda.current_stream())
    assert v.read(7, offset=v.offsets[1]) == b"changed"
    del t
    v.close()


def test_acquire_of_weights() -> None:
    path = save("acquired.safetensors", {"a": torch.zeros(1000), "b": torch.ones(SIZE // 4)})
    w = gaiafs.load_safetensors(path)
    at = {name: t.data_ptr() for name, t in w.items()}
    x = torch.zeros(1, device="cuda")
    x.copy_(w["b"][:1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(w["b"][-1:])
    with open(path, "r+b") as f:
        f.seek(-4, os.SEEK_END)
        f.write(struct.pack("<f", 7))
    w.acquire()
    graph.replay()
    torch.cuda.synchronize()
    assert float(x) == 7 and at == {name: t.data_ptr() for name, t in w.items()}


def test_private_tensors() -> None:
    path = save("private.safetensors", {"a": torch.ones(1000), "b": torch.ones(1000)})
    w = gaiafs.load_safetensors(path, private="a")
    w["a"].add_(1)
    assert float(w["a"].sum()) == 2000 and float(gaiafs.load_safetensors(path)["a"].sum()) == 1000
    old = w["b"]
    w.private("b")["b"].zero_()
    assert float(w["b"].sum()) == 0 and float(old.sum()) == 1000


def test_shards() -> None:
    g = torch.Generator().manual_seed(3)
    tensors = {"column": torch.randn(64, 48, generator=g), "row": torch.randn(32, 64, generator=g).to(torch.bfloat16)}
    path = save("shards.safetensors", tensors)
    plan = gaiafs.ShardPlan({"column": 0, "row": 1})
    parts = [gaiafs.load_safetensors(path, shard=plan, rank=r, world=4) for r in range(4)]
    assert all(t.is_contiguous() and t.data_ptr() % 256 == 0 for p in parts for t in p.values())
    for name, dim in (("column", 0), ("row", 1)):
        assert same(torch.cat([p[name] for p in parts], dim), tensors[name])


def test_safe_open() -> None:
    tensors = weights()
    path = save("opened.safetensors", tensors)
    with gaiafs.safe_open(path, "pt", "cuda:0") as f:
        assert f.keys() == sorted(tensors)
        assert all(same(f.get_tensor(name), t) for name, t in tensors.items())
        s = f.get_slice("half")
        for index in (slice(3, 9), (slice(None), slice(1, 40)), (..., 5), 7, [1, 5]):
            part = s[index]
            assert same(part, tensors["half"][index].contiguous()) and part.data_ptr() % 16 == 0, index


def test_save_file() -> None:
    """From GPU memory, byte for byte what safetensors writes."""
    tensors = {**weights(), "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}
    path = mnt() / "saved.safetensors"
    gaiafs.save_file({name: t.cuda() for name, t in tensors.items()}, path, {"format": "pt"})
    mixed = mnt() / "mixed.safetensors"
    gaiafs.save_file({n: t.cuda() if i % 2 else t for i, (n, t) in enumerate(tensors.items())}, mixed, {"format": "pt"})
    assert mixed.read_bytes() == path.read_bytes()
    assert not [f for f in os.listdir(mnt()) if f.startswith(".")]
    got = gaiafs.load_safetensors(path)
    assert all(same(got[name], t) for name, t in tensors.items())
    gaiafs.save_file(got, mixed, {"format": "pt"})
    assert mixed.read_bytes() == path.read_bytes()
    with raises(gaiafs.Error):  # not on a mount
        gaiafs.save_file({"w": torch.ones(3, device="cuda")}, pathlib.Path(tempfile.gettempdir()) / "gaiafs-none")
    try:
        from safetensors.torch import save_file
    except ImportError:
        return
    save_file(tensors, mixed, {"format": "pt"})
    assert mixed.read_bytes() == path.read_bytes()
    large = {"w": torch.arange(SIZE // 4, device="cuda", dtype=torch.float32)}
    begin = time.monotonic()
    gaiafs.save_file(large, path)
    print(f"    saving {SIZE >> 20} MiB from the GPU to stable storage took {time.monotonic() - begin:.2f} s")
    assert same(gaiafs.load_safetensors(path)["w"], large["w"])


SMALL = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 131, "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "Llama": SMALL,
    "Mistral": {**SMALL, "sliding_window": 8},
    "Qwen2": {**SMALL, "tie_word_embeddings": True},
    "Gemma": {**SMALL, "head_dim": 32},
    "Mixtral": {**SMALL, "num_local_experts": 4},
    "GPT2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 131, "n_positions": 64},
}


def test_models_of_transformers() -> str | None:
    """The same logits, bit for bit, as from transformers' own from_pretrained on the same device."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed"
    from gaiafs.transformers import from_pretrained, weights_of

    ids = (torch.arange(40).reshape(2, 20) % 131).cuda()
    for name, sizes in MODELS.items():
        cls = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
        config = getattr(transformers, f"{name}Config")(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            path = mnt() / f"{name}-{dtype}"
            torch.manual_seed(3)
            cls(config).to(dtype).save_pretrained(path)
            want = cls.from_pretrained(path, dtype="auto", device_map={"": "cuda:0"})
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", gaiafs.CopiedWarning)
                got = from_pretrained(transformers.AutoModelForCausalLM, path, "cuda:0", dtype="auto")
            shared = {t.data_ptr() for t in weights_of(got).values()}
            copied = [n for n, p in got.named_parameters() if p.data_ptr() not in shared]
            assert all("experts" in n for n in copied), copied
            assert bool(copied) == any(w.category is gaiafs.CopiedWarning for w in said)
            assert all(t.device == torch.device("cuda", 0) for t in [*got.parameters(), *got.buffers()])
            for (n, a), (_, b) in zip(want.named_buffers(), got.named_buffers(), strict=True):
                assert same(a, b), n
            with torch.no_grad():
                assert same(got(ids).logits, want(ids).logits), (name, dtype)
                kept = {"max_new_tokens": 8, "do_sample": False}
                assert torch.equal(got.generate(ids[:1], **kept), want.generate(ids[:1], **kept)), (name, dtype)
            del got, want
    return None


def test_models_take_no_memory_of_pytorch() -> str | None:
    """transformers allocates no memory for a second copy of the weights, which it does to make allocations faster."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed"
    from gaiafs.transformers import from_pretrained

    sizes = {**SMALL, "vocab_size": SIZE // 1024, "hidden_size": 512, "tie_word_embeddings": True}
    path = mnt() / "large-model"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(path)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = from_pretrained(transformers.LlamaForCausalLM, path, "cuda:0", dtype="auto")
    took = torch.cuda.memory_reserved() - before
    print(f"    a model of {(path / 'model.safetensors').stat().st_size >> 20} MiB took {took >> 20} MiB of PyTorch's memory")
    assert took < SIZE // 4
    del model
    return None


def test_private_copies_are_freed() -> None:
    path = save("freed.safetensors", {"w": torch.zeros(SIZE // 4)})
    torch.zeros(1, device="cuda")
    gaiafs.load_safetensors(path, private=True)  # once, for what is made and kept
    gc.collect()
    before = torch.cuda.mem_get_info(0)[0]
    for _ in range(3):
        w = gaiafs.load_safetensors(path, private=True)["w"]
        assert float(w.sum()) == 0
        del w
        gc.collect()
    assert before - torch.cuda.mem_get_info(0)[0] < SIZE // 2


def test_written_bytes_are_released() -> None:
    """For any size and stream: the driver returns from small copies before the bytes are there."""
    path = make("written", bytes(8 << 20))
    s = torch.cuda.Stream()
    with gaiafs.mmap(path, mode="r+") as m:
        for i in range(200):
            n = (1, 1000, 60 << 10, 65 << 10, 5 << 20)[i % 5]
            m.write(bytes([i]) * n, 0)
            m.release(stream=s)
            with open(path, "rb") as f:
                assert f.read(n) == bytes([i]) * n, (i, n)


def test_acquire_waits_for_streams() -> None:
    n = 8 << 20
    path = make("acquire-waits", b"\1" * n)
    with gaiafs.mmap(path) as m:
        t, s = m.tensor(), torch.cuda.Stream()
        a = torch.randn(4096, 4096, device="cuda")
        for i, stream in ((2, s), (3, None)):
            torch.cuda.synchronize()
            with torch.cuda.stream(s):
                b = a
                for _ in range(40):
                    b = b @ a  # keeps the stream busy for a while
                total = t.sum(dtype=torch.int64)
            with open(path, "r+b") as f:  # truncating would change the device's memory at once
                f.write(bytes([i]) * n)
            m.acquire(stream=stream)
            assert int(total) == (i - 1) * n, "the kernel saw bytes that came later"
            assert int(t[0]) == i
        del t, total


def test_memory_that_goes_disturbs_no_capture() -> None:
    path = make("capture", bytes(4 << 20))
    weights = save("capture.safetensors", {"w": torch.zeros(1000)})
    x = torch.zeros(1000, device="cuda")
    for where in ("thread", "here"):
        kept = [gaiafs.mmap(path, mode="r+").tensor(), gaiafs.load_safetensors(weights, private=True)["w"]]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()

        def drop(kept: list[torch.Tensor] = kept) -> None:
            kept.clear()
            gc.collect()
            with gaiafs.mmap(path, mode="r+") as m:
                m.write(b"captured", 0)
                assert m.read(8, offset=0) == b"captured"

        with torch.cuda.graph(graph, capture_error_mode="global"):
            x.add_(1)
            if where == "thread":
                t = threading.Thread(target=drop)
                t.start()
                t.join()
            else:
                drop()
            x.add_(1)
        before = float(x[0])
        graph.replay()
        torch.cuda.synchronize()
        assert float(x[0]) == before + 2


def test_load_safetensors() -> None:
    want = weights()
    path = save("weights.safetensors", want)
    got = gaiafs.load_safetensors(path)
    assert got.keys() == want.keys()
    for name, t in got.items():
        assert t.device == torch.device("cuda", 0) and same(t, want[name]), name
    try:
        from safetensors.torch import load_file
    except ImportError:
        return
    theirs = load_file(path, device="cuda:0")
    assert all(same(got[name], theirs[name]) for name in want)


def test_two_processes_share_memory() -> None:
    n = SIZE // 8
    path = save("shared.safetensors", {f"w{i}": torch.full((n // 2,), i, dtype=torch.float16) for i in range(8)})
    script = """
import sys, torch, gaiafs
torch.zeros(1, device="cuda:0").item()
free = torch.cuda.mem_get_info(0)[0]
w = gaiafs.load_safetensors(sys.argv[1], "cuda:0")
assert all((w[f"w{i}"] == i).all().item() for i in range(8))
print(free, torch.cuda.mem_get_info(0)[0], flush=True)
sys.stdin.readline()
"""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    children, numbers = [], []
    try:
        for _ in range(2):
            child = subprocess.Popen([sys.executable, "-c", script, str(path)], env=env, stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True)  # fmt: skip
            children.append(child)
            line = child.stdout.readline()
            assert line, "a process failed"
            numbers.append([int(n) for n in line.split()])
    finally:
        for child in children:
            child.communicate("\n")
    assert all(child.returncode == 0 for child in children)
    print(f"    memory that loading {SIZE >> 20} MiB took: {[(a - b) >> 20 for a, b in numbers]} MiB")
    before, after = numbers[1]
    # PyTorch needs less than half of the weights' memory to compare; a second copy would need all of it.
    assert before - after < SIZE // 2, "the second process took memory of its own"


def test_warm() -> None:
    path = save("warm.safetensors", {"w": torch.ones(SIZE // 4)})
    assert gaiafs.warm(path, 0) == SIZE  # of the tensors
    begin = time.monotonic()
    w = gaiafs.load_safetensors(path)["w"]
    print(f"    loading {SIZE >> 20} MiB that were warm took {1000 * (time.monotonic() - begin):.1f} ms")
    assert float(w.sum(dtype=torch.float64)) == SIZE // 4


def test_use_after_close() -> None:
    m = gaiafs.mmap(make("closed", bytes(PAGE)), mode="r+")
    t = m.tensor()
    with raises(BufferError):
        m.close()
    del t
    m.close()
    for use in (m.acquire, m.release, m.read, m.array, m.tensor, lambda: m.ptr):
        with raises(ValueError, "closed"):
            use()
    t = gaiafs.mmap(make("closed", b"\5" * PAGE)).tensor()
    gc.collect()
    assert int(t.sum()) == 5 * PAGE  # the tensor keeps the memory
    assert (t + 1).sum().item() == 6 * PAGE
    del t
    gc.collect()
    torch.cuda.synchronize()


def test_memory_goes_with_the_last_tensor_while_kernels_run() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        t = gaiafs.mmap(make("kernels", bytes(64 << 20))).tensor("float32", (4096, 4096))
        for _ in range(10):
            b = a @ t
        del t  # unmapped once the kernels are done
        assert float(b.abs().sum()) == 0


def test_hostile_headers() -> None:
    for n, content in enumerate([
        b"", b"\0" * 7, struct.pack("<Q", 1 << 62), struct.pack("<Q", 9) + b"{}", struct.pack("<Q", 2) + b"{}x",
        struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 60) + json.dumps({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode().ljust(60),
    ]):  # fmt: skip
        with raises(gaiafs.FormatError):
            gaiafs.load_safetensors(make(f"hostile-{n}.safetensors", content))


def test_unaligned() -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = make("unaligned.safetensors", struct.pack("<Q", len(text)) + text + b"x" + struct.pack("<2f", 1.5, -2))
    assert gaiafs.load_safetensors(path)["b"].tolist() == [1.5, -2]


def test_file_that_shrinks() -> None:
    path = make("shrinks", b"\1" * (4 << 20))
    with gaiafs.mmap(path) as m:
        t = m.tensor()
        os.truncate(path, 100)
        m.acquire()
        assert int(t.sum()) == 100
        del t


def test_devices() -> None:
    path = make("devices", b"x")
    with raises(gaiafs.Error, "CUDA_VISIBLE_DEVICES"):
        gaiafs.mmap(path, 99)
    script = """
import errno, sys, gaiafs
try:
    gaiafs.mmap(sys.argv[1])
except gaiafs.Error as e:
    assert e.errno == errno.ENODEV, e
    print(e)
"""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script, str(path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "CUDA" in done.stdout, done.stdout + done.stderr


def test_context_is_left_as_it_was() -> None:
    script = """
import ctypes, sys, gaiafs
lib, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(1)
lib.cuInit(0)
m = gaiafs.mmap(sys.argv[1], mode="r+")
m.write(b"stored", 0)
m.release()
assert lib.cuCtxGetCurrent(ctypes.byref(context)) == 0 and not context.value
m.close()
assert lib.cuCtxGetCurrent(ctypes.byref(context)) == 0 and not context.value
"""
    path = make("context", bytes(PAGE))
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    subprocess.run([sys.executable, "-c", script, str(path)], env=env, check=True, timeout=120)
    assert path.read_bytes()[:6] == b"stored"


def test_fork() -> None:
    path = make("fork", b"\3" * PAGE)
    m = gaiafs.mmap(path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            m.acquire()
        except gaiafs.Error as e:
            code = 0 if e.errno == errno.ECHILD else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert m.read(2, offset=0) == b"\3\3"
    m.close()


def test_interrupts() -> None:
    path = make("interrupts", bytes(16384))
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, HERE.parent / "interrupts.py", path, "300", str(time.time_ns()), "all_of_it"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, ""), (command, done)
    print("    " + done.stdout.rstrip())


def test_exit_with_everything_open() -> None:
    script = """
import sys, torch, gaiafs
m = gaiafs.mmap(sys.argv[1], mode="r+")
t, d = m.tensor(), torch.from_dlpack(m.array())
t.fill_(66)
m.release()
w = m.tensor("float32")
"""
    path = make("exit", bytes(1 << 20))
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, "-c", script, str(path)], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stderr)
    assert path.read_bytes() == b"B" * (1 << 20)


def test_examples() -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    for name, *options in (["load_model.py", "--size", "256"], ["train_and_serve.py"], ["numpy_and_cuda.py"]):
        done = subprocess.run([sys.executable, HERE.parents[1] / "examples" / name, *options, mnt()], env=env,
                              capture_output=True, text=True, timeout=300)  # fmt: skip
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        print("    " + done.stdout.rstrip().replace("\n", "\n    "))


def main() -> int:
    global SIZE
    tests = {name.removeprefix("test_"): f for name, f in globals().items() if name.startswith("test_")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"tests to run: {', '.join(tests)}")
    parser.add_argument("--size", type=int, default=SIZE >> 20, metavar="MIB", help="size of large weights (%(default)s)")
    arguments = parser.parse_args()
    SIZE = arguments.size << 20
    if not torch.cuda.is_available():
        print("FAIL: PyTorch finds no GPU")
        return 1
    for name in arguments.name:
        if name not in tests:
            parser.error(f"there is no test {name}")
    failed = skipped = passed = 0
    for name in arguments.name or tests:
        begin = time.monotonic()
        try:
            why = tests[name]()
        except Exception:
            traceback.print_exc()
            print(f"FAIL {name}", flush=True)
            failed += 1
            continue
        took = f"{time.monotonic() - begin:.1f} s"
        print(f"skip {name}: {why}" if why else f"ok   {name} ({took})", flush=True)
        skipped, passed = skipped + bool(why), passed + (not why)
    try:
        teardown_module()
    except Exception as e:
        print(f"FAIL unmounting: {e}")
        failed += 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
