"""Positional against semantic: parts add up to the attention, z is what the definition says, and never overflows."""

import json

import numpy as np
import pytest
import torch

import parapos
from parapos import analysis
from parapos.analysis import maps as analysis_maps
from parapos.analysis import scores as analysis_scores
from parapos.analysis.scores import Heads, Parts
from parapos.attention import attend
from parapos.blocks import Encoder
from parapos.cli import main
from parapos.experiments.store import ReportError
from parapos.training import checkpoint, fit

from ..run_folders import make_run


def model(encoding="pape", **options):
    torch.manual_seed(0)
    size = dict(dim=32, depth=2, mlp_dim=32, heads=4)
    return parapos.create_model("vit_nano_patch4", encoding=encoding, num_classes=10, **size, **options).eval()


class Sequences(torch.nn.Module):
    """A model of tokens (B, N, 16), of which the first `length` are real."""

    inputs = ("tokens", "length")

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.encoder = Encoder(16, 2, 16, heads=2, encoding="pape", pos_dim=1, parabolas=3)

    def forward(self, tokens, length):
        r = torch.arange(tokens.shape[1], dtype=tokens.dtype)[:, None]
        return self.encoder(tokens, r, torch.arange(tokens.shape[1]) < length[:, None])


class Ragged:
    """Sequences of different lengths, as a dataset."""

    ragged = ("tokens",)

    def __init__(self, lengths):
        g = torch.Generator().manual_seed(2)
        self.tokens = [torch.randn(length, 16, generator=g, dtype=torch.float64) for length in lengths]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"tokens": self.tokens[index], "length": len(self.tokens[index]), "id": index, "label": 0}


def parts(lp, ly):
    return Parts(lp, torch.zeros_like(lp), ly)


