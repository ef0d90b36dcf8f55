"""The examples of docs/interop.md run as they are."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

EXAMPLES = sorted((pathlib.Path(__file__).parents[1] / "examples").glob("interop_*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    run = subprocess.run([sys.executable, "-W", "error", path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "attention of the last" in run.stdout


def test_both_are_there():
    assert [path.stem for path in EXAMPLES] == ["interop_jax_owned", "interop_torch_owned"]
