"""UniTR as a whole: sizes, encodings, sensors that are missing, batches, learning."""

from pathlib import Path

import pytest
import torch

from parapos.bench.driving import sweeps
from parapos.encodings import ENCODINGS
from parapos.models import create_model
from parapos.models.unitr import decode, head_loss

from .scenes import SIZE, batch, batch_of, inputs, nano, sample

NAMES = [*(name for name, cls in ENCODINGS.items() if cls.claims.unbounded), "learned"]
UNREAD = ("backbone.blocks.3.layers.1.image.", "backbone.blocks.3.image_norm.")  # patches after the last layer


def count(module):
    return sum(p.numel() for p in module.parameters())


def same(a, b, tolerance=1e-4):
    """Whether two heads say the same."""
    for name, x, y in zip(a._fields, a, b, strict=True):
        if isinstance(x, torch.Tensor):
            assert torch.allclose(x.float(), y.float(), atol=tolerance), name


@torch.no_grad()
def answers(net, given):
    return net.eval()(*inputs(net, given))


@pytest.mark.parametrize(
    ("encoding", "total"),
    [
        ("learned", 12_213_855), ("none", 11_818_847), ("sincos", 11_818_847), ("rope", 11_818_847),
        ("alibi", 11_818_847), ("rope_mixed", 11_819_871), ("pape", 12_644_447), ("pape_ri", 11_827_039),
    ],
)  # fmt: skip
def test_sizes_of_the_paper(encoding, total):
    with torch.device("meta"):
        net = create_model("unitr", encoding=encoding)
    assert count(net) == total


def test_the_page_tells_the_sizes():
    page = (Path(__file__).parents[3] / "docs" / "unitr.md").read_text()
    for total in (11_818_847, 11_819_871, 11_827_039, 12_644_447, 12_213_855, 14_541_861):
        assert f"{total:,}" in page
    with torch.device("meta"):
        net = create_model("unitr", encoding="none")
    cells, inside = net.grid.cells(sweeps()[:, :2])
    assert f"{len(torch.unique(cells[inside], dim=0)):,} pillars" in page
    assert f"{6 * 32 * 88:,} patches" in page


def test_sizes_of_the_parts():
    with torch.device("meta"):
        net = create_model("unitr", encoding="learned")
        assert count(create_model("unitr", encoding="learned", camera_map=True)) == 14_541_861
    assert count(net.pillars) == 17_472
    assert count(net.patches) == 24_960
    blocks = list(net.backbone.blocks)
    assert [count(layer) for block in blocks for layer in block.layers] == [199_168] * 8
    assert sum(count(m) for block in blocks for m in (block.lidar_norm, block.image_norm)) == 2_048
    assert count(net.backbone.learned) + count(net.backbone.lift_residual) == 395_008
    assert len(net.backbone.learned.embeddings) == 22
    assert count(net.backbone) + count(net.patches) == 2_015_360
    assert [count(stage) for stage in net.bev.blocks] == [607_488, 902_912, 3_280_384, 3_608_064]
    assert [count(lateral) for lateral in net.bev.deblocks] == [65_792, 16_640, 131_328, 524_544]
    head = net.head
    parts = (head.shared_conv, head.heatmap_head, head.class_encoding, head.decoder, head.prediction_head)
    assert [count(part) for part in parts] == [589_952, 159_370, 1_408, 233_088, 60_053]


@pytest.mark.parametrize("encoding", NAMES)
def test_every_encoding_learns(encoding):
    """Finite, and a gradient for every weight but those that nothing reads."""
    given = batch(0, boxes=5, ground=300)  # an odd number, of which signs cannot cancel
    net = nano(encoding).train()
    loss = head_loss(net(*inputs(net, given)), given)
    assert loss.total.isfinite()
    loss.total.backward()
    unread = {name for name, p in net.named_parameters() if not float(p.grad.abs().sum()) > 0}
    assert unread == {name for name, _ in net.named_parameters() if name.startswith(UNREAD)}
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_with_a_camera_map_every_weight_is_read():
    given = batch(0, boxes=5, ground=300)
    net = nano("pape", camera_map=True).train()
    outputs = net(*inputs(net, given))
    assert outputs.dense_heatmap.shape == (1, 10, 36, 36)
    head_loss(outputs, given).total.backward()
    assert not [name for name, p in net.named_parameters() if not float(p.grad.abs().sum()) > 0]


