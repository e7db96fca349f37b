"""Augmentation of clips: the same for all frames, a function of the seed, and torchvision's RandAugment."""

import pytest
import torch
from torchvision.transforms import v2

from parapos.data.augment.video import VideoAugment, vary

ALL = VideoAugment()


def noise(frames=1, height=24, width=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, 3, height, width), dtype=torch.uint8, generator=g)


def test_a_static_clip_stays_static():
    """Over 60 draws every operation of RandAugment occurs."""
    still = noise().expand(4, -1, -1, -1).contiguous()
    changed = 0
    for seed in range(60):
        out = vary(still, ALL.transform(), seed)
        assert out.shape == still.shape
        assert out.dtype == torch.uint8
        assert (out == out[:1]).all(), seed
        changed += not torch.equal(out, still)
    assert changed > 40


def test_frames_are_varied_as_if_alone():
    """Parameters are shared, and what is computed from pixels is computed per frame."""
    clip = noise(3)
    for seed in range(40):
        alone = torch.cat([vary(frame[None], ALL.transform(), seed) for frame in clip])
        assert torch.equal(vary(clip, ALL.transform(), seed), alone), seed


def test_steps_are_those_of_the_released_code():
    flip, augment = ALL.transform()
    assert flip.p == 0.5
    assert isinstance(augment, v2.RandAugment)
    assert (augment.num_ops, augment.magnitude, augment.num_magnitude_bins) == (2, 9, 31)
    assert v2.InterpolationMode(augment.interpolation) == v2.InterpolationMode.NEAREST
    space = augment._AUGMENTATION_SPACE
    assert len(space) == 14
    at = {
        name: float(levels(31, 240, 320)[9]) for name, (levels, _) in space.items() if levels(31, 240, 320) is not None
    }
    assert at["ShearX"] == at["ShearY"] == pytest.approx(0.09)
    assert at["TranslateX"] == pytest.approx(43.5, abs=0.05)
    assert at["TranslateY"] == pytest.approx(32.6, abs=0.05)
    assert at["Rotate"] == pytest.approx(9)
    assert at["Brightness"] == at["Color"] == at["Contrast"] == at["Sharpness"] == pytest.approx(0.27)
    assert at["Posterize"] == 7
    assert at["Solarize"] * 255 == pytest.approx(178.5)


def test_flip():
    clip = noise(2)
    always, never = VideoAugment(flip=1, ops=0).transform(), VideoAugment(flip=0, ops=0).transform()
    assert torch.equal(vary(clip, always, 0), clip.flip(-1))
    assert torch.equal(vary(clip, never, 0), clip)
    half = VideoAugment(ops=0).transform()
    flipped = sum(torch.equal(vary(clip, half, seed), clip.flip(-1)) for seed in range(400))
    assert 160 < flipped < 240  # four standard deviations


def test_the_seed_alone_decides():
    clip = noise(2)
    torch.manual_seed(1)
    first = vary(clip, ALL.transform(), 7)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(vary(clip, ALL.transform(), 7), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert any(not torch.equal(vary(clip, ALL.transform(), seed), first) for seed in range(5))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"flip": 1.5}, "flip must be a probability, got 1.5"),
        ({"ops": -1}, "ops must be 0 or more, got -1"),
        ({"magnitude": 31}, "magnitude must be from 0 to 30, got 31"),
    ],
)
def test_bad_options(options, told):
    with pytest.raises(ValueError, match=told):
        VideoAugment(**options)
