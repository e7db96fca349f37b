"""Labels and augmentations of GEN1 against the released code."""

import numpy as np

from parapos.data.augment.events import Change, apply
from parapos.data.events import Events
from parapos.data.gen1 import HEIGHT, WIDTH, usable
from parapos.data.readers import boxes
from tests import golden


def as_boxes(rows):
    found = np.zeros(len(rows), boxes.BOX)
    for name in boxes.BOX.names:
        found[name] = rows[{"t": "ts", "class_confidence": "confidence"}.get(name, name)]
    return found


@golden.files("gen1-labels*.npz")
def test_labels_and_augmentations(path):
    kept = np.load(path)
    for split in ("eval", "train"):
        want = as_boxes(kept[split])
        want = want[np.argsort(want["t"], kind="stable")]
        found = usable(as_boxes(kept["raw"]), train=split == "train")
        assert len(found) == len(want)
        for name in ("t", "class_id"):
            assert found[name].tolist() == want[name].tolist()
        for name in "xywh":
            np.testing.assert_allclose(found[name], want[name], atol=1e-4)
    events = Events(kept["ev_t"].astype(np.int64), kept["ev_x"], kept["ev_y"], kept["ev_p"].astype(np.uint8))
    names = [name.removesuffix(":params") for name in kept if name.endswith(":params")]
    assert names or len(kept["raw"])
    for name in names:
        values = kept[f"{name}:params"]
        change = {
            "flip": Change(True, "identity"),
            "area": Change(False, "area", tuple(values)),
            "time": Change(False, "time", tuple(values)),
            "rotate": Change(False, "rotation", tuple(np.degrees(values))),
        }[name.split("-")[0]]
        found, moved = apply(change, events, WIDTH, HEIGHT, np.random.default_rng(0), kept["boxes"])
        columns = np.stack([found.x, found.y, found.t, found.polarity], axis=1)
        assert np.array_equal(columns, kept[f"{name}:events"]), name
        assert moved.shape == kept[f"{name}:boxes"].shape, name
        np.testing.assert_allclose(moved, kept[f"{name}:boxes"], atol=1e-4)