@pytest.mark.parametrize("options", [{}, {"camera_map": True}, {"encoding": "learned"}], ids=["pape", "lss", "learned"])
def test_batch_mates_do_not_matter(options):
    net = nano(**options)
    together = answers(net, batch(0, 1, ground=300))
    for b, seed in enumerate((0, 1)):
        alone = answers(net, batch(seed, ground=300))
        for name, x, y in zip(alone._fields, alone, together, strict=True):
            if isinstance(x, torch.Tensor):
                assert torch.allclose(x[0].float(), y[b].float(), atol=1e-4), name


@torch.no_grad()
def test_a_missing_camera_leaves_no_trace():
    net = nano().eval()
    scene = sample(0)
    scene["image_mask"][2] = False
    first = answers(net, batch_of([scene]))
    other = {**scene, "images": scene["images"].clone()}
    other["images"][2] = 7.0  # what stands there is not looked at
    same(first, answers(net, batch_of([other])), 0.0)
    x, scenery = net.tokenize(*inputs(net, batch_of([scene])))
    assert scenery.shares[1] == 5 * 8 * 22
    assert len(x) == sum(scenery.shares)
    whole = answers(net, batch_of([sample(0)]))
    assert not torch.allclose(first.dense_heatmap, whole.dense_heatmap)


def test_lidar_alone():
    net = nano()
    scene = sample(0)
    scene["image_mask"][:] = False
    assert answers(net, batch_of([scene])).center.isfinite().all()
    for name, shape in (("images", (0, 3, *SIZE)), ("lidar2image", (0, 4, 4)), ("image_aug", (0, 4, 4))):
        scene[name] = torch.zeros(shape)
    scene["image_mask"] = scene["image_mask"][:0]
    given = batch_of([scene, scene])
    found = decode(answers(net, given))
    assert len(found) == 2
    for options in ({}, {"encoding": "learned"}, {"camera_map": True}):
        net = nano(**options).train()
        head_loss(net(*inputs(net, given)), given).total.backward()
        assert [name for name, p in net.named_parameters() if p.grad is None] == []  # other processes would wait
        assert net.pillars.pfn_layers[0].linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{}, {"camera_map": True}, {"encoding": "learned"}], ids=["pape", "lss", "learned"])
def test_no_points(options):
    """Neither in one sample of two, nor in both, nor on the grid; with images and without."""
    empty, away = sample(1), sample(1)
    empty["points"], away["points"] = torch.zeros(0, 5), torch.full((30, 5), 100.0)
    net = nano(**options)
    alone = answers(net, batch_of([sample(0)]))
    beside = answers(net, batch_of([sample(0), empty]))
    assert torch.allclose(beside.dense_heatmap[0], alone.dense_heatmap[0], atol=1e-4)
    found = decode(answers(net, batch_of([empty])))
    assert len(found) == 1
    assert found[0].boxes.isfinite().all()
    net.train()
    for has_images in (True, False):
        given = batch_of([empty, away])
        given["image_mask"][:] = has_images
        net.zero_grad()
        head_loss(net(*inputs(net, given)), given).total.backward()
        without = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert without == []  # other processes would wait for them


def test_no_boxes_can_be_learned_from():
    scene = sample(0, boxes=0)
    given = batch_of([scene, scene])
    net = nano().train()
    loss = head_loss(net(*inputs(net, given)), given)
    loss.total.backward()
    assert loss.parts["box"] == 0
    assert loss.total.isfinite()


