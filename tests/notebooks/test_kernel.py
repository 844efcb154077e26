"""In a real kernel, what taps print and raise is the output of the cell that ran the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT, python_path

nbclient = pytest.importorskip("nbclient", reason="nbclient runs notebooks; pip install nbclient ipykernel")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.native_only,
    pytest.mark.filterwarnings("ignore"),  # of the client's libraries
]

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

EAGER = "hcb.fori_loop(0, 10, lambda i, x: x + i, 0, progress='eager'); None"

INTERRUPT = """
import os, signal, sys, threading
go = threading.Event()
def interrupt_the_wait():
    main = threading.main_thread().ident
    def frames(frame):
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back
    while "_end_cell" not in frames(sys._current_frames()[main]):
        go.wait(0.01)
    os.kill(os.getpid(), signal.SIGINT)
"""

INTERRUPTED = f"""{INTERRUPT}
def slow(value):
    interrupt_the_wait()
    go.wait(30)
    print("it went on")
jax.jit(lambda x: hcb.tap(slow, x))(jnp.float32(1)); None
"""

STOPPED = """
def stopped(x):
    hcb.breakpoint()
    return x + 1
print(jax.jit(stopped)(jnp.float32(41)))
"""


FAILS = (
    """
import jax, hostcallback as hcb
f = jax.jit(lambda x: (hcb.check(x < 0, "x is {}", x), x)[1])
f(1.0); None
""",
    "print('the next cell')",
    "f(2.0)\nhcb.barrier_wait()",
    "with hcb.error_collector() as errors:\n    f(3.0)",
    "print(sum(check.count for check in errors.failed_checks))",
)


def test_a_failure_stands_below_its_cell_and_its_report_has_the_users_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in FAILS])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True).execute()
    shown = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert re.fullmatch(r"check at .* \(<lambda>\) failed on cpu:0: x is 1.0\n", shown[0])
    assert shown[1] == "the next cell\n"
    for text, line in ((shown[2], "hcb.barrier_wait()"), (shown[3], "with hcb.error_collector() as errors:")):
        files = re.findall(r'File "([^"]+)"', text)
        # IPython's own frame, which ran the cell, is that of every group.
        assert [file for file in files if "ipykernel_" not in file.rpartition("/")[0]] == [files[0]]
        assert "interactiveshell.py" in files[0]
        assert line in text
        assert "CheckError: x is" in text
    assert shown[4] == "1\n"


def test_output_is_in_the_cell_that_ran_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    page = (ROOT / "docs" / "notebooks.md").read_text()
    example, plot = re.findall(r"```python\n(.*?)```", page, re.S)
    sources = [
        LONG_LOOP,
        "f(jnp.int32(40)); None",
        "1 + 1",
        "f(jnp.int32(2)); None",
        RAISES,
        PROGRESS,
        example,
        f"import os; os.chdir({str(tmp_path)!r})\n{plot}",
        INTERRUPTED,
        "go.set()",
        "import base64; print(base64.b64encode(plot._repr_png_()).decode())",
        EAGER,
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
    # A live plot is one picture, which was replaced by its last state.
    assert (tmp_path / "training.png").exists()
    (picture,) = [output for output in notebook.cells[7].outputs if output.output_type == "display_data"]
    assert picture.data["image/png"].strip() == shown[10].strip() != ""
    assert shown[7] == ""
    # The interrupt ends the wait, not the program.
    assert "the wait for the taps of this cell was interrupted" in shown[8]
    assert "it went on" not in shown[8]
    assert "it went on" in shown[9]
    # Without ipywidgets a bar is a line that is drawn again; with it, a widget.
    lines = [line for line in shown[11].split("\n") if "eager" in line]
    widgets = [output for output in notebook.cells[11].outputs if output.output_type == "display_data"]
    assert len(lines + widgets) == 1
    assert "10/10" in shown[11] + str(widgets)


BACKGROUND = (
    """
import threading, jax, jax.numpy as jnp, hostcallback as hcb
def endless(x):  # and not so cheap that XLA runs it on the thread that calls it
    def body(c):
        return c[0] + 1e-3, c[1] @ c[1] * 1e-3
    return hcb.while_loop(lambda c: c[0] > 0, body, (x, jnp.ones((300, 300))), progress=False, stop=True)
train = jax.jit(endless).lower(jnp.float32(1)).compile()
other = jax.jit(lambda x: hcb.id_print(x, name="other"))
other(jnp.float32(0)); None
""",
    """
thread = threading.Thread(target=lambda: jax.block_until_ready(train(jnp.float32(1))))
thread.start()
""",
    "other(jnp.float32(1)); None",
    "print(thread.is_alive())",
    "hcb.request_stop('enough'); thread.join(60); hcb.clear_stop(); print(thread.is_alive())",
    # Without stop=True: the first Ctrl-C in a loop that can be stopped requests a stop.
    f"""{INTERRUPT}
def until_enough(x):
    x = hcb.id_tap(lambda value: None, x)
    def body(c):
        return c[0] + 1, c[1] @ c[1] * 1e-3
    return jax.lax.while_loop(lambda c: ~hcb.knob("enough", False), body, (x, jnp.ones((300, 300))))
held = jax.jit(until_enough).lower(jnp.float32(1)).compile()
threading.Thread(target=interrupt_the_wait).start()
result = held(jnp.float32(1)); None
""",
    "print(result[1].is_ready())",
    "hcb.knobs['enough'] = True; jax.block_until_ready(result); other(jnp.float32(2)); None",
    "hcb.barrier_wait()",
)


def test_cells_do_not_wait_for_programs_that_they_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in BACKGROUND])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    shown = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert shown[:2] == ["0.\n", ""]
    # What a cell prints comes in it, unless it takes longer than a cell waits while others' programs run.
    assert {"1.", "True", "False"} <= set("".join(shown[2:5]).split())
    assert "True\n" in shown[3]
    assert shown[4].endswith("False\n")
    assert "was interrupted" in shown[5]
    assert shown[6] == "False\n"
    assert (shown[7] + shown[8]).endswith("2.\n")


def test_a_breakpoint_asks_in_the_cell_and_fails_where_there_is_no_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("PYTHONPATH", python_path())
    manager, client = start_new_kernel(kernel_name="python3")
    shown: list[str] = []
    commands = iter(["p x", "c"])

    def show(message: dict[str, Any]) -> None:
        content = message["content"]
        shown.append(content.get("text", "") + content.get("evalue", ""))

    def execute(code: str, allow_stdin: bool) -> str:
        shown.clear()
        client.execute_interactive(
            code,
            allow_stdin=allow_stdin,
            stdin_hook=lambda _: client.input(next(commands)),
            output_hook=show,
            timeout=60,
        )
        return "".join(shown)

    try:
        text = execute(f"import jax, jax.numpy as jnp, hostcallback as hcb\n{STOPPED}", True)
        assert "array(41., dtype=float32)" in text
        assert text.endswith("42.0\n")
        assert "BreakpointError" in execute(STOPPED, False)
        assert execute("print(1 + 1)", False).endswith("2\n")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
