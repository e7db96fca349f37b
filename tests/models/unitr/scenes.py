"""Small driving scenes: boxes on the ground, points on them, and cameras that see them as bright rectangles."""

import math

import torch

from parapos.models import create_model
from parapos.models.unitr.batch import CLASSES

SIZE = (64, 176)
HEADINGS = (90, 35, 145, 270, 200, 340)  # degrees in the LiDAR frame, in the order of CAMERAS
SIDES = torch.tensor(
    [[4.6, 1.9, 1.7], [6.9, 2.5, 2.8], [6.4, 2.8, 3.2], [11.0, 2.9, 3.5], [12.0, 2.9, 3.9],
     [0.5, 2.5, 1.0], [2.1, 0.8, 1.5], [1.7, 0.6, 1.3], [0.7, 0.7, 1.8], [0.4, 0.4, 1.1]]
)  # fmt: skip


def calibration():
    """(6, 4, 4): cameras around the car that look outwards, for images of SIZE."""
    found = []
    for heading in HEADINGS:
        c, s = math.cos(math.radians(heading)), math.sin(math.radians(heading))
        axes = torch.tensor([[s, -c, 0.0], [0.0, 0.0, -1.0], [c, s, 0.0]])  # right, down, forward
        place = torch.tensor([0.5 * c, 0.5 * s, -0.3])
        camera = torch.eye(4)
        camera[:3, :3], camera[:3, 3] = axes, -axes @ place
        focal = 0.79 * SIZE[1]
        lens = torch.eye(4)
        lens[:2, :3] = torch.tensor([[focal, 0.0, SIZE[1] / 2], [0.0, focal, SIZE[0] / 2]])
        found.append(lens @ camera)
    return torch.stack(found)


def sample(seed, boxes=6, ground=800):
    """A sample of `DrivingBatch`, before it is batched."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (boxes,), generator=g)
    angle = torch.arange(boxes) * (2 * math.pi / max(boxes, 1)) + torch.rand(boxes, generator=g) * 0.3
    reach = 6 + 11 * torch.rand(boxes, generator=g)
    sides = SIDES[labels]
    centre = torch.stack([angle.cos() * reach, angle.sin() * reach, sides[:, 2] / 2 - 1.8], 1)
    yaw = (torch.rand(boxes, 1, generator=g) * 2 - 1) * math.pi
    true = torch.cat([centre, sides, yaw, torch.randn(boxes, 2, generator=g)], 1)

    local = (torch.rand(boxes, 40, 3, generator=g) - 0.5) * sides[:, None]
    c, s = yaw.cos(), yaw.sin()
    x, y, z = local.unbind(-1)
    turned = torch.stack([x * c - y * s, x * s + y * c, z], -1)
    flat = torch.rand(ground, 2, generator=g) * 46 - 23  # some are off the grid
    xyz = torch.cat([(turned + centre[:, None]).flatten(0, 1), torch.cat([flat, torch.full((ground, 1), -1.8)], 1)])
    rest = torch.stack([torch.rand(len(xyz), generator=g) * 255, torch.rand(len(xyz), generator=g) * 0.45], 1)

    matrices = calibration()
    images = torch.randn(6, 3, *SIZE, generator=g) * 0.3
    for box, label in zip(true, labels.tolist(), strict=True):
        for view, matrix in enumerate(matrices):
            h = matrix @ torch.cat([box[:3], torch.ones(1)])
            if h[2] > 1:
                col, row = int(h[0] / h[2]), int(h[1] / h[2])
                half = max(2, int(0.79 * SIZE[1] * 0.7 / float(h[2])))
                rows, cols = (slice(max(at - half, 0), max(at + half, 0)) for at in (row, col))
                images[view, label % 3, rows, cols] = 2.0
    return {
        "points": torch.cat([xyz, rest], 1), "images": images, "image_mask": torch.ones(6, dtype=torch.bool),
        "lidar2image": matrices, "image_aug": torch.eye(4).repeat(6, 1, 1), "lidar_aug": torch.eye(4),
        "boxes": true, "labels": labels, "count": torch.tensor(boxes),
    }  # fmt: skip


def batch_of(samples):
    """Samples as a task's collate joins them."""
    from parapos.data.batch import collate

    numbered = [{"id": i, **sample} for i, sample in enumerate(samples)]
    return collate(numbered, ragged=("boxes", "labels"), packed=("points",))


def batch(*seeds, **options):
    return batch_of([sample(seed, **options) for seed in seeds])


def inputs(net, batch):
    return [batch[name] for name in net.inputs]


def nano(encoding="pape", **options):
    """A small network that is the same each time."""
    torch.manual_seed(0)
    if encoding == "pape":
        options = {"parabolas": 4, **options}
    return create_model("unitr_nano", encoding=encoding, **options)
