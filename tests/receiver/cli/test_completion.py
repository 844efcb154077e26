"""A shell completes `hcb`: commands, options, values, files, and what is in a log."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hostcallback
from hcb_command import environment, hcb

pytest.importorskip("argcomplete", reason="needs pip install 'hostcallback[completion]'")

# What bash does for Tab, in as many words as there are: the line, and the cursor at its end.
ASK = """
eval "$(hcb completion bash)"
while IFS= read -r line; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9
    COMPREPLY=()
    _python_argcomplete hcb
    printf '%s|' "${COMPREPLY[@]}"
    echo
done
"""


def on_path(folder: Path) -> Path:
    """Puts a command `hcb` of the packages under test into a folder."""
    command = folder / "bin" / "hcb"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hostcallback.receiver.cli "$@"\n')
    command.chmod(0o755)
    return command.parent


def completed(folder: Path, *lines: str) -> list[set[str]]:
    """The words that bash offers at the end of each line."""
    path = f"{on_path(folder)}:/usr/bin:/bin"
    asked = subprocess.run(
        [shutil.which("bash") or "bash", "--norc", "-c", ASK],
        input="".join(f"{line}\n" for line in lines),
        cwd=folder,
        env=environment(folder, PATH=path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert not asked.stderr
    return [{word.strip() for word in line.split("|") if word} for line in asked.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_values_files_and_names_of_a_log(tmp_path: Path) -> None:
    with hostcallback.outfeed_receiver(record=tmp_path / "log"):
        for name in ("loss", "layer0/grad", "layer1/grad"):
            hostcallback.tap(lambda value: None, 1.0, name=name)
    commands, command, option, value, file, taps, tap, runs, nothing = completed(
        tmp_path, "hcb ", "hcb re", "hcb cat --js", "hcb convert log --to p", "hcb cat lo", "hcb cat log --name ",
        "hcb stats log --name lo", "hcb cat log --run al", "hcb cat missing --name ",
    )  # fmt: skip
    assert {"cat", "collect", "help", "completion"} <= commands
    assert command == {"replay", "recover", "reproduce"}
    assert option == {"--json"}
    assert value == {"parquet"}
    assert file == {"log/"}
    assert taps == {"loss", "layer0/grad", "layer1/grad"}
    assert tap == {"loss"}
    assert runs == {"all"}
    assert nothing == set()


HOSTILE = (
    "a$(touch pwned)b",
    "a`touch pwned`c",
    "a;touch pwned",
    "a\x1b]0;owned\x07d",
    "a 'b\" c",
    "a\ntouch pwned",
)


@pytest.fixture
def hostile_names(tmp_path: Path) -> Path:
    """A folder with a log whose taps have names that a shell or a terminal could obey."""
    with hostcallback.outfeed_receiver(record=tmp_path / "log"):
        for name in (*HOSTILE, "loss"):
            hostcallback.tap(lambda value: None, 1.0, name=name)
    return tmp_path


OFFERED = {
    "a$(touch pwned)b",
    "a`touch pwned`c",
    "a;touch pwned",
    "a?]0;owned?d",
    "a 'b\" c",
    "a?touch pwned",
}
"""What is completed for these names: patterns that match them."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_options_and_names_of_anybodys_log(hostile_names: Path) -> None:
    def completed_by_fish(line: str) -> set[str]:
        asked = subprocess.run(
            ["fish", "--no-config", "-c", "hcb completion fish | source; complete -C $argv[1]", line],
            cwd=hostile_names, env=environment(hostile_names, PATH=path), capture_output=True, text=True, timeout=60,
            check=True,
        )  # fmt: skip
        return {offered.partition("\t")[0] for offered in asked.stdout.split("\n") if offered}

    path = f"{on_path(hostile_names)}:/usr/bin:/bin"
    assert completed_by_fish("hcb recov") == {"recover"}
    assert completed_by_fish("hcb cat --js") == {"--json"}
    assert completed_by_fish("hcb cat log --name lo") == {"loss"}
    assert completed_by_fish("hcb cat log --name a") == OFFERED
    assert not (hostile_names / "pwned").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_commands_options_and_names_of_anybodys_log(hostile_names: Path) -> None:
    # `compinit` needs a terminal: zsh's own module for one types the line and the Tab.
    ask = """
    zmodload zsh/zpty
    zpty shell zsh -f -i
    zpty -w shell 'PS1=READY; autoload -U compinit; compinit -u; autoload -U bashcompinit; bashcompinit'
    zpty -w shell 'eval "$(hcb completion zsh)"; echo LOAD''ED'
    zpty -r -m shell found '*LOADED*'
    zpty -w -n shell $1
    zpty -r -m shell found "*$2*" && print -r -- "$found"
    """

    def completed_by_zsh(line: str, wanted: str) -> str:
        asked = subprocess.run(
            ["zsh", "-f", "-c", textwrap.dedent(ask), "zsh", line, wanted],
            cwd=hostile_names, env=environment(hostile_names, PATH=path, TERM="dumb"), capture_output=True,
            timeout=60, check=True,
        )  # fmt: skip
        return asked.stdout.decode()

    path = f"{on_path(hostile_names)}:/usr/bin:/bin"
    assert "hcb recover" in completed_by_zsh("hcb recov\t", "recover")
    assert "--name loss" in completed_by_zsh("hcb cat log --name lo\t", "loss")
    offered = completed_by_zsh("hcb cat log --name a\t\t", "owned?d")
    assert "a?]0;owned?d" in offered
    assert "\x1b]0;" not in offered
    assert not (hostile_names / "pwned").exists()


def test_each_shell_has_a_script_and_an_unknown_one_a_suggestion(tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish", "tcsh"):
        result = hcb(tmp_path, "completion", shell)
        assert (result.returncode, result.stderr) == (0, "")
        assert "hcb" in result.stdout
    assert "Did you mean fish?" in hcb(tmp_path, "completion", "fsh").stderr


def test_without_the_package_the_error_has_the_pip_command(tmp_path: Path) -> None:
    refused = tmp_path / "no_jax" / "argcomplete.py"
    refused.parent.mkdir()
    refused.write_text("raise ImportError")
    result = hcb(tmp_path, "completion", "bash", TERM="dumb")  # a variable: in a separate process
    assert result.returncode == 1
    assert result.stderr == (
        "hcb: completion needs the package argcomplete: pip install 'hostcallback[completion]'\n"
    )


def test_help_of_a_command_is_that_of_the_option(tmp_path: Path) -> None:
    assert hcb(tmp_path, "help", "cat").stdout == hcb(tmp_path, "cat", "--help").stdout
    assert hcb(tmp_path, "help").stdout == hcb(tmp_path, "--help").stdout
    wrong = hcb(tmp_path, "help", "statz")
    assert wrong.returncode == 2
    assert "Did you mean stats?" in wrong.stderr
