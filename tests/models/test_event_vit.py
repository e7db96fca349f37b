"""The event network: sizes to the last parameter, codes, places in space and time, padding, precision, learning.

sigma: events per token, here 6.
"""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parapos import create_encoding, create_model
from parapos.attention import attend, fused
from parapos.encodings import ENCODINGS, published
from parapos.models import EventViT

from ..attention.budget import assert_within_budget, fed, make_case
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
    logits_and_gradients,
    names,
    positions_of,
    size,
)

SIGMA, CELLS = 6, 2 * 3 * 4 * 4


def small(encoding="pape", **options):
    return awake(EventViT(**{**size(encoding), "buckets": 3, **options}))


def recording(*lengths, longest=None, seconds=0.3, seed=0):
    """Samples of tokens from a sensor of 4 x 4 patches, times in microseconds, padded with zeros."""
    g = torch.Generator().manual_seed(seed)
    size = (len(lengths), max(lengths) if longest is None else longest)
    out = {
        "codes": torch.randint(0, CELLS, (*size, SIGMA), generator=g).short(),
        "x": torch.randint(0, 4, size, generator=g),
        "y": torch.randint(0, 4, size, generator=g),
        "t": (torch.rand(size, generator=g, dtype=torch.float64) * seconds * 1e6).round().sort(1)[0],
        "lengths": torch.tensor(lengths),
    }
    for i, n in enumerate(lengths):
        for key in ("codes", "x", "y", "t"):
            out[key][i, n:] = 0
    return out


def sample(batch, i):
    """One sample of a batch, without padding."""
    n = int(batch["lengths"][i])
    return {key: v[i : i + 1] if key == "lengths" else v[i : i + 1, :n] for key, v in batch.items()}


def test_sizes():
    """The paper's 89.0 and 100.1 million, to the last one, and those of query and key heads as costly as PaPE."""
    base = {"name": "event_vit_base_patch16", "num_classes": 11}
    assert count(**base, encoding="none") == 88_999_691
    assert count(**base) == count(**base, parabolas=50) == 100_080_491
    assert count(**base, encoding="pape_ri") == 88_999_691 + 110_592
    assert count(**base, encoding="alibi", qk_dim=114) == 88_999_691 + 11_073_600
    nano = create_model("event_vit_nano_patch16")
    assert (len(nano.encoder.layers), nano.cls.shape[-1]) == (4, 128)
    attention = nano.encoder.layers[0].attention
    assert (attention.heads, attention.head_dim, attention.encoding.pos_dim) == (4, 32, 3)
    assert (nano.embedding.in_features, nano.classifier.out_features) == (5120, 11)
    assert EventViT.inputs == ("codes", "x", "y", "t", "length")


def test_predictions_start_uniform():
    inputs = {**recording(4, 2, 0), "codes": torch.randint(0, 5120, (3, 4, 256)).short()}
    logits = create_model("event_vit_nano_patch16")(**inputs)
    assert F.cross_entropy(logits, torch.tensor([3, 10, 0])).item() == pytest.approx(math.log(11), rel=1e-6)


def test_counts():
    """One by one, as numpy counts them; 256 events on one pixel are 256; padding has none."""
    net, inputs = small(), recording(5, 3, 0)
    mask = torch.arange(5) < inputs["lengths"][:, None]
    found = net.counts(inputs["codes"], mask)
    for i, n in enumerate(inputs["lengths"].tolist()):
        for j in range(5):
            want = np.bincount(inputs["codes"][i, j].numpy(), minlength=CELLS) * (j < n)
            assert found[i, j].tolist() == want.tolist()
    assert torch.equal(found.sum(-1), SIGMA * mask.float())
    many = net.counts(torch.full((1, 1, 256), 17, dtype=torch.int16), torch.ones(1, 1, dtype=torch.bool))
    assert (many[0, 0, 17], many.sum()) == (256, 256)
    assert net.half().counts(inputs["codes"], mask).dtype == torch.float32


def tokens_of(net, inputs):
    """What the encoder is given, without the class token."""
    seen = []
    hook = net.encoder.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    net(**inputs)
    hook.remove()
    return seen[0][:, 1:]


def test_codes_of_the_tokenizer_are_taken():
    net = small()
    codes = torch.tensor([[[1, 2, 2], [7, 7, 7]]], dtype=torch.uint16)
    mask = torch.tensor([[True, True]])
    assert torch.equal(net.counts(codes, mask), net.counts(codes.int(), mask))


