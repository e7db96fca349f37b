"""Patches, pooling and the moves of rows."""

import numpy as np
import pytest
import torch

from parapos.blocks import MLP
from parapos.curves import CURVES
from parapos.models.ptv3 import geometry, layers
from parapos.models.ptv3.geometry import Frame, arrange, cells_of, patch_slots, serialize
from parapos.models.ptv3.layers import Pooling, Unpooling
from parapos.models.ptv3.rows import Groups, copy_rows, group_max, group_sum, pick, spread

from .clouds import GOLDEN, clouds, tiny

FRAME = Frame(source="grid", unit="stage_cell", grid_size=0.02)
LENGTHS = [[10, 3], [4, 5], [9], [4], [1], [3, 2, 1], [17, 33, 16, 4], [8, 7, 5, 4, 3]]


def stage_of(*lengths, rows=range(4), depth=5, **options):
    _, coord, cells, _ = clouds(*lengths, **options)
    return serialize(FRAME, coord, cells, lengths, CURVES, rows, depth)


def test_the_published_patches():
    rank, slot, ends = patch_slots([10, 3], 4)
    assert rank.tolist() == [*range(10), 6, 7, 10, 11, 12]
    assert slot.tolist() == [*range(10), 12, 13, 14]
    assert ends.tolist() == [0, 4, 8, 12, 15]
    for lengths, unpad in (([4, 5], range(9)), ([9], range(9))):
        rank, slot, ends = patch_slots(lengths, 4)
        assert rank.tolist() == [*range(9), 5, 6, 7]
        assert (slot.tolist(), ends.tolist()) == ([*unpad], [0, 4, 8, 12])


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("ptv3-patches*.npz")), ids=lambda path: path.stem)
def test_golden_patches(path):
    file = np.load(path)
    for case in {name.partition(":")[0] for name in file.files}:
        found = patch_slots(file[f"{case}:sizes"].tolist(), int(file[f"{case}:K"]))
        for ours, name in zip(found, ("pad", "unpad", "cu_seqlens"), strict=True):
            assert ours.tolist() == file[f"{case}:{name}"].tolist()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("ptv3-pooling*.npz")), ids=lambda path: path.stem)
def test_golden_pooling(path):
    file = np.load(path)
    for case in {name.partition(":")[0] for name in file.files}:
        data = {name.partition(":")[2]: file[name] for name in file.files if name.startswith(f"{case}:")}
        coord, cells, feat = (torch.from_numpy(data[name]) for name in ("coord", "grid", "feat"))
        rows, depth = range(len(data["orders"])), int(data["depth"])
        stage = serialize(FRAME, coord, cells, data["sizes"].tolist(), data["orders"].tolist(), rows, depth)
        assert stage.codes.tolist() == data["code"].tolist()
        pooled = stage.pool(rows)
        assert pooled.groups.group.tolist() == data["cluster"].tolist()
        assert (pooled.cells.tolist(), pooled.clouds.tolist()) == (
            data["pooled_grid"].tolist(),
            data["pooled_batch"].tolist(),
        )
        assert (pooled.codes.tolist(), pooled.depth) == (data["pooled_code"].tolist(), int(data["pooled_depth"]))
        orders = torch.stack([pooled.order(row) for row in rows])
        assert orders.tolist() == data["pooled_order"].tolist()
        assert orders.argsort(1).tolist() == data["pooled_inverse"].tolist()
        assert np.abs(pooled.coord.numpy() - data["pooled_coord"]).max() < 1e-6
        assert np.array_equal(group_max(feat, pooled.groups).numpy(), data["pooled_feat_max"])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_point_has_one_slot_and_no_patch_repeats_one(lengths):
    layout = arrange(lengths, 4)
    total = sum(lengths)
    assert layout.rank[layout.slot].tolist() == list(range(total))
    assert len(layout.rank) == sum(w * k for w, k in layout.shapes)
    used = torch.cat([layout.slot, layout.borrowed])
    assert len(used.unique()) == len(used) == int((layout.rank >= 0).sum())
    cloud = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    start = 0
    for windows, size in layout.shapes:
        for window in layout.rank[start : start + windows * size].view(windows, size):
            members = window[window >= 0]
            assert len(members.unique()) == len(members)
            assert len(cloud[members].unique()) == 1
            assert len(members) == min(4, lengths[cloud[members[0]]])
        start += windows * size


