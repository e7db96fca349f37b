"""The task of detection: batches, loss, evaluation in the original frame, merging, and files for servers."""

import json
import math

import numpy as np
import pytest
import torch

from parapos.data.batch import collate
from parapos.data.coco import Augment, coco
from parapos.data.coco_tree import write_tiny
from parapos.data.events_tree import make_gen1
from parapos.data.gen1 import gen1
from parapos.data.readers import boxes as box_files
from parapos.models import create_model
from parapos.tasks import answer, create_task, task_class
from parapos.tasks.protocols import Judged, psee_scores

PLAIN = Augment(flip=0.0, slots=0)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("coco") / "tiny"
    write_tiny(root)
    return root


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    root = tmp_path_factory.mktemp("gen1") / "tiny"
    make_gen1(root)
    return gen1("test", root=root, complete=False, threshold=32, refractory_us=20_000)


def net(classes=3, **options):
    torch.manual_seed(0)
    return create_model(
        "vit_det_nano", num_classes=classes, encoding="pape", parabolas=2, neck_dim=16, depth=1, **options
    )


def load(split, root, **options):
    data = coco(split, root=root, complete=False, **{"size": 64, **options})
    return data, create_task("detection", data)


def test_batches(root):
    data, task = load("train", root, augment=PLAIN)
    samples = [data[i] for i in range(8)]
    batch = task.collate(samples)
    most = max(sample["count"] for sample in samples)
    assert batch["image"].shape == (8, 3, 64, 64)
    assert (batch["boxes"].shape, batch["labels"].shape) == ((8, most, 4), (8, most))
    assert batch["count"].tolist() == [sample["count"] for sample in samples]
    assert batch["mask"] is None
    none = task.collate([sample for sample in samples if not sample["count"]][:2] or [samples[0]])
    assert none["boxes"].shape[1] == none["count"].max()


