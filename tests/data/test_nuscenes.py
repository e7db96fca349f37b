"""nuScenes as a data set: sweeps and cameras in one frame, balanced drawing, objects pasted, what is wrong told."""

import codecs
import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from parapos.data import FormatError, create_dataset, nuscenes_prepare, preparations, rigid
from parapos.data.nuscenes import Augment, balanced
from parapos.data.nuscenes_classes import CAMERAS, CATEGORIES, CLASSES, IGNORED, SAMPLES, scenes
from parapos.data.nuscenes_frames import Camera, first_view, scene_frames, seen
from parapos.data.nuscenes_sensors import read_camera, read_sweep, sweep_points
from parapos.data.nuscenes_tree import COLOURS, write_tiny
from parapos.data.pasting import choose, overlaps, paste_pictures, paste_points, rectangle_overlaps
from parapos.data.readers.nuscenes_tables import Tables
from parapos.data.sampling import Key
from parapos.models.unitr import CLASSES as MODEL_CLASSES

from .. import golden
from ..driving import RANGE, SMALL, driving, tree

STILL = dict(resize=(0.48, 0.48), image_flip=0.0, image_turn=0.0, flip=0.0, turn=0.0, scale=(1.0, 1.0), shift=0.0)


@pytest.fixture
def copy(tmp_path):
    root = tmp_path / "nuscenes"
    shutil.copytree(tree(), root)
    return root


def same(a, b):
    return all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


# What is known of the data set


def test_scenes_and_categories_are_the_benchmarks():
    splits = list(scenes("v1.0-trainval").values())
    assert (splits.count("train"), splits.count("val")) == (700, 150)
    assert len(scenes("v1.0-test")) == 150
    assert not set(scenes("v1.0-test")) & set(scenes("v1.0-trainval"))
    assert set(scenes("v1.0-mini")) < set(scenes("v1.0-trainval"))
    assert len(CATEGORIES) + len(IGNORED) == 23
    assert set(CATEGORIES.values()) == set(CLASSES) == set(MODEL_CLASSES)
    assert SAMPLES["v1.0-trainval", "train"] + SAMPLES["v1.0-trainval", "val"] == 34_149


# Geometry


def test_sweeps_of_a_standing_object_coincide():
    frame = driving("val").frames[2]
    points = sweep_points(tree(), frame, 9)
    lags = np.unique(points[:, 4])
    assert len(lags) == 9
    assert np.allclose(np.diff(lags), 0.125, atol=1e-5)
    standing = frame.objects[np.hypot(*frame.objects["velocity"].T) < 1e-6]
    assert len(standing) >= 10
    for row in standing:
        box = row["box"].copy()
        box[3:6] += 0.05
        inside = points[rigid.inside(points[:, :3].astype(float), box)]
        above = inside[inside[:, 2] > row["box"][2] - 0.45 * row["box"][5]]  # without the ground
        now = above[above[:, 4] == 0, :3]
        for lag in lags[1:]:
            then = above[above[:, 4] == lag, :3]
            assert len(then) == len(now)
            assert np.linalg.norm(now[:, None] - then[None], axis=-1).min(1).max() < 0.01


def test_box_centres_are_in_the_drawn_rectangles():
    """Through lidar2image at each camera's own time, moving objects aside."""
    checked = 0
    for frame in driving("val").frames:
        for number, camera in enumerate(frame.cameras):
            pixels = np.array(Image.open(tree() / camera.file).convert("RGB")).astype(int)
            for row in frame.objects[frame.objects["view"] == number]:
                h = camera.lidar2image @ [*row["box"][:3], 1]
                x, y = h[:2] / h[2]
                if not (5 < x < camera.width - 5 and 5 < y < camera.height - 5):
                    continue
                nearer = frame.objects[np.hypot(*frame.objects["box"][:, :2].T) < np.hypot(*row["box"][:2]) - 0.1]
                covers = [seen(rigid.corners(other["box"][None])[0], camera) for other in nearer]
                if any(r is not None and r[0] - 9 < x < r[2] + 9 and r[1] - 9 < y < r[3] + 9 for r in covers):
                    continue
                name = next(c for c in COLOURS if CATEGORIES.get(c) == CLASSES[row["label"]])
                if min(row["rectangle"][2] - row["rectangle"][0], row["rectangle"][3] - row["rectangle"][1]) < 9:
                    continue
                assert np.abs(pixels[int(y), int(x)] - COLOURS[name]).max() < 40, (frame.token, number)
                checked += 1
    assert checked > 15