@pytest.mark.parametrize("centred", [True, False])
def test_patches_count_from_their_middle_or_from_the_cloud(centred):
    _, coord, cells, _ = clouds(70)
    frame = Frame(source="grid", unit="stage_cell", grid_size=0.02, centred=centred)
    stage = serialize(frame, coord, cells + 500, [70], CURVES, range(4), 10)
    windows = stage.windows(0, 32)
    r = torch.cat([table.positions.r.flatten(0, 1) for table in windows.tables])
    assert (r.abs().amax() <= 7) if centred else (r.amin() >= 500)
    assert torch.equal(r[windows.slot], stage.cells.float()) == (not centred)


def test_small_clouds_are_padded_to_others_of_their_size():
    assert arrange([33, 3, 30, 4, 20, 1, 32, 17], 32).shapes == [(3, 32), (3, 30), (2, 4), (1, 1)]
    assert arrange([7, 1000], 1024).shapes == [(1, 1000), (1, 7)]
    assert arrange([16, 9, 8, 5], 32).shapes == [(2, 16), (2, 8)]


@pytest.mark.parametrize("lengths", [(100,), (31, 33), (32, 64, 5, 7), (5,)])
def test_what_goes_through_patches_comes_back_in_its_order(lengths):
    stage, x = stage_of(*lengths), torch.randn(sum(lengths), 3)
    for row in range(4):
        windows = stage.windows(row, 32)
        slots = copy_rows(x, windows.source, windows.slot, windows.borrowed)
        assert torch.equal(pick(slots, windows.slot), x)
        assert torch.equal(x[windows.source], slots)
        first = 0
        for (count, size), positions, mask in windows.tables:
            index = windows.source[first : first + count * size].view(count, size)
            seen = torch.ones(count, size, dtype=torch.bool) if mask is None else mask
            r = stage.cells[index].float()
            middle = positions.r - r
            assert positions.r[~seen].isnan().all()
            assert all(len(m[s].unique(dim=0)) == 1 for m, s in zip(middle, seen, strict=True))  # moved as a whole
            assert (positions.r[seen].abs() <= 12).all()
            first += count * size


def test_a_table_has_no_more_slots_than_fit_at_once(monkeypatch):
    whole = stage_of(200, 60, 20, 30).windows(1, 32)
    assert [table.shape for table in whole.tables] == [(9, 32), (2, 30)]
    monkeypatch.setattr(geometry, "AT_ONCE", 70)
    parts = stage_of(200, 60, 20, 30).windows(1, 32)
    assert [table.shape for table in parts.tables] == [(2, 32)] * 4 + [(1, 32), (2, 30)]
    assert torch.equal(parts.source, whole.source)
    assert torch.equal(parts.slot, whole.slot)
    joined = torch.cat([table.positions.r for table in parts.tables[:5]])
    assert torch.equal(joined, whole.tables[0].positions.r)
    assert torch.equal(parts.tables[5].mask, whole.tables[1].mask)
    monkeypatch.setattr(geometry, "AT_ONCE", 1)  # a window is never cut
    assert len(stage_of(200, 60, 20, 30).windows(1, 32).tables) == 11


@pytest.mark.parametrize("lengths", [(100,), (31, 33), (32, 64, 5, 7), (5,)])
@torch.no_grad()
def test_a_block_whose_attention_returns_its_tokens_keeps_their_order(lengths, monkeypatch):
    monkeypatch.setattr(geometry, "AT_ONCE", 64)
    stage, x = stage_of(*lengths), torch.randn(sum(lengths), 16)
    block = tiny(encoding="none").backbone.enc["enc0"].blocks[0]
    monkeypatch.setattr(block.attn, "forward", lambda x, r, mask: x)
    for row in range(4):
        block.row = row
        assert torch.equal(block._attend(x, stage), x)


def test_windows_that_reach_far_have_tables_of_their_own():
    _, coord, cells, _ = clouds(200, 60, 20, side=8)
    cells[:64] *= 30
    stage = serialize(FRAME, coord, cells, [200, 60, 20], CURVES, range(4), 9)
    windows, x = stage.windows(2, 32), torch.randn(280, 2)
    reach = [table.positions.r.nan_to_num().abs().amax().item() for table in windows.tables]
    assert len(reach) > 2
    assert min(reach) <= 32 < max(reach)
    slots = copy_rows(x, windows.source, windows.slot, windows.borrowed)
    assert torch.equal(pick(slots, windows.slot), x)
    assert len(slots) == sum(w * k for (w, k), _, _ in windows.tables)
    assert torch.autograd.gradcheck(
        lambda t: copy_rows(t, windows.source, windows.slot, windows.borrowed), x.double().requires_grad_()
    )


