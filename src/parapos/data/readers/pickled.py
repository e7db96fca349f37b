"""Plain values and byte arrays in Python 2 pickles, as CIFAR has them, read without unpickling anything.

A pickle is a program, and running one from a file may do anything. Here `pickletools` splits it into operations, and
those that build dictionaries, lists, tuples, texts, numbers and NumPy arrays of bytes are carried out; any other is a
FormatError, and so is any name but the three that an array is built with. Texts are Python 2 strings: one character
per byte.
"""

from __future__ import annotations

import math
import pickletools
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from . import wrong

Array = np.ndarray[Any, Any]
MARK = object()
RECONSTRUCT, NDARRAY, DTYPE = "numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"
VALUES = ("BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE")  # carry what they push
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class _Name(str):
    """Something that a pickle names, which is none of its values."""


class _Dtype:
    """The dtype of bytes, which is the only one."""


class _Array:
    """An array: empty until its state comes."""

    content: Array | None = None


class _Refused(Exception):
    """What a pickle may not do."""


def loads(data: bytes, path: str | Path) -> Any:
    """The value of a pickle. path is for errors, which have it and the byte."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    at = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in texts, which are refused anyway
            for operation, argument, position in pickletools.genops(data):
                at = position or 0
                _carry_out(operation.name, argument, stack, memo)
        (value,) = stack
    except _Refused as error:
        raise wrong(path, at, f"{error}, expected a pickle of plain values and arrays of bytes") from None
    except Exception as error:  # a damaged program stumbles over whatever it meets first
        raise wrong(path, at, f"not a whole pickle: {type(error).__name__}: {str(error)[:100]}") from None
    return _unwrapped(value)


def _carry_out(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    match name:
        case "PROTO" | "STOP":
            pass
        case "MARK":
            stack.append(MARK)
        case "EMPTY_DICT":
            stack.append({})
        case "EMPTY_LIST":
            stack.append([])
        case "EMPTY_TUPLE":
            stack.append(())
        case "TUPLE":
            stack.append(tuple(_to_mark(stack)))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        case "APPEND":
            value = stack.pop()
            list.append(stack[-1], value)
        case "APPENDS":
            values = _to_mark(stack)
            list.extend(stack[-1], values)
        case "SETITEM":
            key, value = stack[-2:]
            del stack[-2:]
            dict.__setitem__(stack[-1], key, value)
        case "SETITEMS":
            values = _to_mark(stack)
            dict.update(stack[-1], zip(values[::2], values[1::2], strict=True))
        case "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "GLOBAL":
            if argument not in (RECONSTRUCT, NDARRAY, DTYPE):
                raise _Refused(f"it names {str(argument)[:100]!r}")
            stack.append(_Name(argument))
        case "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_called(function, arguments))
        case "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        case _ if name in VALUES:
            stack.append(argument)
        case _ if name in CONSTANTS:
            stack.append(CONSTANTS[name])
        case _:
            raise _Refused(f"operation {name}")


def _to_mark(stack: list[Any]) -> list[Any]:
    """Takes what is above the last mark, and the mark."""
    place = len(stack) - 1
    while stack[place] is not MARK:
        place -= 1
        if place < 0:
            raise IndexError("no mark")
    values = stack[place + 1 :]
    del stack[place:]
    return values


def _called(function: Any, arguments: Any) -> _Array | _Dtype:
    if not isinstance(function, _Name) or type(arguments) is not tuple:
        raise _Refused("it calls what is no function")
    if function == RECONSTRUCT and arguments[:1] == (NDARRAY,):
        return _Array()
    if function == DTYPE and arguments[:1] == ("u1",):
        return _Dtype()
    raise _Refused(f"it calls {function} for something else than bytes")


def _build(target: Any, state: Any) -> None:
    if isinstance(target, _Dtype):
        return
    if not isinstance(target, _Array) or type(state) is not tuple:
        raise _Refused("it changes what is no array")
    _, shape, dtype, fortran, content = state
    if not isinstance(dtype, _Dtype) or type(content) is not str or not all(type(n) is int and n >= 0 for n in shape):
        raise _Refused("an array of something else than bytes")
    if math.prod(shape) != len(content):
        raise _Refused(f"an array of shape {str(shape)[:100]} with {len(content)} bytes")
    raw = np.frombuffer(content.encode("latin-1"), np.uint8)
    target.content = raw.reshape(shape, order="F" if fortran else "C")


def _unwrapped(value: Any) -> Any:
    """A value, or a dictionary, with arrays in place of what stood for them."""
    if isinstance(value, dict):
        return {key: item.content if isinstance(item, _Array) else item for key, item in value.items()}
    return value.content if isinstance(value, _Array) else value


def dumps(value: Any) -> bytes:
    """A pickle as Python 2 wrote it, of dictionaries, lists of whole numbers and texts, texts, and arrays of bytes."""
    return b"\x80\x02" + _dumped(value) + b"."


def _dumped(value: Any) -> bytes:
    match value:
        case dict():
            return b"}(" + b"".join(_dumped(part) for item in value.items() for part in item) + b"u"
        case list():
            return b"](" + b"".join(map(_dumped, value)) + b"e"
        case str() if len(value) < 256:
            return b"U" + bytes([len(value)]) + value.encode("latin-1")
        case int() if 0 <= value < 256:
            return b"K" + bytes([value])
        case int():
            return b"J" + struct.pack("<i", value)
        case np.ndarray() if value.dtype == np.uint8 and value.ndim == 2:
            empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
            shape = b"".join(map(_dumped, value.shape)) + b"\x86"
            dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            return (
                empty + b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", value.size) + value.tobytes() + b"tb"
            )
    raise ValueError(f"cannot write {type(value).__name__}, expected plain values or a matrix of bytes")
