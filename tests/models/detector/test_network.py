"""Detectors of images: counts of parameters, shapes, starting values, what trains what, and padding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import parapos
from parapos.encodings import ENCODINGS
from parapos.models import MODELS, DetectorViT, ViT, create_model
from parapos.models.detector import Detector, branch_of, detection_loss, pad_images, postprocess
from parapos.models.detector.head import DualHead
from parapos.models.detector.neck import ChannelNorm, Neck

from ...marks import full
from ..nets import count, positions_of

SOME = ("pape", "rope", "alibi")
NAMES = [name if name in SOME else full(name) for name in ENCODINGS]
EXTRA = {"pape": (11_073_600, 11_080_800), "pape_ri": (110_592, 110_592), "rope_mixed": (9_216, 13_824)}
PLAIN = ("none", "sincos", "rope", "alibi")


def small(encoding="pape", **options):
    """12 heads, for which every encoding has a layout."""
    common = dict(dim=24, heads=12, head_dim=4, depth=1, mlp_dim=32, num_classes=3, neck_dim=16, drop_path=0.0)
    torch.manual_seed(0)
    net = DetectorViT(encoding=encoding, **{**common, **options})
    return stirred(net)


def stirred(net: Detector) -> Detector:
    """With norms and branches as after some training."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d | ChannelNorm):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    for stem in (*net.head.o2m.cls, *net.head.o2o.cls):
        nn.init.normal_(stem.out.bias, -1, 0.3)
    return net


@pytest.mark.parametrize(
    ("name", "classes", "total"),
    [("vit_det_base", 91, 88_929_202), ("vit_det_base", 80, 88_912_240), ("event_det_base", 2, 92_134_300)],
)
@pytest.mark.parametrize("encoding", [*PLAIN, *EXTRA, "lookhere"])
def test_parameters_are_those_of_the_release(name, classes, total, encoding):
    axes = 2 + name.startswith("event")
    if encoding == "lookhere" and axes == 3:
        pytest.skip("lookhere is for grids")
    extra = EXTRA.get(encoding, (0, 0))[axes - 2]
    assert count(name, encoding=encoding, num_classes=classes) == total + extra


@pytest.mark.parametrize(
    ("name", "classes", "parts"),
    [
        ("vit_det_base", 91, (590_592, 85_057_536, 1_181_952, 2_099_122)),
        ("vit_det_base", 80, (590_592, 85_057_536, 1_181_952, 2_082_160)),
        ("event_det_base", 2, (3_932_928, 85_057_536, 1_181_952, 1_961_884)),
    ],
)
def test_parameters_by_part(name, classes, parts):
    with torch.device("meta"):
        net = create_model(name, encoding="none", num_classes=classes)
    members = (net.embedding, net.encoder, net.neck, net.head)
    assert tuple(sum(p.numel() for p in part.parameters()) for part in members) == parts
    frozen = [p.numel() for p in net.parameters() if not p.requires_grad]
    assert frozen == [16]
    branch = net.head.o2m
    assert sum(p.numel() for p in branch.box[0].parameters()) == 188_736
    if classes == 91:
        assert sum(p.numel() for p in branch.cls[2].parameters()) == 161_115


def test_other_sizes():
    assert count("vit_det_nano", num_classes=91) == 3_133_298
    assert count("event_det_nano") == 3_553_916
    tiny = MODELS["vit_official_tiny_patch16"][1]
    assert count("vit_det_base", num_classes=91, **tiny) == 7_101_858
    assert count("event_det_base", **tiny) == 8_080_132
    with torch.device("meta"):
        assert [sum(p.numel() for p in Neck(768, 256, kind).parameters()) for kind in ("lite", "vitdet")] == [
            1_181_952,
            3_444_096,
        ]


def test_a_picture_of_640():
    net = create_model("vit_det_nano").eval()
    seen = positions_of(net, {"images": torch.rand(1, 3, 640, 640)})
    assert seen.shape == (1, 1600, 2)
    assert seen[0, [0, 1, -1]].tolist() == [[1, 1], [2, 1], [40, 40]]
    with torch.no_grad():
        raw = net(torch.rand(1, 3, 640, 640))
    assert [tuple(x.shape) for x in raw.o2o] == [(1, 144, side, side) for side in (80, 40, 20)]
    assert postprocess(raw).shape == (1, 100, 6)


