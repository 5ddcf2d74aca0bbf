"""Mounts that a container sees: a folder or a file of the mount."""

import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import safetensors.numpy
from test_patching import WANTED

from conftest import KIND

PROGRAM = """
import sys, warnings
from safetensors import safe_open
warnings.simplefilter("error")
with safe_open(sys.argv[1], "np") as f: w = f.get_tensor("w")
print("writeable" if w.flags.writeable else "shared")
"""


@pytest.fixture
def elsewhere(directory, tmp_path):
    """Runs a script in mount and user namespaces of its own, where the folder M of the mount is at E."""
    model = directory / "model.safetensors"
    safetensors.numpy.save_file({"w": np.arange(300, dtype=np.float32)}, model)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "at").mkdir()
    (tmp_path / "file").touch()

    def run(script):
        if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
            pytest.skip("this user may not mount")
        env = {**os.environ, "M": str(directory), "T": str(tmp_path)}
        script = f"mount --make-rprivate /\n{script}"
        return subprocess.run(["unshare", "-m", "sh", "-ec", script], env=env, capture_output=True, text=True, timeout=300)

    return run


def test_a_folder_of_the_mount_is_shared(elsewhere, python, mount):
    command = " ".join(python)
    done = elsewhere(
        f"mount --bind $M $T/at; umount -l {mount}\n"
        f"{command} -m gaiafs run --report $T/program.py $T/at/model.safetensors"
    )
    assert (done.returncode, done.stdout) == (0, f"{WANTED}\n"), done.stderr
    assert ("not shared" in done.stderr) == (WANTED == "writeable"), done.stderr


def test_a_file_of_the_mount_is_shared(elsewhere, python, mount):
    command = " ".join(python)
    done = elsewhere(
        f"mount --bind $M/model.safetensors $T/file; umount -l {mount}\n"
        f"{command} -m gaiafs run --report $T/program.py $T/file"
    )
    assert (done.returncode, done.stdout) == (0, f"{WANTED}\n"), done.stderr
    assert re.search(r"/file: (not )?shared", done.stderr), done.stderr


def test_the_report(directory, python, tmp_path):
    model = directory / "model.safetensors"
    safetensors.numpy.save_file({"w": np.ones(3)}, model)
    shutil.copy(model, tmp_path / "copy.safetensors")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom safetensors import safe_open\n"
        "for path, on in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    try:\n        safe_open(path, 'np', on)\n    except Exception: pass\n"
        "sys.exit(3)\n"
    )
    command = [*python, "-m", "gaiafs", "run", "--report", program, model, "cpu", tmp_path / "copy.safetensors", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = {"emulated": "shared", "cuda": "not shared: the program asks for it on cpu, and the mount has GPUs"}[KIND]
    assert done.returncode == 3
    assert done.stderr == (
        f"gaiafs: {model}: {said}\ngaiafs: {tmp_path}/copy.safetensors: not shared: it is not on a gaiafs mount\n"
    )
    program.write_text("")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stderr == "gaiafs: the program has loaded no weights through safetensors\n"


def test_a_device_number_that_is_used_again(mount, monkeypatch):
    """What is known of a mount is forgotten with its line in mountinfo."""
    from gaiafs import patching

    number = os.stat(mount).st_dev
    (line, *_) = patching._lines_of(number)
    monkeypatch.setattr(patching, "_known", {})
    assert patching._Mount.of(number).kind == KIND
    monkeypatch.setattr(patching, "_lines_of", lambda _: iter([line.replace(str(mount), "/nowhere")]))
    assert patching._Mount.of(number).kind is None and patching._Mount.of(number).why
    monkeypatch.setattr(patching, "_lines_of", lambda _: iter([]))
    assert patching._Mount.of(number) is None
