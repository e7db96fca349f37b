"""Tables of nuScenes: what is wrong is told with table, token and file."""

import json
import math
import shutil

import pytest

from parapos.data import FormatError
from parapos.data.nuscenes_frames import scene_frames
from parapos.data.readers.nuscenes_tables import TABLES, Tables, read_table

from ... import golden
from ...driving import tree
from .fuzz import mutations, overwrite, survive


@pytest.fixture
def copy(tmp_path):
    """A copy of the tables, and a function that changes a row of one."""
    folder = tmp_path / "v1.0-mini"
    shutil.copytree(tree() / "v1.0-mini", folder)

    def change(table, row=0, **values):
        path = folder / f"{table}.json"
        rows = json.loads(path.read_text())
        rows[row].update(values)
        path.write_text(json.dumps(rows))
        return rows[row]["token"], path

    return folder, change


@pytest.mark.parametrize("table", TABLES)
def test_a_missing_table_is_named(copy, table):
    folder, _ = copy
    (folder / f"{table}.json").unlink()
    with pytest.raises(FormatError, match=f"{table}.json: not there"):
        Tables(folder)


@pytest.mark.parametrize(
    ("table", "column"),
    [
        *(("sample", "scene_token"), ("sample", "next"), ("sample_data", "ego_pose_token"), ("sample_data", "prev")),
        *(("sample_data", "calibrated_sensor_token"), ("sample_data", "sample_token"), ("instance", "category_token")),
        *(("calibrated_sensor", "sensor_token"), ("sample_annotation", "instance_token"), ("scene", "log_token")),
        *(("sample_annotation", "sample_token"), ("sample_annotation", "next"), ("scene", "first_sample_token")),
    ],
)
def test_a_dangling_token_is_named(copy, table, column):
    folder, change = copy
    token, path = change(table, **{column: "nowhere"})
    with pytest.raises(FormatError) as error:
        Tables(folder)
    assert f"{path}: token {token}: {column}: 'nowhere' is no row of" in str(error.value)


def test_a_dangling_attribute_is_named(copy):
    folder, change = copy
    token, _ = change("sample_annotation", attribute_tokens=["nowhere"])
    with pytest.raises(FormatError, match=f"token {token}: attribute_tokens: 'nowhere' is no row of attribute.json"):
        Tables(folder)


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("calibrated_sensor", {"rotation": [1, 1, 0, 0]}, "rotation: expected a rotation"),
        ("ego_pose", {"rotation": [0, 0, 0, 0]}, "rotation: expected a rotation"),
        ("ego_pose", {"translation": [0, 0]}, "translation: expected three numbers"),
        ("calibrated_sensor", {"camera_intrinsic": [[1, 0, 0], [0, -1, 0], [0, 0, 1]]}, "camera_intrinsic: expected"),
        ("sample_annotation", {"size": [1, 0, 1]}, "size: expected three positive numbers"),
        ("sample_annotation", {"num_lidar_pts": -1}, "num_lidar_pts: expected a whole number"),
        ("sample_data", {"filename": "../../etc/passwd"}, "filename: expected a path below the root"),
        ("sample_data", {"timestamp": 1.5}, "timestamp: expected a whole number"),
    ],
)
def test_what_cannot_be_right_is_named(copy, table, values, message):
    folder, change = copy
    token, path = change(table, **values)
    with pytest.raises(FormatError) as error:
        Tables(folder)
    assert str(error.value).startswith(f"{path}: token {token}: ")
    assert message in str(error.value)


def test_a_camera_without_a_matrix_and_a_chain_in_a_circle(copy):
    folder, change = copy
    for row in range(14):
        change("calibrated_sensor", row, camera_intrinsic=[])
    tables = Tables(folder)
    scene = next(iter(tables["scene"]))
    with pytest.raises(FormatError, match=r"calibrated_sensor.json: token \w+: camera_intrinsic: expected a 3 x 3"):
        list(scene_frames(tables, scene))
    first = tables["scene"][scene]["first_sample_token"]
    last = tables.samples(scene)[-1]
    last["next"] = first
    with pytest.raises(FormatError, match=f"token {first}: next leads back to it"):
        tables.samples(scene)