@pytest.mark.parametrize("classes", [91, 80, 2])
def test_first_scores(classes):
    table = {
        91: (-11.66547, -10.27918, -8.89289),
        80: (-11.53664, -10.15035, -8.76405),
        2: (-7.84776, -6.46147, -5.07517),
    }
    head = DualHead(classes, 16)
    for branch in (head.o2m, head.o2o):
        mass = 0.0
        for stem, want, box, stride in zip(branch.cls, table[classes], branch.box, head.strides, strict=True):
            torch.testing.assert_close(stem.out.bias, torch.full((classes,), want), rtol=0, atol=1e-5)
            assert box.out.bias.eq(1).all()
            mass += (640 / stride) ** 2 * stem.out.bias.sigmoid().sum().item()
        assert mass == pytest.approx(15, rel=5e-3)


@pytest.mark.parametrize("kind", ["lite", "vitdet"])
def test_necks(kind):
    neck = Neck(24, 8, kind)
    maps = neck(torch.randn(2, 24, 5, 7))
    assert [tuple(x.shape) for x in maps] == [(2, 8, 10, 14), (2, 8, 5, 7), (2, 8, 2, 3)]
    for x in maps:  # the last norm starts without an affine part
        torch.testing.assert_close(x.mean(1), torch.zeros_like(x[:, 0]), rtol=0, atol=1e-5)
        torch.testing.assert_close(x.var(1, unbiased=False), torch.ones_like(x[:, 0]), rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match="neck must be one of lite, vitdet, got 'fpn'"):
        Neck(24, 8, "fpn")


def targets(batch, labels=3):
    boxes = torch.tensor([[4.0, 4, 40, 36], [30, 10, 60, 60]]).expand(batch, 2, 4)
    return boxes, torch.arange(2).expand(batch, 2) % labels, torch.full((batch,), 2)


def step_loss(sums):
    return (sum(sums.parts.values()).sum(0) / sums.weight.clamp(min=1)).sum()


def test_the_branches_start_as_one_and_part():
    torch.manual_seed(0)
    net = create_model("vit_det_nano", num_classes=3, depth=1).train()
    images = torch.rand(2, 3, 64, 64)
    raw = net(images)
    assert all(torch.equal(a, b) for a, b in zip(raw.o2m, raw.o2o, strict=True))
    assert raw.o2m[0].data_ptr() != raw.o2o[0].data_ptr()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        step_loss(detection_loss(net(images), *targets(2))).backward()
        optimizer.step()
    raw = net(images)
    assert not any(torch.equal(a, b) for a, b in zip(raw.o2m, raw.o2o, strict=True))


def test_the_one_to_one_branch_teaches_itself_alone():
    net = small()
    sums = detection_loss(net(torch.rand(2, 3, 64, 96)), *targets(2))
    for column in (0, 1):
        net.zero_grad()
        sum(part.sum(0)[column] for part in sums.parts.values()).backward(retain_graph=True)
        for name, p in net.named_parameters():
            if name == "head.bins":
                assert p.grad is None
            elif branch_of(name) != column:
                assert p.grad is None or p.grad.eq(0).all(), name
            else:
                assert p.grad.isfinite().all(), name
                if ".cls." in name or name.startswith(("neck.", "embedding.")):  # boxes need not be on every map
                    assert p.grad.ne(0).any(), name
    names = [name for name, _ in net.named_parameters()]
    assert {name.split(".")[0] for name in names if not branch_of(name)} == {"embedding", "encoder", "neck", "head"}
    assert {".".join(name.split(".")[:2]) for name in names if branch_of(name)} == {"head.o2o"}


