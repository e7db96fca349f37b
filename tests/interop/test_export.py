"""Graphs of our models in onnxruntime and torch.export, at sizes they were not exported at; quantized models."""

import json

import pytest
import torch
from torch import nn

import parapos
from parapos import cli
from parapos.interop import export
from parapos.models import DetectorViT, EventDetector, EventViT, ViViT
from tests.run_folders import make_run

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
FULL = pytest.mark.full
TINY = dict(dim=24, heads=2, depth=1, mlp_dim=32, drop_path=0.0)


def drawn(net):
    """The model with outputs that tell inputs apart."""
    for name, p in net.named_parameters():
        if "classifier" in name or ("head" in name and p.ndim > 1):
            nn.init.normal_(p, std=0.3)
    return net.eval()


def model(kind, encoding="pape"):
    torch.manual_seed(0)
    options = {"directions": [("up", 0.5), ("all", 0.25)]} if encoding == "lookhere" else {}
    if kind in ("vit", "vit-unplaced"):
        more = {"cls_position": "unplaced"} if kind == "vit-unplaced" else {}
        return drawn(parapos.ViT(**TINY, num_classes=3, patch=4, encoding=encoding, **more, **options))
    if kind == "vivit":
        return drawn(ViViT(**TINY, num_classes=3, patch=4, encoding=encoding, **options))
    if kind == "detector":
        return drawn(DetectorViT(**TINY, num_classes=3, patch=4, neck_dim=8, reg_max=4, encoding=encoding, **options))
    if kind == "event":
        return drawn(EventViT(**TINY, num_classes=3, patch=4, buckets=2, encoding=encoding))
    return drawn(EventDetector(**TINY, num_classes=2, patch=4, buckets=2, neck_dim=8, reg_max=4, sensor=(24, 32)))


def cases():
    for kind in ("vit", "vit-unplaced", "vivit", "detector", "event", "event-detector"):
        for encoding in parapos.list_encodings() if kind in ("vit", "vivit", "detector") else ["pape"]:
            if (kind, encoding) != ("vivit", "lookhere"):
                fast = (kind, encoding) == ("vivit", "pape")
                yield pytest.param(kind, encoding, id=f"{kind}-{encoding}", marks=[] if fast else FULL)


@pytest.mark.parametrize(("kind", "encoding"), cases())
def test_onnx_at_sizes_not_seen(kind, encoding, tmp_path):
    report = export.export_model(model(kind, encoding), tmp_path / "net.onnx", max_det=9)
    assert len(report.errors) == 3
    assert max(report.errors.values()) <= 1e-4
    assert report.bytes == report.path.stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
    graph = onnx.load(report.path).graph
    kinds = [node.op_type for node in graph.node]
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}  # none of our own operators
    assert kinds.count("TopK") == (2 if "detector" in kind else 0)
    assert "NonMaxSuppression" not in kinds


