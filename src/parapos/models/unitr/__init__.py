"""UniTR: one transformer for six cameras and a LiDAR, and 3D boxes from the bird's-eye map that it makes.

A batch stands in `parapos.models.unitr.batch`: `DrivingBatch`. The entries `UniTR.inputs` go to the network.

    net = parapos.create_model("unitr", encoding="pape", num_classes=10)          # or unitr_nano
    outputs = net(points, offset, images, image_mask, lidar2image, image_aug, lidar_aug)   # or answer(net, batch)
    loss = head_loss(outputs, batch)       # HeadLoss(total, parts), both of this batch, parts with their weights
    found = decode(outputs)                # a list of B Boxes3D(boxes (n, 9), scores (n,), labels (n,)), n <= 200

`parts` has the names of `LOSS_PARTS`; they add up to `total`. Each is normalised over the batch that it is given, as in
the original: by peaks, positives, or positives that overlap. A task therefore returns

    Loss(B * loss.total, B, {name: B * part for name, part in loss.parts.items()})

so that a step of several parts is their mean over samples. Boxes are those of `DrivingBatch.boxes`, in the frame of the
points. In evaluation a sample's boxes do not depend on the samples beside it.
"""

from .batch import BOX_FEATURES, CAMERAS, CLASSES, POINT_FEATURES, DrivingBatch, DrivingInputs
from .decode import Boxes3D, decode
from .head import HeadOutputs
from .loss import LOSS_PARTS, HeadLoss, head_loss
from .network import UniTR
from .original import from_original

__all__ = [
    "BOX_FEATURES",
    "CAMERAS",
    "CLASSES",
    "LOSS_PARTS",
    "POINT_FEATURES",
    "Boxes3D",
    "DrivingBatch",
    "DrivingInputs",
    "HeadLoss",
    "HeadOutputs",
    "UniTR",
    "decode",
    "from_original",
    "head_loss",
]
