"""Boxes follow every pixel: checked on the pixels of coloured rectangles."""

import pytest
import torch

from parapos.data.augment import boxes as A

H, W = 60, 90
COLOURS = ((230, 0, 0), (0, 230, 0), (0, 0, 230))


def picture():
    """Three rectangles on grey, and their boxes."""
    image = torch.full((3, H, W), 60, dtype=torch.uint8)
    boxes = torch.tensor([[10, 8, 34, 30], [50, 12, 80, 40], [20, 38, 44, 56]], dtype=torch.float64)
    for (left, top, right, bottom), colour in zip(boxes.int().tolist(), COLOURS, strict=True):
        image[:, top:bottom, left:right] = torch.tensor(colour, dtype=torch.uint8)[:, None, None]
    return image, boxes


def seen(image, k):
    """The box around the pixels of a colour, or None."""
    others = [c for c in range(3) if c != k]
    mask = (image[k] > 130) & (image[others].amax(0) < 100)
    if not mask.any():
        return None
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    return torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).double()


def check(image, boxes, slack):
    """Every box is where its colour is, and empty where the colour is not."""
    height, width = image.shape[-2:]
    clean, keep = A.sanitize(boxes, height, width)
    for k in range(3):
        found = seen(image, k)
        if found is None:
            assert not keep[k] or (clean[k, 2:] - clean[k, :2]).min() <= 2 * slack
        elif keep[k]:
            assert (found - clean[k]).abs().max() <= slack, (k, found, clean[k])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_flip():
    image, boxes = picture()
    flipped, moved = A.flip(image, boxes)
    check(flipped, moved, 0)
    again = A.flip(flipped, moved)
    assert torch.equal(again[0], image)
    assert torch.equal(again[1], boxes)


@pytest.mark.parametrize(("dx", "dy"), [(7, -5), (-30, 4), (60, 0), (0, 200), (-89, -59), (0, 0)])
def test_shift(dx, dy):
    image, boxes = picture()
    moved, found = A.shift(image, boxes, dx, dy)
    assert moved.shape == image.shape
    check(moved, found, 0)
    if dx > 0 and dy == 0:
        assert (moved[:, :, :dx] == 0).all()
    _, keep = A.sanitize(found, H, W)
    assert keep.tolist() == [seen(moved, k) is not None for k in range(3)]


def test_translations_stay_in_their_range():
    image, boxes = picture()
    steps = []
    for seed in range(200):
        moved, found = A.translate(image, boxes, generator(seed))
        check(moved, found, 0)
        steps.append((found[1, :2] - boxes[1, :2]).tolist())
    most = torch.tensor(steps).abs().amax(0)
    assert 10 <= most[0] <= round(0.14 * W)
    assert 6 <= most[1] <= round(0.14 * H)
    assert all(step == int(step) for pair in steps for step in pair)


@pytest.mark.parametrize("size", [(120, 90), (30, 45), (200, 200)])
def test_resize(size):
    resized, boxes = A.resize(*picture(), size)
    assert resized.shape == (3, *size)
    check(resized, boxes, 1.0)
    width = boxes[:, 2] - boxes[:, 0]
    assert torch.allclose(width, torch.tensor([24.0, 30, 24]).double() * size[1] / W)


def test_scale_jitter_before_a_resize_leaves_boxes_as_they_were():
    image, boxes = picture()
    plain = A.resize(image, boxes, (64, 64))[1]
    sizes = set()
    for seed in range(30):
        small, moved = A.scale_jitter(image, boxes, (64, 64), generator(seed))
        sizes.add(tuple(small.shape[-2:]))
        assert torch.allclose(A.resize(small, moved, (64, 64))[1], plain)
    assert len(sizes) > 15
    assert max(max(size) for size in sizes) <= 128


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (48, 128)])
def test_large_scale_jitter(size):
    image, boxes = picture()
    widths = []
    for seed in range(60):
        found, moved = A.jitter_and_crop(image, boxes, size, generator(seed))
        assert found.shape == (3, *size)
        assert (moved >= 0).all()
        assert (moved <= torch.tensor([size[1], size[0]] * 2)).all()
        check(found, moved, 2.0 if size[0] * 2 / H > 2.5 else 1.5)
        clean, keep = A.sanitize(moved, *size)
        inside = keep & (clean[:, 0] > 0) & (clean[:, 2] < size[1])
        widths += [float(w) / 24 for w in (moved[:, 2] - moved[:, 0])[inside & torch.tensor([True, False, False])]]
    fits = min(size[0] / H, size[1] / W)
    assert min(widths) >= 0.1 * fits * 0.8
    assert max(widths) <= 2.0 * fits * 1.1
    assert max(widths) > 2 * min(widths)