@FULL
@pytest.mark.parametrize("kind", ["vit-unplaced", "detector"])
def test_masks_are_an_input_of_the_graph(kind, tmp_path):
    net = model(kind)
    report = export.export_model(net, tmp_path / "net.onnx", masked=True, max_det=9)
    assert max(report.errors.values()) <= 1e-4
    subject = export.describe(net, masked=True, max_det=9)
    run = export.runner(subject, report.path)
    images, mask = subject.example(2, 6, 7, 3)
    changed = images.clone()
    step = images.shape[-1] // 7
    changed[0, :, :, -step // (2 if kind == "detector" else 1) :] = 5.0  # behind the mask
    assert (run((images, mask)) - run((changed, mask))).abs().max() < 1e-4
    mask = torch.ones_like(mask)
    assert (run((images, mask)) - run((changed, mask))).abs().max() > 1e-3


@FULL
@pytest.mark.parametrize(
    ("kind", "encoding"),
    [*(("vit", name) for name in parapos.list_encodings()), ("vivit", "pape"), ("detector", "pape")],
)
def test_programs_of_torch_export(kind, encoding, tmp_path):
    report = export.export_model(model(kind, encoding), tmp_path / "net.pt2", "pt2", max_det=9)
    assert max(report.errors.values()) <= 1e-4


def test_a_graph_that_says_something_else_is_not_handed_out(tmp_path, monkeypatch):
    net = model("vit")
    monkeypatch.setattr(export, "write", lambda subject, path, *args, **options: path.write_bytes(b"graph"))
    for off, message in ((1e-2, r"differs from PyTorch by 1\.0e-02"), (None, "gives")):

        def other(subject, path, off=off):
            return lambda inputs: net(*inputs)[:, :2] if off is None else net(*inputs) + off

        monkeypatch.setattr(export, "runner", other)
        with pytest.raises(export.ExportError, match=message):
            export.export_model(net, tmp_path / "net.onnx")
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr(export, "runner", lambda subject, path: lambda inputs: net(*inputs) + 1e-6)
    report = export.export_model(net, tmp_path / "net.onnx")
    assert max(report.errors.values()) < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


def test_the_command(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert cli.main(["export", str(run), "--format", "pt2"]) == 0
    told = capsys.readouterr().out
    assert told.count("largest difference to PyTorch") == 3
    assert (run / "model.pt2").stat().st_size > 1000
    for words, message in (
        (["--out", str(tmp_path / "x.pt")], "ends in .onnx"),
        (["--size", "30"], "multiples of"),
        (["--max-det", "5"], "--max-det: is for detectors"),
        (["--format", "pt2", "--precision", "int8"], "int8 is for --format onnx"),
    ):
        assert cli.main(["export", str(run), *words]) == 2
        assert message in capsys.readouterr().err


@FULL
def test_int8_of_onnx(tmp_path):
    sizes, errors = [], []
    for precision in export.PRECISIONS:
        report = export.export_run(make_run(tmp_path / precision), precision=precision)
        sizes.append(report.bytes)
        errors.append(max(report.errors.values()))
    assert sizes[1] < sizes[0]
    assert errors[0] <= 1e-4 < errors[1] < 0.5


def test_what_has_no_graph_is_refused():
    net = parapos.create_model("ptv3_nano", encoding="pape", num_classes=3)
    with pytest.raises(export.ExportError, match="PointTransformerV3 cannot be exported"):
        export.describe(net)
    with pytest.raises(export.ExportError, match="masks of patches are for image models"):
        export.describe(model("vivit"), masked=True)


@pytest.mark.parametrize("encoding", parapos.list_encodings())
def test_dynamic_int8_of_linear_layers(encoding):
    """PyTorch's own dynamic quantization: smaller weights, nearly the same answers."""
    from torch.ao.quantization import quantize_dynamic

    net, x = model("vit", encoding), torch.rand(4, 3, 20, 24)
    small = quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        want, found = net(x), small(x)
    assert (found - want).abs().max() <= 0.05 * want.abs().max()
    assert (found - want).abs().max() > 0


@pytest.mark.parametrize("encoding", parapos.list_encodings())
@pytest.mark.parametrize("kind", ["vit", "vivit"])
def test_bfloat16_weights(encoding, kind):
    if (kind, encoding) == ("vivit", "lookhere"):
        pytest.skip("LookHere is for images")
    net, plain = model(kind, encoding), model(kind, "none")
    x = torch.rand(2, 3, 20, 24) if kind == "vit" else torch.rand(2, 3, 4, 20, 24)
    with torch.no_grad():
        want, base = net(x), plain(x)
        own = (plain.bfloat16()(x.bfloat16()).float() - base).abs().max() / base.abs().max()
        found = net.bfloat16()(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found.float() - want).abs().max() / want.abs().max() <= 3 * own + 0.01


@pytest.mark.parametrize("kind", ["vit", "vivit", "detector", "event"])
def test_gradient_checkpointing(kind):
    """The same gradients; blocks run twice."""
    net = model(kind).train()
    subject = export.describe(net)
    net.train()
    inputs = subject.example(2, 4, 6, 0)
    runs = []
    net.encoder.layers[0].register_forward_pre_hook(lambda *_: runs.append(1))

    def gradients():
        net.zero_grad()
        out = net(*inputs)
        outputs = [*out.o2m, *out.o2o] if kind == "detector" else [out]
        sum(x.square().sum() for x in outputs).backward()
        return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}

    torch.manual_seed(0)
    want = gradients()
    assert len(runs) == 1
    net.encoder.grad_checkpointing = True
    found = gradients()
    assert len(runs) == 3
    assert found.keys() == want.keys()
    for name, grad in want.items():
        assert (found[name] - grad).abs().max() <= 1e-5 * max(1.0, float(grad.abs().max())), name
    with torch.no_grad():
        net(*inputs)
    assert len(runs) == 4


def test_gradient_checkpointing_is_an_option_of_models():
    net = parapos.create_model("vit_nano_patch4", num_classes=3, grad_checkpointing=True)
    assert net.encoder.grad_checkpointing
    assert json.dumps(sorted(net.state_dict())) == json.dumps(
        sorted(parapos.create_model("vit_nano_patch4", num_classes=3).state_dict())
    )
