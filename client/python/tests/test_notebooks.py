"""The notebooks work: their cells run one after the other, without Jupyter."""

import json
import os
import pathlib
import subprocess

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
pytestmark = pytest.mark.kind("emulated")


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(directory, python, path):
    book = json.loads(path.read_text())
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert book["nbformat"] == 4 and all(c["outputs"] == [] and c["execution_count"] is None for c in code)
    program = "\n\n".join("".join(c["source"]) for c in code)
    done = subprocess.run(
        [*python, "-c", program], capture_output=True, text=True, timeout=300, env={**os.environ, "GAIAFS_DIR": str(directory)}
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert list(directory.iterdir()) == []
