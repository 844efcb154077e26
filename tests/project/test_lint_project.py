"""The project's own linter finds every planted violation, and reports nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from checkout import ROOT
from python_process import run_python


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    return run_python(ROOT / "tools" / "lint_project.py", root, timeout_sec=60)


def lint_file(file: Path, text: str, root: Path) -> subprocess.CompletedProcess[str]:
    """What is found in the one file of a checkout."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")
    return lint(root)


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("hostcallback/api.py", "from jax._src import core", "private name jax._src.core"),
        ("hostcallback/api.py", "import jax._src.core as c", "private name jax._src.core"),
        ("hostcallback/api.py", "import jax\njax._src.core", "private name jax._src"),
        ("hostcallback/api.py", "import jax as j\nj.lax._x", "private name jax.lax._x"),
        ("hostcallback/api.py", "from jaxlib import xla_client", "private name jaxlib.xla_client"),
        ("tests/test_x.py", "from jax._src import core", "private name jax._src.core"),
        ("hostcallback/_jax_compat.py", "from jax._src import core", "private name jax._src.core"),
        ("hostcallback/api.py", "import jax\njax.__version_info__", "version of JAX"),
        ("hostcallback/api.py", "from jax import __version_info__", "version of JAX"),
        ("hostcallback/receiver/messages.py", "import jax", "receiver/ imports jax"),
        ("hostcallback/receiver/messages.py", "def f():\n    from jax import lax", "receiver/ imports jax"),
        ("hostcallback/receiver/messages.py", "import hostcallback", "receiver/ imports hostcallback"),
        (
            "hostcallback/receiver/messages.py",
            "from hostcallback import api",
            "receiver/ imports hostcallback",
        ),
        (
            "hostcallback/receiver/wire/frame.py",
            "from hostcallback.receivers import x",
            "receiver/ imports hostcallback",
        ),
        ("hostcallback/receiver/messages.py", "import grpc", "grpc outside receiver/remote/"),
        ("hostcallback/api.py", "from grpc import aio", "grpc outside receiver/remote/"),
        ("hostcallback/receiver/x.py", "f(error.details() or '')", "another program's text without foreign"),
        ("hostcallback/receiver/x.py", "f(str(answer['error']))", "another program's text without foreign"),
        (
            "hostcallback/receiver/x.py",
            "f(answer.get('error', ''))",
            "another program's text without foreign",
        ),
        ("hostcallback/receiver/x.py", "f(partial.error_message)", "another program's text without foreign"),
        ("tests/test_x.py", "import time\ntime.sleep(1)", "time.sleep in a test"),
        ("tests/a/test_x.py", "from time import sleep as s", "time.sleep in a test"),
        ("tests/test_x.py", "import time as t\nt.sleep(1)", "time.sleep in a test"),
    ],
)
def test_a_broken_rule_is_named_with_file_line_and_cure(
    tmp_path: Path, path: str, code: str, message: str
) -> None:
    result = lint_file(tmp_path / path, code, tmp_path)
    assert result.returncode == 1, result.stdout
    assert result.stdout.startswith(f"{path}:{code.count(chr(10)) + 1}: {message}")
    assert "1 files, 1 violations" in result.stdout


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("hostcallback/_jax_compat/dispatch.py", "from jax._src import core"),
        ("hostcallback/_jax_compat/versions.py", "import jax\njax.__version_info__"),
        ("tests/test_x.py", "import jax\njax.__version_info__"),
        ("hostcallback/api.py", "import jax\njax.__version__\njax.lax.scan"),
        ("hostcallback/api.py", "import jaxlib\njaxlib.__version__"),
        ("hostcallback/receiver/remote/client.py", "import grpc"),
        ("hostcallback/receiver/x.py", "f(foreign(error.details()), foreign(found['error']))"),
        ("hostcallback/receiver/x.py", "found['error'] = error"),
        ("tests/test_x.py", "import grpc, jax, hostcallback"),
        (
            "hostcallback/receiver/wire/frame.py",
            "import hostcallback.receiver.wire\nfrom hostcallback import receiver",
        ),
        ("tools/bench.py", "import time\ntime.sleep(1)"),
        ("hostcallback/receiver/messages.py", "'import jax'  # jax._src"),
        ("hostcallback/receiver/messages.py", "from .jax import x"),
    ],
)
def test_allowed_code_passes(tmp_path: Path, path: str, code: str) -> None:
    result = lint_file(tmp_path / path, code, tmp_path)
    assert result.returncode == 0, result.stdout


