"""The head: which cells ask, what they see, and the map's orientation."""

import pytest
import torch
import torch.nn.functional as F

from parapos.models.unitr.bev import BevNetwork, scatter
from parapos.models.unitr.grid import BevFrame, BevGrid
from parapos.models.unitr.head import CountedBatchNorm, Decoder, QueryHead

FRAME = BevFrame((-6.0, -3.6), (0.6, 0.6), 20, 12)


def head(**options):
    torch.manual_seed(0)
    size = dict(num_classes=10, dim=16, heads=2, mlp_dim=32, queries=9, radius=2)
    return QueryHead(8, FRAME, **{**size, **options})


def test_peaks_are_the_largest_of_their_neighbours():
    logits = torch.randn(2, 10, 12, 20)
    logits[0, 0, 0, 5] = 9.0  # at the border
    found, heat = head().peaks(logits), logits.sigmoid()
    for c in range(10):
        for row in range(12):
            for col in range(20):
                around = heat[0, c, max(row - 1, 0) : row + 2, max(col - 1, 0) : col + 2]
                inner = 0 < row < 11 and 0 < col < 19
                stays = c in (8, 9) or (inner and float(heat[0, c, row, col]) == float(around.max()))
                assert float(found[0, c, row, col]) == (float(heat[0, c, row, col]) if stays else 0.0)


def literal(net, x, r, cells, at, near):
    """The decoder as the original has it: keys are copied first, and everything is computed on the copies."""
    place = net.self_posembed(r)
    value = net.self_attn.project(x + place, 2, 3)
    x = net.norm1(x + net.self_attn.out_proj(value))
    first, norm, act, last = net.cross_posembed.position_embedding_head
    key_place = F.linear(at[near].flatten(0, 1), first.weight[..., 0], first.bias)
    key_place = F.linear(act(norm(key_place)), last.weight[..., 0], last.bias).view(*near.shape, -1)
    keys = cells[near] + key_place
    dim = x.shape[1]
    found, _ = F.multi_head_attention_forward(
        (x + place)[None], keys.transpose(0, 1), keys.transpose(0, 1), dim, net.heads,
        net.multihead_attn.in_proj_weight, net.multihead_attn.in_proj_bias, None, None, False, 0.0,
        net.multihead_attn.out_proj.weight, net.multihead_attn.out_proj.bias,
    )  # fmt: skip
    x = net.norm2(x + found[0])
    return net.norm3(x + net.linear2(F.relu(net.linear1(x))))


@pytest.mark.parametrize("training", [True, False])
def test_the_decoder_is_that_of_copied_keys(training):
    torch.manual_seed(0)
    nets = [Decoder(16, 2, 32, 0.0).train(training) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    inputs = torch.randn(7, 16), torch.rand(7, 2) * 12, torch.randn(60, 16), torch.rand(60, 2) * 12
    near = torch.randint(60, (7, 25))
    out, want = nets[0](*inputs, near), literal(nets[1], *inputs, near)
    assert torch.allclose(out, want, atol=1e-5)
    for y in (out, want):
        (y * torch.arange(16.0)).sum().backward()
    for a, b in zip(*([p.grad for p in net.parameters()] for net in nets), strict=True):
        assert torch.allclose(a, b, atol=1e-3)
    for a, b in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_counted_rows_count_as_often():
    rows, counts = torch.randn(5, 3), torch.tensor([1, 4, 0, 2, 1])
    plain, counted = torch.nn.BatchNorm1d(3), CountedBatchNorm(3)
    want = plain(rows.repeat_interleave(counts, 0))
    found = counted(rows, counts)
    assert torch.allclose(found.repeat_interleave(counts, 0), want, atol=1e-5)
    assert torch.allclose(counted.running_var, plain.running_var, atol=1e-6)
    assert torch.allclose(counted.running_mean, plain.running_mean, atol=1e-6)


def test_a_query_sees_its_surroundings_and_no_more():
    net = head(small_classes=()).eval()
    x = torch.randn(1, 8, 12, 20)
    seen = []
    net.decoder.register_forward_pre_hook(lambda module, args: seen.append(args))
    net(x)
    _, place, _, at, near = seen[0]
    assert near.shape == (9, 25)
    for q in range(9):
        around = at[near[q]]
        assert float((around - place[q]).abs().max()) <= 2
        inner = (place[q] > 2) & (place[q] < torch.tensor([18.0, 10.0]))
        assert (len(set(near[q].tolist())) == 25) == bool(inner.all())  # the border's cells repeat


def test_centres_are_counted_in_columns_and_rows():
    """A map that is bright in one cell asks there, on a map that is not square."""
    net = head(small_classes=(), queries=1).eval()
    with torch.no_grad():
        for conv in (net.shared_conv, net.heatmap_head[0].conv, net.heatmap_head[1]):
            conv.weight.zero_()
            conv.bias.zero_()
            conv.weight[:, :, 1, 1] = 1.0
        for parameter in net.prediction_head["center"][1].parameters():
            parameter.zero_()
    x = torch.zeros(1, 8, 12, 20)
    x[0, :, 3, 17] = 1.0
    assert net(x).center[0, :, 0].tolist() == [17.5, 3.5]


def test_pillars_stand_in_rows_of_y():
    cells, sample = torch.tensor([[5, 1], [0, 3], [5, 1]]), torch.tensor([0, 1, 1])
    found = scatter(torch.eye(3), cells, sample, 2, (8, 4))
    assert found.shape == (2, 3, 4, 8)
    assert found.nonzero().tolist() == [[0, 0, 1, 5], [1, 1, 3, 0], [1, 2, 1, 5]]


def test_shapes_of_the_map():
    net = BevNetwork(8, (8, 8, 12, 12), 6).eval()
    assert net(torch.randn(1, 8, 16, 24)).shape == (1, 24, 8, 12)
    assert net(torch.randn(2, 8, 24, 24)).shape == (2, 24, 12, 12)
    with pytest.raises(ValueError, match="4 stages"):
        BevNetwork(8, (8, 8), 6)


def test_grids_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple of 8"):
        BevGrid.of((-10, -10, -5, 10, 10, 3), 0.6)
    with pytest.raises(ValueError, match="not empty"):
        BevGrid.of((10, -10, -5, -10, 10, 3), 0.6)
    with pytest.raises(ValueError, match="both corners"):
        BevGrid.of((0, 0, 1, 1), 0.6)
    with pytest.raises(ValueError, match="small_classes"):
        head(small_classes=(10,))
    with pytest.raises(ValueError, match="queries"):
        head(queries=10_000)