def test_padding_is_to_the_right_and_below():
    found, moved = A.jitter_and_crop(*picture(), (200, 100), generator(0), (0.5, 0.5))
    factor = 0.5 * 100 / W
    height, width = round(H * factor), round(W * factor)
    assert (found[:, height:] == torch.tensor(A.PAD)[:, None, None]).all()
    assert (found[:, :, width:] == torch.tensor(A.PAD)[:, None, None]).all()
    assert moved[:, 3].max() <= height


@pytest.mark.parametrize("mode", A.MODES)
def test_whatever_is_drawn_boxes_stay_on_their_colours(mode):
    image, boxes = picture()
    settings = A.BoxAugment(mode=mode, slots=0 if mode == "lsj" else 2, scale=(0.5, 2.0))
    names = []
    for seed in range(80):
        found, moved = A.augment(image, boxes, settings, (64, 96), generator(seed))
        assert found.dtype == torch.uint8
        if mode == "lsj":
            assert found.shape == (3, 64, 96)
            check(found, moved, 1.5)
        again = A.augment(image, boxes, settings, (64, 96), generator(seed))
        assert torch.equal(found, again[0])
        assert torch.equal(moved, again[1])
        names.append(bool((found == image).all()) if found.shape == image.shape else None)
    assert len(set(names)) > 1 or mode == "lsj"


@pytest.mark.parametrize("name", A.COLOURS)
def test_colours_move_no_pixel_and_change_something(name):
    image, boxes = picture()
    image = ((image.float() + torch.rand(image.shape, generator=generator(0)) * 25).clamp(10)).to(torch.uint8)
    image = image.clamp(max=240)
    changed = A.COLOURS[name](image, generator(1))
    assert changed.shape == image.shape
    assert changed.dtype == torch.uint8
    assert torch.equal(changed, image) == (name == "identity")
    if name not in ("saturation_and_hue", "equalize", "solarize", "autocontrast"):
        check(changed, boxes, 0)


def test_all_operations_are_drawn_evenly(monkeypatch):
    counts = dict.fromkeys([*A.COLOURS, "translate", "scale_jitter"], 0)

    def note(name, give):
        def run(*args):
            counts[name] += 1
            return give(*args)

        return run

    for name in A.COLOURS:
        monkeypatch.setitem(A.COLOURS, name, note(name, lambda image, g: image))
    for name in ("translate", "scale_jitter"):
        monkeypatch.setattr(A, name, note(name, lambda image, boxes, *rest: (image, boxes)))
    image, boxes = picture()
    for seed in range(2200):
        A.augment(image, boxes, A.BoxAugment(), (64, 64), generator(seed))
    assert len(counts) == 11
    assert all(320 < count < 480 for count in counts.values()), counts


def test_sanitize():
    boxes = torch.tensor(
        [[0, 0, W, H], [-5, 3, 10, 9], [80, 50, 95, 70], [5, 5, 5.5, 20], [100, 5, 120, 20], [1, 1, 2, 2]]
    )
    clean, keep = A.sanitize(boxes, H, W)
    assert keep.tolist() == [True, True, True, False, False, True]
    assert clean[1].tolist() == [0, 3, 10, 9]
    assert clean[2].tolist() == [80, 50, W, H]
    touching = torch.rand(3000, 4, generator=generator(0)) * 0.5
    touching[:, 2:] = 1
    _, keep = A.sanitize(touching * 640, 640, 640)
    assert keep.all()
    assert A.sanitize(torch.zeros(0, 4), H, W)[1].shape == (0,)


@pytest.mark.parametrize(
    ("option", "told"),
    [({"mode": "mosaic"}, "mode"), ({"flip": 2.0}, "flip"), ({"slots": -1}, "slots"), ({"scale": (2.0, 1.0)}, "scale")],
)
def test_settings_are_checked(option, told):
    with pytest.raises(ValueError, match=f"{told} must be"):
        A.BoxAugment(**option)