def test_images_change_what_is_seen():
    """Cameras reach the map by attention, and the loss reaches both tokenizers."""
    given = batch(0)
    net = nano("none").train()
    given["images"].requires_grad_()
    head_loss(net(*inputs(net, given)), given).total.backward()
    assert given["images"].grad.abs().sum() > 0
    assert net.patches.projection.weight.grad.abs().sum() > 0
    assert net.pillars.pfn_layers[0].linear.weight.grad.abs().sum() > 0


def test_world_augmentation_is_undone_for_cameras():
    """Points that were moved, with the matrix that moved them, fall on the same patches."""
    scene, net = sample(0), nano()
    aug = torch.eye(4)
    aug[:2, :2], aug[:3, 3] = torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.tensor([0.6, -1.2, 0.0])
    moved = {**scene, "lidar_aug": aug, "points": scene["points"].clone()}
    moved["points"][:, :3] = scene["points"][:, :3] @ aug[:3, :3].mT + aug[:3, 3]
    with torch.no_grad():
        scenes = [net.tokenize(*inputs(net, batch_of([x])))[1] for x in (scene, moved)]
    # A quarter turn and whole pillars keep pillars pillars; those that both grids have are the same.
    found = []
    for scenery, turn in zip(scenes, (False, True), strict=True):
        centres = scenery.grid.centres(scenery.pillars)
        centres = (centres - aug[:2, 3]) @ aug[:2, :2] if turn else centres
        canvas = scenery.canvas()
        places = torch.cat([canvas.view[:, None], canvas.at], 1)
        keys = [tuple(key) for key in (centres * 10).round().long().tolist()]
        found.append(dict(zip(keys, places, strict=True)))
    shared = found[0].keys() & found[1].keys()
    assert len(shared) > 400
    assert all(torch.allclose(found[0][key], found[1][key], atol=1e-2) for key in shared)


@torch.no_grad()
def test_positions_can_be_scaled():
    given, net = batch(0), nano("rope").eval()
    plain, wide = net(*inputs(net, given)), net(*inputs(net, given), 2.0)
    assert not torch.allclose(plain.dense_heatmap, wide.dense_heatmap)
    same(wide, answers(nano("rope", pos_scale=2.0), given), 0.0)


@torch.no_grad()
def test_switches_do_what_they_say():
    given = batch(0)
    base = answers(nano("pape"), given)
    for options in ({"continuous_positions": True}, {"keep_lift_residual": True}):
        assert not torch.allclose(answers(nano("pape", **options), given).dense_heatmap, base.dense_heatmap, atol=1e-5)
    net = nano("pape", continuous_positions=True)
    _, scenery = net.tokenize(*inputs(net, given))
    pillars, patches = scenery.partition("canvas", 0, "x").positions.r[0].split(scenery.shares)
    assert (patches == patches.round()).all()
    assert not (pillars == pillars.round()).all()
    coarse = nano("pape").tokenize(*inputs(net, given))[1].partition("canvas", 0, "x").positions.r[0]
    assert float((coarse[: len(pillars)] - pillars).abs().max()) <= 0.5
    torch.manual_seed(0)
    drawn = nano("none", init="xavier").backbone.blocks[0].layers[0].attention.qkv.weight
    assert float(drawn.abs().max()) == pytest.approx((6 / (32 + 96)) ** 0.5, rel=0.02)


@pytest.mark.parametrize("encoding", ["pape", "learned"])
def test_half_precision_by_autocast(encoding):
    given, net = batch(0, ground=300), nano(encoding, camera_map=True).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_loss(net(*inputs(net, given)), given)
    loss.total.backward()
    assert loss.total.dtype == torch.float32
    assert loss.total.isfinite()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    net.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outputs = net(*inputs(net, given))
        x, scenery = net.tokenize(*inputs(net, given))
        half = net.bev(net.map_of(net.backbone(x, scenery), scenery))
    with torch.no_grad():
        x, scenery = net.tokenize(*inputs(net, given))
        plain = net.bev(net.map_of(net.backbone(x, scenery), scenery))
    assert float((half.float() - plain).norm() / plain.norm()) < 0.1
    assert decode(outputs)[0].boxes.dtype == torch.float32


