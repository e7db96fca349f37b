"""Sweeps, cameras and boxes of nuScenes in one frame, and scenes that only cameras tell apart."""

import codecs
import pickle

import numpy as np
import pytest
from PIL import Image

from parapos.data import rigid
from parapos.data.nuscenes_classes import CAMERAS, CATEGORIES, CLASSES
from parapos.data.nuscenes_frames import Camera, first_view, scene_frames, seen
from parapos.data.nuscenes_sensors import read_camera, read_sweep, sweep_points
from parapos.data.nuscenes_tree import COLOURS, write_tiny
from parapos.data.readers.nuscenes_tables import Tables

from .. import golden
from ..driving import driving, tree


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