@pytest.mark.parametrize("row", range(4))
def test_groups_are_the_cells_of_twice_the_side(row):
    stage = stage_of(150, 40, 1)
    rows = [row, *(other for other in range(4) if other != row)]
    pooled = stage_of(150, 40, 1, rows=rows).pool(range(4))
    want = torch.cat([stage.clouds[:, None], stage.cells >> 1], 1)
    found = torch.cat([pooled.clouds[:, None], pooled.cells], 1)
    assert torch.equal(found[pooled.groups.group], want)
    assert len(found.unique(dim=0)) == len(found) == len(want.unique(dim=0))
    assert pooled.lengths == [int((pooled.clouds == b).sum()) for b in range(3)]
    assert (pooled.clouds.diff() >= 0).all()
    for group in range(len(found)):
        members = pooled.groups.group == group
        torch.testing.assert_close(pooled.coord[group], stage.coord[members].mean(0))


def test_pooling_goes_on_when_there_is_nothing_left_to_pool():
    stage = stage_of(30, 7, depth=4)
    for _ in range(7):
        stage = stage.pool([3, 2, 1, 0])
    assert (stage.depth, stage.lengths, stage.cells.abs().sum()) == (0, [1, 1], 0)


def test_positions_have_a_source_and_a_unit():
    _, coord, cells, _ = clouds(50)
    for source, unit, want in (
        ("grid", "stage_cell", lambda s: s.cells.float()),
        ("grid", "base_cell", lambda s: s.cells * 2.0**s.level),
        ("grid", "metre", lambda s: s.cells * (0.02 * 2**s.level)),
        ("coord", "stage_cell", lambda s: s.coord / (0.02 * 2**s.level)),
        ("coord", "base_cell", lambda s: s.coord / 0.02),
        ("coord", "metre", lambda s: s.coord),
    ):
        frame = Frame(source=source, unit=unit, grid_size=0.02, scale=[1.0, 2.0, 0.5])
        stage = serialize(frame, coord, cells, [50], CURVES, range(4), 5)
        for at in (stage, stage.pool(range(4))):
            torch.testing.assert_close(at.positions().r[0], want(at) * torch.tensor([1, 2, 0.5]), rtol=1e-5, atol=0)


def test_cells_are_counted_in_each_cloud():
    coord = torch.tensor([[-0.5, 0.0, 0.0], [0.09, 0.05, 0.0], [7.0, 7.0, 7.0]])
    assert cells_of(coord, [2, 1], 0.1).tolist() == [[0, 0, 0], [5, 0, 0], [0, 0, 0]]


