"""Average precision against pycocotools, on recorded and on random cases; GEN1's protocol against its toolbox."""

import contextlib
import io
import json
import math
import time

import numpy as np
import pytest

from parapos.data.readers.boxes import BOX
from parapos.tasks.coco_scores import STATS, coco_scores, write_curves
from parapos.tasks.protocols import psee_scores
from tests import golden

SIDE = 400


def oracle(truth, detections):
    """The twelve numbers and the AP of each category, by pycocotools; -1 is undefined."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        gt = COCO()
        gt.dataset = {"info": {}, **truth}
        gt.createIndex()
        judge = COCOeval(gt, gt.loadRes([dict(entry) for entry in detections]), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    precision = judge.eval["precision"][:, :, :, 0, -1]
    return judge.stats, [
        float(part[part > -1].mean()) if (part > -1).any() else -1.0 for part in precision.transpose(2, 0, 1)
    ]


def same(found, stats, by_class, tolerance):
    want = [math.nan if value < 0 else value for value in stats]
    np.testing.assert_allclose(list(found.stats.values()), want, rtol=0, atol=tolerance)
    want = [math.nan if value < 0 else value for value in by_class]
    np.testing.assert_allclose(found.ap, want, rtol=0, atol=tolerance)


def random_case(seed, images=6, most=12):
    """Crowds, equal scores, images without boxes or without detections, areas unlike those of boxes."""
    rng = np.random.default_rng(seed)
    categories = sorted(rng.choice(90, 4, replace=False).tolist())
    truth, found = [], []
    numbers = rng.permutation(1000)[:images].tolist()
    for image in numbers:
        for _ in range(int(rng.integers(0, most)) if rng.random() > 0.2 else 0):
            w, h = np.exp(rng.uniform(1.5, 5.2, 2))
            x, y = rng.uniform(0, SIDE - w), rng.uniform(0, SIDE - h)
            kind = {
                "image_id": image,
                "category_id": int(rng.choice(categories[:3])),
                "iscrowd": int(rng.random() < 0.15),
            }
            truth.append({"id": len(truth) + 1, "bbox": [x, y, w, h], "area": w * h * rng.uniform(0.4, 1.0), **kind})
            for _ in range(int(rng.integers(0, 3))):
                shift = rng.normal(0, 0.08, 4) * [w, h, w, h]
                label = kind["category_id"] if rng.random() < 0.9 else int(rng.choice(categories))
                box = [x + shift[0], y + shift[1], max(1.0, w + shift[2]), max(1.0, h + shift[3])]
                found.append({"image_id": image, "category_id": label, "bbox": box, "score": round(rng.random(), 1)})
        for _ in range(int(rng.integers(0, 5))):
            box = [*rng.uniform(0, SIDE / 2, 2), *rng.uniform(2, SIDE / 2, 2)]
            label = int(rng.choice(categories))
            found.append({"image_id": image, "category_id": label, "bbox": box, "score": round(rng.random(), 2)})
    order = rng.permutation(len(found))
    whole = {
        "images": [{"id": number, "height": SIDE, "width": SIDE} for number in numbers],
        "categories": [{"id": number, "name": str(number)} for number in categories],
        "annotations": truth,
    }
    return whole, [found[i] for i in order]


def compare(seeds):
    judged = 0
    for seed in seeds:
        truth, detections = random_case(seed)
        if detections and any(not note["iscrowd"] for note in truth["annotations"]):
            same(coco_scores(truth, detections), *oracle(truth, detections), 1e-6)
            judged += 1
    assert judged > 0.9 * len(seeds)


def test_random_cases():
    compare(range(25))


@pytest.mark.full
def test_many_random_cases():
    compare(range(1000, 1220))


@golden.files("cocometric*.json")
def test_recorded_cases(path):
    for case in json.loads(path.read_text()).values():
        found = coco_scores(case["gt"], case["dt"])
        numbers = {int(key): value for key, value in case["per_category"].items()}
        same(found, case["stats"], [numbers[key]["AP"] for key in found.categories], 1e-9)
        want = [math.nan if numbers[key]["AP50"] < 0 else numbers[key]["AP50"] for key in found.categories]
        np.testing.assert_allclose(found.ap50, want, rtol=0, atol=1e-9)


@golden.files("gen1metric*.npz")
def test_recorded_recordings(path):
    kept = np.load(path)
    for case in sorted({name.split(":")[0] for name in kept}):
        count = sum(name.startswith(f"{case}:gt") for name in kept)
        truth, found = ([kept[f"{case}:{kind}{i}"] for i in range(count)] for kind in ("gt", "dt"))
        scores, images = psee_scores(truth, found)
        assert images == kept[f"{case}:images"]
        want = [math.nan if value < 0 else value for value in kept[f"{case}:stats"]]
        np.testing.assert_allclose(list(scores.stats.values()), want, rtol=0, atol=1e-9)


def perfect(truth):
    return [{**{key: note[key] for key in ("image_id", "category_id", "bbox")}, "score": 0.9} for note in truth]


def test_perfect_none_and_shuffled():
    truth, detections = random_case(3)
    truth["annotations"] = [note for note in truth["annotations"] if not note["iscrowd"]]
    best = coco_scores(truth, perfect(truth["annotations"]))
    assert best.stats["map"] == pytest.approx(1.0)
    assert np.nanmin(best.precision) == pytest.approx(1.0)
    none = coco_scores(truth, [])
    assert none.stats["map"] == 0
    assert math.isnan(none.stats["map_large"]) == math.isnan(coco_scores(truth, detections).stats["map_large"])
    distinct = [{**entry, "score": (k + 1) / 1000} for k, entry in enumerate(detections)]
    assert coco_scores(truth, distinct[::-1]).stats == coco_scores(truth, distinct).stats
    for x, y in ((2.0, 1.0), (0.3, 3.0)):  # an axis may be scaled by itself
        scaled = {**truth, "annotations": [_scaled(note, x, y) for note in truth["annotations"]]}
        found = coco_scores(scaled, [_scaled(entry, x, y) for entry in distinct])
        assert found.stats["map"] == pytest.approx(coco_scores(truth, distinct).stats["map"], abs=1e-9)
    without = {**truth, "annotations": []}
    assert all(math.isnan(value) for value in coco_scores(without, detections).stats.values())


def _scaled(entry, x, y):
    return {**entry, "bbox": [value * factor for value, factor in zip(entry["bbox"], (x, y, x, y), strict=True)]}


def test_what_matches_a_crowd_is_no_mistake():
    truth, _ = random_case(1)
    number = truth["images"][0]["id"]
    label = truth["categories"][0]["id"]
    one = {"image_id": number, "category_id": label, "bbox": [10, 10, 50, 50], "area": 2500, "iscrowd": 0, "id": 1}
    crowd = {**one, "bbox": [100, 100, 200, 200], "area": 40000, "iscrowd": 1, "id": 2}
    truth["annotations"] = [one, crowd]
    found = [{**entry, "score": 0.5} for entry in perfect([one])]
    inside = [{**found[0], "bbox": [120 + 3 * k, 120, 40, 40], "score": 0.9} for k in range(5)]
    assert coco_scores(truth, found + inside).stats["map"] == pytest.approx(1.0)
    outside = [{**found[0], "bbox": [310, 10, 40, 40], "score": 0.9}]
    assert coco_scores(truth, found + outside).stats["map"] < 0.6


def test_numbers_that_are_not_finite_are_refused():
    truth, detections = random_case(3)
    for change in ({"score": math.nan}, {"bbox": [0, 0, math.inf, 1]}):
        with pytest.raises(ValueError, match="detections must be finite"):
            coco_scores(truth, [*detections, {**detections[0], **change}])


def test_curves_are_written(tmp_path):
    truth, detections = random_case(4)
    found = coco_scores(truth, detections)
    names = [entry["name"] for entry in truth["categories"]]
    paths = write_curves(found, names, tmp_path)
    assert {path.name for path in paths} >= {"classes.csv", "precision-recall.csv"}
    lines = (tmp_path / "precision-recall.csv").read_text().splitlines()
    assert (len(lines), lines[0]) == (102, ",".join(["recall", *names]))
    shown = np.array([[float(v or "nan") for v in line.split(",")] for line in lines[1:]])
    np.testing.assert_allclose(shown[:, 1:], found.precision, atol=1e-6)
    np.testing.assert_allclose(shown[:, 1:].mean(0), found.ap50, atol=1e-6)
    assert list(found.stats) == list(STATS)


def rows(*boxes):
    """t, x, y, w, h, class, confidence."""
    found = np.zeros(len(boxes), BOX)
    for k, (t, x, y, w, h, label, score) in enumerate(boxes):
        found[k] = (t, x, y, w, h, label, 0, score)
    return found


def test_gen1_limits():
    def judge(truth, found):
        scores, images = psee_scores([rows(*truth)], [rows(*found)])
        return scores.stats["map"], images

    box, late = (10, 10, 40, 40), 600_000
    assert judge([(late, *box, 0, 1)], [(late, *box, 0, 0.5)]) == (pytest.approx(1.0), 1)
    assert judge([(late, *box, 0, 1)], [(late, *box, 1, 0.5)])[0] == 0  # another class
    assert judge([(late, *box, 0, 1)], [])[0] == 0
    for t, images in ((500_000, 0), (500_001, 1)):  # strictly later than half a second
        assert judge([(t, *box, 0, 1)], [(t, *box, 0, 0.5)])[1] == images
    for gap, score in ((50_000, 1.0), (-50_000, 1.0), (50_001, 0.0), (-50_001, 0.0)):
        assert judge([(late, *box, 0, 1)], [(late + gap, *box, 0, 0.5)])[0] == pytest.approx(score)
    for w, h, images in ((10, 30, 1), (9.9, 40, 0), (40, 9.9, 0), (20, 22, 0), (18, 24, 1)):
        assert judge([(late, 10, 10, w, h, 0, 1)], [])[1] == images
    twice = [(late, *box, 0, 1), (late + 60_000, *box, 0, 1)]
    assert judge(twice, [(late + 30_000, *box, 0, 0.5)]) == (pytest.approx(1.0), 2)  # counts for both
    with pytest.raises(ValueError, match="in the order of time"):
        judge(twice[::-1], [])


@pytest.mark.full
def test_half_the_time_of_pycocotools():
    """5,000 images with 100 detections each; the detections as lists, as an evaluation has them."""
    truth, _ = random_case(0, images=1)
    rng = np.random.default_rng(0)
    categories = [entry["id"] for entry in truth["categories"]]
    truth["images"] = [{"id": i, "height": SIDE, "width": SIDE} for i in range(5000)]
    truth["annotations"] = [
        {"id": 7 * i + k + 1, "image_id": i, "category_id": int(rng.choice(categories)), "iscrowd": 0}
        | {"bbox": [*rng.uniform(0, 200, 2), *rng.uniform(10, 200, 2)], "area": 900.0}
        for i in range(5000)
        for k in range(7)
    ]
    found = [
        {"image_id": i, "category_id": int(label), "bbox": box, "score": score}
        for i in range(5000)
        for label, box, score in zip(
            rng.choice(categories, 100), rng.uniform(1, 200, (100, 4)).tolist(), rng.random(100).tolist(), strict=True
        )
    ]
    begin = time.process_time()
    ours = coco_scores(truth, found)
    middle = time.process_time()
    stats, by_class = oracle(truth, found)
    end = time.process_time()
    same(ours, stats, by_class, 1e-6)
    assert middle - begin <= 0.5 * (end - middle)
