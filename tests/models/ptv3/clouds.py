"""Small clouds and networks for tests."""

import os
from pathlib import Path

import torch

from parapos.models import PointTransformerV3

GOLDEN = Path(os.environ.get("PARAPOS_GOLDEN", Path(__file__).resolve().parents[4] / "shared" / "golden"))
TINY = {"enc_dims": (16, 32, 64), "enc_depths": (1, 1, 2), "patch": 32, "drop_path": 0.0, "num_classes": 5}


def clouds(*lengths, side=12, seed=0, channels=6):
    """feat, coord, grid_coord, offset of clouds whose cells all differ."""
    generator = torch.Generator().manual_seed(seed)
    cells = []
    for length in lengths:
        code = torch.randperm(side**3, generator=generator)[:length]
        cells.append(torch.stack([code // side**2, code // side % side, code % side], dim=1))
    cells = torch.cat(cells)
    coord = (cells + torch.rand(cells.shape, generator=generator)) * 0.02
    return torch.randn(len(cells), channels, generator=generator), coord, cells, torch.tensor(lengths).cumsum(0)


def tiny(**options):
    torch.manual_seed(0)
    return PointTransformerV3(**{**TINY, **options})
