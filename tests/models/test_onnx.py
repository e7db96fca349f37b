"""Exported to ONNX, a model runs without PyTorch and without parapos, at sizes that its export never saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import parapos

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ANY = torch.export.Dim.DYNAMIC
ROWS, COLS = 7, 11  # patches at export; no size of the model has these numbers
FULL = pytest.mark.full
ENCODINGS = [name if name == "pape" else pytest.param(name, marks=FULL) for name in parapos.list_encodings()]


def vit(encoding: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"directions": [("up", 0.5), ("all", 0.25)]} if encoding == "lookhere" else {}
    net = parapos.ViT(
        dim=16, heads=2, depth=1, mlp_dim=24, num_classes=3, patch=2, encoding=encoding, drop_path=0.0, **options
    )
    nn.init.normal_(net.classifier.weight)
    return net.eval()


def run(path: Path, *inputs: Tensor) -> Tensor:
    session = ort.InferenceSession(str(path))
    names = [x.name for x in session.get_inputs()]
    return torch.from_numpy(session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})[0])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_at_sizes_not_seen(encoding: str, tmp_path: Path) -> None:
    net, path = vit(encoding), tmp_path / "net.onnx"
    image = torch.randn(2, 3, 2 * ROWS, 2 * COLS)
    torch.onnx.export(net, (image,), path, dynamo=True, dynamic_shapes=({0: ANY, 2: ANY, 3: ANY},), verbose=False)
    graph = onnx.load(path)
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}
    bound = {ROWS, COLS, ROWS * COLS, ROWS * COLS + 1, 2 * ROWS, 2 * COLS}
    sizes = {tuple(x.dims) for x in graph.graph.initializer}
    assert not [dims for dims in sizes if bound & set(dims)], "a constant that depends on the size at export"
    for batch, height, width in ((1, 6, 6), (3, 20, 14), (1, 34, 30)):
        x = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            want = net(x)
        np.testing.assert_allclose(run(path, x), want, rtol=0, atol=1e-4 * float(want.abs().max().clamp(min=1)))


class Masked(nn.Module):
    """Attention among padded tokens of which some have no position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = parapos.Attention(16, heads=2, encoding="pape", pos_dim=2)

    def forward(self, x: Tensor, r: Tensor, mask: Tensor) -> Tensor:
        return self.attention(x, r, mask)


@FULL
def test_masks_and_tokens_without_a_position(tmp_path: Path) -> None:
    def inputs(batch: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        x, r = torch.randn(batch, n, 16), torch.randn(batch, n, 2)
        r[:, 0] = torch.nan
        mask = torch.rand(batch, n) < 0.7
        mask[-1] = False  # a sample of padding alone
        return x, r, mask

    net, path = Masked().eval(), tmp_path / "net.onnx"
    shapes = tuple({0: ANY, 1: ANY} for _ in range(3))
    torch.onnx.export(net, inputs(2, 9), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    for batch, n in ((3, 5), (2, 40)):
        args = inputs(batch, n)
        with torch.no_grad():
            want = net(*args)
        np.testing.assert_allclose(run(path, *args), want, rtol=0, atol=1e-5)