def test_images_of_different_sizes_in_a_batch(root):
    """What a model says of an image does not depend on what is beside it."""
    data, task = load("val", root, fit="inside", size=96)
    model = net().eval()
    samples = [data[i] for i in range(6)]
    assert len({sample["image"].shape for sample in samples}) > 1
    batch = task.collate(samples)
    height, width = batch["image"].shape[-2:]
    assert batch["mask"].shape == (6, -(-height // 16), -(-width // 16))
    evaluators = [task.evaluator(), task.evaluator()]
    with torch.no_grad():
        evaluators[0].update(model, batch)
        for sample in samples:
            evaluators[1].update(model, task.collate([sample]))
    for index in range(6):
        info = data.instances.images[index]
        together, alone = (evaluator.samples[index].detections for evaluator in evaluators)
        assert len(together) == len(alone)
        np.testing.assert_allclose(together[:, 4], alone[:, 4], atol=1e-5)
        centre = (together[:, :2] + together[:, 2:4]) / 2
        assert (centre < [info.width + 40, info.height + 40]).all()
    loss = task.loss(model.train(), batch)
    assert torch.isfinite(loss.total).all()


def test_loss_has_named_parts_and_a_weight_for_each_branch(root):
    data, task = load("train", root, augment=PLAIN)
    model, batch = net(), task.collate([data[i] for i in range(6)])
    loss = task.loss(model, batch)
    assert (loss.total.shape, loss.weight.shape, loss.by_sample.shape) == ((2,), (2,), (6, 2))
    assert set(loss.parts) == set(task.parts) == {"box", "cls", "dfl"}
    assert torch.allclose(torch.stack(list(loss.parts.values())).sum(0), loss.total.detach())
    assert torch.allclose(loss.by_sample.sum(0), loss.total.detach())
    (loss.total / loss.weight.clamp(min=1)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert {task.normalizer_of(name) for name, _ in model.named_parameters()} == {0, 1}
    nothing = task.collate([sample for sample in (data[i] for i in range(20)) if sample["count"] == 0])
    empty = task.loss(model, nothing)
    assert empty.weight.tolist() == [0, 0]
    assert empty.parts["box"].tolist() == [0, 0]
    assert torch.isfinite(empty.total).all()


def judged(data, rows):
    """Samples with these detections, by index."""
    plain = {i: {k: v.numpy() if torch.is_tensor(v) else v for k, v in data.truth(i).items()} for i in rows}
    return {i: Judged(found, plain[i]) for i, found in rows.items()}


def truth_of(data, index, score=0.9):
    """What a perfect model would say, in the pixels of the file."""
    rows = data.instances.of(index)
    boxes, labels = data.instances.boxes[rows], data._labels[data.instances.labels[rows]].numpy()
    columns = [boxes[:, :2], boxes[:, :2] + boxes[:, 2:], np.full((len(boxes), 1), score), labels[:, None]]
    return np.concatenate(columns, axis=1).astype(float)


@pytest.mark.parametrize("raw_ids", [False, True])
def test_perfect_detections_and_the_file_for_the_server(root, tmp_path, raw_ids):
    data, task = load("val", root, raw_ids=raw_ids)
    whole = task.evaluator()
    whole.samples = judged(data, {i: truth_of(data, i) for i in range(len(data))})
    found = whole.compute()
    assert found["map"] == pytest.approx(1.0)
    assert [metric.name for metric in task.metrics] == list(found)
    assert {name: found[name] for name in ("ap_red", "ap_green", "ap_blue")} == pytest.approx(
        {"ap_red": 1.0, "ap_green": 1.0, "ap_blue": 1.0}
    )
    paths = task.export(whole, tmp_path / "out")
    assert paths[0].name == "detections_val2017_parapos_results.json"
    rows = json.loads(paths[0].read_text())
    assert {row["category_id"] for row in rows} == {1, 3, 90}
    assert set(rows[0]) == {"image_id", "category_id", "bbox", "score"}
    truth = json.loads((root / "annotations/instances_val2017.json").read_text())["annotations"]
    key = lambda note: (note["image_id"], note["category_id"], [round(v, 2) for v in note["bbox"]])  # noqa: E731
    assert sorted(map(key, rows)) == sorted(map(key, truth))


def test_a_task_of_training_data_judges_other_splits(root):
    """As training does, whose task is that of its own data."""
    _, task = load("train", root, augment=PLAIN)
    data, own = load("val", root)
    evaluators = task.evaluator(), own.evaluator()
    for evaluator in evaluators:
        evaluator.samples = judged(data, {i: truth_of(data, i) for i in range(len(data))})
    assert evaluators[0].compute() == pytest.approx(evaluators[1].compute(), nan_ok=True)
    assert evaluators[0].compute()["map"] == pytest.approx(1.0)


def test_boxes_come_back_to_the_original_frame(root):
    """A model that draws boxes in its own frame is judged in that of the file, in every way to fit."""
    for fit in ("stretch", "pad", "inside"):
        data, task = load("val", root, fit=fit, size=(96, 64))
        evaluator = task.evaluator()
        for i in range(len(data)):
            sample = data[i]
            boxes, count = sample["boxes"], sample["count"]
            model = _Fixed(boxes, sample["labels"], task.classes)
            evaluator.update(model, task.collate([sample]))
            assert len(evaluator.samples[i].detections) == count
        assert evaluator.compute()["map"] == pytest.approx(1.0), fit


class _Fixed:
    """Raw answers with one certain anchor for each box: here the decoder is stood in for."""

    inputs = ("image", "mask")

    def __init__(self, boxes, labels, classes, score=0.8):
        self.rows = torch.cat([boxes, torch.full((len(boxes), 1), score), labels[:, None].float()], 1)[None]

    def __call__(self, *inputs):
        return self.rows


@pytest.fixture(autouse=True)
def _no_decoder(request, monkeypatch):
    if request.node.name.startswith("test_boxes_come_back"):
        from parapos.tasks import detection

        monkeypatch.setattr(detection, "postprocess", lambda raw, max_det: raw[:, :max_det])


def test_the_least_score_counts(root, monkeypatch):
    monkeypatch.setattr("parapos.tasks.detection.postprocess", lambda raw, max_det: raw)
    data, _ = load("val", root)
    sample = next(data[i] for i in range(len(data)) if data[i]["count"] > 1)
    for least, kept in ((0.75, sample["count"]), (0.7501, 0)):
        task = create_task("detection", data, min_score=least)
        evaluator, model = task.evaluator(), _Fixed(sample["boxes"], sample["labels"], task.classes, score=0.75)
        evaluator.update(model, task.collate([sample]))
        assert len(evaluator.samples[sample["id"]].detections) == kept


def test_crowds_and_areas_are_those_of_the_file(root):
    data, task = load("train", root, augment=PLAIN)
    data, evaluator, model = data.as_judged(), task.evaluator(), net().eval()
    with torch.no_grad():
        evaluator.update(model, task.collate([data[i] for i in range(len(data))]))
    for i, sample in evaluator.samples.items():
        rows = data.instances.of(i)
        assert sample.truth["crowd"].tolist() == data.instances.crowd[rows].tolist()
        assert sample.truth["area"].tolist() == data.instances.area[rows].tolist()
    assert sum(sample.truth["crowd"].sum() for sample in evaluator.samples.values()) == 1
    truth = {"image_id": 7, "height": 96, "width": 96, "labels": np.array([0, 0]), "crowd": np.array([False, True])}
    truth |= {"boxes": np.array([[10.0, 10, 20, 20], [30, 30, 40, 40]]), "area": np.array([1500.0, 1600])}
    inside = [[32.0 + k, 32, 50, 50, 0.9, 0] for k in range(4)]  # of the crowd: neither right nor wrong
    evaluator.samples = {0: Judged(np.array([*inside, [10, 10, 30, 30, 0.5, 0]]), truth)}
    found = evaluator.compute()
    assert found["map"] == found["map_medium"] == pytest.approx(1.0)  # medium by the area of the file, not of the box
    assert math.isnan(found["map_small"])


def test_processes_are_merged_without_counting_twice(root):
    data, task = load("val", root)
    model = net().eval()
    whole, parts = task.evaluator(), [task.evaluator(), task.evaluator()]
    with torch.no_grad():
        for i in range(len(data)):
            batch = task.collate([data[i]])
            for evaluator in (whole, parts[i % 2]):
                evaluator.update(model, batch)
            if i == 0:
                parts[1].update(model, batch)  # a stand-in that both processes saw
    parts[0].merge([part.state() for part in parts])
    assert parts[0].compute() == pytest.approx(whole.compute(), nan_ok=True)
    assert sorted(parts[0].samples) == list(range(len(data)))


def test_a_blind_list_is_exported_and_not_judged(tmp_path):
    write_tiny(tmp_path / "tiny")
    (tmp_path / "tiny/annotations/instances_test2017.json").unlink()
    data, task = load("test", tmp_path / "tiny")
    evaluator = task.evaluator()
    evaluator.samples = judged(data, {i: np.array([[1.0, 2, 30, 40, 0.5, 1]]) for i in range(len(data))})
    assert all(math.isnan(value) for value in evaluator.compute().values())
    (path,) = task.export(evaluator, tmp_path / "out")
    assert path.name == "detections_test-dev2017_parapos_results.json"
    assert len(json.loads(path.read_text())) == len(data)


def test_options(root):
    data, _ = load("val", root)
    for option, told in (({"min_score": 1.0}, "min_score"), ({"max_det": 0}, "max_det"), ({"method": "a/b"}, "method")):
        with pytest.raises(ValueError, match=f"{told} must be"):
            create_task("detection", data, **option)
    clipped = create_task("detection", data, clip_boxes=True).evaluator()
    clipped.samples = judged(data, {0: np.array([[-5.0, -5, 1000, 1000, 0.5, 0]])})
    info = data.instances.images[0]
    assert clipped.judging.results(clipped.samples)[0]["bbox"] == [0, 0, info.width, info.height]
    few, none = create_task("detection", data, max_det=3).evaluator(), create_task("detection", data, min_score=0.99)
    batch, model = none.collate([data[3]]), net().eval()
    with torch.no_grad():
        few.update(model, batch)
        high = none.evaluator()
        high.update(model, batch)
    assert len(few.samples[3].detections) <= 3
    assert len(high.samples[3].detections) == 0
    with pytest.raises(ValueError, match="protocol"):
        create_task("detection", type("Data", (), {"classes": 2, "class_names": "ab", "ragged": ()})())


def test_what_was_learned(root):
    _, task = load("val", root)
    assert task.learned() == {"num_classes": 3, "class_names": ["red", "green", "blue"], "category_ids": [1, 3, 90]}
    task.adapt(task.learned())
    with pytest.raises(ValueError, match="has 3 classes, the model has 4"):
        task.adapt({"num_classes": 4})
    with pytest.raises(ValueError, match="class 1 is 'green', the model learned 'pink'"):
        task.adapt({**task.learned(), "class_names": ["red", "pink", "blue"]})
    cls = task_class("detection")
    assert (cls.metric("ap_red").factor, cls.metric("psee_map").label) == (100.0, "mAP of the toolbox")
    assert "mAP50 25.0" in cls.summary({"map": 0.1, "map50": 0.25, "map75": 0.0, "samples": 3})


def test_a_model_that_diverged_is_told(root):
    data, task = load("val", root)
    model = net().eval()
    with torch.no_grad():
        next(model.neck.parameters()).fill_(math.nan)
        with pytest.raises(ValueError, match="detections of samples"):
            task.evaluator().update(model, task.collate([data[0]]))


# GEN1


def said(clips, index, score=0.9):
    x, y, w, h, label = clips.objects(index).T
    return np.stack([x, y, x + w, y + h, np.full(len(x), score), label], axis=1)


def test_gen1_by_both_protocols(clips, tmp_path):
    task = create_task("detection", clips)
    evaluator = task.evaluator()
    rows = {i: said(clips, i) for i in range(len(clips))}
    evaluator.samples = judged(clips, rows)
    found = evaluator.compute()
    assert found["map"] == pytest.approx(1.0)
    assert found["psee_map"] == pytest.approx(1.0)
    assert [metric.name for metric in task.metrics] == list(found)
    early = [i for i in range(len(clips)) if clips.times[i] < 500_000]
    edge = [i for i in range(len(clips)) if clips.times[i] == 500_000]
    assert early
    assert edge
    for i in early:  # what is said there does not count
        rows[i] = np.zeros((0, 6))
    evaluator.samples = judged(clips, rows)
    assert evaluator.compute()["map"] == pytest.approx(1.0)
    for i in edge:  # counts in the released code, and not in the toolbox
        rows[i] = np.zeros((0, 6))
    evaluator.samples = judged(clips, rows)
    found = evaluator.compute()
    assert found["map"] < 1
    assert found["psee_map"] == pytest.approx(1.0)
    paths = task.export(evaluator, tmp_path)
    arrays = [box_files.read(path) for path in paths if path.suffix == ".npy"]
    assert len(arrays) == len(clips.names)
    starts = [clips.bounds[np.flatnonzero(clips.clips == k)[[0, -1]] + [0, 1]] for k in range(len(arrays))]
    truth = [clips.boxes[a:b] for a, b in starts]
    assert psee_scores(truth, arrays)[0].stats["map"] == pytest.approx(1.0)


def test_gen1_small_detections_do_not_count(clips):
    task = create_task("detection", clips)
    evaluator = task.evaluator()
    small = np.array([[5.0, 5, 14, 60, 0.99, 0], [5, 5, 25, 26, 0.99, 0], [-30, 5, 9, 100, 0.99, 0]])
    evaluator.samples = judged(clips, {i: np.concatenate([small, said(clips, i)]) for i in range(len(clips))})
    assert evaluator.compute()["map"] == pytest.approx(1.0)
    large = np.array([[5.0, 5, 15, 60, 0.99, 0]])
    evaluator.samples = judged(clips, {i: np.concatenate([large, said(clips, i)]) for i in range(len(clips))})
    assert evaluator.compute()["map"] < 1


def test_gen1_samples_are_learned_from(clips):
    task = create_task("detection", clips)
    torch.manual_seed(0)
    model = create_model("event_det_nano", encoding="pape", parabolas=2, neck_dim=16, depth=1, num_classes=2)
    samples = [clips[i] for i in (0, 1, 2, 5)]
    assert "mask" not in collate(samples, clips.ragged)
    batch = task.collate(samples)
    loss = task.loss(model, batch)
    assert torch.isfinite(loss.total).all()
    assert loss.weight[0] > 0
    evaluator = task.evaluator()
    with torch.no_grad():
        raw = answer(model.eval(), batch)
        assert [tuple(level.shape[-2:]) for level in raw.o2o] == [(30, 38), (15, 19), (7, 9)]
        evaluator.update(model, batch)
    assert sorted(evaluator.samples) == [0, 1, 2, 5]


# Learning


def steps(model, task, batch, count, autocast=False, lr=3e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(count):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * step / count))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = task.loss(model.train(), batch)
        optimizer.zero_grad()
        (loss.total / loss.weight.clamp(min=1)).sum().backward()
        optimizer.step()
    return loss


def test_a_step_in_bfloat16_is_finite(root):
    data, task = load("train", root, augment=PLAIN)
    model = net()
    loss = steps(model, task, task.collate([data[i] for i in range(4)]), 1, autocast=True)
    assert torch.isfinite(loss.total).all()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["pape", "rope"])
def test_four_images_are_learned_by_heart(root, encoding):
    data, task = load("val", root, size=96)
    chosen = [i for i in range(len(data)) if data.instances.boxes[data.instances.of(i)][:, 2:].min(initial=99) > 8][:4]
    assert sum(data[i]["count"] > 0 for i in chosen) >= 2
    torch.manual_seed(0)
    model = create_model("vit_det_nano", num_classes=3, encoding=encoding, neck_dim=32, drop_path=0.0)
    batch = task.collate([data[i] for i in chosen])
    steps(model, task, batch, 250)
    assert score(model, task, batch)["map50"] > 0.9


def score(model, task, batch):
    evaluator = task.evaluator()
    with torch.no_grad():
        evaluator.update(model.eval(), batch)
    return evaluator.compute()


@pytest.mark.full
def test_a_recording_is_learned_by_heart(clips):
    """Its labels are later than half a second, before which nothing is judged."""
    task = create_task("detection", clips)
    torch.manual_seed(0)
    model = create_model("event_det_nano", parabolas=4, neck_dim=32, depth=2, num_classes=2, drop_path=0.0)
    batch = task.collate([clips[2]])
    steps(model, task, batch, 80)
    assert score(model, task, batch)["map50"] > 0.9
