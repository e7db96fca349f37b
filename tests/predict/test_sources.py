"""What a model is given of a file is what the evaluation of its data set would have given it."""

import numpy as np
import pytest
import torch
from PIL import Image

from parapos import predict
from parapos.data import coco, coco_tree, create_dataset
from parapos.data.readers import aedat, dat
from parapos.data.readers.video import write_video
from parapos.predict import PredictError, Predictor, sources, views
from tests.data.event_trees import load_gen1, load_gestures, small_gen1, small_gestures
from tests.predict.conftest import make_detector, make_event_detector
from tests.run_folders import make_run


@pytest.mark.parametrize(("crop", "normalize"), [(0.875, False), (1.0, True)])
def test_classified_images(crop, normalize, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("train/a/1.png", "test/a/1.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        Image.fromarray(rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(path)
    data = create_dataset("images", "test", root=tmp_path, size=32, crop=crop, normalize=normalize)
    model = torch.nn.Module()
    model.inputs, model.patch = ("image",), 4
    source = sources.ImageFiles(model, {"size": 32, **data.preprocessing}, size=None, every=None)
    (frame,) = source.read(path).frames
    torch.testing.assert_close(frame.sample["image"], data[0]["image"], rtol=0, atol=1e-6)
    assert frame.picture.shape == (3, 50, 70)


@pytest.mark.parametrize("fit", ["stretch", "pad", "inside"])
def test_images_with_boxes(fit, tmp_path):
    coco_tree.write_tiny(tmp_path / "data", train=6, val=6, test=6)
    data = coco.coco("val", root=tmp_path / "data", size=(64, 96), fit=fit, complete=False)
    source = predict.load(make_detector(tmp_path / "run", fit=fit), size=(64, 96)).source
    frames = [next(iter(source.read(data.path(i)).frames)) for i in range(len(data))]
    for i, frame in enumerate(frames):
        sample = data[i]
        assert torch.equal(frame.sample["image"], sample["image"])
        back = torch.tensor([1 / zoom for zoom in frame.zoom], dtype=torch.float64)
        torch.testing.assert_close(back, sample["scale"])
    batch = source.collate([frame.sample for frame in frames])
    assert batch["image"].shape[0] == len(data)
    assert (batch["mask"] is None) == (fit != "inside")


class OneBox(torch.nn.Module):
    """Finds the box that it is made with."""

    inputs, patch = ("image", "mask"), 16

    def __init__(self, box):
        super().__init__()
        self.box = box

    def detect(self, image, mask, max_det):
        return torch.tensor([[[*self.box, 0.9, 1.0], [0, 0, 5, 5, 0.1, 0.0]]] * len(image))


@pytest.mark.parametrize(
    ("fit", "box", "expected"),
    [
        ("stretch", (16, 8, 32, 64), [50, 12.5, 100, 100]),  # 200 x 100 pixels become 64 x 64
        ("pad", (16, 8, 32, 64), [50, 25, 100, 100]),  # shrunk by 3.125 in both; what is below the image is cut
        ("crop", (0, 0, 32, 32), [50, 0, 100, 50]),  # the middle 100 x 100 of the image
    ],
)
def test_boxes_come_back_to_the_picture(fit, box, expected):
    source = sources.MaskedImages(OneBox(box), {"fit": fit, "size": 64, "crop": 1.0}, size=None, every=None)
    view = views.Boxes({"class_names": ["a", "b"]})
    predictor = Predictor(OneBox(box), source, view, device=torch.device("cpu"), batch=1)
    found = predictor(torch.zeros(3, 100, 200, dtype=torch.uint8))
    assert found.answers == [{"box": expected, "class": 1, "name": "b", "score": 0.9}]


def test_what_an_image_may_be(digits_run, tmp_path):
    predictor = predict.load(digits_run)
    array = np.random.default_rng(1).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    Image.fromarray(array).save(tmp_path / "x.png")
    forms = [array, Image.fromarray(array), torch.from_numpy(array).permute(2, 0, 1), tmp_path / "x.png"]
    found = [predictor(form) for form in (*forms, str(tmp_path / "x.png"))]
    assert all(one.answers == found[0].answers for one in found)
    together = predictor(forms)
    assert [[answer["class"] for answer in one.answers] for one in together] == [
        [answer["class"] for answer in found[0].answers]
    ] * 4
    with pytest.raises(PredictError, match=r"expected a path, a PIL image.*got torch.float32"):
        predictor(torch.rand(3, 8, 8))
    with pytest.raises(PredictError, match="got int"):
        predictor(3)


def test_names_come_from_the_run(tmp_path):
    learned = {"targets": {"num_classes": 10, "class_names": [f"number {i}" for i in range(10)]}}
    folder = make_run(tmp_path / "run", learned=learned)
    found = predict.load(folder)(torch.zeros(3, 8, 8, dtype=torch.uint8))
    assert all(answer["name"] == f"number {answer['class']}" for answer in found.answers)


def test_videos_frame_by_frame(digits_run, tmp_path):
    frames = [np.full((32, 48, 3), 10 * i, np.uint8) for i in range(10)]
    write_video(tmp_path / "v.avi", frames, rate=10)
    found = predict.load(digits_run, batch=3)(tmp_path / "v.avi")
    assert [one.frame.about["frame"] for one in found] == list(range(10))
    assert found[3].frame.about["seconds"] == pytest.approx(0.3)
    still = predict.load(digits_run)(found[7].frame.picture)
    assert [a["class"] for a in still.answers] == [a["class"] for a in found[7].answers]
    some = predict.load(digits_run, every=200)(tmp_path / "v.avi")
    assert [one.frame.about["frame"] for one in some] == [0, 2, 4, 6, 8]


def test_whole_clips(tmp_path):
    learned = {"preprocessing": {"height": 16, "width": 24, "pixel_scale": "unit", "spacing": "starts"}}
    learned["targets"] = {"num_classes": 4, "class_names": ["left", "right", "up", "down"]}
    changes = dict(data__root="nowhere", data__options__height="16", data__options__width="24")
    folder = make_run(tmp_path / "run", source="ucf101_smoke", classes=4, learned=learned, **changes)
    write_video(tmp_path / "v.avi", [np.full((32, 48, 3), 5 * i, np.uint8) for i in range(25)])
    found = predict.load(folder)(tmp_path / "v.avi")
    assert len(found.answers) == 4
    assert found.frame.sample["tubelets"] == 3
    assert found.frame.sample["video"].shape == (3, 10, 16, 24)
    assert found.frame.picture.shape == (3, 32, 3 * 48)
    with pytest.raises(PredictError, match="every has no effect"):
        predict.load(folder, every=5)


def test_recordings_with_boxes(tmp_path):
    data = load_gen1("test", small_gen1(tmp_path / "gen1"))
    path = data.folder / f"{data.names[0]}_td.dat"
    predictor = predict.load(make_event_detector(tmp_path / "run", data.preprocessing), every=125, threshold=0)
    found = predictor(path)
    times = [one.frame.about["time_us"] for one in found]
    assert times == list(range(times[0], times[-1] + 1, 125_000))
    known = {int(time): i for i, time in enumerate(data.times)}
    shared = [one for one in found if one.frame.about["time_us"] in known]
    assert shared
    for one in shared:
        sample = data[known[one.frame.about["time_us"]]]
        assert all(torch.equal(one.frame.sample[name], sample[name]) for name in ("codes", "x", "y", "t"))
    assert all(one.frame.picture.shape == (3, 240, 304) for one in found)
    last = int(dat.read(path).t[-1])
    assert times[-2] < last <= times[-1]
    assert any(one.answers for one in found)


@pytest.mark.parametrize(
    ("times", "moments"),
    [([0], [500_000]), ([10, 500_000], [500_000]), ([10, 500_001], [500_000, 1_000_000]), ([2_000_001], [2_500_000])],
)
def test_moments_cover_a_recording(times, moments, tmp_path):
    from parapos.data.events import Events

    data = load_gen1("test", small_gen1(tmp_path / "gen1"))
    predictor = predict.load(make_event_detector(tmp_path / "run", data.preprocessing))
    zeros = [0] * len(times)
    dat.write(tmp_path / "few.dat", Events.of(times, zeros, zeros, zeros))
    found = predictor(tmp_path / "few.dat")
    assert [one.frame.about["time_us"] for one in found] == moments


def test_recordings_with_classes(tmp_path):
    data = load_gestures("test", small_gestures(tmp_path / "gestures"))
    changes = dict(data__root="nowhere", data__options__threshold="16")
    learned = {"preprocessing": data.preprocessing, "targets": {"num_classes": 11, "class_names": data.class_names}}
    folder = make_run(tmp_path / "run", source="dvsgesture_smoke", classes=11, learned=learned, **changes)
    sample = data.samples[0]
    whole = aedat.read(data.root / f"{sample.recording}.aedat")
    part = whole.select((whole.t >= sample.gesture.start) & (whole.t <= sample.gesture.end))
    aedat.write(tmp_path / "one.aedat", part)
    found = predict.load(folder)(tmp_path / "one.aedat")  # shorter than six seconds, so it is one piece
    assert len(found) == 1
    first = int(part.t[0]) - sample.gesture.start
    assert torch.equal(found[0].frame.sample["t"] + first, data[0]["t"])
    assert torch.equal(found[0].frame.sample["x"], data[0]["x"])
    pieces = predict.load(folder, every=50)(tmp_path / "one.aedat")
    assert len(pieces) == -(-(int(part.t[-1] - part.t[0]) + 1) // 50_000)
    assert pieces[1].frame.about["start_us"] == int(part.t[0]) + 50_000


def test_a_recording_without_events_is_skipped(tmp_path):
    from parapos.data import FormatError
    from parapos.data.events import Events

    data = load_gen1("test", small_gen1(tmp_path / "gen1"))
    predictor = predict.load(make_event_detector(tmp_path / "run", data.preprocessing))
    dat.write(tmp_path / "empty.dat", Events.empty())
    with pytest.raises(FormatError, match="no events on the sensor"):
        predictor(tmp_path / "empty.dat")
    with pytest.raises(PredictError, match="size has no effect"):
        predict.load(tmp_path / "run", size=64)


def test_runs_that_do_not_tell_how_events_were_cut(tmp_path):
    folder = make_event_detector(tmp_path / "run", {"patch": 16})
    with pytest.raises(PredictError, match="the run does not say height, width"):
        predict.load(folder)


def test_new_tasks_and_inputs_plug_in(monkeypatch, digits_run):
    monkeypatch.setattr(views, "VIEWS", dict(views.VIEWS))
    monkeypatch.setattr(sources, "SOURCES", dict(sources.SOURCES))

    class Loudest(views.Classes):
        key = "loudest"

        def answers(self, model, batch, frames):
            return [found[:1] for found in super().answers(model, batch, frames)]

    with pytest.raises(ValueError, match="has a view"):
        views.register_view("classification", Loudest)
    views.VIEWS.pop("classification")
    with pytest.raises(PredictError, match="task 'classification' has no view"):
        predict.load(digits_run)
    views.register_view("classification", Loudest)
    sources.SOURCES.pop(("image",))
    with pytest.raises(PredictError, match="ViT takes image, and no source gives these"):
        predict.load(digits_run)
    sources.register_source(("image",), sources.ImageFiles)
    found = predict.load(digits_run)(torch.zeros(3, 8, 8, dtype=torch.uint8))
    assert list(found.as_json()) == ["loudest"]
    assert len(found.answers) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"threshold": -0.1}, "threshold must be from 0 to 1"),
        ({"every": 0}, "every must be a positive number"),
        ({"size": 0}, "size must be a multiple"),
    ],
)
def test_bad_options(options, message, digits_run):
    with pytest.raises(PredictError, match=message):
        predict.load(digits_run, **options)


def test_no_gpu(digits_run, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(PredictError, match="no CUDA device"):
        predict.load(digits_run, device="cuda")
