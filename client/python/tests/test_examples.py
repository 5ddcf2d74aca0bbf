"""The examples do what they say, and check it themselves. What they compute they can on emulated devices only, without a GPU."""

import pathlib
import subprocess

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.kind("emulated")


def run(python, name, *arguments):
    # Without -W error: PyTorch, where it is installed, may warn of what it likes.
    return subprocess.run([python[0], EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "name, options",
    [
        ("load_model.py", ["--size", "16"]),
        ("train_and_serve.py", []),
        ("train_and_serve.py", ["--serve-device", "cuda:1"]),
        ("numpy_and_cuda.py", []),
    ],
)
def test_example(directory, python, name, options):
    done = run(python, name, str(directory), "--device", "cuda:0", *options)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_help(python, path):
    done = run(python, path.name, "--help")
    assert done.returncode == 0 and "usage" in done.stdout
