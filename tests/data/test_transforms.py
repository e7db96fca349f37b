"""The image pipelines: sizes, order, what is random and what is not."""

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

from parapos.data import FormatError
from parapos.data.transforms import MEAN, STD, Augment, ResizeShorter, eval_transform, train_transform

RESIZED = {224: 256, 320: 365, 384: 438, 448: 512, 512: 585, 640: 731, 768: 877, 896: 1024, 1024: 1170}


def noise(height, width, seed=0):
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def as_float(image):
    return v2.functional.to_dtype(image, torch.float32, scale=True)


@pytest.mark.parametrize("size", RESIZED)
def test_resolutions_of_the_paper(size):
    steps = list(eval_transform(size))
    assert [type(step) for step in steps] == [ResizeShorter, v2.CenterCrop, v2.ToDtype]
    assert (steps[0].height, steps[0].width) == (RESIZED[size], RESIZED[size])
    assert size % 16 == 0


def test_shorter_side_is_exact_for_every_shape():
    """Multiplying by a rounded ratio loses a pixel for some shapes; whole numbers do not."""
    lossy = 0
    for short in (17, 75, 106, 333, 375, 499, 1200):
        for longer in (short, short + 1, short * 3 // 2, short * 4):
            for side in (16, 37, 256):
                lossy += int(short * (side / short)) != side
                want = (side, side * longer // short)
                resize = ResizeShorter(side)
                assert tuple(resize(torch.zeros(1, short, longer, dtype=torch.uint8)).shape[1:]) == want
                assert tuple(resize(torch.zeros(1, longer, short, dtype=torch.uint8)).shape[1:]) == want[::-1]
    assert lossy > 0


@pytest.mark.parametrize("size", [(32, 64), (64, 32), (48, 50), (16, 16)])
@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (64, 64), (20, 300), (300, 20), (33, 66)])
def test_images_of_any_shape_get_any_size(shape, size):
    image = noise(*shape)
    assert eval_transform(size)(image).shape == (3, *size)
    cover = tuple(int(side / 0.875) for side in size)
    resized = ResizeShorter(*cover)(image).shape[1:]
    assert all(side >= least for side, least in zip(resized, cover, strict=True))
    assert any(side == least for side, least in zip(resized, cover, strict=True))
    stretch = (resized[1] / shape[1]) / (resized[0] / shape[0])  # one pixel lost to rounding at most
    assert abs(stretch - 1) <= 1 / min(resized)
    torch.manual_seed(0)
    assert train_transform(size)(image).shape == (3, *size)


def test_a_whole_image_of_the_size_is_left_alone():
    image = noise(40, 64)
    assert torch.equal(eval_transform((40, 64), crop=1.0)(image), as_float(image))
    plain = Augment(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, ops=0)
    assert torch.equal(train_transform((40, 64), plain)(image), as_float(image))


def test_one_number_and_two_alike_are_the_same():
    for size, image in ((32, noise(60, 90)), (48, noise(90, 61))):
        assert torch.equal(eval_transform(size)(image), eval_transform((size, size))(image))
        torch.manual_seed(5)
        one = train_transform(size)(image)
        torch.manual_seed(5)
        assert torch.equal(one, train_transform([size, size])(image))


@pytest.mark.parametrize("size", [0, -1, (32,), (32, 0), (32, 32, 3), (32.0, 32), "32"])
def test_sizes_that_cannot_be(size):
    for make in (train_transform, eval_transform):
        with pytest.raises(ValueError, match=r"size must be (a height and a width of )?at least 1, got"):
            make(size)


def test_eval_is_resize_crop_divide():
    image = noise(60, 90)
    resized = torch.nn.functional.interpolate(image[None].double(), (36, 54), mode="bilinear", antialias=True)[0]
    want = resized[:, 2:34, 11:43] / 255
    got = eval_transform(32)(image)
    assert got.dtype == torch.float32
    assert got.shape == (3, 32, 32)
    assert (got - want).abs().max() < 1.01 / 255  # uint8 arithmetic rounds
    assert torch.equal(got, eval_transform(32)(image))


