"""Runs with random weights, which answer something, and pictures to apply them to."""

import numpy as np
import pytest
from PIL import Image

from tests.run_folders import make_run

DETECTOR = """
[model]
name = "{model}"
[model.options]
{options}
[model.encodings.pape]
parabolas = 4
[data]
name = "{data}"
root = "nowhere"
{size}
[data.options]
complete = false
[optim]
epochs = 1
batch = 2
lr = 1e-3
"""
NAMES = {"num_classes": 3, "class_names": ["cat", "dog", "ufo"]}


def make_detector(folder, *, fit="stretch", size=64, **changes):
    """A detector of images of 3 classes."""
    folder.mkdir(parents=True)
    source = folder / "source.toml"
    options = "dim = 32\nheads = 2\ndepth = 1\nmlp_dim = 32\nneck_dim = 16"
    source.write_text(
        DETECTOR.format(model="vit_det_nano", options=options, data="coco", size=f"size = {size}\neval_batch = 4")
    )
    known = {"preprocessing": {"size": size, "fit": fit, "mean": [0.0] * 3, "scale": [1.0] * 3}, "targets": NAMES}
    return make_run(folder, source=source, classes=3, learned=known, **changes)


def make_event_detector(folder, tokenizing):
    """A detector of events of 2 classes; tokenizing: what its run knows of events."""
    folder.mkdir(parents=True)
    source = folder / "source.toml"
    options = "dim = 32\nheads = 2\ndepth = 1\nmlp_dim = 32\nneck_dim = 16"
    source.write_text(DETECTOR.format(model="event_det_nano", options=options, data="gen1", size=""))
    targets = {"num_classes": 2, "class_names": ["car", "pedestrian"]}
    return make_run(folder, source=source, classes=2, learned={"preprocessing": tokenizing, "targets": targets})


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture(scope="session")
def detector_run(tmp_path_factory):
    return make_detector(tmp_path_factory.mktemp("runs") / "detector")


@pytest.fixture
def pictures(tmp_path):
    """Three images, one of them below another folder with a name that is there already, and two files that are none."""
    folder, rng = tmp_path / "pictures", np.random.default_rng(0)
    for name, shape in (("a.png", (40, 60, 3)), ("b.jpg", (64, 48, 3)), ("deep/a.png", (30, 30))):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)
    (folder / "broken.png").write_text("no picture")
    (folder / "notes.txt").write_text("not looked at")
    (folder / ".hidden.png").write_text("not looked at")
    return folder
