"""UniTR against networks of the original that were recorded: geometry exactly, features to 1e-4."""

import numpy as np
import torch

from parapos.models.unitr import from_original
from parapos.models.unitr.bev import BevNetwork
from parapos.models.unitr.decode import decode
from parapos.models.unitr.grid import BevFrame, BevGrid
from parapos.models.unitr.head import HeadOutputs, QueryHead
from parapos.models.unitr.loss import LOSS_PARTS, head_loss, match
from parapos.models.unitr.lss import CameraNeck, Fuser, Splat, frustum, unproject
from parapos.models.unitr.network import UniTR
from parapos.models.unitr.targets import box_codes, heatmap_targets
from tests.golden import files

MEAN, DEVIATION = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
SHAPES = ("center", "height", "dim", "rot", "vel", "iou", "heatmap")


def load(path):
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def weights_of(case, prefix=""):
    return {f"{prefix}{name[2:]}": x.float() for name, x in case.items() if name.startswith("w:")}


def fill(net, weights):
    missing = net.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys)
    return net.eval()


def near(found, want, tolerance=1e-4):
    assert found.shape == want.shape
    assert float((found.float() - want.float()).abs().max()) < tolerance


def rows(index):
    """Sets as rows in any order."""
    return sorted(map(tuple, index.tolist()))


