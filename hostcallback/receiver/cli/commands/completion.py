"""`hcb completion`: prints the script that completes hcb in a shell."""

from __future__ import annotations

import argparse

from hostcallback.receiver.cli.completion import SHELLS, script

EXAMPLES = """\
Completes commands, options, files, and what a log or a process has: names of taps, runs, devices, process ids.
Needs the package argcomplete: pip install 'hostcallback[completion]'.

  bash   eval "$(hcb completion bash)"            in ~/.bashrc
  zsh    eval "$(hcb completion zsh)"             in ~/.zshrc, after compinit
  fish   hcb completion fish | source             in ~/.config/fish/config.fish
  tcsh   eval `hcb completion tcsh`               in ~/.tcshrc
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    print(script(arguments.shell))
    return 0
