"""Detectors: a transformer's tokens on a grid, a pyramid of three maps, a head with two branches, boxes without NMS.

B images, A anchors (cells of all three maps), G most boxes of an image, k detections, C classes, R bins per side.
Boxes are XYXY in pixels of what the network is given, float32, the right and bottom edges excluded.

Models, by the names of the registry:

    net = create_model("vit_det_base", encoding="pape", num_classes=80, neck="lite")      # or vit_det_nano
    net = create_model("event_det_base", encoding="pape", num_classes=2, sensor=(240, 304))   # or event_det_nano

    DetectorViT.inputs   = ("image", "mask")
    DetectorViT.forward(images, mask=None, position_scale=1.0) -> RawDetections
        images (B, 3, H, W) float in [0, 1]; any H and W: sides that 2 x patch = 32 does not divide are padded to the
        right and below. mask (B, ceil(H / 16), ceil(W / 16)) boolean, True for patches that hold pixels of the image;
        None: all do. The batch of a task must have the entry "mask"; it may be None.
        `pad_images([image, ...])` gives both for images of different sizes.
    EventDetector.inputs = ("codes", "x", "y", "t", "length")
    EventDetector.forward(codes, x, y, t, lengths=None, position_scale=1.0) -> RawDetections
        tokens in chronological order, as of EventViT; t is the age of a token, at the moment of prediction 0.

    Both: net.detect(*inputs, position_scale=1.0, max_det=100) -> (B, k, 6)   # the one-to-one branch alone
          net.load_backbone(state_dict of a classifier)                       # embedding and encoder
          net.num_classes, net.patch, net.reg_max, net.strides = (8, 16, 32)

Answers:

    RawDetections(o2m, o2o, strides, bins, mask)   a NamedTuple
        o2m, o2o: three maps (B, 4 R + C, h, w) each, of strides 8, 16, 32; o2m is () with forward(..., deploy=True).
        mask: (B, A) boolean, True for anchors on the image, or None: all are.
    decode(raw.o2o, raw.strides, raw.bins, raw.mask) -> boxes (B, A, 4), scores (B, A, C)   # float32, always
    postprocess(raw, max_det=100) -> (B, k, 6): x1, y1, x2, y2, score, class; best first; k = min(max_det, A).
        Scores of anchors off the image are 0; thresholds such as score >= 0.001 are the caller's.

Loss:

    detection_loss(raw, boxes (B, G, 4), labels (B, G), counts (B,)) -> DetectionSums
        The first counts[b] rows of an image are real; counts may be 0, and so may G.
        .parts: {"box": (B, 2), "cls": (B, 2), "dfl": (B, 2)} sums of each image, gains included; column 0 is o2m,
                column 1 is o2o; not divided by anything.
        .weight: (2,) S of both branches, the sum of target scores, not clamped.

A step minimises samples x (sum of column 0 / max(1, S_o2m) + sum of column 1 / max(1, S_o2o)), with sums over all
parts and processes. The branches share no parameter that both train, since the one-to-one branch gets features without
gradient. So the engine can divide when the step is complete, each parameter by the weight of its branch. A `Task` says
so by four members, which default to what a task with one weight needs:

    class Detection(Task):
        parts = ("box", "cls", "dfl")
        normalizers = 2          # Loss.total, Loss.weight and each part are (2,); by_sample is (B, 2)
        least_weight = 1.0       # a step's weight is at least this
        def normalizer_of(self, parameter: str) -> int: return branch_of(parameter)   # 1 for "head.o2o...", else 0
        def gain(self, samples: int) -> float: return samples   # of the gradient; logged losses are without it

        def loss(self, model, batch):
            raw = answer(model, batch)
            sums = detection_loss(raw, batch["boxes"], batch["labels"], batch["count"])
            by_sample = sum(sums.parts.values())                                     # (B, 2)
            parts = {name: part.detach().sum(0) for name, part in sums.parts.items()}
            return Loss(by_sample.sum(0), sums.weight, parts, by_sample.detach())

BatchNorm's running statistics: the engine starts each part of a step from the step's buffers and ends the step with
their mean over the samples, so that neither the number of processes nor of parts changes how often they move.
"""

from .base import Deployed, Detector
from .boxes import RawDetections, ciou, decode, postprocess, select_topk
from .events import EventDetector
from .image import DetectorViT, pad_images
from .loss import DetectionSums, branch_of, detection_loss

__all__ = [
    "Deployed",
    "DetectionSums",
    "Detector",
    "DetectorViT",
    "EventDetector",
    "RawDetections",
    "branch_of",
    "ciou",
    "decode",
    "detection_loss",
    "pad_images",
    "postprocess",
    "select_topk",
]
