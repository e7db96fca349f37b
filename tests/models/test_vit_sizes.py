"""Images of different sizes in one batch, padded to one size and masked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import parapos
from parapos.encodings import ENCODINGS

SIZES = [(4, 6), (3, 5), (6, 2)]  # rows and columns of patches
PATCH = 2


def model(name: str, pool: str) -> parapos.ViT:
    torch.manual_seed(0)
    heads = 2 if ENCODINGS[name].claims.unbounded else 12
    options = {"dim": 24, "heads": heads, "head_dim": 8, "depth": 2, "mlp_dim": 16, "num_classes": 3, "patch": PATCH}
    net = parapos.ViT(encoding=name, pool=pool, **options).double().eval()
    torch.nn.init.normal_(net.classifier.weight)
    return net


def padded(fill: float) -> tuple[list[Tensor], Tensor, Tensor]:
    """Images one by one, as a batch that is padded with `fill`, and its mask."""
    images = [torch.randn(3, rows * PATCH, cols * PATCH, dtype=torch.float64) for rows, cols in SIZES]
    batch = torch.full((len(images), 3, 6 * PATCH, 6 * PATCH), fill, dtype=torch.float64)
    mask = torch.zeros(len(images), 6, 6, dtype=torch.bool)
    for i, (image, (rows, cols)) in enumerate(zip(images, SIZES, strict=True)):
        batch[i, :, : rows * PATCH, : cols * PATCH], mask[i, :rows, :cols] = image, True
    return images, batch, mask


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("fill", [0.0, 1e3])
def test_logits_do_not_depend_on_padding(name: str, pool: str, fill: float) -> None:
    net = model(name, pool)
    images, batch, mask = padded(fill)
    logits = net(batch, mask=mask)
    for image, row in zip(images, logits, strict=True):
        torch.testing.assert_close(net(image[None])[0], row, rtol=1e-9, atol=1e-9)


def test_gradients_reach_real_patches_alone() -> None:
    net = model("pape", "mean")
    _, batch, mask = padded(1.0)
    batch.requires_grad_()
    (grad,) = torch.autograd.grad(net(batch, mask=mask).square().sum(), batch)
    pixels = mask.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[:, None].expand_as(grad)
    assert (grad[~pixels] == 0).all()
    assert (grad[pixels] != 0).any()


@pytest.mark.parametrize("shape", [(3, 36), (3, 5, 6), (2, 6, 6)])
def test_masks_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"mask must be boolean \(3, 6, 6\)"):
        model("pape", "cls")(torch.zeros(3, 3, 12, 12).double(), mask=torch.ones(shape, dtype=torch.bool))