def inputs_of(case):
    """Inputs of a recorded backbone."""
    points = case["points"]
    samples = int(case["batch_size"])
    images = case["image"].float() / 255
    images = (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
    order = points[:, 0].argsort(stable=True)
    counts = torch.bincount(points[:, 0].long(), minlength=samples)
    return [
        points[order, 1:], counts.cumsum(0), images, torch.ones(images.shape[:2], dtype=torch.bool),
        case["lidar2image"], case["img_aug_matrix"], torch.eye(4).repeat(samples, 1, 1),
    ]  # fmt: skip


def network(case):
    """The network that recorded weights belong to; what they do not tell is what the folder's page says."""
    weights = from_original(weights_of(case))
    dim = len(weights["patches.norm.weight"])
    mlp_dim = len(weights["backbone.blocks.0.layers.0.image.mlp.fc1.bias"])
    lidar, image = (case[f"{space}:shift1:in_window_zyx"] for space in ("lidar", "image"))
    window, shift = int(lidar.max()) + 1, int(image[0, 1])
    patch, set_size = weights["patches.projection.weight"].shape[-1], case["image:shift0:sets_y"].shape[1]
    net = UniTR(
        point_range=(-21.6, -14.4, -5.0, 21.6, 14.4, 3.0), pillar=0.6, patch=patch, dim=dim, heads=4, mlp_dim=mlp_dim,
        window=window, shift=shift, set_size=set_size, lift_heights=5, bev_dims=(8, 8, 8, 8), bev_out=8, query_dim=32,
        query_heads=4, queries=20, query_radius=3, encoding="learned",
    ).eval()  # fmt: skip
    missing = net.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    for name in missing.missing_keys:
        assert name.startswith(("bev.", "head.")) or name.endswith("num_batches_tracked"), name
    return net


@files("unitr-backbone*.npz")
@torch.no_grad()
def test_golden_backbone(path):
    case = load(path)
    net = network(case)
    x, scene = net.tokenize(*inputs_of(case))
    count = len(scene.pillars)
    assert torch.equal(torch.cat([scene.sample[:, None], scene.pillars], 1), case["pillar_coords_bxy"].long())
    near(x[:count], case["pillar_features"])

    canvas = scene.canvas()
    found = torch.stack([canvas.view, canvas.cells[:, 1], canvas.cells[:, 0]], 1)
    assert torch.equal(found, case["lidar_canvas_view_col_row"].long())
    cells, residual = scene.lifted()
    assert torch.equal(cells, case["image_bev_cell_exact"].long())
    near(residual, case["image_bev_residual"])

    names = {"image": "image", "lidar": "lidar", "canvas": "joint2d", "bev": "joint3d-exact"}
    for space, name in names.items():
        for number, shift in enumerate((0, net.sets.shift)):
            for major in "xy":
                found = scene.partition(space, shift, major)
                assert rows(found.tokens) == rows(case[f"{name}:shift{number}:sets_{major}"].long())
            inside = found.positions.r[0] + net.sets.window // 2
            assert torch.equal(inside.long(), case[f"{name}:shift{number}:in_window_zyx"].long()[:, [2, 1]])

    after = net.backbone(x, scene)
    for block in range(3):
        near(after[block][:count], case[f"block{block}_lidar"])
    near(after[3][:count], case["lidar_tokens_exact"])
    near(after[3][count:][::7], case["image_tokens_exact"])


@files("unitr-bev*.npz")
@torch.no_grad()
def test_golden_bev(path):
    case = load(path)
    weights = weights_of(case)
    dims = [len(weights[f"blocks.{i}.0.bn1.weight"]) for i in range(4)]
    net = fill(BevNetwork(case["x"].shape[1], dims, len(weights["deblocks.0.1.weight"])), weights)
    near(net(case["x"]), case["y"])


def frame_of(case):
    """The map of a recorded head. The folder's page tells its range: +-21.6 m in cells of twice 0.6 m."""
    rows, cols = case["dense_heatmap"].shape[-2:]
    return BevFrame((-0.6 * cols, -0.6 * rows), (1.2, 1.2), cols, rows)


def detections_are(case, found):
    for b, sample in enumerate(found):
        order = np.argsort(-sample.scores.numpy(), kind="stable")
        want = np.argsort(-case[f"det{b}:scores"].numpy(), kind="stable")
        near(sample.scores[order], case[f"det{b}:scores"][want])
        near(sample.boxes[order], case[f"det{b}:boxes"][want], 1e-3)
        assert torch.equal(sample.labels[order], case[f"det{b}:labels0"].long()[want])


@files("unitr-head[-.]*npz")
@torch.no_grad()
def test_golden_head(path):
    case = load(path)
    weights = weights_of(case)
    dim, channels = weights["shared_conv.weight"].shape[:2]
    net = QueryHead(
        channels, frame_of(case), num_classes=case["heatmap"].shape[1], dim=dim, heads=4,
        mlp_dim=len(weights["decoder.linear1.bias"]), queries=case["query_labels"].shape[1], radius=3,
    )  # fmt: skip
    found = fill(net, weights)(case["x"])
    near(found.dense_heatmap, case["dense_heatmap"])
    assert torch.equal(found.query_labels, case["query_labels"])
    near(found.query_heatmap_score, case["query_heatmap_score"])
    for name in SHAPES:
        near(getattr(found, name), case[name])
    detections_are(case, decode(found))


@files("unitr-headloss*.npz")
def test_golden_headloss(path):
    case = load(path)
    shown = {name: case[name].clone().requires_grad_() for name in SHAPES}
    outputs = HeadOutputs(
        case["dense_heatmap"], case["query_labels"], case["query_heatmap_score"], **shown, frame=frame_of(case),
        small_classes=(8, 9),
    )  # fmt: skip
    boxes, labels = case["gt"][..., :9], case["gt"][..., 9].long() - 1
    labels, count = labels.clamp(min=0), torch.full((len(boxes),), boxes.shape[1])  # padding has no size
    classes = case["heatmap"].shape[1]

    near(heatmap_targets(boxes, labels, count, classes, outputs.frame), case["heatmap_target"], 1e-6)
    found = match(outputs, boxes, labels, count)
    assigned = torch.full_like(case["centre:labels"], classes)
    assigned[found.sample, found.query] = labels[found.sample, found.box]
    assert torch.equal(assigned, case["centre:labels"])
    codes = torch.zeros_like(case["centre:box_target"])
    codes[found.sample, found.query] = box_codes(boxes[found.sample, found.box], outputs.frame)
    near(codes, case["centre:box_target"])

    loss = head_loss(outputs, {"boxes": boxes, "labels": labels, "count": count})
    names = dict(zip(LOSS_PARTS, ("heatmap", "cls", "bbox", "iou", "iou_reg"), strict=True))
    for name, theirs in names.items():
        want = float(case[f"centre:loss_{theirs}"])
        assert abs(float(loss.parts[name].detach()) - want) < 1e-4 * max(1, want), name
    assert abs(float(loss.total.detach()) - float(case["centre:loss"])) < 1e-4 * float(case["centre:loss"])
    for name, grad in zip(shown, torch.autograd.grad(loss.total, list(shown.values())), strict=True):
        near(grad, case[f"centre:grad_{name}"])
    detections_are(case, decode(outputs))


@files("unitr-lss*.npz")
@torch.no_grad()
def test_golden_lss(path):
    case = load(path)
    weights = weights_of(case)
    parts = {
        name: {k.removeprefix(f"{name}."): x for k, x in weights.items() if k.startswith(f"{name}.")}
        for name in ("neck", "vtransform", "fuser")
    }
    maps = [case[f"feat{i}"].float() for i in range(4)]
    out = len(parts["neck"]["fpn_convs.0.bn.weight"])
    neck = fill(CameraNeck(maps[0].shape[1], out, 4), parts["neck"])
    near(neck(maps), case["neck"])

    grid = BevGrid.of((-21.6, -14.4, -5.0, 21.6, 14.4, 3.0), 0.6)
    depths = (1.0, 20.0, 0.5)
    context = case["camera_bev_floor"].shape[1]
    splat = fill(Splat(out, context, grid, depths), parts["vtransform"])
    samples, cameras = case["lidar2image"].shape[:2]
    matrices = [case[name].flatten(0, 1) for name in ("lidar2image", "img_aug_matrix")]
    patches = tuple(maps[0].shape[2:])
    size = (patches[0] * 8, patches[1] * 8)
    points = frustum(size, patches, splat.bins(torch.device("cpu")))
    for i in range(samples * cameras):
        found = unproject(points, matrices[0][i], matrices[1][i])
        want = case["points"].flatten(0, 1)[i]
        near(found[::6], want, 1e-3)
    sample = torch.arange(samples).repeat_interleave(cameras)
    camera = splat(case["neck"], sample, *matrices, size, samples)
    assert ((camera - case["camera_bev_floor"]).abs() > 1e-4).float().mean() <= 1e-3
    fuser = fill(Fuser(context, case["lidar_bev"].shape[1]), parts["fuser"])
    near(fuser(case["camera_bev_floor"], case["lidar_bev"].float()), case["fused_floor"])
    assert torch.allclose(camera.sum((2, 3)), case["camera_bev_floor"].sum((2, 3)), rtol=1e-3, atol=1e-3)
