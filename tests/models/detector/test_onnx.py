"""A detector exported to ONNX gives final boxes, the best ones chosen inside of the graph, at sizes it never saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import parapos
from parapos.models.detector import Deployed

from ...marks import full
from ..test_onnx import ANY, run
from .test_network import small

onnx = pytest.importorskip("onnx")
ENCODINGS = [name if name == "pape" else full(name) for name in parapos.list_encodings()]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_boxes_come_out_of_the_graph(encoding: str, tmp_path: Path) -> None:
    net, path = Deployed(small(encoding), max_det=30).eval(), tmp_path / "net.onnx"
    image = torch.rand(2, 3, 96, 160)
    torch.onnx.export(net, (image,), path, dynamo=True, dynamic_shapes=(({0: ANY, 2: ANY, 3: ANY},),), verbose=False)
    graph = onnx.load(path).graph
    kinds = [node.op_type for node in graph.node]
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
    assert kinds.count("TopK") == 2
    assert "NonMaxSuppression" not in kinds
    for batch, height, width in ((1, 64, 64), (3, 160, 96), (1, 256, 192)):
        x = torch.rand(batch, 3, height, width)
        with torch.no_grad():
            want = net(x)
        found = run(path, x)
        assert found.shape == (batch, 30, 6)
        np.testing.assert_allclose(found[..., 4], want[..., 4], rtol=0, atol=1e-5)
        for a, b in zip(found, want, strict=True):  # scores that are equal but for rounding may change places
            order = [int((row - b).abs().sum(1).argmin()) for row in a]
            np.testing.assert_allclose(a, b[order], rtol=0, atol=2e-3)
