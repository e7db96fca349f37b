"""What all commands share: how arguments are read, and how a user's mistake is reported."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..text import nearest

SPLITS = ("train", "val", "test")


class UserError(Exception):
    """Something on the command line is wrong; the message is for the user."""


class Parser(argparse.ArgumentParser):
    """Shows defaults in help, and reports an error in one line instead of the whole usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        see = " See" if message.endswith("?") else "; see"
        raise UserError(f"{self.prog}: {message}{see} {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = nearest(str(value), [str(choice) for choice in action.choices or ()])
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not (value.isdecimal() and low <= int(value) <= high):
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got {value!r}")
        return int(value)

    return parse


def number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Parses numbers that fit; what is no number is judged as NaN."""

    def parse(value: str) -> float:
        try:
            parsed = float(value)
        except ValueError:
            parsed = math.nan
        if not fits(parsed):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {value!r}")
        return parsed

    return parse


seconds = number("a positive number of seconds", lambda value: 0 < value < math.inf)


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(value: str) -> list[str]:
        words = value.split(",")
        for name in words:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}, expected some of {','.join(known)}")
        if (twice := repeated(words)) is not None:
            raise argparse.ArgumentTypeError(f"expected each once, got {twice} twice")
        return words

    return parse


def repeated(things: Sequence[str]) -> str | None:
    """The first that is there a second time."""
    return next((thing for place, thing in enumerate(things) if thing in things[:place]), None)


def several(parse: Callable[[str], int]) -> Callable[[str], list[int]]:
    return lambda value: [parse(part) for part in value.split(",")]


def image_size(value: str) -> int:
    if not (value.isdecimal() and 16 <= int(value) <= 8192 and int(value) % 16 == 0):
        raise argparse.ArgumentTypeError(f"expected a multiple of 16 from 16 to 8192, got {value!r}")
    return int(value)


def sides(value: str) -> int | tuple[int, int]:
    """A side in pixels, or HEIGHTxWIDTH."""
    parts = value.split("x")
    if len(parts) > 2 or not all(part.isdecimal() and 1 <= int(part) <= 65536 for part in parts):
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH or a whole number from 1 to 65536, got {value!r}")
    return int(value) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def command(commands: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=summary, epilog=f"example: {example}")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def wrote(paths: Sequence[Path]) -> None:
    for path in paths:
        tell(f"wrote {path}")


def describe(error: Exception) -> str:
    """An error in one line; one of a file as "file: what is wrong"."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split("\n")) or type(error).__name__


def guarded(name: str, work: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """The work of a command, with its errors as one line and missing packages by the name of what brings them."""

    def run(args: argparse.Namespace) -> None:
        try:
            from ..data import FormatError
            from ..experiments.store import ReportError
            from ..training.callbacks import Stopped
            from ..training.checkpoint import CheckpointError
            from ..training.module import NonFiniteLoss
            from ..training.recipe import RecipeError
        except ImportError as error:
            raise UserError(f"parapos {name}: {error}; install it with: pip install 'parapos[train,report]'") from None
        try:
            work(args)
        except (RecipeError, CheckpointError, FormatError, ReportError, OSError) as error:
            raise UserError(f"parapos {name}: {describe(error)}") from None
        except ModuleNotFoundError as error:
            raise UserError(f"parapos {name}: {error}; install it with: pip install 'parapos[train,report]'") from None
        except Stopped as stop:
            tell(str(stop))
            raise SystemExit(128 + stop.signal) from None
        except NonFiniteLoss as error:
            tell(str(error))
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            tell(f"parapos {name}: stopped; run the same command again to resume")
            raise SystemExit(130) from None

    return run


def judge(found: Any, *, show: bool = True, most: int = 20) -> None:
    """Prints what a check of data found and at most so many problems; with any, ends with exit code 1. show: also print
    if nothing is wrong."""
    from ..text import table

    if show or found.problems:
        print(table(["", "found", "expected"], found.rows))
    for problem in found.problems[:most]:
        print(problem)
    if len(found.problems) > most:
        print(f"and {len(found.problems) - most} more")
    if found.problems:
        raise SystemExit(1)
