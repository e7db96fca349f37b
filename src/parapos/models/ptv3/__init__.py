"""Point Transformer V3: attention in patches of a space-filling curve, on clouds of any size, on any device.

A batch of clouds (B clouds, N points of all of them, C features of a point, k classes):

    feat        (N, C) float     features of points: colour and normal for rooms, coordinates and normal for objects
    coord       (N, 3) float32   coordinates in metres, or in the unit of the data, after augmentation
    grid_coord  (N, 3) integers  the cell of each point, counted from 0 in each cloud; what curves, patches, pooling
                                 and convolutions see. Cells may repeat in a cloud (Mix3D does that)
    offset      (B,) int64       where each cloud ends: clouds lie one after another, nothing is padded

Per-point labels `segment` (N,) and labels of clouds `label` (B,) are entries of the same batch that the network never
sees. These four are `PointTransformerV3.inputs`, in this order, so `answer(model, batch)` works. The network returns

    task="segmentation"      logits (N, k), in the order in which the points were given
    task="classification"    logits (B, k)

Options that the data decide: num_classes; in_channels (C, 6 by default); grid_size, the side of a cell in units of
coord (0.02 m for ScanNet, 0.01 for ModelNet40), which positions in metres need.

    net = parapos.create_model("ptv3_scannet", encoding="pape", num_classes=20)
    logits = net(feat, coord, grid_coord, offset)       # (N, 20)

In evaluation, a cloud's logits do not depend on the clouds beside it.
"""

from .network import PointTransformerV3

__all__ = ["PointTransformerV3"]