def test_cameras_are_where_they_were_at_their_own_time():
    """Through the tables once more: from global corners to the pixels of a camera that moved on since the LiDAR."""
    tables = Tables(tree() / "v1.0-mini")
    frame = driving("val").frames[1]
    for number, camera in enumerate(frame.cameras):
        row = tables["sample_data"][camera.token]
        mount = tables["calibrated_sensor"][row["calibrated_sensor_token"]]
        camera2global = rigid.pose(tables["ego_pose"][row["ego_pose_token"]]) @ rigid.pose(mount)
        for one in frame.objects[frame.objects["view"] == number]:
            local = rigid.apply(rigid.inverse(camera2global), one["translation"][None])[0]
            x, y, depth = np.array(mount["camera_intrinsic"]) @ local
            h = camera.lidar2image @ [*one["box"][:3], 1]
            assert h[2] == pytest.approx(depth, abs=1e-6)
            assert h[:2] / h[2] == pytest.approx([x / depth, y / depth], abs=1e-4)


def test_lidar_and_global_boxes_agree():
    for frame in driving("train").frames:
        for row in frame.objects:
            assert np.allclose(rigid.apply(frame.lidar2global, row["box"][None, :3])[0], row["translation"], atol=1e-6)
            turned = frame.lidar2global[:3, :3] @ rigid.turn(row["box"][6])
            assert np.allclose(turned, rigid.rotation(row["rotation"]), atol=1e-6)
            assert np.allclose(row["size"][[1, 0, 2]], row["box"][3:6])
            velocity = frame.lidar2global[:2, :2] @ row["box"][7:9]
            assert np.allclose(velocity, row["velocity"], atol=1e-6)


class Plain(pickle.Unpickler):
    """Of numbers of NumPy and built-in types alone."""

    def find_class(self, module, name):
        known = {"numpy.core.multiarray scalar": np._core.multiarray.scalar, "numpy dtype": np.dtype}
        return {**known, "_codecs encode": codecs.encode}[f"{module} {name}"]


def test_a_real_keyframe():
    """Points in real boxes are as many as annotators counted, and boxes are where cameras see them."""
    folder = golden.SAMPLES / "nuscenes"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    (info,) = (folder / "mmdet3d_info").iterdir()
    frame = Plain(info.open("rb")).load()["data_list"][0]
    (path,) = (folder / "samples" / "LIDAR_TOP").iterdir()
    points = read_sweep(folder, str(path.relative_to(folder)), "real")[:, :3].astype(float)
    boxes = np.array([one["bbox_3d"] for one in frame["instances"]])
    counts = np.array([rigid.inside(points, box).sum() for box in boxes])
    expected = np.array([one["num_lidar_pts"] for one in frame["instances"]])
    assert (np.abs(counts - expected) <= 2 + 0.05 * expected).mean() > 0.95  # roads are not level, these boxes are
    assert (counts == expected).mean() > 0.8
    cameras = []
    for channel in CAMERAS:
        (path,) = (folder / "samples" / channel).iterdir()
        known = frame["images"][channel]
        lens = rigid.transform(np.array(known["cam2img"]), np.zeros(3)) @ np.array(known["lidar2cam"])
        cameras.append(Camera(str(path.relative_to(folder)), "real", 1600, 900, lens))
        assert read_camera(folder, cameras[-1]).size == (1600, 900)
    views = [first_view(box, cameras)[0] for box in boxes]
    ahead = boxes[:, 1] > 2 * np.abs(boxes[:, 0])
    assert {view for view, front in zip(views, ahead, strict=True) if front} == {0}


