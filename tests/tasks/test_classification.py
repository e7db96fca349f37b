"""Loss and metrics by hand, evaluators that add up, predictions, and data with other classes."""

import csv

import pytest
import torch

from parapos.data.batch import collate
from parapos.data.digits import Digits
from parapos.tasks import Metric, classification, create_task, list_tasks, register_task
from parapos.tasks.classification import Classification


class Data:
    classes = 10


@pytest.fixture(scope="module")
def batch():
    digits = Digits("train", size=16)
    return collate([digits[i] for i in range(6)])


@pytest.fixture
def answers(monkeypatch):
    """answers(logits): what any model says."""

    def put(logits):
        monkeypatch.setattr(classification, "answer", lambda model, batch: logits)

    return put


def test_smoothed_cross_entropy(batch, answers):
    logits = torch.randn(6, 10)
    answers(logits)
    loss = Classification(Data, smoothing=0.1).loss(None, batch)
    target = torch.nn.functional.one_hot(batch["label"], 10) * 0.9 + 0.01
    want = -(target * logits.log_softmax(-1)).sum(-1)
    assert torch.allclose(loss.by_sample, want, atol=1e-6)
    assert torch.allclose(loss.total, want.sum(), atol=1e-5)
    assert loss.weight == 6


@pytest.mark.parametrize(
    ("mixup", "cutmix", "names"), [(0.8, 1.0, ["MixUp", "CutMix"]), (0, 1, ["CutMix"]), (0, 0, [])]
)
def test_mixed_labels_sum_to_one(mixup, cutmix, names, batch):
    task = Classification(Data, mixup=float(mixup), cutmix=float(cutmix))
    assert [type(mixer).__name__ for mixer in task.mixers] == names
    for mixer in task.mixers:
        images, labels = mixer(batch["image"], batch["label"])
        assert images.shape == batch["image"].shape
        assert labels.shape == (6, 10)
        assert torch.allclose(labels.sum(-1), torch.ones(6))
        assert (labels > 0).sum(-1).max() == 2


