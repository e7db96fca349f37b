"""Looks through the pickle of a checkpoint before anything is made of it.

PyTorch's loader of weights runs no foreign code, but it does make what a pickle asks for: a bytearray of any length, or
a dictionary key whose hash takes years or overflows the stack. So the instructions are read first, as text. Only those
pass that `torch.save` writes for a dictionary of tensors.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from enum import Enum

LARGEST = 1 << 22  # bytes; a network of a thousand tensors takes about a tenth of a megabyte
LONGEST = 512  # letters of a name
ORDERED = "collections OrderedDict"
REBUILDS = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
ITEM_BYTES = {
    **dict.fromkeys(("torch BoolStorage", "torch ByteStorage", "torch CharStorage"), 1),
    **dict.fromkeys(("torch BFloat16Storage", "torch HalfStorage", "torch ShortStorage"), 2),
    **dict.fromkeys(("torch FloatStorage", "torch IntStorage"), 4),
    **dict.fromkeys(("torch ComplexFloatStorage", "torch DoubleStorage", "torch LongStorage"), 8),
    "torch ComplexDoubleStorage": 16,
}
NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1")
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Kind(Enum):
    """A value of which only its kind is kept."""

    DICT = "dictionary"
    EMPTY = "empty tuple"
    TUPLE = "tuple"
    VALUE = "value"
    MARK = "mark"


PUSHES = {
    "EMPTY_DICT": Kind.DICT,
    "EMPTY_TUPLE": Kind.EMPTY,
    "MARK": Kind.MARK,
    "NEWFALSE": Kind.VALUE,
    "NEWTRUE": Kind.VALUE,
}


@dataclass(frozen=True)
class Global:
    """A class or function that a pickle names: its module, a space, its name."""

    name: str


@dataclass(frozen=True)
class StorageId:
    """The tuple by which a pickle asks for the record `key` as `numel` items of a type."""

    storage: str
    key: str
    numel: int


Item = Kind | Global | StorageId | str | int


class PickleError(ValueError):
    """The pickle is not that of a dictionary of tensors. The message says what it asks for."""


def check(data: bytes) -> dict[str, int]:
    """The bytes that each storage must have, by its key. A PickleError if it is not a dictionary of tensors."""
    if len(data) > LARGEST:
        raise PickleError(f"its pickle has {len(data)} bytes, expected at most {LARGEST}")
    stack: list[Item] = []
    memo: dict[int, Item] = {}
    storages: dict[str, StorageId] = {}
    try:
        for instruction, argument, _ in pickletools.genops(data):
            _follow(instruction.name, argument, stack, memo, storages)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError) as error:
        raise PickleError(f"its pickle is broken: {error}"[:200]) from None
    if stack != [Kind.DICT]:
        what = f"a {_kind(stack[0])}" if len(stack) == 1 else f"{len(stack)} values"
        raise PickleError(f"its pickle ends with {what}")
    return {key: wanted.numel * ITEM_BYTES[wanted.storage] for key, wanted in storages.items()}


def _follow(
    name: str, argument: object, stack: list[Item], memo: dict[int, Item], storages: dict[str, StorageId]
) -> None:
    """Does to the stack what an instruction would do, with kinds of values in place of values."""
    if name in PUSHES:
        stack.append(PUSHES[name])
    elif name in NUMBERS:
        stack.append(int(str(argument)))
    elif name == "BINUNICODE":
        letters = str(argument)
        if len(letters) > LONGEST:
            raise PickleError(f"a name has {len(letters)} letters, expected at most {LONGEST}")
        stack.append(letters)
    elif name == "GLOBAL":
        wanted = str(argument)
        if wanted != ORDERED and wanted not in REBUILDS and wanted not in ITEM_BYTES:
            raise PickleError(f"it names {wanted.replace(' ', '.')[:80]}")
        stack.append(Global(wanted))
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[int(str(argument))] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[int(str(argument))])
    elif name in TUPLES:
        del stack[-TUPLES[name] :]
        stack.append(Kind.TUPLE)
    elif name == "TUPLE":
        stack.append(_tuple(_pop_to_mark(stack)))
    elif name == "BINPERSID":
        stack.append(_persist(stack.pop(), storages))
    elif name == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        called = function.name if isinstance(function, Global) else _kind(function)
        wants = Kind.EMPTY if called == ORDERED else Kind.TUPLE
        if not isinstance(function, Global) or called in ITEM_BYTES or arguments != wants:
            raise PickleError(f"it calls {called} with {_kind(arguments)}")
        stack.append(Kind.DICT if called == ORDERED else Kind.VALUE)
    elif name in ("SETITEM", "SETITEMS"):
        items = _pop_to_mark(stack) if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
        for key in items[::2]:
            if not isinstance(key, str):
                raise PickleError(f"expected names of tensors, got a key that is a {_kind(key)}")
        if stack[-1] != Kind.DICT:
            raise PickleError(f"it sets items of a {_kind(stack[-1])}")
    elif name == "BUILD":  # attributes of an OrderedDict, such as versions of modules
        state, target = stack.pop(), stack[-1]
        if (state, target) != (Kind.DICT, Kind.DICT):  # a tuple of pairs would be hashed
            raise PickleError(f"it sets attributes of a {_kind(target)} from a {_kind(state)}")
    elif name not in ("PROTO", "STOP"):
        raise PickleError(f"its pickle has the instruction {name}, which torch.save does not write for tensors")


def _kind(item: Item) -> str:
    """What an item is, for messages."""
    if isinstance(item, Kind):
        return item.value
    if isinstance(item, Global):
        return item.name
    return {str: "text", int: "number"}.get(type(item), "storage id")


def _tuple(items: list[Item]) -> Item:
    """What a tuple of these items is: the id of a storage, or any other tuple."""
    match items:
        case ["storage", Global(name), str(key), str(), int(numel)] if name in ITEM_BYTES:
            return StorageId(name, key, numel)
    return Kind.TUPLE if items else Kind.EMPTY


def _persist(wanted: Item, storages: dict[str, StorageId]) -> Item:
    """Keeps what a storage is said to be. PyTorch looks its key up in a dictionary, so it must be text."""
    if not isinstance(wanted, StorageId):
        raise PickleError(f"it asks for a storage that is named by a {_kind(wanted)}")
    if storages.setdefault(wanted.key, wanted) != wanted:
        raise PickleError(f"storage {wanted.key[:80]!r} has two sizes or types")
    return Kind.VALUE


def _pop_to_mark(stack: list[Item]) -> list[Item]:
    start = len(stack) - 1  # from the end, so that many marks over a long stack take no time
    while start >= 0 and stack[start] is not Kind.MARK:
        start -= 1
    if start < 0:
        raise ValueError("no mark on the stack")
    items = stack[start + 1 :]
    del stack[start:]
    return items