def test_twins_differ_in_their_images_alone(tmp_path):
    write_tiny(root := tmp_path / "nuscenes", keyframes=1, twins=True)
    tables = Tables(root / "v1.0-mini")
    found = {row["name"]: next(iter(scene_frames(tables, token))) for token, row in tables["scene"].items()}
    a, b = found["scene-0061"], found["scene-0553"]
    assert np.array_equal(sweep_points(root, a, 1), sweep_points(root, b, 1))
    assert np.allclose(a.objects["box"][:, :7], b.objects["box"][:, :7])
    assert (a.objects["label"] != b.objects["label"]).all()
    assert sorted(a.objects["label"]) == sorted(b.objects["label"])
    images = [np.array(Image.open(root / frame.cameras[0].file)).astype(int) for frame in (a, b)]
    assert np.abs(images[0] - images[1]).max() > 100


# Samples


def test_a_sample_is_what_the_model_takes():
    data = driving("val")
    sample = data[0]
    assert sample["points"].dtype == torch.float32
    assert sample["points"].shape[1] == 5
    assert sample["images"].shape == (6, 3, 64, 176)
    assert sample["image_mask"].tolist() == [True] * 6
    assert sample["boxes"].shape == (20, 9)
    assert sample["boxes"].isfinite().all()
    assert sorted(set(sample["labels"].tolist())) == list(range(10))
    assert torch.equal(sample["lidar_aug"], torch.eye(4))
    assert (sample["points"][:, :2].abs() <= 21.6).all()
    assert (sample["points"][:, 4] >= 0).all()


def test_the_start_of_a_scene_repeats_its_oldest_sweep():
    frame = driving("val").frames[0]
    once, thrice = (sweep_points(tree(), frame, count) for count in (1, 3))
    near = (np.abs(once[:, :2]) < 1).all(1).sum()  # points on the car, which older sweeps leave out
    assert near > 0
    assert len(thrice) == 3 * len(once) - 2 * near
    assert set(np.unique(thrice[:, 4])) == {0.0}
    older = driving("val").frames[1]
    points = sweep_points(tree(), older, 10)
    counts = [int((points[:, 4] == np.float32(sweep.lag)).sum()) for sweep in older.sweeps]
    assert counts[-1] > 5 * counts[1]  # the fifth of five stands for six


def test_training_samples_follow_from_seed_epoch_and_place():
    a, b, c = driving("train"), driving("train"), driving("train", seed=1)
    assert same(a[Key(3, 1)], b[Key(3, 1)])
    assert not same(a[Key(3, 1)], a[Key(3, 2)])
    assert (a.order == b.order).all()
    assert (a.order != c.order).any()
    still = a.as_judged()
    assert len(still) == 3
    assert len(a) == 30
    assert same(still[1], still[Key(1, 5)])


def test_sensors_can_be_left_out():
    lidar, cameras = driving("val", sensors="lidar")[0], driving("val", sensors="cameras")[0]
    assert not lidar["image_mask"].any()
    assert not lidar["images"].any()
    assert len(lidar["points"])
    assert cameras["image_mask"].all()
    assert len(cameras["points"]) == 0
    varied = driving("train", sensors="cameras")[Key(0, 0)]
    assert len(varied["points"]) == 0
    other = create_dataset("nuscenes_lidar", "val", root=tree(), point_range=RANGE, **SMALL)
    assert other.sensors == "lidar"


def test_no_boxes_in_the_range_draws_another_frame(monkeypatch):
    monkeypatch.setattr("parapos.data.nuscenes.MOST_TRIES", 3)
    data = driving("train", augment=Augment(**STILL, paste=(0,) * 10))
    frames = [replace(frame, objects=frame.objects[:0]) for frame in data.frames]
    data.frames[0] = frames[0]
    data.order = np.zeros(1, np.int64)
    sample = data[0]
    assert sample["id"] != 0
    assert sample["count"] == 20
    data.frames = frames
    with pytest.raises(FormatError, match="3 frames without a box"):
        data[0]
    assert data.as_judged()[0]["count"] == 0


