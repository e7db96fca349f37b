"""What a pillar sees in the cameras, against attention that is computed pair by pair."""

import pytest
import torch

from parapos.analysis.driving import joint_layers, make_pillar_maps, watch_layers
from parapos.experiments.store import ReportError

from ..models.unitr.scenes import batch, inputs, nano


@pytest.fixture(scope="module")
def given():
    torch.manual_seed(0)
    return nano("pape").eval(), batch(0, boxes=5, ground=300)


def pairwise(net, scene_batch, layer, head, pillar):
    """Tokens of the set that a pillar is in, and what it gives each of them, by the formula."""
    with watch_layers(net) as layers:
        x, scene = net.tokenize(*inputs(net, scene_batch))
        net.backbone(x, scene)
        seen = layers[layer - 1]
    tokens = next(row[real] for row, real in zip(*seen.partition[:2], strict=True) if (row[real] == pillar).any())
    enc, places = seen.attention.encoding, seen.partition.positions.r[0].double()
    h, at = head - 1, seen.x.double()
    q, k = (t[0, h].double() for t in seen.attention.project(seen.x[None])[:2])
    w_p = enc.w_p[h].double()
    a, b = -torch.nn.functional.softplus(enc.w_a[h].double() @ at[pillar]), enc.w_b[h].double() @ at[pillar]
    step = (places[tokens] - places[pillar]) @ w_p.T
    logits = (step.square() @ a + step @ b + k[tokens] @ q[pillar]) * enc.scale
    return tokens, logits.softmax(0), len(scene.pillars)


@pytest.mark.parametrize(("layer", "head"), [(1, 2), (3, 1), (6, 4), (8, 3)])
def test_maps_are_the_attention_of_the_set(given, layer, head):
    net, scene_batch = given
    maps = make_pillar_maps(net, scene_batch, layer=layer, head=head, query=(8.0, 8.0))
    gap = (maps.places - torch.tensor([8.0, 8.0])).norm(dim=1)
    assert float(gap[maps.query]) == float(gap.min())
    tokens, want, count = pairwise(net, scene_batch, layer, head, maps.query)
    whole = torch.cat([maps.pillars, maps.attention.flatten()])
    assert len(maps.pillars) == count
    assert torch.allclose(whole[tokens], want, atol=1e-5)
    others = torch.ones(len(whole), dtype=torch.bool)
    others[tokens] = False
    assert whole[others].isnan().all()
    assert maps.space == ("own", "canvas", "canvas", "bev")[(layer - 1) // 2]


def test_what_cannot_be_asked(given):
    net, scene_batch = given
    assert joint_layers(net) == [3, 4, 5, 6]
    for wrong in (dict(layer=9, head=1), dict(layer=1, head=5), dict(layer=1, head=1, query=(0,))):
        with pytest.raises(ReportError, match="must be"):
            make_pillar_maps(net, scene_batch, **wrong)
    empty = {**scene_batch, "points": scene_batch["points"][:0], "offset": torch.zeros_like(scene_batch["offset"])}
    with pytest.raises(ReportError, match="no pillar"):
        make_pillar_maps(net, empty, layer=1, head=1)