def test_moves_of_rows_have_the_gradients_of_their_definitions():
    torch.manual_seed(0)
    keys, members = torch.sort(torch.randint(0, 6, (20,)), stable=True)
    groups = Groups.of_sorted(keys, members)
    x = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    low = torch.randn(len(groups.offsets), 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(spread(low, groups), low[groups.group])
    torch.testing.assert_close(group_sum(x, groups), torch.zeros_like(low).index_add(0, groups.group, x))
    index = groups.group[:, None].expand(-1, 3)
    torch.testing.assert_close(group_max(x, groups), torch.full_like(low, -9.0).scatter_reduce(0, index, x, "amax"))
    for move, given in ((group_sum, x), (group_max, x), (spread, low)):
        assert torch.autograd.gradcheck(lambda t, move=move: move(t, groups), given)
    assert torch.autograd.gradcheck(lambda t: pick(t, torch.tensor([7, 3, 11])), x)
    windows = stage_of(20).windows(2, 8)
    assert len(windows.borrowed) == 4
    assert torch.autograd.gradcheck(lambda t: copy_rows(t, windows.source, windows.slot, windows.borrowed), x)


def test_codes_begin_with_the_cloud():
    cells = torch.tensor([[0, 0, 0], [7, 7, 7], [5, 6, 7]])
    stage = serialize(FRAME, cells * 0.02, cells, [1, 1, 1], CURVES, range(4), 3)
    assert stage.codes[:, 2].tolist() == [2 << 9 | code for code in (477, 491, 342, 370)]
    assert int(stage.codes[2, 2]) == 1366


def test_too_many_bits():
    with pytest.raises(ValueError, match=r"depth must be in 1\.\.16"):
        stage_of(5, depth=17)
    cells, most = torch.zeros(2**15, 3, dtype=torch.long), 2**15 - 1  # 48 bits of a cell leave 15 for the cloud
    assert int(serialize(FRAME, cells[:most] * 0.02, cells[:most], [1] * most, CURVES, [0], 16).codes.min()) == 0
    with pytest.raises(ValueError, match=r"got 16 and 32768 clouds"):
        serialize(FRAME, cells * 0.02, cells, [1] * 2**15, CURVES, [0], 16)
    with pytest.raises(ValueError, match="larger cells"):
        stage_of(50, depth=3)


def test_clouds_stay_together_along_every_curve():
    _, coord, cells, offset = clouds(40, 7, 25)
    stage = tiny().eval().stages(coord, cells, offset)[0]
    for row in range(4):
        assert torch.equal(stage.clouds[stage.order(row)], stage.clouds)


def test_pooling_is_the_largest_of_what_the_layer_gives_and_the_mean_of_places():
    _, coord, cells, offset = clouds(60, 30)
    fine, coarse = tiny(enc_dims=(16, 32), enc_depths=(1, 1)).eval().stages(coord, cells, offset)
    layer, x = Pooling(8, 16).eval(), torch.randn(90, 8)
    found = layer(x, coarse)
    y = layer.proj(x)
    for point in range(len(coarse.cells)):
        mine = coarse.groups.group == point
        want = torch.nn.functional.gelu(layer.norm(y[mine].amax(0, keepdim=True)))
        torch.testing.assert_close(found[point : point + 1], want)
        torch.testing.assert_close(coarse.coord[point], coord[mine].mean(0))
        assert (cells[mine] >> 1 == coarse.cells[point]).all()
    up = Unpooling(16, 8, 16).eval()
    both, skip = up(found, x, coarse)
    torch.testing.assert_close(both - skip, up.proj(found)[coarse.groups.group])
    assert len(both) == len(fine.cells)


@pytest.mark.parametrize("encoding", ["pape", "pape_ri", "rope", "alibi"])
@torch.no_grad()
def test_centred_patches_change_nothing(encoding):
    batch = clouds(90, 40)
    net = tiny(encoding=encoding).eval()
    assert net.centred
    want = net(*batch)
    net.centred = False
    torch.testing.assert_close(net(*batch), want, rtol=1e-3, atol=1e-4)
    exact = [net.double()(batch[0].double(), *batch[1:])]
    net.centred = True
    exact.append(net(batch[0].double(), *batch[1:]))
    torch.testing.assert_close(*exact, rtol=1e-9, atol=1e-10)
    assert exact[0].dtype == torch.float64
    assert not tiny(encoding="sincos").centred  # which sees heights, not differences


@pytest.mark.parametrize("encoding", ["pape", "pape_ri"])
@torch.no_grad()
def test_half_precision_bears_positions_far_from_the_origin(encoding):
    """Scores of positions are float32 and centred whatever queries are: the error is that of queries and keys."""
    feat, coord, cells, offset = clouds(90, 40)
    net = tiny(encoding=encoding, depth=16).eval()
    want, errors = net(feat, coord, cells, offset), []
    for centred, shift in ((True, 0), (False, 0), (False, 2**14)):  # a shift that keeps curves and patches
        net.centred = centred
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = net(feat, coord, cells + shift, offset)
        errors.append((found.float() - want).norm().item())
    assert 0 < errors[0] < 0.1 * want.norm().item()
    assert max(errors[1:]) < 1.5 * errors[0]


@torch.no_grad()
def test_inputs_may_have_any_strides():
    feat, coord, cells, offset = clouds(70, 30)
    strided = [x.t().contiguous().t() for x in (feat, coord, cells)]
    assert not any(x.is_contiguous() for x in strided)
    net = tiny(encoding="pape", cpe="xcpe").eval()
    torch.testing.assert_close(net(*strided, offset), net(feat, coord, cells, offset), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_few_points_at_a_time_give_the_same_logits(monkeypatch):
    inputs, net = clouds(200, 90), tiny(encoding="pape", cpe="xcpe").eval()
    hidden: list[int] = []
    for module in net.modules():
        if isinstance(module, MLP):
            module.register_forward_pre_hook(lambda module, args: hidden.append(len(args[0])))
    want = net(*inputs)
    assert max(hidden) == 290
    hidden.clear()
    monkeypatch.setattr(layers, "AT_ONCE", 50)
    monkeypatch.setattr(geometry, "AT_ONCE", 64)
    torch.testing.assert_close(net(*inputs), want, rtol=1e-5, atol=1e-5)
    assert max(hidden) == 50
    hidden.clear()
    with torch.enable_grad():
        net(*inputs)
    assert max(hidden) == 290  # what backward keeps is kept in any case
    hidden.clear()
    net.train()(*inputs)
    assert max(hidden) == 290  # drop path draws for all points at once, with gradients or without