def test_eval_takes_small_images_and_other_crops():
    assert eval_transform(224)(noise(20, 17)).shape == (3, 224, 224)
    whole = eval_transform(32, crop=1.0)(noise(32, 32))
    assert torch.equal(whole, as_float(noise(32, 32)))


def test_normalisation_is_an_option():
    image = noise(40, 40)
    plain, normal = eval_transform(32)(image), eval_transform(32, normalize=True)(image)
    assert 0 <= plain.min() < plain.max() <= 1
    mean, std = (torch.tensor(t)[:, None, None] for t in (MEAN, STD))
    torch.testing.assert_close(normal, (plain - mean) / std)
    torch.manual_seed(1)
    assert train_transform(32, normalize=True)(image).min() < 0


def test_train_steps_are_those_of_the_paper():
    crop, flip, augment, to_float = train_transform(224)
    assert crop.size == (224, 224)
    assert tuple(crop.scale) == (0.08, 1.0)
    assert tuple(crop.ratio) == (3 / 4, 4 / 3)
    assert InterpolationMode(crop.interpolation) == InterpolationMode.BILINEAR
    assert crop.antialias is True
    assert flip.p == 0.5
    assert isinstance(augment, v2.RandAugment)
    assert (augment.num_ops, augment.magnitude, augment.num_magnitude_bins) == (2, 9, 31)
    assert InterpolationMode(augment.interpolation) == InterpolationMode.NEAREST
    assert len(augment._AUGMENTATION_SPACE) == 14
    white = torch.full((3, 9, 9), 255, dtype=torch.uint8)
    turned = v2.functional.rotate(white, 45, fill=augment.fill)
    assert turned[:, 0, 0].tolist() == [0, 0, 0]
    assert isinstance(to_float, v2.ToDtype)
    assert to_float.scale is True


def test_train_draws_from_torch_alone():
    image, transform = noise(50, 70), train_transform(32)
    torch.manual_seed(5)
    first = transform(image)
    assert first.shape == (3, 32, 32)
    assert 0 <= first.min() <= first.max() <= 1
    others = [transform(image) for _ in range(5)]
    torch.manual_seed(5)
    assert torch.equal(transform(image), first)
    assert not any(torch.equal(first, other) for other in others)


def test_augment_options_reach_the_transform():
    image = noise(32, 32)
    still = Augment(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, ops=0)
    assert torch.equal(train_transform(32, still)(image), as_float(image))
    mirror = Augment(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=1.0, ops=0)
    assert torch.equal(train_transform(32, mirror)(image), as_float(image.flip(2)))
    _, _, augment, _ = train_transform(32, Augment(ops=3, magnitude=4))
    assert (augment.num_ops, augment.magnitude) == (3, 4)


def test_absurd_shapes_are_refused_before_memory_is_taken():
    with pytest.raises(FormatError, match="1 x 3000000 would become 256 x 768000000"):
        ResizeShorter(256)(torch.zeros(1, 3_000_000, 1, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: eval_transform(0), "size must be at least 1, got 0"),
        (lambda: train_transform(-1), "size must be at least 1, got -1"),
        (lambda: eval_transform(32, crop=1.5), r"crop must be in \(0, 1\], got 1.5"),
        (lambda: eval_transform(32, crop=0), "crop must be in"),
        (lambda: Augment(scale=(0.5, 0.1)), "scale must be two positive numbers"),
        (lambda: Augment(scale=(0.5, 2.0)), "scale must end at 1"),
        (lambda: Augment(ratio=(0.0, 1.0)), "ratio must be two positive"),
        (lambda: Augment(flip=2), "flip must be a probability, got 2"),
        (lambda: Augment(ops=-1), "ops must be 0 or more, got -1"),
        (lambda: Augment(magnitude=31), "magnitude must be from 0 to 30, got 31"),
    ],
)
def test_bad_options(make, told):
    with pytest.raises(ValueError, match=told):
        make()
