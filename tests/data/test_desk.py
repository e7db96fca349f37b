"""Generated clips and gestures of the desk recipes: written once, of the counts that they state, larger on demand."""

import numpy as np
import pytest

from parapos.data import create_dataset, desk_clips, desk_gestures
from parapos.data.events import Events, enlarged
from parapos.data.events_tree import make_dvsgesture
from parapos.data.generated import ensure
from parapos.training import recipe


def test_a_pixel_becomes_a_block_and_an_event_one_in_each_pixel_of_it():
    events = Events.of([5, 9], [1, 0], [2, 3], [1, 0])
    large = enlarged(events, 2)
    assert large.t.tolist() == [5] * 4 + [9] * 4
    assert sorted(zip(large.x.tolist(), large.y.tolist(), strict=True))[:4] == [(0, 6), (0, 7), (1, 6), (1, 7)]
    assert {(x, y) for x, y, p in zip(large.x, large.y, large.polarity, strict=True) if p} == {
        (2, 4),
        (2, 5),
        (3, 4),
        (3, 5),
    }


def test_a_larger_sensor_has_more_tokens_at_the_same_places(tmp_path, monkeypatch):
    monkeypatch.setattr(desk_gestures, "write", lambda root: make_dvsgesture(root, users=(1, 21, 24), lights=("led",)))
    small, large = (create_dataset("desk_gestures", "test", root=tmp_path / "g", enlarge=f)[0] for f in (1, 4))
    assert large["length"] > 8 * small["length"]
    assert large["x"].max() > 3 * small["x"].max()
    for axis in ("x", "y"):
        middle = [float(sample[axis].double().mean()) for sample in (small, large)]
        assert (middle[1] + 0.5) / 4 == pytest.approx(middle[0] + 0.5, rel=0.2)
    assert small["label"] == large["label"]
    with pytest.raises(ValueError, match="enlarge must be from 1 to 256, and 1 for training, got 2 for train"):
        create_dataset("desk_gestures", "train", root=tmp_path / "g", enlarge=2)


def test_data_are_written_once_and_never_over_others(tmp_path):
    def write(root):
        root.mkdir()
        (root / "marker").touch()

    ensure(tmp_path / "new", "marker", write)
    (tmp_path / "new" / "mine").touch()
    ensure(tmp_path / "new", "marker", write)
    assert (tmp_path / "new" / "mine").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ValueError, match="not empty, expected a new folder or the generated data set"):
        ensure(tmp_path / "other", "marker", write)


def test_counts_are_those_that_are_stated(monkeypatch):
    asked = {}
    monkeypatch.setattr(desk_clips, "make_ucf101", lambda root, **options: asked.update(options))
    monkeypatch.setattr(desk_gestures, "make_dvsgesture", lambda root, **options: asked.update(options))
    desk_clips.write(None)
    desk_gestures.write(None)
    tested = asked["groups"] * 7 // 25
    each = asked["classes"] * asked["clips"]
    assert f"{each * (asked['groups'] - tested - 1)} clips for training" in desk_clips.write.__doc__
    assert f"{each * tested} for testing" in desk_clips.write.__doc__
    users = np.array(asked["users"])
    for count, word in ((24 * (users < 21).sum(), "training"), (24 * (users > 23).sum(), "testing")):
        assert f"{count} for {word}" in desk_gestures.write.__doc__


@pytest.mark.parametrize("name", ["desk_video", "desk_events"])
def test_recipes_are_of_one_model(name):
    here, digits = recipe.load(name), recipe.load("desk_digits")
    for option in ("dim", "depth", "mlp_dim"):
        assert here.model.options[option] == digits.model.options[option]
    assert here.model.encodings["pape"] == digits.model.encodings["pape"]
