"""Where points look: the strongest keys of each block are those of its attention, for every encoding."""

import pytest
import torch

import parapos
from parapos.attention import attend
from parapos.encodings import ENCODINGS
from parapos.models.ptv3.look import ancestors, strongest, watch_blocks

from .clouds import clouds

SPATIAL = [name for name, cls in ENCODINGS.items() if cls.claims.unbounded]
SMALL = dict(enc_dims=(16, 32), enc_depths=(1, 2), patch=16, drop_path=0.0, num_classes=3)


def weights_of(seen):
    """The mean attention (N, N) of a block over heads, from whole windows."""
    attention, total = seen.block.attn, torch.zeros(len(seen.x), len(seen.x))
    for points, owned, x, positions, mask in seen.patches():
        q, k, v = attention.project(x)
        q, k, terms = attention.encoding(x, q, k, positions)
        weights = attend(q, k, v, terms, mask, attention.encoding.scale, return_weights=True)[1].mean(1)
        for window, slot in owned.nonzero().tolist():
            real = slice(None) if mask is None else mask[window]
            total[points[window, slot], points[window][real]] = weights[window, slot][real]
    return total


@pytest.mark.parametrize("encoding", SPATIAL)
@torch.no_grad()
def test_the_strongest_keys(encoding, monkeypatch):
    monkeypatch.setattr("parapos.models.ptv3.look.SCORES", 300)  # in several parts
    options = {"parabolas": 4} if encoding == "pape" else {}
    model = parapos.create_model("ptv3_nano", encoding=encoding, **SMALL, **options).eval()
    batch = clouds(40, 9, 5)  # the last is padded to the one before
    with watch_blocks(model) as blocks:
        logits = model(*batch)
        assert len(blocks) == 4  # three of the encoder, one of the decoder
        assert [seen.stage.level for seen in blocks] == [0, 1, 1, 0]
        for seen in blocks:
            total = weights_of(seen)
            found = strongest(seen, 10**6, 5)
            assert sorted(found.queries.tolist()) == list(range(len(seen.x)))
            wanted = total[found.queries].topk(5)
            assert torch.allclose(found.weights, wanted.values, atol=2e-6)
            assert torch.allclose(total[found.queries].gather(1, found.keys), found.weights, atol=2e-6)
            few = strongest(seen, 6, 5)
            assert 1 <= len(few.queries) < len(found.queries)
            assert len(few.queries.unique()) == len(few.queries)
    assert torch.equal(model(*batch), logits)  # no hook stays behind
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_more_keys_than_a_window_has():
    model = parapos.create_model("ptv3_nano", encoding="none", **SMALL).eval()
    with watch_blocks(model) as blocks:
        model(*clouds(3))
        found = strongest(blocks[0], 10, 8)
    assert found.keys.shape == (3, 8)
    assert torch.allclose(found.weights.sum(1), torch.ones(3), atol=1e-5)
    assert (found.weights[:, 3:] == 0).all()


@torch.no_grad()
def test_ancestors_are_the_cells_of_each_stage():
    model = parapos.create_model("ptv3_nano", encoding="none", enc_dims=(16, 16, 16), enc_depths=(1, 1, 1), head_dim=16)
    _, coord, cells, offset = clouds(70, 20)
    stages = model.eval().stages(coord, cells, offset)
    for level, numbers in enumerate(ancestors(stages)):
        assert torch.equal(stages[level].cells[numbers], cells >> level)
        assert torch.equal(stages[level].clouds[numbers], stages[0].clouds)