def random_parts(batch=3, heads=2, tokens=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    lp = -3 * torch.rand(batch, heads, tokens, tokens, generator=g, dtype=torch.float64)
    lp = lp * (1 - torch.eye(tokens, dtype=torch.float64))
    return parts(lp, torch.randn(batch, heads, tokens, tokens, generator=g, dtype=torch.float64))


def score(layers, tau=0.8):
    heads = Heads.empty(len(layers), layers[0].semantics.shape[1])
    heads.add(layers, tau)
    return heads


@pytest.mark.parametrize("encoding", ["pape", "pape_ri"])
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_parts_make_the_attention(encoding, pool, monkeypatch):
    net, images = model(encoding, pool=pool).double(), torch.rand(2, 3, 16, 24, dtype=torch.float64)
    seen = []

    def spy(q, k, v, terms, mask, scale, **options):
        out, weights = attend(q, k, v, terms, mask, scale, return_weights=True)
        seen.append(weights)
        return out

    monkeypatch.setattr("parapos.blocks.attend", spy)
    with analysis_scores.watch(net) as found:
        net(images)
        net(images)  # a second pass begins anew
    assert len(found) == 2
    for layer, weights in zip(found, seen[2:], strict=True):
        part = layer.parts()
        torch.testing.assert_close(part.attention, weights, rtol=1e-10, atol=1e-12)
        assert (part.position.diagonal(dim1=-2, dim2=-1) == 0).all()  # P_ii = 1
        assert (part.distance <= 0).all()
        assert bool(part.direction.any()) == (encoding == "pape")
    assert not any(module._forward_hooks for module in net.modules())


def test_padding_is_neither_query_nor_key(monkeypatch):
    net, length = Sequences().double().eval(), torch.tensor([3, 7, 5])
    tokens = torch.randn(3, 7, 16, dtype=torch.float64)
    tokens[torch.arange(7) >= length[:, None]] = torch.nan
    seen = []

    def spy(q, k, v, terms, mask, scale, **options):
        out, weights = attend(q, k, v, terms, mask, scale, return_weights=True)
        seen.append(weights)
        return out

    monkeypatch.setattr("parapos.blocks.attend", spy)
    with analysis_scores.watch(net) as found:
        net(tokens, length)
    for layer, weights in zip(found, seen, strict=True):
        attention = layer.parts().attention
        for sample, count in enumerate(length):
            real = (sample, slice(None), slice(count))
            torch.testing.assert_close(attention[real], weights[real], rtol=1e-10, atol=1e-12)
            assert (attention[sample, :, count:] == 0).all()
            assert (attention[sample, :, :, count:] == 0).all()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


@pytest.mark.parametrize("tau", [0.8, None])
def test_padding_does_not_change_the_score(tau):
    net, data = Sequences().double().eval(), Ragged([3, 7, 1, 5])
    alone = analysis_scores.score_heads(net, data, 4, batch=1, tau=tau)
    together = analysis_scores.score_heads(net, data, 4, batch=4, tau=tau)
    torch.testing.assert_close(together.z, alone.z, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(together.bounded, alone.bounded, rtol=1e-9, atol=1e-12)
    assert torch.equal(together.pairs, alone.pairs)
    assert together.samples == alone.samples == 4
    if tau is None:
        assert (together.pairs == 9 + 49 + 1 + 25).all()


def test_scores_in_blocks_are_the_same(monkeypatch):
    net, data = Sequences().double().eval(), Ragged([9, 7])
    whole = analysis_scores.score_heads(net, data, 2, batch=2)
    formed = []
    monkeypatch.setattr(analysis_scores, "BLOCK", 2 * 9 * 4)  # four queries
    inner = analysis_scores.Layer.parts
    monkeypatch.setattr(
        analysis_scores.Layer, "parts", lambda self, *some: formed.append(inner(self, *some)) or formed[-1]
    )
    pieces = analysis_scores.score_heads(net, data, 2, batch=2)
    assert [part.semantics.shape for part in formed] == 2 * 2 * [(1, 2, 4, 9), (1, 2, 4, 9), (1, 2, 1, 9)]
    torch.testing.assert_close(pieces.z, whole.z, rtol=1e-12, atol=1e-14)
    assert torch.equal(pieces.pairs, whole.pairs)


def test_no_token_no_score():
    with pytest.raises(ReportError, match="none of the 2 samples has a token"):
        analysis_scores.score_heads(Sequences().double().eval(), Ragged([0, 0]), 2)


def test_z_by_the_definition():
    some = random_parts()
    p, y = some.position.exp(), some.semantics.exp()
    gamma = (p * y).sum(-1, keepdim=True)
    a = p * y / gamma
    found = score([some])
    for head in range(2):
        total, count = 0.0, 0
        for image in range(3):
            for query in range(5):
                row = a[image, head, query].tolist()
                mass = 0.0
                for key in sorted(range(5), key=lambda j: (-row[j], j)):
                    here = (image, head, query, key)
                    total += float((p[here] - y[here]) / gamma[image, head, query, 0])
                    count += 1
                    mass += row[key]
                    if mass >= 0.8 - 1e-9:
                        break
        assert int(found.pairs[0, head]) == count
        assert float(found.z[0, head]) == pytest.approx(total / count, rel=1e-12)
    everything = score([some], tau=None)
    torch.testing.assert_close(everything.z[0], ((p - y) / gamma).mean((0, 2, 3)))
    torch.testing.assert_close(everything.bounded[0], ((p - y) / (p + y)).mean((0, 2, 3)))


def test_selection_is_the_smallest_that_suffices():
    a = torch.rand(50, 9, dtype=torch.float64).pow(3)
    a = a / a.sum(-1, keepdim=True)
    chosen = analysis_scores.selected(a, 0.8)
    mass = (a * chosen).sum(-1)
    least = a.masked_fill(~chosen, torch.inf).amin(-1)
    assert (mass >= 0.8 - 1e-9).all()
    assert (mass - least < 0.8).all()
    assert (least >= a.masked_fill(chosen, -torch.inf).amax(-1)).all()
    ties = torch.full((1, 5), 0.2, dtype=torch.float64)
    assert analysis_scores.selected(ties, 0.8).tolist() == [[True, True, True, True, False]]
    assert analysis_scores.selected(torch.tensor([[0.0, 1.0, 0.0]]), 1e-3).tolist() == [[False, True, False]]


def test_order_and_batches_do_not_matter():
    some = random_parts(batch=6)
    whole = score([some])
    pieces = Heads.empty(1, 2)
    for index in ([4, 1], [0], [5, 3, 2]):
        pieces.add([parts(some.distance[index], some.semantics[index])], samples=len(index))
    torch.testing.assert_close(pieces.z, whole.z, rtol=1e-12, atol=1e-14)
    assert torch.equal(pieces.pairs, whole.pairs)
    assert pieces.samples == 6


def test_no_overflow():
    lp = torch.tensor([[0.0, -2000.0], [-2000.0, 0.0]], dtype=torch.float64)[None, None]
    ly = torch.tensor([[0.0, 1999.0], [0.0, 0.0]], dtype=torch.float64)[None, None]
    found = score([parts(lp, ly)], tau=None)
    assert float(found.semantic[0, 0]) == pytest.approx(1999 - np.log1p(np.exp(-1)))
    assert not found.positional.isnan().any()
    assert not found.z.isnan().any()
    assert found.extreme.tolist() == [[2]]
    told = json.loads(found.as_json())
    assert told["z"] == [[None]]
    assert told["bounded"][0][0] == pytest.approx((0 - 1 - 1 + 0) / 4)


def test_a_constant_of_the_query_changes_z_but_not_attention():
    """Why the whole positional part is needed, not columns that drop what softmax does not see."""
    some = random_parts()
    moved = parts(some.distance + torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None], some.semantics)
    torch.testing.assert_close(moved.attention, some.attention)
    assert (score([moved]).z - score([some]).z).abs().min() > 0.05


def test_scaling_may_be_left_out():
    net, images = model(), torch.rand(1, 3, 16, 16)
    with analysis_scores.watch(net) as scaled:
        net(images)
    with analysis_scores.watch(net, scaled=False) as raw:
        net(images)
    torch.testing.assert_close(raw[0].parts().distance, scaled[0].parts().distance * 8**0.5)
    torch.testing.assert_close(raw[0].parts().semantics, scaled[0].parts().semantics * 8**0.5)


def test_maps_leave_out_the_class_token():
    net, image = model(pool="cls"), torch.rand(3, 16, 24)
    maps = analysis_maps.make_maps(net, image, layer=2, head=3, query=(2, 5))
    with analysis_scores.watch(net) as found:
        net(image[None])
    row = found[1].parts().distance[0, 2, 1 + 1 * 6 + 4]  # after the class token, row 2, column 5 of 4 x 6
    assert torch.equal(maps.distance.flatten(), row[1:])
    assert maps.distance.shape == (1, 4, 6)
    assert maps.distance[maps.query] == 0
    assert maps.query == (0, 1, 4)


def test_choice_of_a_head():
    bounded = torch.tensor([[0.1, 0.9], [0.3, 0.2]])
    assert analysis.choose(bounded, None, None) == (1, 2)
    assert analysis.choose(bounded, 2, None) == (2, 1)
    assert analysis.choose(bounded, None, 1) == (2, 1)
    assert analysis.choose(bounded, 2, 2) == (2, 2)
    assert analysis.choose(bounded, None, None, among=[2]) == (2, 1)
    fewer = torch.tensor([[torch.nan, 0.1], [torch.nan, 0.3]])  # where a layer has fewer heads
    assert analysis.choose(fewer, None, None) == (2, 2)


def test_training_samples_are_shown_as_they_are(tmp_path):
    run = make_run(tmp_path / "run")
    assert main(f"analyze {run} --images 1 --index 3 --split train".split()) == 0
    shown = np.load(run / "analysis" / "maps.npz")["image"]
    want = fit.load_run(run).dataset("train")
    want.augment = None
    np.testing.assert_array_equal(shown, want[3]["image"].numpy())


def test_command(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    words = f"analyze {run} --images 10 --index 3 --query 2,3 --layer 2 --head 4 --size 32"
    assert main(words.split()) == 0
    out = run / "analysis"
    told = json.loads((out / "heads.json").read_text())
    assert (told["samples"], told["tau"], told["scaled"], told["split"]) == (10, 0.8, True, "test")
    assert np.array(told["z"]).shape == (2, 4)
    arrays = np.load(out / "maps.npz")
    assert arrays["distance"].shape == (8, 8)
    assert arrays["query"].tolist() == [1, 2]
    np.testing.assert_allclose(arrays["sum"], arrays["distance"] + arrays["direction"] + arrays["semantics"])
    assert arrays["attention"].sum() == pytest.approx(1)
    for name in ("heads.png", "maps.png"):
        assert (out / name).read_bytes()[1:4] == b"PNG"

    from PIL import Image

    Image.new("RGB", (50, 40), (200, 30, 30)).save(tmp_path / "red.png")
    assert main(["analyze", str(run), "--image", str(tmp_path / "red.png"), "--images", "1"]) == 0
    assert np.load(out / "maps.npz")["image"][0] == pytest.approx(200 / 255)
    capsys.readouterr()

    make_run(tmp_path / "rope", "rope")
    for words, message in (
        (f"{tmp_path}/rope", "expected a model with pape, pape_ri or a subclass, whose scores"),
        (f"{run} --layer 3 --images 1", "layer must be from 1 to 2, got 3"),
        (f"{run} --head 5 --images 1", "head must be from 1 to 4, got 5"),
        (f"{run} --query 5,1 --images 1", "row of the query must be from 1 to 4 at this size, got 5"),
        (f"{run} --query 0,1", "row,col counted from 1, got '0,1'"),
        (f"{run} --index 5000", "index must be from 0 to "),
        (f"{run} --image {tmp_path}/none.png --images 1", "none.png"),
        (f"{run} --size 18 --images 1", "multiples of the model's patch size 4, got 18 x 18"),
        (f"{run} --tau 0", "above 0 and up to 1, got '0'"),
    ):
        assert main(["analyze", *words.split()]) == 2, words
        err = capsys.readouterr().err
        assert message in err
        assert err.splitlines()[-1].startswith("parapos analyze")


@pytest.mark.parametrize("encoding", ["pape", "pape_ri"])
def test_weights_alone_of_both_encodings_are_loaded(encoding, tmp_path):
    net = parapos.create_model("vit_nano_patch4", encoding=encoding, num_classes=3, depth=1)
    about = {"model": "vit_nano_patch4", "encoding": encoding, "options": {"depth": 1}, "classes": 3}
    checkpoint.export(tmp_path / "weights.safetensors", net.state_dict(), **about)
    assert analysis.load(tmp_path / "weights.safetensors")[1]["encoding"] == encoding
