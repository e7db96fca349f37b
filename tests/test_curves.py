"""Space-filling curves: the codes of the released tables, and what any such curve must be."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parapos.curves import CURVES, curve_cells, curve_codes, curve_depth, curve_order

GOLDEN = Path(os.environ.get("PARAPOS_GOLDEN", Path(__file__).resolve().parents[2] / "shared" / "golden"))
TABLE = {  # depth 3: z, z-trans, hilbert, hilbert-trans
    (0, 0, 0): (0, 0, 0, 0),
    (1, 0, 0): (4, 2, 1, 7),
    (0, 1, 0): (2, 4, 7, 1),
    (0, 0, 1): (1, 1, 3, 3),
    (1, 2, 3): (29, 43, 48, 38),
    (3, 2, 1): (53, 51, 20, 22),
    (5, 6, 7): (477, 491, 342, 370),
    (7, 0, 0): (292, 146, 511, 237),
    (7, 7, 7): (511, 511, 365, 365),
}


def everything(dims, depth):
    """All cells, (2^(dims depth), dims)."""
    return torch.cartesian_prod(*[torch.arange(2**depth)] * dims).reshape(-1, dims)


def test_the_published_codes():
    cells = torch.tensor(list(TABLE))
    for i, curve in enumerate(CURVES):
        assert curve_codes(cells, curve, 3).tolist() == [codes[i] for codes in TABLE.values()]
    far = torch.tensor([[100, 200, 300]])
    assert [int(curve_codes(far, curve, depth)) for depth in (9, 16) for curve in ("z", "hilbert")] == [
        22710080,
        33097122,
        22710080,
        124266514,
    ]
    far = torch.tensor([[12345, 54321, 40000]])
    assert [int(curve_codes(far, curve, 16)) for curve in ("z", "hilbert")] == [117041080526854, 87783608035092]
    visited = everything(3, 1)[curve_order(everything(3, 1), "hilbert", 1)]
    assert ["".join(map(str, cell)) for cell in visited.tolist()] == [f"{i ^ i >> 1:03b}" for i in range(8)]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("ptv3-serialization*.npz")), ids=lambda path: path.stem)
def test_golden_serialization(path):
    file = np.load(path)
    for name in {key.partition(":")[0] for key in file.files}:
        depth, cells = int(name[1:]), torch.from_numpy(file[f"{name}:grid"])
        batch = torch.from_numpy(file[f"{name}:batch"]).long()
        for row, curve in enumerate(CURVES):
            codes = curve_codes(cells, curve, depth) | batch << 3 * depth
            assert codes.tolist() == file[f"{name}:code"][row].tolist()
            assert torch.sort(codes, stable=True)[1].tolist() == file[f"{name}:order"][row].tolist()


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("dims", "depth"), [(1, 5), (2, 1), (2, 4), (3, 1), (3, 3), (4, 2)])
def test_a_curve_passes_every_cell_once(curve, dims, depth):
    if dims == 1 and curve.endswith("trans"):
        pytest.skip("one dimension has none to change places with")
    cells = everything(dims, depth)
    codes = curve_codes(cells, curve, depth)
    assert sorted(codes.tolist()) == list(range(2 ** (dims * depth)))
    assert torch.equal(curve_cells(codes, curve, dims, depth), cells)
    if curve.startswith("hilbert"):
        steps = cells[codes.argsort()].diff(dim=0).abs().sum(1)
        assert (steps == 1).all()  # each step leads to an adjacent cell
    if depth > 1:  # pooled cells keep the order
        assert torch.equal(codes >> dims, curve_codes(cells >> 1, curve, depth - 1))


@given(st.data())
def test_what_holds_for_any_cells(data):
    dims, depth = data.draw(st.sampled_from([(2, 31), (3, 21), (3, 16), (3, 7), (1, 63), (4, 15)]))
    curve = data.draw(st.sampled_from(CURVES[:: 2 if dims == 1 else 1]))
    row = st.lists(st.integers(0, 2**depth - 1), min_size=dims, max_size=dims)
    cells = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=30)))
    codes = curve_codes(cells, curve, depth)
    assert torch.equal(curve_cells(codes, curve, dims, depth), cells)
    assert torch.equal(codes, torch.cat([curve_codes(cell[None], curve, depth) for cell in cells]))  # alone as together
    if depth > 1:
        assert torch.equal(codes >> dims, curve_codes(cells >> 1, curve, depth - 1))
    if curve.startswith("z") and dims * (depth + 1) <= 63:  # the z order does not depend on the depth
        assert torch.equal(codes, curve_codes(cells, curve, depth + 1))
    if curve == "hilbert" and dims * (depth + dims) <= 63:  # p further levels turn Hilbert's curve back
        assert torch.equal(codes, curve_codes(cells, curve, depth + dims))


def test_orders():
    cells = torch.tensor([[3, 1, 2], [0, 0, 0], [3, 1, 2], [0, 0, 1]])
    assert curve_order(cells, "z").tolist() == [1, 3, 0, 2]  # equal cells keep their order
    assert curve_depth(cells) == 3
    assert curve_depth(torch.zeros(1, 3, dtype=torch.long)) == 1
    assert curve_order(cells[:1], "hilbert").tolist() == [0]
    assert curve_order(cells[:0], "hilbert").tolist() == []
    strided = torch.randint(0, 99, (3, 50)).int().t()
    assert torch.equal(curve_order(strided, "hilbert"), curve_order(strided.contiguous().long(), "hilbert"))
    shapes = torch.randint(0, 8, (5, 4, 3))
    assert torch.equal(curve_codes(shapes, "hilbert", 3).flatten(), curve_codes(shapes.flatten(0, 1), "hilbert", 3))


def test_hilbert_keeps_neighbours_together():
    """Pieces of the curve reach less far than pieces of a row-major order, and than those of z."""
    cells = everything(3, 5)

    def reach(order):
        pieces = cells[order].view(-1, 64, 3).float()
        return (pieces.amax(1) - pieces.amin(1)).norm(dim=-1)

    hilbert, z = (reach(curve_order(cells, curve)) for curve in ("hilbert", "z"))
    assert hilbert.max() <= z.max() < reach(torch.arange(len(cells))).min()


@pytest.mark.parametrize(
    ("cells", "curve", "depth", "told"),
    [
        (torch.zeros(2, 3), "z", 3, "must be integers"),
        (torch.tensor([[0, 8, 0]]), "z", 3, r"0\.\.7 at depth 3"),
        (torch.tensor([[0, -1, 0]]), "hilbert", 3, "larger cells, crop"),
        (torch.zeros(2, 3, dtype=torch.long), "z", 22, r"1\.\.21"),
        (torch.zeros(2, 3, dtype=torch.long), "z", 0, "depth must be"),
        (torch.zeros(2, 3, dtype=torch.long), "hilber", 3, "did you mean 'hilbert'"),
    ],
)
def test_what_is_refused(cells, curve, depth, told):
    with pytest.raises((ValueError, TypeError), match=told):
        curve_codes(cells, curve, depth)
    with pytest.raises(ValueError, match="codes must be"):
        curve_cells(torch.tensor([8]), "z", 3, 1)
