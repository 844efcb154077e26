"""The project's own linter finds what it is for, wherever it hides, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "lint_project.py"), str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("hostcallback/api.py", "from jax._src import core", "private name jax._src.core"),
        ("hostcallback/api.py", "import jax._src.core as c", "private name jax._src.core"),
        ("hostcallback/api.py", "import jax\njax._src.core", "private name jax._src"),
        ("hostcallback/api.py", "import jax as j\nj.lax._x", "private name jax.lax._x"),
        ("hostcallback/api.py", "from jaxlib import xla_client", "private name jaxlib.xla_client"),
        ("tests/test_x.py", "from jax._src import core", "private name jax._src.core"),
        ("receiver/messages/message.py", "import jax", "receiver/ imports jax"),
        ("receiver/messages/message.py", "def f():\n    from jax import lax", "receiver/ imports jax"),
        ("receiver/messages/message.py", "import hostcallback", "receiver/ imports hostcallback"),
        ("receiver/messages/message.py", "import grpc", "grpc outside receiver/remote/"),
        ("hostcallback/api.py", "from grpc import aio", "grpc outside receiver/remote/"),
        ("tests/test_x.py", "import time\ntime.sleep(1)", "time.sleep in a test"),
        ("tests/a/test_x.py", "from time import sleep as s", "time.sleep in a test"),
        ("tests/test_x.py", "import time as t\nt.sleep(1)", "time.sleep in a test"),
    ],
)
def test_a_broken_rule_is_named_with_file_line_and_cure(
    tmp_path: Path, path: str, code: str, message: str
) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(code + "\n")
    result = lint(tmp_path)
    assert result.returncode == 1, result.stdout
    assert result.stdout.startswith(f"{path}:{code.count(chr(10)) + 1}: {message}")
    assert "1 files, 1 violations" in result.stdout


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("hostcallback/_jax_compat.py", "from jax._src import core"),
        ("hostcallback/api.py", "import jax\njax.__version__\njax.lax.scan"),
        ("hostcallback/api.py", "import jaxlib\njaxlib.__version__"),
        ("receiver/remote/client.py", "import grpc"),
        ("tests/test_x.py", "import grpc, jax, receiver"),
        ("tools/bench.py", "import time\ntime.sleep(1)"),
        ("receiver/messages/message.py", "'import jax'  # jax._src"),
        ("receiver/messages/message.py", "from .jax import x"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, path: str, code: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(code + "\n")
    result = lint(tmp_path)
    assert result.returncode == 0, result.stdout


def test_this_checkout_keeps_the_rules() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout
