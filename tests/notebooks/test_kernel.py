"""In a real kernel, what taps print and raise is the output of the cell that ran the program."""

from __future__ import annotations

import re

import pytest

from checkout import ROOT, python_path

nbclient = pytest.importorskip("nbclient", reason="nbclient runs notebooks; pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

LONG_LOOP = """
import jax, jax.numpy as jnp, hostcallback as hcb
@jax.jit
def f(n):
    def body(c):
        y = jnp.ones((300, 300))
        for _ in range(3):
            y = y @ y * 1e-3
        hcb.id_print(c[0], name="i")
        return c[0] + 1, c[1] + y.sum() * 0
    return jax.lax.while_loop(lambda c: c[0] < n, body, (n * 0, 0.0))
f(jnp.int32(3)); None
"""

RAISES = """
def fail(value):
    raise OSError("disk full")
jax.jit(lambda x: hcb.tap(fail, x, name="saver"))(jnp.float32(1)); None
"""

PROGRESS = """
jax.jit(lambda: hcb.fori_loop(0, 10, lambda i, x: x + i, 0, progress="train"))().block_until_ready(); None
"""


@pytest.mark.native_only
@pytest.mark.filterwarnings("ignore")  # of the client's libraries
def test_output_is_in_the_cell_that_ran_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    page = (ROOT / "docs" / "notebooks.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    sources = [
        LONG_LOOP,
        "f(jnp.int32(40)); None",
        "1 + 1",
        "f(jnp.int32(2)); None",
        RAISES,
        PROGRESS,
        example,
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    shown = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert shown[0].split() == ["0", "1", "2"]
    assert shown[1].split() == [str(number) for number in range(40)]
    assert shown[2] == ""
    assert shown[3].split() == ["0", "1"]
    assert "OSError: disk full" in shown[4]
    assert "saver" in shown[4]
    assert "train" in shown[5] + str(notebook.cells[5].outputs)
    assert "[0 1 2]" in shown[6]
    assert "disk full" not in shown[5] + shown[6]