def test_scenes_are_held_together(copy):
    folder, change = copy
    tables = Tables(folder)
    (one, first), (_, second) = tables["scene"].items()
    place = list(tables["sample"]).index(first["last_sample_token"])
    stray, _ = change("sample", place, next=second["first_sample_token"])
    with pytest.raises(FormatError, match=rf"sample.json: token {second['first_sample_token']}: scene_token: expected"):
        Tables(folder).samples(one)
    change("sample", place, next="")
    assert Tables(folder).samples(one)[-1]["token"] == stray
    for column in ("first_sample_token", "last_sample_token"):
        change("scene", **{column: second[column]})
        with pytest.raises(FormatError, match=f"(scene|sample).json: token .*{second[column]}"):
            Tables(folder).samples(one)
        change("scene", **{column: first[column]})
    change("scene", last_sample_token=first["first_sample_token"])
    with pytest.raises(
        FormatError, match=f"scene.json: token {one}: last_sample_token: expected {stray!r}, with which"
    ):
        Tables(folder).samples(one)


def test_two_scenes_of_one_name_are_refused(copy):
    folder, change = copy
    one, other = Tables(folder)["scene"].values()
    change("scene", 1, name=one["name"])
    with pytest.raises(FormatError, match=f"scene.json: token {other['token']}: name: .*{one['name']}.*{one['token']}"):
        Tables(folder)


def test_two_attributes_are_refused(copy):
    folder, change = copy
    tables = Tables(folder)
    tokens = list(tables["attribute"])[:2]
    token, _ = change("sample_annotation", attribute_tokens=tokens)
    tables = Tables(folder)
    with pytest.raises(FormatError, match=f"sample_annotation.json: token {token}: attribute_tokens: expected at most"):
        [list(scene_frames(tables, scene)) for scene in tables["scene"]]


def test_velocities_at_the_ends_and_over_gaps(copy):
    folder, _ = copy
    tables = Tables(folder)
    moving = [row for row in tables["sample_annotation"].values() if tables.category(row) == "vehicle.car"]
    speeds = {round(math.hypot(*tables.velocity(row)), 6) for row in moving}
    assert speeds == {0.0, 1.0}  # of the standing and of the moving one, at both ends and in the middle
    for row in tables["sample"].values():
        row["timestamp"] = row["timestamp"] * 4  # two seconds apart
    assert all(math.isnan(tables.velocity(row)[0]) for row in moving)
    alone = dict(moving[0], prev="", next="")
    assert all(map(math.isnan, tables.velocity(alone)))


def test_damaged_tables_are_read_or_refused(tmp_path):
    rows = json.loads((tree() / "v1.0-mini" / "sample_annotation.json").read_text())[:2]
    seed = json.dumps(rows).encode()
    read, refused = survive(
        lambda path: read_table(path, "sample_annotation"),
        mutations([seed, b"[]", b'[{"token": "a"}]'], 600),
        tmp_path / "sample_annotation.json",
        per_byte=200,
        least=200_000,
        place="",
    )
    assert read > 5
    assert refused > 200


def test_damaged_folders_are_read_or_refused(copy):
    folder, _ = copy
    good = {name: (folder / f"{name}.json").read_bytes() for name in TABLES}
    names = [name for name in TABLES if len(good[name]) < 50_000]
    messages = []
    for number, name in enumerate(names * 4):
        data = next(mutations([good[name]], 1, seed=number))
        overwrite(folder / f"{name}.json", data)
        try:
            tables = Tables(folder)
            [list(scene_frames(tables, scene)) for scene in tables["scene"]]
        except FormatError as error:
            messages.append(str(error))
        overwrite(folder / f"{name}.json", good[name])
    assert len(messages) > len(names)
    assert all(message.startswith(str(folder)) for message in messages)


def test_a_bomb_of_brackets(tmp_path):
    (path := tmp_path / "map.json").write_bytes(b"[" * 100_000)
    with pytest.raises(FormatError, match="not JSON"):
        read_table(path, "map")
    path.write_bytes(b'[{"token": "a", "log_tokens": [], "filename": NaN}]')
    with pytest.raises(FormatError, match="NaN is no number of JSON"):
        read_table(path, "map")


def test_the_fragment_of_lyft_is_refused():
    folder = golden.SAMPLES / "nuscenes" / "lyft_tables_nuscenes_schema" / "v1.01-train"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    with pytest.raises(
        FormatError, match=r"sample_annotation.json|sample_data.json|ego_pose.json|sample.json"
    ) as error:
        Tables(folder)
    assert "token " in str(error.value)
