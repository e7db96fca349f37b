"""The tables of nuScenes: JSON lists of rows that name each other by token, checked before anything relies on them.

Whatever cannot be right raises FormatError with the file of the table and the token of the row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import FormatError

Row = dict[str, Any]
UNIT = 1e-2  # by which the length of a quaternion may differ from 1; files round to few digits


def _numbers(count: int, *, least: float = -math.inf) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, list) and len(value) == count and all(_finite(x) and x > least for x in value)

    return check


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # also no NaN


def _rotation(value: Any) -> bool:
    return _numbers(4)(value) and abs(math.hypot(*value) - 1) < UNIT


def _intrinsic(value: Any) -> bool:
    if value == []:
        return True
    rows = isinstance(value, list) and len(value) == 3 and all(map(_numbers(3), value))
    return rows and value[0][0] > 0 and value[1][1] > 0 and value[2] == [0, 0, 1]


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


Kind = tuple[Callable[[Any], bool], str]
TEXT: Kind = (lambda x: isinstance(x, str) and x != ""), "a text"
LINK: Kind = (lambda x: isinstance(x, str)), "a token"
LINKS: Kind = _texts, "a list of tokens"
FLAG: Kind = (lambda x: isinstance(x, bool)), "true or false"
COUNT: Kind = (lambda x: type(x) is int and 0 <= x < 2**53), "a whole number of 0 or more"
PLACE: Kind = _numbers(3), "three numbers"
SIZE: Kind = _numbers(3, least=0.0), "three positive numbers"
ROTATION: Kind = _rotation, "a rotation: a quaternion (w, x, y, z) of length 1"
INTRINSIC: Kind = _intrinsic, "a 3 x 3 camera matrix with positive focal lengths and (0, 0, 1) below, or an empty list"

# what is read of each table; other columns are left alone
TABLES: dict[str, dict[str, Kind]] = {
    "category": {"name": TEXT},
    "attribute": {"name": TEXT},
    "visibility": {},
    "instance": {"category_token": LINK},
    "sensor": {"channel": TEXT, "modality": TEXT},
    "calibrated_sensor": {
        **{"sensor_token": LINK, "translation": PLACE, "rotation": ROTATION, "camera_intrinsic": INTRINSIC},
    },
    "ego_pose": {"translation": PLACE, "rotation": ROTATION, "timestamp": COUNT},
    "log": {},
    "scene": {"name": TEXT, "log_token": LINK, "first_sample_token": LINK, "last_sample_token": LINK},
    "sample": {"timestamp": COUNT, "scene_token": LINK, "prev": LINK, "next": LINK},
    "sample_data": {
        **{"sample_token": LINK, "ego_pose_token": LINK, "calibrated_sensor_token": LINK, "timestamp": COUNT},
        **{"filename": TEXT, "is_key_frame": FLAG, "prev": LINK, "next": LINK, "height": COUNT, "width": COUNT},
    },
    "sample_annotation": {
        **{"sample_token": LINK, "instance_token": LINK, "attribute_tokens": LINKS, "translation": PLACE},
        **{"size": SIZE, "rotation": ROTATION, "prev": LINK, "next": LINK},
        **{"num_lidar_pts": COUNT, "num_radar_pts": COUNT},
    },
    "map": {"log_tokens": LINKS, "filename": TEXT},
}
OPTIONAL = ("sample_annotation", "instance", "attribute", "visibility")  # v1.0-test has them empty
ENDS = ("prev", "next")  # which may be empty: a chain has a first and a last row


def table_of(name: str, column: str) -> str:
    """The table that a column names rows of."""
    if column in ENDS:
        return name
    stem = column.removesuffix("s").removesuffix("_token")
    return {"first_sample": "sample", "last_sample": "sample"}.get(stem, stem)


def read_table(path: str | Path, name: str) -> dict[str, Row]:
    """The rows of a table by token. Links are not followed."""
    try:
        rows = json.loads(Path(path).read_bytes(), parse_constant=_no_constant)
    except FileNotFoundError:
        raise FormatError(f"{path}: not there, expected the table {name} of nuScenes") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {str(error)[:200]}") from None
    if not isinstance(rows, list):
        raise FormatError(f"{path}: expected a list of rows, got {type(rows).__name__}")
    found: dict[str, Row] = {}
    for number, row in enumerate(rows):
        token = row.get("token") if isinstance(row, dict) else None
        if not isinstance(token, str) or not token or len(token) > 200:
            raise FormatError(f"{path}: row {number} has no token, expected one in each row")
        if token in found:
            raise FormatError(f"{path}: token {token}: two rows have it, expected one")
        for column, (is_good, expected) in TABLES[name].items():
            if column not in row:
                raise FormatError(f"{path}: token {token}: no {column}, expected {expected}")
            if not is_good(row[column]):
                raise FormatError(f"{path}: token {token}: {column}: expected {expected}, got {row[column]!r:.120}")
        found[token] = row
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


class Tables:
    """All tables of a version of nuScenes, in which every token leads somewhere.

    folder: <root>/v1.0-..., as in the archives. `tables["sample"][token]` is a row.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FormatError(f"{self.folder}: no such folder, expected the tables of nuScenes")
        self._rows = {name: read_table(self.path(name), name) for name in TABLES}
        for name in TABLES:
            if not self._rows[name] and name not in OPTIONAL:
                raise FormatError(f"{self.path(name)}: no rows, expected some")
            self._check_links(name)
        self.annotations = self._group("sample_annotation")
        self.data = self._group("sample_data")
        self._check_paths()
        self._check_names()

    def __getitem__(self, name: str) -> Mapping[str, Row]:
        return self._rows[name]

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _check_links(self, name: str) -> None:
        columns = [column for column, kind in TABLES[name].items() if kind in (LINK, LINKS)]
        for token, row in self._rows[name].items():
            for column in columns:
                others = self._rows[table_of(name, column)]
                for link in row[column] if isinstance(row[column], list) else [row[column]]:
                    if link not in others and not (column in ENDS and link == ""):
                        told = f"{link!r:.80} is no row of {self.path(table_of(name, column)).name}"
                        raise FormatError(f"{self.path(name)}: token {token}: {column}: {told}")

    def _check_paths(self) -> None:
        for token, row in self._rows["sample_data"].items():
            parts = row["filename"].replace("\\", "/").split("/")
            if ".." in parts or parts[0] == "" or "\0" in row["filename"]:
                told = f"expected a path below the root, got {row['filename']!r:.120}"
                raise FormatError(f"{self.path('sample_data')}: token {token}: filename: {told}")

    def _check_names(self) -> None:
        tokens: dict[str, str] = {}  # of scenes by name
        for token, row in self._rows["scene"].items():
            if row["name"] in tokens:
                told = f"{row['name']!r:.80} is the name of {tokens[row['name']]} too, expected each once"
                raise FormatError(f"{self.path('scene')}: token {token}: name: {told}")
            tokens[row["name"]] = token

    def _group(self, name: str) -> Mapping[str, Sequence[Row]]:
        """Rows of a table by their sample."""
        found: dict[str, list[Row]] = {token: [] for token in self._rows["sample"]}
        for row in self._rows[name].values():
            found[row["sample_token"]].append(row)
        return found

    def channel(self, row: Row) -> str:
        """The sensor that recorded a row of sample_data."""
        calibrated = self._rows["calibrated_sensor"][row["calibrated_sensor_token"]]
        return str(self._rows["sensor"][calibrated["sensor_token"]]["channel"])

    def keyframes(self, sample: str) -> dict[str, Row]:
        """The rows of sample_data that are the keyframe of a sample, by channel."""
        found: dict[str, Row] = {}
        for row in self.data[sample]:
            if row["is_key_frame"]:
                channel = self.channel(row)
                if channel in found:
                    told = f"{channel} has another key frame of sample {sample}: {found[channel]['token']}"
                    raise FormatError(f"{self.path('sample_data')}: token {row['token']}: {told}")
                found[channel] = row
        return found

    def samples(self, scene: str) -> list[Row]:
        """The samples of a scene in the order of time. FormatError if they leave the scene or do not end with it."""
        row = self._rows["scene"][scene]
        samples = self.chain("sample", row["first_sample_token"], "next")
        for sample in samples:
            if sample["scene_token"] != scene:
                told = f"expected {scene!r}, whose samples lead here, got {sample['scene_token']!r}"
                raise FormatError(f"{self.path('sample')}: token {sample['token']}: scene_token: {told}")
        if samples[-1]["token"] != row["last_sample_token"]:
            told = f"expected {samples[-1]['token']!r}, with which its samples end, got {row['last_sample_token']!r}"
            raise FormatError(f"{self.path('scene')}: token {scene}: last_sample_token: {told}")
        return samples

    def chain(self, name: str, token: str, direction: str, most: int | None = None) -> list[Row]:
        """A row and those that follow it, at most `most`. A chain that comes back to itself is an error."""
        rows: dict[str, Row] = {}
        while token and (most is None or len(rows) < most):
            if token in rows:
                raise FormatError(f"{self.path(name)}: token {token}: {direction} leads back to it, expected an end")
            rows[token] = self._rows[name][token]
            token = rows[token][direction]
        return list(rows.values())

    def category(self, annotation: Row) -> str:
        instance = self._rows["instance"][annotation["instance_token"]]
        return str(self._rows["category"][instance["category_token"]]["name"])

    def velocity(self, annotation: Row) -> tuple[float, float, float]:
        """Metres per second in the global frame, from the neighbours in time; NaN if there are none within 1.5 s."""
        before = self._rows["sample_annotation"].get(annotation["prev"])
        after = self._rows["sample_annotation"].get(annotation["next"])
        if before is None and after is None:
            return (math.nan,) * 3
        first, last = before or annotation, after or annotation
        start, end = (1e-6 * self._rows["sample"][row["sample_token"]]["timestamp"] for row in (first, last))
        most = 3.0 if before is not None and after is not None else 1.5
        if end - start > most or end <= start:
            return (math.nan,) * 3
        x, y, z = ((b - a) / (end - start) for a, b in zip(first["translation"], last["translation"], strict=True))
        return x, y, z