@pytest.mark.parametrize("boxes", [True, False])
@pytest.mark.parametrize("encoding", NAMES)
def test_every_parameter_learns(encoding, boxes):
    """Also where no image has a box, as processes that share gradients expect."""
    net = small(encoding).train()
    data = targets(2) if boxes else (torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.long), torch.zeros(2).long())
    step_loss(detection_loss(net(torch.rand(2, 3, 64, 96)), *data)).backward()
    for name, p in net.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
    still = {name for name, p in net.named_parameters() if p.requires_grad and not p.grad.ne(0).any()}
    assert {name for name in still if ".box." not in name} == set()
    for branch in ("head.o2m.box.", "head.o2o.box."):  # boxes need not be on every map, but are on one
        maps = [{name for name, _ in net.named_parameters() if name.startswith(f"{branch}{i}.")} for i in range(3)]
        assert all(maps)
        assert any(not names & still for names in maps) == boxes
        assert boxes or all(names <= still for names in maps)


def test_the_head_leaves_its_input_alone():
    net = small().eval()
    maps = [torch.randn(1, 16, side, side) for side in (8, 4, 2)]
    before = [x.clone() for x in maps]
    held = list(maps)
    net.head(maps)
    assert all(a is b for a, b in zip(maps, held, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(maps, before, strict=True))
    for batch, height, width in ((1, 64, 64), (3, 64, 64), (2, 32, 96)):
        found = net.detect(torch.rand(batch, 3, height, width))
        assert found.shape == (batch, min(100, 21 * height * width // 1024), 6)


@pytest.mark.parametrize("neck", ["lite", "vitdet"])
@pytest.mark.parametrize("encoding", NAMES)
def test_a_padded_batch_is_its_images_alone(encoding, neck):
    """Of any sizes, also such that no stride divides."""
    net = small(encoding, neck=neck).double().eval()
    images = [torch.rand(3, *size, dtype=torch.float64) for size in ((64, 96), (50, 70), (33, 120))]
    batch, mask = pad_images(images)
    assert batch.shape == (3, 3, 64, 120)
    assert mask.tolist()[1] == [[col < 5 for col in range(8)]] * 4
    batch = torch.where(mask.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None, :64, :120], batch, torch.nan)
    with torch.no_grad():
        together = net(torch.nan_to_num(batch, nan=7.0), mask)
        found = postprocess(together, 30)
        for i, image in enumerate(images):
            alone = net(image[None])
            for a, b in zip(together.o2m, alone.o2m, strict=True):
                rows, cols = (-(-side // s) for side, s in zip(image.shape[1:], [128 // b.shape[3]] * 2, strict=True))
                torch.testing.assert_close(a[i, :, :rows, :cols], b[0, :, :rows, :cols], rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(found[i], postprocess(alone, 30)[0], rtol=1e-8, atol=1e-8)


def test_training_knows_nothing_of_padding():
    """Loss, gradients and running statistics of two equal sizes, with and without a border around them."""
    images = torch.rand(2, 3, 64, 96, dtype=torch.float64)
    border = torch.cat([images, torch.full((2, 3, 64, 64), 9.0, dtype=torch.float64)], dim=3)
    mask = torch.zeros(2, 4, 10, dtype=torch.bool)
    mask[:, :, :6] = True
    found = []
    for args in ((images,), (border, mask)):
        net = small().double().train()
        sums = detection_loss(net(*args), *targets(2))
        step_loss(sums).backward()
        buffers = {name: b for name, b in net.named_buffers() if "running" in name}
        grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        found.append(({k: v.detach() for k, v in sums.parts.items()}, sums.weight, buffers, grads))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)


def test_sides_that_no_stride_divides():
    net = small().eval()
    image = torch.rand(1, 3, 40, 56)
    with torch.no_grad():
        raw, mask = net(image), torch.zeros(1, 4, 4, dtype=torch.bool)
        mask[:, :3, :4] = True
        want = net(nn.functional.pad(image, (0, 8, 0, 24)), mask)
    for a, b in zip(raw.o2o, want.o2o, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(raw.mask, want.mask)
    assert [tuple(x.shape[2:]) for x in small(pad=False)(torch.rand(1, 3, 48, 80)).o2o] == [(6, 10), (3, 5), (1, 2)]
    with pytest.raises(ValueError, match=r"mask must be boolean \(1, 3, 4\), got \(1, 2, 2\)"):
        net(image, mask[:, :2, :2])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"neck": "fpn"}, "neck must be one of"),
        ({"reg_max": 1}, "reg_max must be at least 2, got 1"),
        ({"patch": 7}, "patch of a detector must be even"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"pos_dim": 3}, "pos_dim of DetectorViT is 2"),
    ],
)
def test_bad_options(options, word):
    with pytest.raises(ValueError, match=word):
        create_model("vit_det_nano", **options)