def test_the_embedding_is_a_convolution():
    """ln(1 + counts) as an image of 2 buckets channels, through a kernel as large as the patch; the same start."""
    net = create_model("event_vit_nano_patch16", depth=1)
    g = torch.Generator().manual_seed(0)
    draw = {"p": 2, "bucket": 10, "row": 16, "col": 16}
    p, b, row, col = (torch.randint(0, n, (1, 3, 256), generator=g) for n in draw.values())
    images = torch.zeros(3, 20, 16, 16)
    for token in range(3):
        for event in range(256):
            at = (0, token, event)
            images[token, p[at] * 10 + b[at], row[at], col[at]] += 1
    inputs = recording(3)
    inputs["codes"] = (((p * 10 + b) * 16 + row) * 16 + col).short()
    convolution = nn.Conv2d(20, 128, 16, 16)
    bound = convolution.weight.abs().max().item(), convolution.bias.abs().max().item()
    found = net.embedding.weight.abs().max().item(), net.embedding.bias.abs().max().item()
    assert found == pytest.approx(bound, rel=0.1)
    with torch.no_grad():
        convolution.weight.copy_(net.embedding.weight.view(128, 20, 16, 16))
        convolution.bias.copy_(net.embedding.bias)
        want = convolution((1 + images).log()).flatten(1)
        torch.testing.assert_close(tokens_of(net, inputs)[0], want, rtol=1e-4, atol=1e-5)
    assert sum(x.numel() for x in convolution.parameters()) == sum(x.numel() for x in net.embedding.parameters())


def test_padding_embeds_to_the_bias():
    net = small()
    assert torch.equal(tokens_of(net, recording(2, 1))[1, 1], net.embedding.bias)


def test_positions():
    """(x, y, t / time_scale) in float64, the class token at the origin; a scale for all axes or for each."""
    inputs = {
        "codes": torch.zeros(1, 2, SIGMA, dtype=torch.int16),
        "x": torch.tensor([[0, 7]]),
        "y": torch.tensor([[3, 0]]),
        "t": torch.tensor([[0, 6_543_217]]),
        "lengths": torch.tensor([2]),
    }
    r = positions_of(small(), inputs)
    assert r.dtype == torch.float64
    assert r[0].tolist() == [[0, 0, 0], [0, 3, 0], [7, 0, 6_543_217 / 50_000]]
    assert positions_of(small(time_scale=100_000.0), inputs)[0, 2].tolist() == [7, 0, 65.43217]
    assert torch.equal(positions_of(small(), inputs, position_scale=0.5), r / 2)
    scaled = positions_of(small(), inputs, position_scale=(0.5, 0.25, 1.0))
    assert torch.equal(scaled, r * torch.tensor([0.5, 0.25, 1.0]))
    assert torch.equal(positions_of(small(pool="mean"), inputs), r[:, 1:])
    assert positions_of(small(cls_position="unplaced"), inputs)[0, 0].isnan().all()
    late = {**inputs, "t": inputs["t"] + 2**40}  # a clock of days; float32 would not tell a second
    assert positions_of(small(), late)[0, 2, 2] * 50_000 == pytest.approx(2**40 + 6_543_217, abs=1e-3)


@names
def test_every_parameter_learns(name):
    assert_every_parameter_learns(small(name, drop_path=0.0), recording(6, 3))


@names
def test_the_order_of_tokens_is_nothing(name):
    """Where and when a token happened is told by its position, not by its place in the batch."""
    net, inputs = small(name).double(), recording(7)
    order = torch.randperm(7)
    mixed = {key: v if key == "lengths" else v[:, order] for key, v in inputs.items()}
    torch.testing.assert_close(net(**mixed), net(**inputs), rtol=1e-9, atol=1e-9)
    moved = {**inputs, "t": inputs["t"].flip(1)}
    assert torch.allclose(net(**moved), net(**inputs), rtol=1e-9, atol=1e-9) == (name == "none")


@pytest.mark.parametrize("pool", ["cls", "mean"])
@names
def test_padding_never_matters(name, pool):
    net, together = small(name, pool=pool).double(), recording(7, 2, 0, 5, longest=9)
    alone = [sample(together, i) for i in range(4)]
    assert_padding_never_matters(net, together, alone)
    for inputs in alone:
        del inputs["lengths"]
    assert_padding_never_matters(net, together, alone)


@names
def test_what_stands_in_padding_never_matters(name):
    """Codes out of range, places anywhere, times that are no numbers."""
    clean = recording(6, 3, 0)
    poisoned = {key: v.clone() for key, v in clean.items()}
    for i, n in enumerate(clean["lengths"].tolist()):
        for key, fill in (("codes", -5), ("x", 10**12), ("y", -(10**12)), ("t", torch.nan)):
            poisoned[key][i, n:] = fill
    real = {**clean, "codes": clean["codes"].clone()}
    real["codes"][0, 5], real["codes"][1, 2] = 1, 2
    for pool in ("cls", "mean"):
        net = small(name, pool=pool)
        assert_same_to_the_bit(net, clean, poisoned)
        assert (net(**real) - net(**clean))[:2].abs().amax(1).min() > 1e-4  # the last real token does