def test_metrics_by_hand_and_merged(answers):
    """Three processes, one without a batch, count what one does."""
    logits, labels = torch.randn(12, 10), torch.randint(10, (12,))
    logits[range(0, 12, 2), labels[::2]] += 9  # every other answer is right
    task = Classification(Data)
    alone, *others = (task.evaluator(keep_predictions=True) for _ in range(4))
    answers(logits)
    alone.update(None, {"label": labels, "id": torch.arange(12)})
    for evaluator, part in zip(others, (slice(0, 5), slice(5, 12)), strict=False):
        answers(logits[part])
        evaluator.update(None, {"label": labels[part], "id": torch.arange(12)[part]})
    others[2].merge([evaluator.state() for evaluator in others])
    want, found = alone.compute(), others[2].compute()
    assert list(want) == list(found) == [metric.name for metric in task.metrics]
    assert found == pytest.approx(want)
    assert want["top1"] >= 0.5
    assert want["top1"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert want["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())
    assert others[2].answers == alone.answers
    alone.merge([alone.state()])
    assert alone.compute() == want


def test_answers_among_some_classes(answers):
    """Two of four answers are right among ten classes, three among the subset; without one nothing is added."""
    logits = torch.zeros(4, 10)
    logits[torch.arange(4), torch.tensor([0, 5, 9, 2])] = 3.0
    logits[[0, 2], [2, 5]] = 1.0  # the best of the subset, once right and once wrong
    answers(logits)

    class Some(Data):
        subset = (2, 5, 7)

    for data, names in ((Data, []), (Some, ["top1_3"])):
        task = Classification(data)
        evaluator = task.evaluator()
        evaluator.update(None, {"label": torch.tensor([2, 5, 7, 2])})
        evaluator.merge([evaluator.state()])
        found = evaluator.compute()
        assert list(found) == [metric.name for metric in task.metrics]
        assert list(found) == ["loss", "top1", "precision", "recall", "f1", *names]
        assert found["top1"] == 0.5
    assert found["top1_3"] == 0.75


def test_unreadable_samples_are_wrong(answers):
    logits = torch.nn.functional.one_hot(torch.arange(4), 10).float()
    answers(logits)
    evaluator = Classification(Data).evaluator()
    evaluator.update(None, {"label": torch.arange(4), "readable": torch.tensor([1, 0, 1, 1])})
    assert evaluator.compute()["top1"] == 0.75


def test_predictions_are_written(answers, tmp_path):
    logits = torch.zeros(2, 10)
    logits[0, 7], logits[0, 1], logits[1, 3] = 3.0, 2.0, 1.0
    answers(logits)
    task = Classification(Data)
    evaluator = task.evaluator(keep_predictions=True)
    evaluator.update(None, {"label": torch.tensor([7, 4]), "id": torch.tensor([12, 5])})
    (path,) = task.export(evaluator, tmp_path / "new")
    rows = list(csv.DictReader(path.open()))
    assert [(row["id"], row["label"], row["answer1"]) for row in rows] == [("5", "4", "3"), ("12", "7", "7")]
    assert rows[1]["answer2"] == "1"
    assert len(rows[0]) == 7


class Named:
    def __init__(self, *names):
        self.classes, self.class_names = len(names), names


LEARNED = {"num_classes": 3, "class_names": ["cat", "dog", "owl"]}


def test_the_same_classes_need_nothing():
    task = Classification(Named("cat", "dog", "owl"))
    assert task.learned() == LEARNED
    task.adapt(LEARNED)
    assert task.labels is None
    Classification(Named("x", "y", "z")).adapt({"num_classes": 3})  # of a run that knows no names
    task = Classification(Data)
    assert task.learned() == {"num_classes": 10}


@pytest.mark.parametrize(
    ("names", "relabel", "message"),
    [
        (("cat", "dog"), "", "has 2 classes, expected the model's 3; parapos eval --relabel names"),
        (("cat", "dog"), "order", "has 2 classes, expected the model's 3; parapos eval --relabel names"),
        (("cat", "owl", "dog"), "", "class 1 is 'owl', the model learned 'dog'; if that is meant, give --relabel"),
        (("cat", "dig"), "names", "class 'dig' was not learned; did you mean 'dog'"),
        (("cat", "dog"), "nowhere.toml", "expected order, names or a TOML file, got 'nowhere.toml'"),
    ],
)
def test_other_classes_are_refused(names, relabel, message):
    with pytest.raises(ValueError, match=message):
        Classification(Named(*names)).adapt(LEARNED, relabel)


def test_other_classes_are_put_right(answers, tmp_path):
    pairs = tmp_path / "pairs.toml"
    pairs.write_text('"tabby cat" = "cat"\n"barn owl" = "owl"\n')
    logits = torch.eye(3)[[0, 2]]  # cat, owl
    answers(logits)
    for names, relabel in ((("owl", "cat"), "names"), (("barn owl", "tabby cat"), str(pairs))):
        task = Classification(Named(*names))
        task.adapt(LEARNED, relabel)
        evaluator = task.evaluator()
        evaluator.update(None, {"label": torch.tensor([1, 0])})
        assert evaluator.compute()["top1"] == 1.0
    task = Classification(Named("owl", "dog", "cat"))
    task.adapt(LEARNED, "order")
    assert task.labels is None
    pairs.write_text("a = 1")
    with pytest.raises(ValueError, match=r"pairs.toml: a: expected the name of a class, got 1"):
        task.adapt(LEARNED, str(pairs))
    pairs.write_text("cat = 'cat'")
    with pytest.raises(ValueError, match="says nothing of class 'barn owl'"):
        Classification(Named("barn owl", "cat")).adapt(LEARNED, str(pairs))
    with pytest.raises(ValueError, match="needs names of classes"):
        Classification(Data).adapt(LEARNED, "names")


def test_the_registry():
    assert "classification" in list_tasks()
    with pytest.raises(ValueError, match=r"unknown task 'clasification'.*did you mean 'classification'"):
        create_task("clasification", Data)
    with pytest.raises(ValueError, match=r"no option 'mixp', expected some of mixup, .*did you mean 'mixup'"):
        create_task("classification", Data, mixp=1.0)
    register_task("classification", Classification)  # a second import does no harm
    with pytest.raises(ValueError, match="is taken by Classification"):
        register_task("classification", object)


def test_metrics_say_which_is_better():
    loss, top1 = Classification.metric("loss"), Classification.metric(Classification.headline)
    assert loss.better(1.0, 2.0)
    assert not top1.better(1.0, 2.0)
    assert (top1.unit, top1.factor) == ("%", 100.0)
    assert top1.better(0.0, float("nan"))
    assert not top1.better(float("nan"), 0.0)
    assert Classification.metric("top1_200").label == "top-1 of 200"
    with pytest.raises(ValueError, match="no metric 'top5', expected one of loss, top1"):
        Classification.metric("top5")
    assert not Metric("a", "a", higher_is_better=False).better(2, 1)