# Balance


def test_rare_classes_are_drawn_as_often():
    labels = [np.array([0] + [9] * (i % 20 == 0) + [3] * (i % 5 == 0)) for i in range(400)]
    order = balanced(labels, 0)
    total = 400 + 20 + 80
    assert len(order) == 3 * int(total / 10)
    counts = [sum(label in labels[i] for i in order) for label in (0, 3, 9)]
    assert counts[0] == len(order)
    assert min(counts[1:]) >= total // 10
    assert (order == balanced(labels, 0)).all()
    assert (order != balanced(labels, 1)).any()
    with pytest.raises(FormatError, match="no frame has a box"):
        balanced([np.zeros(0, int)], 0)


# Pasting


def test_overlap_from_above_is_exact():
    unit = np.array([[0.0, 0, 0, 2, 2, 1, 0]])
    beside = np.array([[2.0, 0, 0, 2, 2, 1, 0], [1.99, 0, 0, 2, 2, 1, 0], [2.2, 0, 0, 2, 2, 1, np.pi / 4]])
    assert overlaps(unit, beside).tolist() == [[False, True, True]]
    diagonal = np.array([[2.42, 0, 0, 2, 2, 1, np.pi / 4], [1.8, 1.8, 0, 2, 2, 1, np.pi / 4]])
    assert overlaps(unit, diagonal).tolist() == [[False, False]]
    assert overlaps(unit[:0], beside).shape == (0, 3)


def test_pasted_objects_fit_and_bring_their_points():
    data = driving("train", augment=Augment(**STILL, paste=(4,) * 10))
    database, frame = data.database, data.frames[0]
    rng = np.random.default_rng(1)
    kept = frame.objects[frame.objects["label"] == 0]
    numbers = choose(kept, database, data.augment, rng)
    assert len(numbers) >= 5
    chosen = database.objects[numbers]
    assert not overlaps(chosen["box"], kept["box"]).any()
    among = overlaps(chosen["box"], chosen["box"])
    np.fill_diagonal(among, False)
    assert not among.any()
    assert (chosen["points"] >= 5).all()
    for label in range(10):
        assert (chosen["label"] == label).sum() <= 4 - (kept["label"] == label).sum()
    points = sweep_points(tree(), frame, 1)
    pasted = paste_points(points, database, numbers, oldest=0.0)
    assert set(np.unique(pasted[:, 4])) == {0.0}
    for number in numbers:
        expected = database.points(int(number))
        expected = expected[expected[:, 4] <= 1e-3]
        inside = pasted[rigid.inside(pasted[:, :3].astype(float), database.objects[number]["box"] + [0] * 9)]
        assert len(inside) >= len(expected) - 1
        assert len(inside) <= len(expected) + 1  # at the border of a float