@names
def test_no_tokens_at_all(name):
    """In a sample, in all samples, and in a batch that has no room for any. The mean of nothing is zero."""
    for pool in ("cls", "mean"):
        net = small(name, pool=pool)
        some, padded, none = (net(**recording(*n, longest=m)) for n, m in (((3, 0), 3), ((0, 0), 3), ((0, 0), 0)))
        for found in (some[1], padded[0], padded[1], none[0]):
            torch.testing.assert_close(found, none[1])
        if pool == "mean":
            assert torch.equal(none, net.classifier.bias.expand(2, -1))
            assert torch.equal(padded, none)
        _, grads = logits_and_gradients(net, recording(0, 0, longest=0), torch.ones(2, 5))
        assert all(grad.isfinite().all() for grad in grads.values())
        assert grads["classifier.bias"].eq(2).all()


@names
def test_a_batch_of_nobody(name):
    for pool in ("cls", "mean"):
        net = small(name, pool=pool)
        for longest in (0, 3):
            inputs = {key: v[:0] for key, v in recording(3, longest=3).items()}
            inputs = {key: v if key == "lengths" else v[:, :longest] for key, v in inputs.items()}
            logits, grads = logits_and_gradients(net, inputs, torch.ones(0, 5))
            assert logits.shape == (0, 5)
            assert not any(grad.any() for grad in grads.values())
            del inputs["lengths"]
            assert net(**inputs).shape == (0, 5)


@names
def test_when_a_recording_starts_is_nothing_to_relative_encodings(name):
    """Without a class token at the origin, which is a place and a time of its own."""
    net, inputs = small(name, pool="mean").double(), recording(30, 12)
    later = {**inputs, "t": inputs["t"] + 3e6}
    same = torch.allclose(net(**later), net(**inputs), rtol=1e-9, atol=1e-9)
    assert same == ENCODINGS[name].claims.translation
    if same:  # float32 has no more digits than its own rounding
        truth = net(**inputs)
        ours = net.float()(**later)
        reference = small(name, pool="mean", kernel="reference")
        reference.load_state_dict(net.state_dict())
        mine, theirs = ((x - truth).square().mean().sqrt() for x in (ours, reference(**inputs)))
        assert mine <= 2 * theirs + torch.finfo(torch.float32).eps * truth.abs().max()
    if name == "pape":
        net = small(name).double()
        assert not torch.allclose(net(**later), net(**inputs), rtol=1e-3, atol=1e-3)


def long_recording(units=140, tokens=600):
    """Positions (N, 3) of events up to 140 units of time: seven seconds at 50 ms; the class token at the origin."""
    g = torch.Generator().manual_seed(0)
    place = torch.randint(0, 8, (tokens, 2), generator=g).double()
    time = torch.rand(tokens, 1, generator=g, dtype=torch.float64).sort(0)[0] * units
    return F.pad(torch.cat([place, time], dim=1), (0, 0, 1, 0))


@DTYPES
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_seven_seconds_cost_no_digits(dtype, exact):
    """Attention over 140 units of time is as exact as the reference, in every type."""
    r = long_recording(tokens=120)
    assert_within_budget(make_case("pape", p=3, r=r, heads=2, head_dim=16, dtype=dtype), "fused", exact=exact)


def test_logits_of_seven_seconds():
    """A layer at its initialisation: the kernel's columns against the term itself, and the paper's form beside them."""
    r, encoding = long_recording()[None], create_encoding("pape", dim=128, heads=2, head_dim=64, pos_dim=3)
    x, q = torch.randn(1, 601, 128), torch.zeros(1, 2, 601, 64)
    (term,) = encoding(x, q, q, r)[2]
    truth = term.scores(torch.float64) * encoding.scale

    def every_sample(coefficients, *_):
        return torch.ones(len(coefficients), dtype=torch.bool)

    def error(query, key):
        logits = (query.float() @ key.float().mT).double() * encoding.scale
        logits = logits - logits.diagonal(dim1=-2, dim2=-1)[..., None]  # what a query has in common with all keys
        return (logits - truth).abs().max().item()

    ours, paper = {}, {}
    columns = published.paper(*published.coefficients(encoding, x), encoding.w_p, r.float())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        heads = q.to(dtype)
        with fed() as calls, torch.no_grad(), patch.object(fused, "fits", every_sample):
            attend(heads, heads, heads, [term], scale=encoding.scale, kernel="fused")
        ours[dtype] = error(*(torch.cat(x, 1) for x in zip(*calls, strict=True)))  # heads go in parts
        paper[dtype] = error(*(t.to(dtype) for t in columns))
    assert ours[torch.float32] < 1e-2
    assert ours[torch.float16] < 1e-2
    assert math.isnan(paper[torch.float16])  # its numbers leave the range of the type
    assert ours[torch.bfloat16] < paper[torch.bfloat16] / 100


