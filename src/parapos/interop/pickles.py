"""Looks through the pickle of a checkpoint before anything is made of it.

PyTorch's loader of weights runs no foreign code, but it does make what a pickle asks for: a bytearray of any length, or
a dictionary key whose hash takes years or overflows the stack. So the instructions are read first, as text. Only those
pass that `torch.save` writes for a dictionary of tensors.
"""

from __future__ import annotations

import pickletools
import re

LARGEST = 1 << 22  # bytes; a network of a thousand tensors takes about a tenth of a megabyte
LONGEST = 512  # letters of a name
TEXT, EMPTY, TUPLE, VALUE, MARK = "text", "empty tuple", "tuple", "value", "mark"
ORDERED = "collections OrderedDict"
REBUILDS = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
STORAGE = re.compile(r"torch (\w+Storage)|torch\.storage (Typed|Untyped)Storage")
PUSHES = {
    **dict.fromkeys(("EMPTY_DICT", "BININT", "BININT1", "BININT2", "LONG1", "NEWTRUE", "NEWFALSE"), VALUE),
    "BINUNICODE": TEXT,
    "EMPTY_TUPLE": EMPTY,
    "MARK": MARK,
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PickleError(ValueError):
    """The pickle is not that of a dictionary of tensors. The message says what it asks for."""


def check(data: bytes) -> None:
    """A PickleError for a pickle that is not that of a dictionary of tensors."""
    if len(data) > LARGEST:
        raise PickleError(f"its pickle has {len(data)} bytes, expected at most {LARGEST}")
    stack: list[str] = []
    memo: dict[int, str] = {}
    try:
        for instruction, argument, _ in pickletools.genops(data):
            _follow(instruction.name, argument, stack, memo)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError) as error:
        raise PickleError(f"its pickle is broken: {error}"[:200]) from None


def _follow(name: str, argument: object, stack: list[str], memo: dict[int, str]) -> None:
    """Does to the stack what an instruction would do, with kinds of values in place of values."""
    if name in PUSHES:
        if name == "BINUNICODE" and len(str(argument)) > LONGEST:
            raise PickleError(f"a name has {len(str(argument))} letters, expected at most {LONGEST}")
        stack.append(PUSHES[name])
    elif name == "GLOBAL":
        wanted = str(argument)
        if wanted != ORDERED and wanted not in REBUILDS and not STORAGE.fullmatch(wanted):
            raise PickleError(f"it names {wanted.replace(' ', '.')[:80]}")
        stack.append(wanted)
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[int(str(argument))] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[int(str(argument))])
    elif name in TUPLES:
        del stack[-TUPLES[name] :]
        stack.append(TUPLE)
    elif name == "TUPLE":
        _pop_to_mark(stack)
        stack.append(TUPLE)
    elif name == "BINPERSID":
        stack[-1] = VALUE
    elif name == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        if arguments != (EMPTY if function == ORDERED else TUPLE) or function not in (ORDERED, *REBUILDS):
            raise PickleError(f"it calls {function[:80]} with {arguments[:80]}")
        stack.append(VALUE)
    elif name in ("SETITEM", "SETITEMS"):
        items = _pop_to_mark(stack) if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
        if wrong := next((key for key in items[::2] if key != TEXT), None):
            raise PickleError(f"expected names of tensors, got a key that is a {wrong[:80]}")
    elif name == "BUILD":  # attributes of an OrderedDict, such as versions of modules
        stack.pop()
    elif name not in ("PROTO", "STOP"):
        raise PickleError(f"its pickle has the instruction {name}, which torch.save does not write for tensors")


def _pop_to_mark(stack: list[str]) -> list[str]:
    start = len(stack) - 1 - stack[::-1].index(MARK)
    items = stack[start + 1 :]
    del stack[start:]
    return items
