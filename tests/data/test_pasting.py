"""Objects of other frames pasted into points and images: what fits, what it brings, and when it ends."""

import numpy as np
import torch

from parapos.data import rigid
from parapos.data.nuscenes import Augment
from parapos.data.nuscenes_sensors import sweep_points
from parapos.data.pasting import choose, overlaps, paste_pictures, paste_points, rectangle_overlaps
from parapos.data.sampling import Key

from ..driving import driving, tree

STILL = dict(resize=(0.48, 0.48), image_flip=0.0, image_turn=0.0, flip=0.0, turn=0.0, scale=(1.0, 1.0), shift=0.0)


def same(a, b):
    return all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


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