@DTYPES
def test_precision(dtype):
    """The whole network over 140 units of time, with padding."""
    for name in ("pape", "rope", "alibi"):
        net, reference = small(name, exact=True), small(name, kernel="reference")  # columns have a budget of their own
        assert excess(net, reference, recording(40, 12, 0, seconds=7.0), dtype) <= 1


@HALVES
def test_autocast(dtype):
    assert_autocast(small(), recording(20, 9, 0), dtype)


def test_one_graph():
    assert_one_graph(small(depth=1), [recording(*lengths) for lengths in ((7, 3), (12, 5), (4, 0))])


def test_export():
    net, inputs = small(depth=1), recording(9, 5)
    batch, tokens = torch.export.Dim("batch", min=2), torch.export.Dim("tokens", min=2)
    shapes = {key: {0: batch} if key == "lengths" else {0: batch, 1: tokens} for key in inputs}
    program = torch.export.export(net, (), inputs, dynamic_shapes=shapes)
    other = recording(4, 7, 0)
    torch.testing.assert_close(program.module()(**other), net(**other))


def gestures():
    """16 recordings of a blob that moves right and the same 16 with time reversed, in which it moves left."""
    right = recording(*[8] * 16)
    for i in range(16):
        right["codes"][i] = i % 4  # all tokens of a recording look the same
        right["x"][i], right["y"][i] = torch.arange(8), i // 4
        right["t"][i] = 50_000.0 * torch.arange(8)
    left = {key: v.clone() for key, v in right.items()}
    left["x"] = right["x"].flip(1)
    return {key: torch.cat([v, left[key]]) for key, v in right.items()}, torch.arange(32) // 16


@pytest.mark.parametrize("encoding", ["pape", "rope", "sincos"])
def test_learns_which_way_things_move(encoding):
    assert accuracy_after_training(EventViT, encoding, *gestures(), buckets=3) == 1


def test_cannot_learn_it_without_an_encoding():
    assert accuracy_after_training(EventViT, "none", *gestures(), steps=20, buckets=3) <= 0.5


@pytest.mark.parametrize(
    ("error", "options", "word"),
    [
        (ValueError, {"patch": 0}, "patch.*0"),
        (ValueError, {"buckets": 0}, "buckets.*0"),
        (ValueError, {"time_scale": 0.0}, r"time_scale.*0\.0"),
        (ValueError, {"time_scale": math.nan}, "time_scale.*nan"),
        (ValueError, {"time_scale": math.inf}, "time_scale.*inf"),
        (ValueError, {"pos_dim": 2}, "EventViT is 3, got 2"),
        (ValueError, {"encoding": "lookhere"}, "pos_dim 2"),
        (TypeError, {"threshold": 256}, "threshold"),
    ],
)
def test_bad_options(error, options, word):
    with pytest.raises(error, match=word):
        create_model("event_vit_nano_patch16", **options)


@pytest.mark.parametrize(
    ("error", "change", "word"),
    [
        (ValueError, {"codes": torch.full((2, 4, SIGMA), CELLS)}, rf"0\.\.{CELLS - 1}, got .*{CELLS}"),
        (ValueError, {"codes": torch.full((2, 4, SIGMA), -1)}, "codes.*got -1"),
        (ValueError, {"codes": torch.zeros(2, 4, SIGMA)}, "integers.*float32"),
        (ValueError, {"codes": torch.zeros(2, 4, dtype=torch.int16)}, r"integers \(B, L, events\).*\(2, 4\)"),
        (ValueError, {"x": torch.zeros(2, 3)}, r"x must be \(2, 4\).*\(2, 3\)"),
        (ValueError, {"t": torch.zeros(8)}, r"t must be \(2, 4\).*\(8,\)"),
        (TypeError, {"t": torch.zeros(2, 4, dtype=torch.bfloat16)}, "t must be.*bfloat16"),
        (ValueError, {"t": torch.full((2, 4), torch.nan)}, "NaN in part"),
        (ValueError, {"t": torch.full((2, 4), torch.inf)}, "at most"),
        (ValueError, {"lengths": torch.tensor([5, 0])}, r"0\.\.4, got \[5, 0\]"),
        (ValueError, {"lengths": torch.tensor([[4, 0]])}, r"2 integers.*\(1, 2\)"),
        (ValueError, {"position_scale": -1.0}, r"position_scale.*-1\.0"),
    ],
)
def test_bad_inputs(error, change, word):
    with pytest.raises(error, match=word):
        small()(**{**recording(4, 2), **change})
