"""The text files of ScanNet: over-segments of vertices, labelled groups of them, the table of labels, lists of scenes.

<scene>_vh_clean_2.0.010000.segs.json   {"segIndices": [id of the over-segment of each vertex]}
<scene>.aggregation.json                {"segGroups": [{"id": 0, "segments": [ids], "label": "raw category"}]}
scannetv2-labels.combined.tsv           tab-separated, with the columns raw_category and nyu40id
scannetv2_train.txt                     the name of a scene per line
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import FormatError
from . import read_bytes, read_lines, wrong, wrong_line

Array = np.ndarray[Any, Any]
MAX_JSON = 256 * 1024**2  # bytes; the largest true file has some 5 MB
MAX_LIST = 16 * 1024**2
_SCENE = re.compile(r"scene\d{4}_\d\d", re.ASCII)


class Group(NamedTuple):
    """An object: its number, its raw category, and its over-segments."""

    id: int
    label: str
    segments: list[int]


def read_segments(path: str | Path) -> Array:
    """The over-segment of each vertex, int64 (n,)."""
    value = _json(path)
    found = value.get("segIndices") if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise wrong(path, 0, 'expected {"segIndices": [...]}')
    bad = next((i for i, x in enumerate(found) if type(x) is not int or not 0 <= x < 2**53), None)
    if bad is not None:
        raise wrong(path, 0, f"segIndices[{bad}] is {str(found[bad])[:40]!r}, expected a whole number of 0 or more")
    return np.array(found, np.int64)


def read_groups(path: str | Path) -> list[Group]:
    """The objects of a scene in the order of the file."""
    value = _json(path)
    found = value.get("segGroups") if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise wrong(path, 0, 'expected {"segGroups": [...]}')
    groups: list[Group] = []
    for i, group in enumerate(found):
        parts = [group.get(key) for key in ("id", "label", "segments")] if isinstance(group, dict) else [None] * 3
        number, label, segments = parts
        good = type(number) is int and 0 <= number < 2**53 and isinstance(label, str) and isinstance(segments, list)
        if not good or not all(type(x) is int and 0 <= x < 2**53 for x in segments):  # type: ignore[union-attr]
            raise wrong(path, 0, f"segGroups[{i}]: expected a whole number id, a text label and a list segments of ids")
        groups.append(Group(number, label, segments))  # type: ignore[arg-type]
    return groups


def read_categories(path: str | Path) -> dict[str, int]:
    """NYU40 ids by raw category; the first row of a category counts."""
    lines = read_lines(path, MAX_LIST)
    number, line = lines[0] if lines else (1, "")
    header = [name.strip() for name in line.split("\t")]
    if not {"raw_category", "nyu40id"} <= set(header):
        raise wrong_line(path, number, f"expected columns raw_category and nyu40id with tabs, got {line[:80]!r}")
    name, place = header.index("raw_category"), header.index("nyu40id")
    found: dict[str, int] = {}
    for number, line in lines[1:]:
        row = line.split("\t")
        if len(row) <= max(name, place) or not re.fullmatch(r"\d{1,9}", row[place].strip(), re.ASCII):
            raise wrong_line(path, number, f"expected a category and its nyu40id, got {line[:80]!r}")
        found.setdefault(row[name].strip(), int(row[place]))
    return found


def read_scenes(path: str | Path) -> list[str]:
    """Names of scenes in the order of the list."""
    names: dict[str, None] = {}
    for number, line in read_lines(path, MAX_LIST):
        if not _SCENE.fullmatch(line):
            raise wrong_line(path, number, f"expected a name such as scene0000_00, got {line[:80]!r}")
        if line in names:
            raise wrong_line(path, number, f"{line} is here twice, expected it once")
        names[line] = None
    return list(names)


def label_vertices(
    path: str | Path, segments: Array, groups: list[Group], categories: dict[str, int], classes: dict[int, int]
) -> tuple[Array, Array]:
    """The class and the object of each vertex, int64 (n,), −1 for none; later groups overwrite earlier ones.

    classes: class by NYU40 id; categories that the table does not have, and ids that are no class, stay −1. path: the
    file of the groups, whose over-segments must exist.
    """
    values, place = np.unique(segments, return_inverse=True)
    label, instance = (np.full(len(values), -1, np.int64) for _ in range(2))
    for i, group in enumerate(groups):
        ids = np.array(group.segments, np.int64)
        found = np.searchsorted(values, ids)
        missing = (
            (found == len(values)) | (values[np.minimum(found, len(values) - 1)] != ids) if len(values) else ids >= 0
        )
        if missing.any():
            told = f"segGroups[{i}] has over-segment {int(ids[missing][0])}, which no vertex has"
            raise wrong(path, 0, f"{told}; expected the aggregation of the same scene")
        label[found] = classes.get(categories.get(group.label, 0), -1)
        instance[found] = group.id
    return label[place], instance[place]


def _json(path: str | Path) -> Any:
    data = read_bytes(path, MAX_JSON)
    if len(data) > MAX_JSON:
        raise wrong(path, MAX_JSON, f"more than {MAX_JSON} bytes, expected a list of numbers")
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise wrong(path, error.pos, f"not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise wrong(path, error.start, "not text in UTF-8") from None
    except RecursionError:
        raise wrong(path, 0, "JSON that is nested too deeply") from None
    except ValueError as error:  # whole numbers of thousands of digits
        raise FormatError(f"{path}: at byte 0: {str(error)[:200]}") from None
