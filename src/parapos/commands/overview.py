"""What `parapos --help` shows: the commands by what people want to do, each with an example; and shell completion."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any

from .base import Parser, UserError, command

GROUPS = {
    "See what it does": ("demo", "explore", "doctor"),
    "Train and judge a model": ("train", "eval", "sweep"),
    "Use a trained model": ("predict", "analyze"),
    "Repeat the paper, or make a table of your own": ("table", "figure"),
    "Prepare data, exchange models": ("prepare", "import", "export"),
    "Measure speed and memory": ("bench",),
    "Set up": ("completion",),
}
OTHER = "More"  # what no group names
WIDEST = 110  # characters of a line, in a terminal that has room for them


class Overview(Parser):
    """The parser of the whole command line, whose help groups the commands."""

    def format_help(self) -> str:
        (action,) = (a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        parsers: dict[str, argparse.ArgumentParser] = action.choices
        summaries = {choice.dest: str(choice.help) for choice in action._choices_actions}
        unnamed = tuple(name for name in parsers if not any(name in group for group in GROUPS.values()))
        lines = [f"usage: {self.prog} COMMAND [OPTIONS]", "", self.description or "", ""]
        width, columns = max(map(len, parsers)) + 2, min(WIDEST, shutil.get_terminal_size().columns)
        for title, names in {**GROUPS, OTHER: unnamed}.items():
            shown = [name for name in names if name in parsers]
            if not shown:
                continue
            lines.append(f"{title}:")
            for name in shown:
                summary, indent = summaries[name].split(". ")[0].rstrip("."), " " * (width + 2)
                lines += textwrap.wrap(summary, columns, initial_indent=f"  {name:{width}}", subsequent_indent=indent)
                lines.append(f"  {'':{width}}  {(parsers[name].epilog or '').removeprefix('example: ')}")
            lines.append("")
        lines.append(f"{self.prog} COMMAND --help explains a command. Options of every command:")
        for option in self._actions:
            if option.option_strings and option is not action:
                name = ", ".join(option.option_strings) + (f" {option.metavar}" if option.metavar else "")
                lines.append(f"  {name:20}  {option.help}")
        return "\n".join(lines) + "\n"


def _completion(top: argparse.ArgumentParser, shell: str) -> None:
    try:
        import shtab
    except ImportError as error:
        raise UserError(f"parapos completion: {error}; install it with: pip install 'parapos[completion]'") from None
    print(shtab.complete(top, shell=shell))


def add(commands: Any, top: argparse.ArgumentParser) -> None:
    """Adds the command to a parser."""
    completion = command(
        commands,
        "completion",
        "Print a script that makes a shell complete commands and options.",
        "parapos completion bash > ~/.local/share/bash-completion/completions/parapos",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell that is to complete")
    completion.set_defaults(run=lambda args: _completion(top, args.shell))