def test_what_would_cover_something_in_an_image_is_not_pasted():
    a = np.array([[0.0, 0, 0, 10, 10], [1, 0, 0, 10, 10], [-1, 0, 0, 10, 10]])
    b = np.array([[0.0, 0, 5, 10, 15], [1, 0, 0, 10, 10], [-1, 0, 0, 10, 10]])
    expected = [[50 / 150, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert np.allclose(rectangle_overlaps(a, b), expected)
    data = driving("train")
    database = data.database
    number = int(np.flatnonzero((database.objects["label"] == 0) & (database.objects["view"] >= 0))[0])
    database.by_class = [np.array([number] if label == 0 else [], np.int64) for label in range(10)]
    settings = Augment(**STILL, paste=(2, *[0] * 9))
    rng = np.random.default_rng(0)
    other = np.repeat(database.objects[number : number + 1], 1)
    other["label"], other["box"] = 1, other["box"] + [50, 50, 0, 0, 0, 0, 0, 0, 0]
    assert choose(other, database, settings, rng).tolist() == []
    other["view"] = (other["view"] + 1) % 6
    assert choose(other, database, settings, rng).tolist() == [number]


def test_pictures_are_blended_from_far_to_near():
    data = driving("train")
    database, frame = data.database, data.frames[0]
    images = data.images(frame)
    number = int(np.flatnonzero((database.objects["view"] == 0) & (database.objects["frame"] > 0))[0])
    row = database.objects[number]
    none = frame.objects[:0]
    found = paste_pictures(images, none, database, np.array([number]), 0.7)
    assert all(found[view] is images[view] for view in range(1, 6))
    left, top, right, bottom = (int(x) for x in row["rectangle"])
    before, after = (np.array(i[0]).astype(float)[top + 1 : bottom - 1, left + 1 : right - 1] for i in (images, found))
    picture = np.array(database.picture(number)).astype(float)[1:, 1:][: after.shape[0], : after.shape[1]]
    assert np.abs(after - (0.7 * picture + 0.3 * before)).max() <= 2
    outside = np.array(found[0]).copy()
    outside[max(0, top - 1) : bottom + 2, max(0, left - 1) : right + 2] = 0
    expected = np.array(images[0]).copy()
    expected[max(0, top - 1) : bottom + 2, max(0, left - 1) : right + 2] = 0
    assert (outside == expected).all()
    nearer = np.repeat(row[None], 1)
    nearer["box"][:, :2] = 0.1
    covered = np.array(paste_pictures(images, nearer, database, np.array([number]), 0.7)[0]).astype(float)
    covered = covered[top + 1 : bottom - 1, left + 1 : right - 1]
    assert np.abs(covered - (0.7 * before + 0.3 * after)).max() <= 3


def test_pasting_fades_out_also_in_workers():
    from parapos.training.loading import Loader

    many = Augment(**STILL, paste=(4,) * 10, paste_epochs=1)
    data = driving("train", augment=many, balance=False)
    alone = driving("train", augment=Augment(**STILL, paste=(0,) * 10), balance=False)

    class Batches:
        def __iter__(self):
            yield [Key(0, 0)]
            yield [Key(0, 1)]

        def __len__(self):
            return 2

    first, second = Loader(data, Batches(), 1, lambda samples: samples[0])
    assert first["count"] > 20
    assert second["count"] == 20
    assert same(first, data[Key(0, 0)])
    assert torch.equal(second["images"], alone[Key(0, 1)]["images"])


# Bad input


def test_a_cut_sweep_names_file_and_token(copy):
    data = driving("val", copy)
    sweep = data.frames[0].sweeps[0]
    (copy / sweep.file).write_bytes((copy / sweep.file).read_bytes()[:-7])
    with pytest.raises(FormatError, match=f"{sweep.file}: at byte .*; sample_data {sweep.token}"):
        data[0]
    (copy / sweep.file).write_bytes(b"")
    for one in data.frames[0].sweeps:
        (copy / one.file).write_bytes(b"")
    assert data[0]["points"].shape == (0, 5)  # no point is no mistake
    (copy / sweep.file).unlink()
    with pytest.raises(FormatError, match=f"{sweep.file}: No such file.*sample_data {sweep.token}"):
        data[0]


def test_an_image_of_another_size_names_file_and_token(copy):
    data = driving("val", copy)
    camera = data.frames[1].cameras[2]
    Image.new("RGB", (300, 225)).save(copy / camera.file)
    with pytest.raises(FormatError, match=f"{camera.file}: 300 x 225 pixels, expected 400 x 225.*{camera.token}"):
        data[1]
    (copy / camera.file).write_bytes(b"no picture")
    with pytest.raises(FormatError, match=f"{camera.file}: .*; sample_data {camera.token}"):
        data[1]
    (copy / camera.file).unlink()
    with pytest.raises(FormatError, match=f"sample_data {camera.token}"):
        data[1]
    masked = driving("val", copy, missing="mask")[1]
    assert masked["image_mask"].tolist() == [True, True, False, True, True, True]
    assert masked["lidar2image"][2].any()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sweeps", 11),
        ("resize", 0.0),
        ("sensors", "radar"),
        ("missing", "skip"),
        ("tables", "v2"),
        ("point_range", (1,)),
    ],
)
def test_options_that_cannot_be(option, value):
    with pytest.raises(ValueError, match=option):
        driving("val", **{option: value})


