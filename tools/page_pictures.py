"""Writes the pictures of docs/ui.md and docs/notebooks.md: `python -m tools.page_pictures`.

Needs the extra `browser`, and Chromium.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import nbclient
import nbconvert
import nbformat
from playwright.sync_api import sync_playwright

import hostcallback as hcb
from hostcallback.receiver.ui.server.serving import Listening, serve_logs

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
STEPS, TIMED_STEPS = 3000, 400

PICTURES = (
    # log, name, tab, width, height, scale
    ("runs", "ui-errors", "Errors", 1200, 620, 1),
    ("runs", "ui-charts", "Charts", 1200, 980, 1),
    ("runs", "ui-runs", "Runs", 1200, 420, 1),
    ("runs", "ui-compare", "Compare", 1200, 760, 1),
    ("runs", "ui-phone", "Charts", 390, 760, 2),
    ("timed", "ui-time", "Time", 1200, 1000, 1),
)

CELLS = (
    """\
import jax, jax.numpy as jnp
import hostcallback as hcb""",
    """\
def step(i, w):
    grad = 2 * (w - 3) + jax.random.normal(jax.random.key(i))
    loss = (w - 3) ** 2
    hcb.metrics({"loss": loss, "grad": grad}, step=i)
    jax.lax.cond(i % 100 == 0, lambda: hcb.print("step {}: loss {:.3f}", i, loss), lambda: None)
    return w - 0.01 * grad

@jax.jit
def train(w):
    return hcb.fori_loop(0, 300, step, w, progress="train")

with hcb.live_plot("loss", "grad", log="loss"):
    train(jnp.float32(0))""",
    """\
@jax.jit
def root(x, i):
    hcb.check(x > 0, "x is {}, not positive", x, step=i)
    return jnp.sqrt(x)

for i in range(4):
    root(jnp.float32(2 - i), i)""",
    """\
try:
    hcb.barrier_wait()
except* hcb.CheckError as group:
    display(group.exceptions[0])""",
)
"""Of the notebook."""


@jax.jit
def train(rate: Any, key: Any) -> Any:
    """Descends to a noisy minimum; its gradient is too large now and then."""

    def step(number: Any, state: Any) -> Any:
        weights, key = state
        key, sub = jax.random.split(key)
        noise = jax.random.normal(sub, weights.shape)
        gradient = weights + 0.6 * noise * (1 + 6 * (number % 997 == 500))
        norm = jnp.linalg.norm(gradient)
        grid = jnp.linspace(0, 5, 64)
        loss = 0.5 * jnp.mean(weights**2) + 0.02 * jnp.abs(noise[0])
        hcb.metrics({"loss": loss, "gradient": norm}, step=number)
        hcb.check(norm < 30.0, "the norm of the gradient is {norm}", norm=norm)
        hcb.id_tap(ignore, {"step": number, "weights": weights}, name="layer_1")
        wave = 0.5 + 0.5 * jnp.sin(jnp.outer(grid, grid) + weights[0] + number / 99)
        hcb.metrics({"activation": hcb.image(wave)}, step=number)
        return weights - rate * gradient, key

    return jax.lax.fori_loop(0, STEPS, step, (4.0 * jnp.linspace(-1, 2, 64), key))


@jax.jit
def step(weights: Any, batch: Any, number: Any) -> Any:
    """A training step of six layers, which are places that are timed."""

    def loss_of(weights: Any) -> Any:
        x = batch
        for i, (mixing, out) in enumerate(weights):
            with jax.named_scope(f"layers/{i}"):
                x = x + jax.nn.softmax(x @ mixing @ x.T) @ x
                x = x / jnp.linalg.norm(x, axis=1, keepdims=True) + jnp.tanh(x @ out)
        return jnp.mean((x - batch[::-1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    hcb.metrics({"loss": loss}, step=number)
    return jax.tree.map(lambda weight, gradient: weight - 0.3 * gradient, weights, gradients)


def record_times(folder: Path) -> None:
    """Records a training with the times of its layers."""
    keys = jax.random.split(jax.random.key(0), 13)
    matrices = [jax.random.normal(key, (256, 256)) / 16 for key in keys]
    weights = list(zip(matrices[:6], matrices[6:12], strict=True))
    with (
        hcb.outfeed_receiver(record=folder),
        hcb.observe(where="layers/*", what="time", name="layers", tap_func=ignore),
    ):
        for number in range(TIMED_STEPS):
            weights = jax.block_until_ready(step(weights, matrices[12], number))


def ignore(value: Any) -> None:
    """A tap function: the log is what is looked at."""


def record(folder: Path) -> None:
    """Records two runs that differ in their rate."""
    for run, rate in (("slow", 0.002), ("fast", 0.004)):
        config = {"rate": rate, "steps": STEPS, "notes": f"the {run} one"}
        with (
            hcb.record(folder, run=run, config=config) as recorder,
            hcb.outfeed_receiver(sinks=[recorder], on_error="warn"),
        ):
            jax.block_until_ready(train(jnp.float32(rate), jax.random.key(7)))


def executed() -> Any:
    """Executes the cells in a kernel, and returns the notebook with what they show."""
    os.environ["PYTHONWARNINGS"] = "ignore"  # of tqdm: that there are no widgets
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    return nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", coalesce_streams=True
    ).execute()


def take_notebook(browser: Any, notebook: Any) -> None:
    """Writes the pictures of a notebook."""
    for theme, suffix in (("light", ""), ("dark", "-dark")):
        shown, _ = nbconvert.HTMLExporter(theme=theme).from_notebook_node(notebook)
        context = browser.new_context(viewport={"width": 940, "height": 600}, offline=True)
        page = context.new_page()
        page.set_content(shown, wait_until="domcontentloaded")
        page.screenshot(path=IMAGES / f"notebook{suffix}.png", full_page=True)
        context.close()


def main() -> None:
    """Records, serves the logs, and takes the pictures, light and dark."""
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    record(folder / "runs")
    record_times(folder / "timed")
    notebook = executed()
    servers = {log: serve_logs([log], Listening()) for log in ("runs", "timed")}
    try:
        with sync_playwright() as playwright:
            program = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            for log, *picture in PICTURES:
                for scheme, suffix in (("light", ""), ("dark", "-dark")):
                    take(browser, servers[log].address, scheme, suffix, *picture)
            take_notebook(browser, notebook)
            browser.close()
    finally:
        for server in servers.values():
            server.close()
        shutil.rmtree(folder)


def take(
    browser: Any,
    address: str,
    scheme: str,
    suffix: str,
    name: str,
    tab: str,
    width: int,
    height: int,
    scale: int,
) -> None:
    """Writes one picture, once what it shows has been drawn."""
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=scale)
    page = context.new_page()
    page.goto(address)
    page.get_by_role("tab", name=tab).click()
    page.locator("section:not([hidden]) :is(canvas, .source, small)").first.wait_for()
    page.wait_for_timeout(2500)  # the slower cards
    page.screenshot(path=IMAGES / f"{name}{suffix}.png")
    context.close()


if __name__ == "__main__":
    main()
