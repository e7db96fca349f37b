"""`parapos predict` on point clouds: rooms whole and in pieces, objects, files with and without labels and colours."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from parapos import cli, predict
from parapos.data import FormatError, point_files
from parapos.data.meshes import ball, box
from parapos.data.readers import off, ply
from parapos.predict import PredictError, points
from parapos.tasks import answer

from ..data.readers.fuzz import peak_below
from .points import make_object_run, make_scene_run, write_room, write_shape

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))


@pytest.fixture(scope="module")
def scene_run(tmp_path_factory):
    return make_scene_run(tmp_path_factory.mktemp("runs") / "rooms")


@pytest.fixture(scope="module")
def object_run(tmp_path_factory):
    return make_object_run(tmp_path_factory.mktemp("runs") / "shapes")


def run(*words):
    return cli.main(["predict", *map(str, words)])


def test_rooms_with_labels_and_without(scene_run, tmp_path, capsys):
    folder, out = tmp_path / "clouds", tmp_path / "out"
    folder.mkdir()
    room = write_room(folder / "a.ply")
    write_room(folder / "b.ply", label=False, color=False, faces=False)
    np.savez(folder / "c.npz", xyz=room.coord, labels=room.segment)
    (folder / "d.ply").write_text("ply\nformat ascii 1.0\nelement vertex 4000000000\nend_header\n")
    assert run(scene_run, folder, "--out", out) == 0
    found = json.loads((out / "predictions.json").read_text())
    a, b, c = found["files"]
    assert [Path(entry["file"]).name for entry in (a, b, c)] == ["a.ply", "b.ply", "c.npz"]
    assert "vertices have no x" in found["skipped"][0]["reason"]
    assert (a["points"], a["pieces"], a["picture"]) == (len(room.coord), 1, "pictures/a.html")
    assert "normals" not in a
    assert b["normals"] == c["normals"] == "estimated"
    assert "sees black" in b["colors"]
    assert "accuracy" not in b
    assert sum(answer["points"] for answer in a["classes"]) == a["points"]
    for name, entry in (("a", a), ("c", c)):
        drawn = ply.read(out / "pictures" / f"{name}.ply")
        assert np.array_equal(drawn.columns("x", "y", "z"), room.coord)
        labels = drawn.vertex["prediction"]
        assert np.array_equal(drawn.vertex["label"], room.segment)
        assert entry["accuracy"] == pytest.approx((labels == room.segment).mean(), abs=1e-6)
        classes = np.union1d(labels, room.segment)
        iou = [
            ((labels == k) & (room.segment == k)).sum() / ((labels == k) | (room.segment == k)).sum() for k in classes
        ]
        assert entry["miou"] == pytest.approx(np.mean(iou), abs=1e-5)
        assert {answer["class"]: answer["points"] for answer in entry["classes"]} == dict(
            zip(*map(np.ndarray.tolist, np.unique(labels, return_counts=True)), strict=True)
        )
        colors = np.array(points.class_colors(9))
        assert np.array_equal(drawn.columns("red", "green", "blue"), colors[labels])
    assert (out / "pictures" / "b.html").stat().st_size > 10_000
    assert "3 of 4 files predicted, 1 with problems" in capsys.readouterr().out


def test_points_get_what_the_network_says(scene_run, tmp_path):
    room = write_room(tmp_path / "a.ply")
    predictor = predict.load(scene_run)
    found = predictor(tmp_path / "a.ply")
    (piece,) = found.frame.sample["pieces"]
    batch = points.piece_batch(piece, ("color", "normal"), torch.device("cpu"))
    with torch.no_grad():
        scores = answer(predictor.model, batch).softmax(-1)
    assert torch.equal(batch["grid_coord"].amin(0), torch.zeros(3, dtype=torch.long))
    inverse = found.frame.sample["voxels"].inverse
    assert np.array_equal(found.extra["labels"], scores.argmax(-1).numpy()[inverse])
    assert np.allclose(found.extra["scores"], scores.amax(-1).numpy()[inverse])
    # colours and normals reach the points that they belong to
    voxels = found.frame.sample["voxels"]
    assert np.allclose(batch["feat"][:, :3], room.color[voxels.index] / 255)
    assert found.draw().size[0] >= 560
    again = predictor(tmp_path / "a.ply")
    assert np.array_equal(again.extra["scores"], found.extra["scores"])


def test_pieces_cover_the_cloud_and_bound_what_the_network_sees(scene_run, tmp_path):
    write_room(tmp_path / "a.ply", step=0.1)
    predictor = predict.load(scene_run, cells=150)
    seen = []
    hook = predictor.model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    found = predictor(tmp_path / "a.ply")
    hook.remove()
    assert found.frame.about["pieces"] == len(seen) > 3
    assert max(seen) <= 150
    assert sum(entry["points"] for entry in found.answers) == found.frame.about["points"]
    whole = predict.load(scene_run)(tmp_path / "a.ply")
    assert (found.extra["labels"] == whole.extra["labels"]).mean() > 0.5  # pieces see less around them


def test_memory_grows_with_points_alone(scene_run, tmp_path):
    """The network sees one piece at a time, and what is kept of a point is small."""
    count, rng = 400_000, np.random.default_rng(0)
    coord = rng.random((count, 3), dtype=np.float32) * np.array([40, 40, 3], np.float32)
    np.savez(tmp_path / "a.npz", coord=coord, normal=coord, color=np.zeros((count, 3), np.uint8))
    predictor = predict.load(scene_run, cells=300)
    predictor.source.grid_size = 1.0
    predictor(coord[:2000])  # warm
    with peak_below(count * 250 // 1024):
        found = predictor(tmp_path / "a.npz")
    assert found.frame.about["pieces"] > 20


def test_answers_that_are_no_numbers(scene_run, tmp_path):
    write_room(tmp_path / "a.ply")
    predictor = predict.load(scene_run)
    torch.nn.init.constant_(predictor.model.seg_head.bias, float("nan"))
    with pytest.raises(FormatError, match="answers to this cloud are not finite"):
        predictor(tmp_path / "a.ply")


def test_unsure_points(scene_run, tmp_path):
    write_room(tmp_path / "a.ply")
    least = float(np.median(predict.load(scene_run)(tmp_path / "a.ply").extra["scores"]))
    found = predict.load(scene_run, threshold=least)(tmp_path / "a.ply")
    unsure = found.extra["scores"] < least
    assert 0 < unsure.sum() < len(unsure)
    assert ((found.extra["labels"] == points.UNSURE) == unsure).all()
    assert {"class": -1, "name": "unsure"}.items() <= next(x for x in found.answers if x["class"] == -1).items()
    right = (found.extra["labels"] == found.frame.sample["whole"].segment).mean()
    assert found.extra["metrics"]["accuracy"] == pytest.approx(right, abs=1e-6)  # unsure is not right


def test_objects(object_run, tmp_path, capsys):
    write_shape(tmp_path / "torus.off")
    assert run(object_run, tmp_path / "torus.off", "--out", tmp_path / "out") == 0
    (entry,) = json.loads((tmp_path / "out" / "predictions.json").read_text())["files"]
    assert (entry["points"], entry["sampled"]) == (10_000, 10_000)
    assert entry["cells"] <= 150
    assert len(entry["classes"]) == 5
    assert sorted(path.name for path in (tmp_path / "out" / "pictures").iterdir()) == ["torus.html"]


def test_size_and_place_of_an_object_do_not_matter(object_run, tmp_path):
    mesh = write_shape(tmp_path / "a.off")
    off.write(tmp_path / "b.off", mesh.coord * 8 + 64, mesh.faces)
    predictor = predict.load(object_run)
    a, b = (predictor(tmp_path / name).answers[0] for name in ("a.off", "b.off"))
    assert a["name"] == b["name"]
    assert a["score"] == pytest.approx(b["score"], abs=0.02)


def test_points_are_put_on_meshes_of_scenes(scene_run, tmp_path):
    cube = box((0, 0, 0), (2, 2, 2))
    off.write(tmp_path / "cube.off", cube.coord, cube.faces)
    found = predict.load(scene_run)(tmp_path / "cube.off")
    assert found.frame.about["sampled"] == int(2 * 24 / 0.25**2)  # two for each cell of its 24 square metres
    assert np.abs(found.frame.sample["whole"].coord - 1).max(1).min() > 0.99  # on its sides


def test_an_array(scene_run):
    coord = np.random.default_rng(0).random((200, 3)) * 2
    found = predict.load(scene_run)(coord)
    assert found.frame.about["points"] == 200
    with pytest.raises(PredictError, match=r"expected coordinates \(n, 3\)"):
        predict.load(scene_run)(coord[:, :2])
    with pytest.raises(PredictError, match=r"expected the path of a file or an array \(n, 3\), got Tensor"):
        predict.load(scene_run)(torch.from_numpy(coord))


def test_estimated_normals_point_into_rooms_and_out_of_objects(scene_run, object_run, tmp_path):
    np.savez(tmp_path / "ball.npz", coord=ball(2.0, 0.2).coord)
    for folder, sign in ((scene_run, -1), (object_run, 1)):
        voxels = predict.load(folder)(tmp_path / "ball.npz").frame.sample["voxels"]
        outward = voxels.cloud.coord - (voxels.cloud.coord.min(0) + voxels.cloud.coord.max(0)) / 2
        assert (sign * (voxels.cloud.normal * outward).sum(1) > 0).mean() > 0.95


def test_one_point_and_points_that_coincide(scene_run, object_run, tmp_path):
    for count in (1, 40):
        np.savez(tmp_path / "a.npz", coord=np.ones((count, 3), np.float32))
        for folder in (scene_run, object_run):
            found = predict.load(folder)(tmp_path / "a.npz")
            assert found.frame.about["cells"] == 1
            assert points.paint_cloud(np.ones((count, 3)), np.zeros((count, 3), np.uint8)).shape == (3, 420, 560)


def test_refused(scene_run, object_run, digits_run, tmp_path, capsys):
    write_room(tmp_path / "a.ply")
    room = point_files.read(tmp_path / "a.ply").cloud
    np.savez(tmp_path / "b.npz", coord=room.coord, label=room.segment + 40)
    np.savez(tmp_path / "far.npz", coord=np.array([[0, 0, 0], [9e9, 0, 0]]))
    for words, told in (
        ((scene_run, tmp_path / "a.ply", "--size", 32), "size has no effect"),
        ((scene_run, tmp_path / "a.ply", "--every", 5), "every has no effect"),
        ((object_run, tmp_path / "a.ply", "--cells", 5), "cells has no effect"),
        ((digits_run, tmp_path / "a.ply", "--cells", 5), "cells has no effect"),
    ):
        assert run(*words, "--out", tmp_path / "out") == 2
        assert told in capsys.readouterr().err
    for name, told in (("b.npz", "labels from 40 to 4"), ("far.npz", "cells of 0.25 along an axis")):
        with pytest.raises(SystemExit):
            run(scene_run, tmp_path / name, "--out", tmp_path / "out2")
        assert told in capsys.readouterr().err
        assert not list((tmp_path / "out2" / "pictures").iterdir())  # nothing half-written
    with pytest.raises(PredictError, match="cells must be at least 1"):
        predict.load(scene_run, cells=0)


def test_old_runs_are_told(tmp_path, monkeypatch):
    folder = make_scene_run(tmp_path / "run")
    from parapos.training import checkpoint

    load = checkpoint.load_weights

    def older(path):
        model, about = load(path)
        del about["learned"]["preprocessing"]["cloud"]
        return model, about

    monkeypatch.setattr(checkpoint, "load_weights", older)
    with pytest.raises(PredictError, match="does not say cloud of its points: it was trained by an older version"):
        predict.load(folder)


@pytest.mark.skipif(not (SHARED / "samples/scannet").is_dir(), reason="no real scenes here")
def test_a_real_scene(scene_run, tmp_path, capsys):
    (path,) = sorted(SHARED.glob("samples/scannet/scans/scene0000_00/*_vh_clean_2.ply"))
    assert run(scene_run, path, "--out", tmp_path, "--cells", 800) == 0
    (entry,) = json.loads((tmp_path / "predictions.json").read_text())["files"]
    assert (entry["points"], entry["pieces"] > 1) == (81369, True)
    assert len(ply.read(tmp_path / "pictures" / f"{path.stem}.ply").vertex["x"]) == 81369


@pytest.mark.skipif(not (SHARED / "samples/modelnet40").is_dir(), reason="no real meshes here")
def test_real_meshes(object_run):
    predictor = predict.load(object_run)
    meshes = sorted(SHARED.glob("samples/modelnet40/ModelNet40_off/*/*/*.off"))
    for path in meshes[:2]:
        assert len(predictor(path).answers) == 5
