"""The video network: sizes to the last parameter, tubelets and their places, padding, precision, learning."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parapos
from parapos import create_model
from parapos.models import MODELS, ViViT

from .nets import (
    DTYPES,
    HALVES,
    accuracy_after_training,
    assert_autocast,
    assert_every_parameter_learns,
    assert_one_graph,
    assert_padding_never_matters,
    assert_same_to_the_bit,
    awake,
    count,
    excess,
    names,
    positions_of,
    size,
)


def small(encoding="pape", **options):
    return awake(ViViT(**{**size(encoding), **options}))


def clips(*shape, seed=0, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_sizes():
    """The paper's 86.3 and 97.4 million, to the last one, and those of query and key heads as costly as PaPE."""
    base = {"name": "vivit_base_patch16", "num_classes": 101}
    assert count(**base, encoding="none") == 86_316_389
    assert count(**base) == count(**base, parabolas=50) == 97_397_189
    assert count(**base, encoding="pape_ri") == 86_316_389 + 110_592
    assert count(**base, encoding="rope", qk_dim=114) == 86_316_389 + 11_073_600
    nano = create_model("vivit_nano_patch16")
    assert (len(nano.encoder.layers), nano.cls.shape[-1]) == (4, 128)
    attention = nano.encoder.layers[0].attention
    assert (attention.heads, attention.head_dim, attention.encoding.pos_dim) == (4, 32, 3)
    assert nano.classifier.out_features == 101


def test_every_model_names_its_inputs():
    """A forward takes them first, in that order, then position_scale and what has a default."""
    for name, (cls, _) in MODELS.items():
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
        assert [p.name for p in parameters].index("position_scale") == len(cls.inputs), name
        assert all(p.default is not p.empty for p in parameters[len(cls.inputs) :]), name
    assert parapos.ViT.inputs == ("image",)
    assert ViViT.inputs == ("video", "tubelets")


def test_predictions_start_uniform():
    net = create_model("vivit_nano_patch16")
    logits = net(clips(2, 3, 4, 32, 48), torch.tensor([2, 1]))
    assert F.cross_entropy(logits, torch.tensor([3, 90])).item() == pytest.approx(math.log(101), rel=1e-6)


def test_tubelets_are_cut_in_order():
    """Token (t, row, col) is the linear image of its own frames and pixels, and of no others."""
    net = small(tubelet=3, patch=2)
    videos = clips(2, 3, 6, 4, 8)
    blocks = videos.reshape(2, 3, 2, 3, 2, 2, 4, 2).permute(0, 2, 4, 6, 1, 3, 5, 7)  # (B, t, row, col, C, 3, 2, 2)
    want = F.linear(blocks.flatten(4), net.embedding.weight.flatten(1), net.embedding.bias).flatten(1, 3)
    seen = []
    net.encoder.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    net(videos)
    torch.testing.assert_close(seen[0][:, 1:], want)
    torch.testing.assert_close(seen[0][:, :1], net.cls.expand(2, -1, -1))


def test_positions():
    """(t, y, x) from 1, the class token at the origin; a scale for all axes or for each."""
    net, videos = small(), {"videos": torch.rand(2, 3, 4, 8, 12)}
    want = torch.tensor([[t, y, x] for t in (1, 2) for y in (1, 2) for x in (1, 2, 3)], dtype=torch.float32)
    r = positions_of(net, videos)
    assert torch.equal(r[0], F.pad(want, (0, 0, 1, 0)))
    assert torch.equal(positions_of(net, videos, position_scale=0.5), r / 2)
    assert torch.equal(positions_of(net, videos, position_scale=(1.0, 0.5, 0.25)), r * torch.tensor([1, 0.5, 0.25]))
    assert torch.equal(positions_of(small(pool="mean"), videos)[0], want)
    assert positions_of(small(cls_position="unplaced"), videos)[0, 0].isnan().all()
    nano = create_model("vivit_nano_patch16", depth=1, dim=16, encoding="none")
    assert positions_of(nano, {"videos": torch.rand(1, 3, 10, 240, 320)})[0].amax(0).tolist() == [5, 15, 20]