def test_bfloat16_autocast_takes_a_step():
    net = small().train()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = step_loss(detection_loss(net(torch.rand(2, 3, 64, 64)), *targets(2)))
    assert loss.dtype == torch.float32
    loss.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.full
def test_one_graph():
    """For all sizes; in training, too, where the loss stays outside."""
    net = small().train()
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    for size in ((2, 3, 64, 96), (3, 3, 96, 160)):
        images = torch.rand(size)
        for a, b in zip(compiled(images).o2o, net(images).o2o, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_a_classifier_lends_its_backbone():
    torch.manual_seed(1)
    size = dict(dim=24, heads=12, head_dim=4, depth=1, mlp_dim=32)
    classifier = ViT(**size, encoding="pape", num_classes=7)
    net = small()
    head = {name: x.clone() for name, x in net.state_dict().items() if name.startswith(("neck.", "head."))}
    net.load_backbone(classifier.state_dict())
    state = net.state_dict()
    for name, x in classifier.state_dict().items():
        if name.startswith(("embedding.", "encoder.")):
            assert torch.equal(state[name], x), name
    assert all(torch.equal(state[name], x) for name, x in head.items())
    with pytest.raises(ValueError, match=r"expected \(12, .*got none.*same size and encoding"):
        net.load_backbone(ViT(**size, encoding="rope").state_dict())
    with pytest.raises(ValueError, match="expected none, got"):
        small("rope").load_backbone(classifier.state_dict())
    other = ViT(**size, encoding="pape", num_classes=3)
    other.load_backbone(classifier.state_dict())
    assert torch.equal(other.cls, classifier.cls)
    assert other.classifier.out_features == 3


@pytest.mark.full
def test_it_learns_four_images():
    """Every box is found at IoU > 0.5 with a score above any other box's."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(3)
    images, boxes = 0.1 * torch.rand(4, 3, 64, 96, generator=g), torch.zeros(4, 2, 4)
    for i in range(4):
        for j, (x, y) in enumerate(((4 + 6 * i, 8), (52 + 4 * i, 24 - 2 * i))):
            width, height = 24 + 4 * j, 20 + 5 * i
            boxes[i, j] = torch.tensor([x, y, x + width, y + height])
            images[i, j, y : y + height, x : x + width] += 0.9
    labels, counts = torch.tensor([0, 1]).expand(4, 2), torch.full((4,), 2)
    net = create_model("vit_det_nano", num_classes=2, drop_path=0.0, neck_dim=64)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(250):
        optimizer.zero_grad()
        step_loss(detection_loss(net.train()(images), boxes, labels, counts)).backward()
        optimizer.step()
    with torch.no_grad():
        found = net.eval().detect(images, max_det=2)
    for i in range(4):
        rows = found[i][found[i, :, 5].argsort()]
        assert rows[:, 5].tolist() == [0, 1]
        for row, box in zip(rows, boxes[i], strict=True):
            inner = (torch.minimum(row[2:4], box[2:]) - torch.maximum(row[:2], box[:2])).clamp(min=0).prod()
            union = (row[2:4] - row[:2]).prod() + (box[2:] - box[:2]).prod() - inner
            assert inner / union > 0.5


def test_detectors_are_registered():
    assert {"vit_det_base", "vit_det_nano", "event_det_base", "event_det_nano"} <= set(parapos.list_models())
    assert DetectorViT.inputs == ("image", "mask")
    assert math.isclose(create_model("vit_det_nano", norm_eps=1e-3).head.o2m.box[0].layers[0].norm.eps, 1e-3)
