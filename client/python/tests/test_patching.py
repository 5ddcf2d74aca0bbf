"""Programs that do not know gaiafs, and share weights."""

import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

import gaiafs

from conftest import KIND

PROGRAM = """
import sys
from safetensors import safe_open
from safetensors.numpy import load_file
path = sys.argv[1]
with safe_open(path, framework="np") as f:
    w = f.get_tensor("w")
    assert f.metadata() == {"a": "b"} and f.get_slice("w")[1:2].tolist() == [w[1]]
all = load_file(path)
assert all["w"].tolist() == w.tolist() == list(range(len(w)))
try:
    load_file(path + "no")
except FileNotFoundError:
    print("writeable" if w.flags.writeable or all["w"].flags.writeable else "shared", *sys.argv[2:], __name__)
"""


@pytest.fixture
def model(make):
    path = make(b"", "model.safetensors")
    safetensors.numpy.save_file({"w": np.arange(300, dtype=np.float32)}, path, {"a": "b"})
    return path


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(python, *arguments, **options):
    command = [*python, "-m", "gaiafs", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


# On GPUs NumPy's arrays are not asked for where the devices are.
WANTED = "shared" if KIND == "emulated" else "writeable"


def test_an_unchanged_program_shares_weights(python, program, model, tmp_path):
    done = run(python, "run", program, model, "--an", "option")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{WANTED} --an option __main__\n", "")
    done = run(python, "run", "-m", "program", model, "x", cwd=program.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{WANTED} x __main__\n", "")
    elsewhere = tmp_path / "model.safetensors"
    elsewhere.write_bytes(model.read_bytes())
    assert run(python, "run", program, elsewhere).stdout == "writeable __main__\n"


@pytest.mark.kind("emulated")
def test_names_that_were_imported_before(python, model):
    code = "from safetensors import safe_open\nimport sys, gaiafs; gaiafs.patch(); gaiafs.patch()\n"
    code += "with safe_open(sys.argv[1], 'np') as f: print(type(f).__module__, f.get_tensors()['w'].flags.writeable)"
    done = subprocess.run([*python, "-c", code, str(model)], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("gaiafs.opened False\n", "")


@pytest.mark.kind("emulated")
def test_what_does_not_work_goes_the_usual_way(python, make):
    path = make(b"", "large.safetensors")
    safetensors.numpy.save_file({"w": np.zeros(8)}, path)
    code = "import gaiafs.opened, safetensors, sys, warnings; gaiafs.patch()\n"
    code += "def refuse(*a, **k): raise gaiafs.Error(12, 'no room')\ngaiafs.opened.map_weights = refuse\n"
    code += "with warnings.catch_warnings(record=True) as said:\n warnings.simplefilter('always')\n"
    code += " f = safetensors.safe_open(sys.argv[1], 'np')\n"
    code += "print(type(f).__module__.split('.')[0], said[0].category.__name__, 'no room' in str(said[0].message))"
    done = subprocess.run([*python, "-c", code, str(path)], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("builtins CopiedWarning True\n", "")


NEWER = """
import safetensors, sys, warnings
original = safetensors.safe_open
class Newer:  # as a later version may be
    def __init__(self, *arguments): self.f, self.plan = original(*arguments), None
    def __enter__(self): return self
    def __exit__(self, *arguments): print("ended")
    def keys(self): return self.f.keys()
    def prefetch(self, plan=None): self.plan = plan
    def get_tensor(self, name): return (self.plan, self.f.get_tensor(name))
    def more(self): return "more"
safetensors.safe_open = Newer
import gaiafs; gaiafs.patch()
warnings.simplefilter("error")
with safetensors.safe_open(sys.argv[1], "np") as f:
    f.prefetch()
    print(f.get_tensor("w").flags.writeable, hasattr(f, "nothing"))
for use in (lambda f: f.prefetch("plan"), lambda f: print(f.more())):
    with safetensors.safe_open(sys.argv[1], "np") as f:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            use(f)
            print([w.category.__name__ for w in said])
        print(f.get_tensor("w")[0], sorted(f.keys()))
"""


@pytest.mark.kind("emulated")
def test_methods_of_the_installed_version(python, make):
    path = make(b"", "newer.safetensors")
    safetensors.numpy.save_file({"w": np.zeros(8)}, path)
    done = subprocess.run([*python, "-c", NEWER, str(path)], capture_output=True, text=True, timeout=300)
    said = "False False\n['CopiedWarning']\nplan ['w']\nended\nmore\n['CopiedWarning']\nNone ['w']\nended\n"
    assert (done.stdout, done.stderr) == (said, "")


def test_the_command_says_what_is_wrong(python, tmp_path):
    for arguments, words in (
        (["run", "nosuch.py"], "gaiafs: [Errno 2] No such file or directory: 'nosuch.py'"),
        (["run", tmp_path], f"gaiafs: [Errno 21] Is a directory: '{tmp_path}'"),
        (["run", "-m", "no.such.module"], "gaiafs: [Errno 2] there is no module no.such.module"),
    ):
        done = run(python, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", words + "\n")
    failing = tmp_path / "failing.py"
    failing.write_text("import sys; sys.exit(7) if len(sys.argv) > 1 else 1 / 0")
    assert run(python, "run", failing, "x").returncode == 7
    done = run(python, "run", failing)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    help = run(python, "--help")
    assert help.returncode == 0 and all(c in help.stdout for c in ("warm", "info", "run"))
    assert "trains" in run(python, "run", "--help").stdout


@pytest.mark.kind("emulated")
def test_transformers_shares_weights(directory):
    pytest.importorskip("torch", exc_type=ImportError)
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 131}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).save_pretrained(directory / "llama")
    code = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
regions = [line.split()[0].split("-") for line in open("/proc/self/maps") if "memfd" in line]
regions = [(int(a, 16), int(b, 16)) for a, b in regions]
print(sum(any(a <= p.data_ptr() < b for a, b in regions) for p in model.parameters()), len(list(model.parameters())))
"""
    script = directory / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "gaiafs", "run", script, directory / "llama"], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == [done.stdout.split()[1]] * 2, done.stdout + done.stderr


def test_nothing_is_patched_here():
    assert safetensors.safe_open.__module__ == "builtins" and gaiafs.patch is not None
