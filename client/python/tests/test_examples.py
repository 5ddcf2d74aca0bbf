"""The examples do what they say, and check it themselves. What they compute they can on emulated devices only, without
a GPU.
"""

import importlib.metadata
import os
import pathlib
import re
import subprocess

import pytest

REAL = "silero-vad"  # carries its model's weights
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.kind("emulated")


def run(python, name, *arguments):
    # Without -W error: if PyTorch is installed, it may warn.
    return subprocess.run([python[0], EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "name, options",
    [
        ("load_model.py", ["--size", "16"]),
        ("train_and_serve.py", []),
        ("train_and_serve.py", ["--serve-device", "1"]),
        ("numpy_and_cuda.py", []),
    ],
)
def test_example(directory, python, name, options):
    done = run(python, name, str(directory), "--device", "0", *options)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("device, given", [("0", 0), ("cuda:0", "cuda:0")])
def test_what_pytorch_is_given_as_a_device(directory, python, monkeypatch, tmp_path, device, given):
    """A fake torch stands for one with GPUs. It has only what the example calls first."""
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: True)\n"
        "def zeros(n, device):\n    raise SystemExit(f'zeros on {device!r}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    done = run(python, "load_model.py", str(directory), "--size", "8", "--device", device)
    assert f"zeros on {given!r}" in done.stderr, done.stdout + done.stderr


def test_real_weights(directory, python):
    try:
        importlib.metadata.version(REAL)
    except importlib.metadata.PackageNotFoundError:
        assert "GAIAFS_REQUIRE_TOOLS" not in os.environ, f"{REAL} is missing: .ci/setup test gets it"
        pytest.skip(f"{REAL} is missing: .ci/setup test gets it")
    done = run(python, "load_model.py", str(directory), "--package", REAL)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr
    assert "weights of silero-vad: silero_vad_16k.safetensors" in done.stdout
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    "name, arguments, words",
    [
        ("load_model.py", ["--package", "no-such-package"], "pip install --no-deps no-such-package.*Without a network"),
        ("load_model.py", ["--package", "pytest"], "has no safetensors"),
        ("train_and_serve.py", ["--device", "7"], "there is no device 7"),
        ("load_model.py", ["--size", "8", "/tmp"], "not on a gaiafs mount"),
        ("numpy_and_cuda.py", ["/tmp"], "not on a gaiafs mount"),
    ],
)
def test_what_goes_wrong_is_said(directory, tmp_path, python, name, arguments, words):
    place = tmp_path if "/tmp" in arguments else directory
    done = run(python, name, *(a for a in arguments if a != "/tmp"), str(place))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert re.search(words, done.stderr), done.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_help(python, path):
    done = run(python, path.name, "--help")
    assert done.returncode == 0 and "usage" in done.stdout