def test_maps_that_are_not_square():
    net = nano(point_range=(-21.6, -14.4, -5.0, 21.6, 14.4, 3.0))
    given = batch(0)
    outputs = net(*inputs(net, given))
    assert outputs.dense_heatmap.shape == (1, 10, 24, 36)
    head_loss(outputs, given).total.backward()


def test_wrong_input_is_refused():
    net, given = nano(), batch(0)
    wrong = {
        "points": (given["points"][:, :4], r"points must be \(N, 5\)"),
        "offset": (given["offset"] - 1, "offset must rise"),
        "images": (given["images"][0], r"images must be \(1, V, 3, H, W\)"),
        "image_mask": (given["image_mask"].float(), "image_mask must be boolean"),
        "lidar2image": (given["lidar2image"][:, :2], "lidar2image must be"),
        "lidar_aug": (given["lidar_aug"] * torch.nan, "lidar_aug must be finite"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            net(*inputs(net, {**given, name: value}))
    points = given["points"].clone()
    points[3, 0] = torch.nan
    with pytest.raises(ValueError, match="points must be finite"):
        net(*inputs(net, {**given, "points": points}))
    for options, message in (
        ({"encoding": "lookhere"}, "made for grids of images"),
        ({"encoding": "learned", "keep_lift_residual": True}, "no effect"),
        ({"shift": 12}, "shift must be"),
        ({"init": "normal"}, "init must be"),
        ({"pos_dim": 3}, "pos_dim of UniTR is 2"),
        ({"encoding": "rope", "parabola": 3}, "has no option"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            nano(**options)


def learn(encoding, steps, seeds=(0, 1)):
    given, net = batch(*seeds), nano(encoding).train()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.03)
    losses = []
    for _ in range(steps):
        loss = head_loss(net(*inputs(net, given)), given)
        optimizer.zero_grad()
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        losses.append({name: float(part.detach()) for name, part in loss.parts.items()})
    still = [name for name, p in net.named_parameters() if torch.equal(p, before[name])]
    return net, given, losses, still


def test_a_few_steps_learn_and_move_every_weight():
    _, _, losses, still = learn("pape", 6, seeds=(0,))
    totals = [sum(parts.values()) for parts in losses]
    assert totals[-1] < totals[0] / 4
    # Biases of a branch that nothing reads start at zero, where decay leaves them.
    assert all(
        name.startswith(("backbone.blocks.3.layers.1.image.", "backbone.blocks.3.image_norm.")) for name in still
    )
    assert all(name.endswith("bias") for name in still)


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["pape", "rope", "learned"])
def test_two_scenes_can_be_learned_by_heart(encoding):
    """Every part of the loss but the heatmap's, which falls by far more, is down by 80 percent, and boxes are there."""
    net, given, losses, _ = learn(encoding, 80)
    start, end = (sum(v for k, v in losses[i].items() if k != "heatmap") for i in (0, -1))
    assert end < 0.2 * start
    assert losses[-1]["heatmap"] < 0.05 * losses[0]["heatmap"]
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    with torch.no_grad():  # by the batch's own statistics: running ones need hundreds of steps to follow
        outputs = net(*inputs(net, given))
    close = 0
    for b, found in enumerate(decode(outputs)):
        for box, label in zip(given["boxes"][b], given["labels"][b], strict=True):
            mine = (found.labels == label) & (found.scores > 0.2)
            close += bool(((found.boxes[mine, :2] - box[:2]).norm(dim=1) < 1).any())
    assert close >= 8  # of twelve