@names
def test_one_state_dict_serves_all_sizes(name):
    net, other = small(name), small(name)
    other.load_state_dict(net.state_dict(), strict=True)
    for shape in ((2, 8, 8), (4, 8, 12), (6, 4, 4), (2, 12, 4)):
        videos = clips(2, 3, *shape)
        logits = net(videos)
        assert logits.isfinite().all()
        assert torch.equal(other(videos), logits)
        assert net.forward_features(videos).shape == (2, 1 + math.prod(shape) // 32, 24)


@names
def test_every_parameter_learns(name):
    inputs = {"videos": clips(2, 3, 4, 8, 8), "lengths": torch.tensor([2, 1])}
    assert_every_parameter_learns(small(name, drop_path=0.0), inputs)


def padded(dtype=torch.float64):
    """Four clips of 3, 1, 2 and 0 tubelets in a batch for 3."""
    lengths = torch.tensor([3, 1, 2, 0])
    return {"videos": clips(4, 3, 6, 8, 8, dtype=dtype), "lengths": lengths}


@pytest.mark.parametrize("pool", ["cls", "mean"])
@names
def test_padding_never_matters(name, pool):
    net, together = small(name, pool=pool).double(), padded()
    alone = []
    for i, n in enumerate(together["lengths"].tolist()):
        frames = 2 * max(n, 1)
        sample = {"videos": together["videos"][i : i + 1, :, :frames]}
        alone.append(sample if n else {**sample, "lengths": torch.tensor([0])})
    assert_padding_never_matters(net, together, alone)


@pytest.mark.parametrize("fill", [7.0, torch.nan, torch.inf])
@names
def test_what_stands_in_padding_never_matters(name, fill):
    clean = padded(torch.float32)
    poisoned = {**clean, "videos": clean["videos"].clone()}
    for i, n in enumerate(clean["lengths"].tolist()):
        poisoned["videos"][i, :, 2 * n :] = fill
    real = {**clean, "videos": clean["videos"].clone()}
    for i, n in enumerate([3, 1, 2]):
        real["videos"][i, :, 2 * n - 1] += 1
    for pool in ("cls", "mean"):
        net = small(name, pool=pool)
        assert_same_to_the_bit(net, clean, poisoned)
        assert (net(**real) - net(**clean))[:3].abs().amax(1).min() > 1e-4  # the last real frame does


def test_a_clip_without_tubelets():
    """The class token answers alone; the mean of nothing is zero."""
    videos, lengths = clips(1, 3, 2, 8, 8), torch.tensor([0])
    net = small(pool="mean")
    assert torch.equal(net(videos, lengths)[0], net.classifier.bias)
    net = small()
    assert torch.equal(net(videos, lengths), net(clips(1, 3, 4, 8, 8, seed=3), lengths))


@names
def test_a_batch_of_nobody(name):
    net, videos = small(name), clips(0, 3, 4, 8, 8)
    assert net(videos).shape == net(videos, torch.zeros(0, dtype=torch.long)).shape == (0, 5)


def test_mean_pooling_counts_real_tokens_only():
    net, inputs = small(pool="mean"), padded(torch.float32)
    features = net.forward_features(**inputs)
    for i, n in enumerate(inputs["lengths"].tolist()):
        want = features[i, : 4 * n].mean(0) if n else torch.zeros(24)
        torch.testing.assert_close(net(**inputs)[i], net.classifier(want))
    half = small(pool="mean").to(torch.float16)
    nn.init.constant_(half.encoder.norm_post.weight, 0.0)
    nn.init.constant_(half.encoder.norm_post.bias, 60_000.0)  # whose sum is out of range
    nn.init.constant_(half.classifier.weight, 1e-6)
    assert half(clips(2, 3, 6, 8, 8, dtype=torch.float16), [3, 2]).isfinite().all()


def test_lengths_may_be_a_list():
    net, videos = small(), clips(2, 3, 4, 8, 8)
    want = net(videos, torch.tensor([2, 1]))
    assert torch.equal(net(videos, [2, 1]), want)
    assert torch.equal(net(videos, torch.tensor([2, 1], dtype=torch.int32)), want)
    torch.testing.assert_close(net(videos, [2, 2]), net(videos))


@names
def test_time_has_a_direction(name):
    """Tubelets in another order are another clip, unless positions are ignored."""
    net, videos = small(name).double(), clips(1, 3, 6, 8, 8, dtype=torch.float64)
    backwards = videos.reshape(1, 3, 3, 2, 8, 8).flip(2).reshape(videos.shape)
    assert torch.allclose(net(videos), net(backwards), rtol=1e-9, atol=1e-9) == (name == "none")


@DTYPES
@pytest.mark.parametrize("name", ["pape", "rope", "alibi"])
def test_precision(name, dtype):
    net, reference = small(name), small(name, kernel="reference")
    inputs = {"videos": clips(3, 3, 6, 16, 12), "lengths": torch.tensor([3, 1, 2])}
    assert excess(net, reference, inputs, dtype) <= 1


@HALVES
def test_autocast(dtype):
    assert_autocast(small(), padded(torch.float32), dtype)


def test_one_graph():
    sizes = {(4, 8, 12): [2, 1], (6, 16, 12): [1, 3], (8, 12, 20): [0, 4]}
    batches = [{"videos": clips(2, 3, *s), "lengths": torch.tensor(lengths)} for s, lengths in sizes.items()]
    assert_one_graph(small(depth=1), batches)


def test_export():
    net, inputs = small(depth=1), padded(torch.float32)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(net, tuple(inputs.values()), dynamic_shapes=({0: batch}, {0: batch}))
    other = {"videos": clips(2, 3, 6, 8, 8, seed=4), "lengths": torch.tensor([1, 3])}
    torch.testing.assert_close(program.module()(*other.values()), net(**other))


def squares():
    """16 clips of a square that moves right and the same 16 played backwards, which moves left."""
    right = torch.zeros(16, 3, 8, 8, 16)
    for i in range(16):
        for step in range(4):
            top, left = 4 * (i % 2), 4 * step
            right[i, :, 2 * step : 2 * step + 2, top : top + 4, left : left + 4] = 1 + i // 2 / 4
    left = right.reshape(16, 3, 4, 2, 8, 16).flip(2).reshape(right.shape)  # a tubelet itself does not move
    return {"videos": torch.cat([right, left])}, torch.arange(32) // 16


@pytest.mark.parametrize("encoding", ["pape", "rope", "sincos"])
def test_learns_which_way_things_move(encoding):
    assert accuracy_after_training(ViViT, encoding, *squares()) == 1


def test_cannot_learn_it_without_an_encoding():
    assert accuracy_after_training(ViViT, "none", *squares(), steps=20) <= 0.5


@pytest.mark.parametrize(
    ("error", "options", "word"),
    [
        (ValueError, {"tubelet": 0}, "tubelet.*0"),
        (ValueError, {"patch": 0}, "patch.*0"),
        (ValueError, {"channels": 0}, "channels.*0"),
        (ValueError, {"num_classes": 0}, "num_classes.*0"),
        (ValueError, {"pos_dim": 2}, "ViViT is 3, got 2"),
        (ValueError, {"pool": "max"}, "pool.*max"),
        (ValueError, {"encoding": "lookhere"}, "pos_dim 2"),
        (TypeError, {"frames": 2}, "frames"),
    ],
)
def test_bad_options(error, options, word):
    with pytest.raises(error, match=word):
        create_model("vivit_nano_patch16", **options)


@pytest.mark.parametrize(
    ("shape", "lengths", "scale", "word"),
    [
        ((1, 3, 3, 8, 8), None, 1.0, "tubelet length 2, got 3"),
        ((1, 3, 0, 8, 8), None, 1.0, "tubelet length 2, got 0"),
        ((1, 3, 2, 8, 10), None, 1.0, "patch size 4, got 8 x 10"),
        ((1, 1, 2, 8, 8), None, 1.0, r"\(B, 3, T, H, W\).*\(1, 1, 2, 8, 8\)"),
        ((3, 2, 8, 8), None, 1.0, r"\(3, 2, 8, 8\)"),
        ((2, 3, 4, 8, 8), [3, 0], 1.0, r"0\.\.2, got \[3, 0\]"),
        ((2, 3, 4, 8, 8), [-1, 0], 1.0, r"0\.\.2, got \[-1, 0\]"),
        ((2, 3, 4, 8, 8), [1], 1.0, r"2 integers.*\(1,\)"),
        ((2, 3, 4, 8, 8), [1.0, 2.0], 1.0, r"2 integers.*float32"),
        ((2, 3, 4, 8, 8), [True, False], 1.0, r"2 integers.*bool"),
        ((1, 3, 4, 8, 8), None, 0.0, r"position_scale.*0\.0"),
        ((1, 3, 4, 8, 8), None, math.inf, "position_scale.*inf"),
        ((1, 3, 4, 8, 8), None, (1.0, 0.5), r"one number or 3, got \(1\.0, 0\.5\)"),
        ((1, 3, 4, 8, 8), None, (1.0, 0.5, -1.0), "position_scale"),
    ],
)
def test_bad_inputs(shape, lengths, scale, word):
    with pytest.raises(ValueError, match=word):
        small()(torch.rand(shape), lengths, scale)