# Preparing


def test_prepare_resumes_and_checks(tmp_path):
    write_tiny(root := tmp_path / "nuscenes", keyframes=1)
    job = preparations.Job(root, complete=False)
    first = preparations.prepare(nuscenes_prepare, job)
    assert (first.now, first.before) == (2, 0)
    again = preparations.prepare(nuscenes_prepare, job)
    assert (again.now, again.before) == (0, 2)
    store = nuscenes_prepare.open_store(job)
    (store.folder / "train" / "scene-0061" / "points.npy").unlink()
    assert preparations.check(nuscenes_prepare, job).problems
    repaired = preparations.prepare(nuscenes_prepare, job)
    assert (repaired.now, repaired.before) == (1, 1)
    assert not preparations.check(nuscenes_prepare, job).problems
    whole = preparations.check(nuscenes_prepare, replace(job, complete=True)).problems
    assert any("train: scenes: found 1, expected 8" in problem for problem in whole)
    with pytest.raises(FormatError, match="is there already"):
        write_tiny(root)


def test_what_is_not_prepared_or_damaged_is_told(copy, tmp_path):
    write_tiny(root := tmp_path / "raw", keyframes=1)
    with pytest.raises(FormatError, match=r"no prepared frames of val.*parapos prepare nuscenes --tables v1.0-mini"):
        driving("val", root)
    with pytest.raises(FormatError, match="3 prepared frames of val, expected 81"):
        driving("val", copy, complete=True)
    with pytest.raises(FormatError, match=r"v1\.0-mini has train, val"):
        driving("test", copy)
    folder = copy / "prepared" / "v1.0-mini" / "val" / "scene-0103"
    (folder / "frames.json").write_text(json.dumps([{"token": 1}]))
    with pytest.raises(FormatError, match=r"frames\.json: damaged"):
        driving("val", copy)
    (folder / "objects.npy").write_bytes(b"no array")
    with pytest.raises(FormatError, match=r"objects\.npy: expected"):
        driving("val", copy)


def test_check_reads_every_file(copy):
    frame = driving("val", copy).frames[2]
    older = next(sweep for sweep in frame.sweeps if sweep.file.startswith("sweeps/"))
    (copy / older.file).write_bytes(b"cut")
    Image.new("RGB", (10, 10)).save(copy / frame.cameras[3].file)
    problems = preparations.check(nuscenes_prepare, preparations.Job(copy, complete=False)).problems
    assert any(older.token in problem and older.file in problem for problem in problems)
    assert any(frame.cameras[3].token in problem for problem in problems)


def test_a_missing_sensor_file_is_a_problem(copy):
    frame = driving("val", copy).frames[0]
    (copy / frame.cameras[0].file).unlink()
    whole = preparations.check(nuscenes_prepare, preparations.Job(copy, quick=True)).problems
    assert any(frame.cameras[0].file in problem and frame.cameras[0].token in problem for problem in whole)


def test_points_and_pictures_of_objects_are_those_in_their_boxes():
    data = driving("train")
    database = data.database
    assert (database.objects["points"] >= database.objects["lidar"]).all()
    for number in range(0, len(database.objects), 7):
        points, row = database.points(number), database.objects[number].copy()
        row["box"][3:6] += 1e-3
        assert rigid.inside(points[:, :3].astype(float), row["box"]).all()
        picture = database.picture(number)
        if row["view"] >= 0:
            wide, high = row["rectangle"][2:] - row["rectangle"][:2]
            assert abs(picture.width - wide) <= 2
            assert abs(picture.height - high) <= 2