def test_a_long_file_and_a_folder_of_many_modules_are_found(tmp_path: Path) -> None:
    ring = tmp_path / "hostcallback" / "receiver" / "native" / "ring"
    ring.mkdir(parents=True)
    vendored = tmp_path / "hostcallback" / "receiver" / "native" / "third_party"
    vendored.mkdir()
    (vendored / "long.h").write_text("//\n" * 501)
    for number in range(15):
        (ring / f"m{number}.cc").touch()
        (ring / f"m{number}.h").touch()
    (ring / "__init__.py").write_text("x = 1\n" * 500)
    assert lint(tmp_path).returncode == 0
    (ring / "m0.cc").write_text("//\n" * 501)
    (ring / "m15.py").touch()
    found = lint(tmp_path).stdout
    assert "hostcallback/receiver/native/ring:1: 16 modules, at most 15" in found
    assert "hostcallback/receiver/native/ring/m0.cc:501: 501 lines, at most 500" in found


def test_two_test_modules_of_one_name_are_found(tmp_path: Path) -> None:
    for folder in ("tests/one", "tests/two"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_it.py").touch()
    assert (
        "tests/two/test_it.py:1: tests/one/test_it.py has the same name: rename one" in lint(tmp_path).stdout
    )


@pytest.mark.parametrize(
    ("path", "text", "line", "idiom"),
    [
        ("README.md", "The log\nis beside it.", 2, "beside"),
        ("CHANGELOG.md", "- It waits for ever.", 1, "for ever"),
        ("docs/control.md", "Rules apply by\nway of a file.", 1, "by way of"),
        ("hostcallback/tap.py", '"""A module.\n\nNobody waits."""', 3, "Nobody"),
        ("hostcallback/receiver/tap.py", 'def f():\n    """Traces anew."""', 2, "anew"),
        ("hostcallback/receiver/tap.py", "x = 1  # has a thread of its own", 1, "of its own"),
        ("hostcallback/receiver/tap.py", "x = 1\n# It goes by\n# way of a spool.", 2, "by way of"),
        ("tests/test_x.py", "raise ValueError('whoever calls')", 1, "whoever"),
        ("tools/x.py", "print(f'{1} is through')", 1, "is through"),
        ("examples/x.py", "print('so '\n'many')", 1, "so many"),
        ("hostcallback/receiver/native/ring/ring.cc", "int x;  // somebody waits", 1, "somebody"),
        ("hostcallback/receiver/native/ring/ring.h", "// So\n// it is as\n// ever.", 2, "as ever"),
        ("tests/native/stress.cc", "// likewise", 1, "likewise"),
    ],
)
def test_an_idiom_is_found_wherever_people_read(
    tmp_path: Path, path: str, text: str, line: int, idiom: str
) -> None:
    result = lint_file(tmp_path / path, text, tmp_path)
    assert result.returncode == 1, result.stdout
    assert result.stdout.startswith(f'{path}:{line}: "{idiom}" in prose')
    assert "1 violations" in result.stdout


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/convert.md", "Besides, `hcb convert --beside PROFILE` writes both. Renewed."),
        ("hostcallback/receiver/tap.py", "beside = {}\nx = f'{beside}'\nwhoever = 1"),
        (
            "hostcallback/receiver/native/ring/ring.cc",
            'int beside = 1;  // plain\nchar* url = "https://beside";',
        ),
        ("hostcallback/receiver/native/third_party/xla/c_api.h", "// beside"),
    ],
)
def test_names_in_code_and_allowed_texts_are_not_idioms(tmp_path: Path, path: str, text: str) -> None:
    result = lint_file(tmp_path / path, text, tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_this_checkout_keeps_the_rules() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("guard", ["HOSTCALLBACK_RING_H_", "HOSTCALLBACK_BLOCK_H_"])
def test_a_header_is_guarded_by_its_path(tmp_path: Path, guard: str) -> None:
    header = tmp_path / "hostcallback" / "receiver" / "native" / "ring" / "block.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#ifndef {guard}\n#define {guard}\n#endif\n")
    wrong = lint(tmp_path)
    assert (wrong.returncode, wrong.stdout.count("must be HOSTCALLBACK_RING_BLOCK_H_")) == (1, 1)
    header.write_text("#ifndef HOSTCALLBACK_RING_BLOCK_H_\n#define HOSTCALLBACK_RING_BLOCK_H_\n#endif\n")
    assert lint(tmp_path).returncode == 0
