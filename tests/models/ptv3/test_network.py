"""Point Transformer V3 as a whole: recorded networks, sizes, encodings, batches, randomness."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import parapos
from parapos.encodings import ENCODINGS
from parapos.models import create_model
from parapos.models.ptv3.layers import Block
from parapos.models.ptv3.norm import BatchNorm
from tests.marks import full

from .clouds import GOLDEN, clouds, tiny

SPATIAL = [name for name, cls in ENCODINGS.items() if cls.claims.unbounded]
TASKS = ("segmentation", "classification")


def recorded(kind):
    return sorted(path for path in GOLDEN.glob(f"ptv3-{kind}*.npz") if not path.stem.endswith("-common"))


def load(path):
    """A recorded case: inputs, results and weights, with what its kind shares."""
    shared = path.with_name("-".join(path.stem.split("-")[:2]) + "-common.npz")
    return {name: file[name] for file in (np.load(p) for p in (shared, path) if p.exists()) for name in file.files}


def rebuild(case, task, encoding, **options):
    """The network that recorded weights belong to."""
    weights = {name[2:]: torch.from_numpy(x).float() for name, x in case.items() if name.startswith("w:")}
    if options["cpe"] == "none":
        weights = {name: x for name, x in weights.items() if ".cpe." not in name}

    def widths(part):
        norms = {name: len(x) for name, x in weights.items() if name.endswith("norm1.0.weight") and f".{part}." in name}
        stages = sorted({name.split(".")[2] for name in norms})
        return {
            f"{part}_dims": [next(v for n, v in norms.items() if f".{s}." in n) for s in stages],
            f"{part}_depths": [sum(f".{s}." in n for n in norms) for s in stages],
        }

    sizes = {**widths("enc"), **(widths("dec") if task == "segmentation" else {})}
    stem = weights["backbone.embedding.stem.conv.weight"]
    net = parapos.models.PointTransformerV3(
        task=task, encoding=encoding, in_channels=stem.shape[-1], num_classes=case["logits"].shape[1],
        patch=int(case.get("K", 32)), eval_seed=None, depth=None, **sizes, **options,
    ).eval()  # fmt: skip
    missing = net.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys)
    return net


@pytest.mark.parametrize(
    ("task", "path"),
    [(task, path) for task, kind in zip(TASKS, ("seg", "cls"), strict=True) for path in recorded(kind)],
    ids=lambda x: getattr(x, "stem", x),
)
def test_golden_networks(task, path):
    case = load(path)
    encoding = next((part for part in reversed(path.stem.split("-")[2:]) if part in ENCODINGS), "none")
    inputs = [torch.from_numpy(case[name]) for name in ("feat", "coord", "grid_coord", "offset")]
    rows = case["perms"].tolist() if "perms" in case else None
    kinds = {"logits": ("xcpe", "skip"), "logits_sum": ("xcpe", "sum"), "logits_nocpe": ("none", None)}
    for name in kinds.keys() & case.keys():
        cpe, seen = kinds[name]
        options = {"unpool_conv_input": seen} if task == "segmentation" and seen else {}
        net = rebuild(case, task, encoding, cpe=cpe, **options)
        with torch.no_grad():
            found = net(*inputs, rows=rows)
        assert np.abs(found.numpy() - case[name]).max() < 1e-4, name


def count(module):
    return sum(p.numel() for p in module.parameters())


def meta(name, **options):
    with torch.device("meta"):
        return create_model(name, **options)


def test_published_sizes():
    net = meta("ptv3_scannet", encoding="none", cpe="xcpe")
    assert (count(net), count(net.backbone), count(net.seg_head)) == (46_167_572, 46_166_272, 1_300)
    assert count(net.backbone.embedding) == 24_064
    blocks = [module for module in net.modules() if isinstance(module, Block)]
    assert sum(count(block.cpe) for block in blocks) == 31_956_736
    assert sum(count(block.cpe[0]) for block in blocks) == 30_803_904
    firsts = [count(stage.blocks[0]) for stage in net.backbone.enc.values()]
    assert firsts == [41_504, 164_928, 657_536, 2_625_792, 10_494_464]
    downs = [count(stage.down) for stage in list(net.backbone.enc.values())[1:]]
    assert downs == [2_240, 8_576, 33_536, 132_608]
    assert [count(stage.up) for stage in net.backbone.dec.values()] == [198_144, 49_920, 12_672, 6_528]
    named = [(name, p.numel()) for name, p in net.named_parameters()]
    slow = sum(size for name, size in named if "block" in name)
    assert (slow, sum(size for _, size in named) - slow) == (45_697_984, 469_588)
    assert sum(b.numel() for b in net.backbone.buffers()) == 4_045
    assert count(meta("ptv3_scannet", encoding="none")) == 14_210_836
    net = meta("ptv3_modelnet40", encoding="none", cpe="xcpe")
    assert (count(net), count(net.backbone), count(net.cls_head)) == (38_842_792, 38_672_640, 170_152)
    assert count(meta("ptv3_modelnet40", encoding="none")) == 11_936_424
    assert all(block.attn.head_dim == 16 for block in blocks)


@pytest.mark.parametrize(
    ("encoding", "encoder", "decoder"),
    [
        ("pape", 6_003_200 + 28_200, 1_126_400 + 9_600),
        ("pape_ri", 60_032, 11_264),
        ("rope_mixed", 4_512, 1_536),
        ("sincos", 0, 0),
        ("rope", 0, 0),
        ("alibi", 0, 0),
    ],
)
def test_sizes_of_encodings(encoding, encoder, decoder):
    assert count(meta("ptv3_modelnet40", encoding=encoding)) - 11_936_424 == encoder
    net = meta("ptv3_scannet", encoding=encoding)
    assert count(net) - 14_210_836 == encoder + decoder
    assert all("block" in name for name, _ in net.named_parameters() if "encoding" in name)


def test_drop_path_grows_inwards():
    net = meta("ptv3_scannet", encoding="none")
    rates = [block.drop_path.rate for stage in net.backbone.enc.values() for block in stage.blocks]
    assert rates == pytest.approx([0.3 * i / 13 for i in range(14)])
    rates = [block.drop_path.rate for stage in net.backbone.dec.values() for block in stage.blocks]
    assert rates == pytest.approx([0.3 * i / 7 for i in range(7, -1, -1)])
    layers = [block.attn.encoding.layer for block in net.modules() if isinstance(block, Block)]
    assert sorted(layers) == list(range(22))


GRID = [
    (cpe, task) if (cpe, task) in (("none", "segmentation"), ("xcpe", "classification")) else full(cpe, task)
    for cpe in ("none", "xcpe")
    for task in TASKS
]


@pytest.mark.parametrize("encoding", SPATIAL)
@pytest.mark.parametrize(("cpe", "task"), GRID)
def test_every_parameter_learns(encoding, cpe, task):
    net = tiny(encoding=encoding, cpe=cpe, task=task).train()
    inputs = clouds(90, 20, 150)
    logits = net(*inputs)
    assert logits.shape == ((260, 5) if task == "segmentation" else (3, 5))
    (logits * torch.randn_like(logits)).sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        # What a norm takes away again has no gradient but rounding.
        if not (
            name.endswith(("proj.0.bias", "proj_skip.0.bias", "down.proj.bias", "cls_head.0.bias", "cls_head.4.bias"))
        ):
            assert p.grad.abs().max() > 0, name


@pytest.mark.parametrize("encoding", SPATIAL)
@pytest.mark.parametrize("task", TASKS)
def test_a_cloud_does_not_depend_on_others(encoding, task):
    net = tiny(encoding=encoding, cpe="xcpe", task=task).eval()
    feat, coord, cells, offset = clouds(40, 33, 100, 9, side=8)
    cells[-9:] *= 999  # a wide cloud must not change how others are ordered
    ends = [0, *offset.tolist()]
    with torch.no_grad():
        together = net(feat, coord, cells, offset)
        for b, (begin, end) in enumerate(pairwise(ends)):
            own = slice(begin, end)
            alone = net(feat[own], coord[own], cells[own], torch.tensor([end - begin]))
            beside = together[own] if task == "segmentation" else together[b : b + 1]
            torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-4)


def test_lookhere_is_refused():
    with pytest.raises(ValueError, match=r"lookhere.*grids of images"):
        tiny(encoding="lookhere")


def test_positions_matter_where_an_encoding_says_so():
    """Positions in other units change logits; a common shift changes them for absolute encodings alone."""
    feat, coord, cells, offset = clouds(200)
    for encoding in SPATIAL:
        net = tiny(encoding=encoding).eval()
        with torch.no_grad():
            logits = net(feat, coord, cells, offset)
            scaled = net(feat, coord, cells, offset, 3.0)
            # Whole multiples of the coarsest patches keep curves and groups as they are.
            shifted = net(feat, coord, cells + 64 * 8, offset)
        assert torch.allclose(logits, scaled, atol=1e-5) == (encoding == "none"), encoding
        assert torch.allclose(logits, shifted, atol=1e-3) == ENCODINGS[encoding].claims.translation, encoding


@pytest.mark.parametrize("options", [{"pos_source": "coord"}, {"pos_unit": "metre"}, {"pos_unit": "base_cell"}])
def test_positions_can_be_chosen(options):
    inputs = clouds(120)
    with torch.no_grad():
        logits, other = (tiny(encoding="pape", **o).eval()(*inputs) for o in ({}, options))
        scale = {"metre": 50.0}.get(options.get("pos_unit"))
        assert not torch.allclose(logits, other, atol=1e-4)
        if scale:  # at the finest stage, metres are cells of 0.02
            blocks = [tiny(encoding="pape", enc_dims=(16,), enc_depths=(1,), **o).eval() for o in ({}, options)]
            blocks[1].pos_scale = scale
            torch.testing.assert_close(blocks[0](*inputs), blocks[1](*inputs), rtol=1e-4, atol=1e-4)


def test_additive_encodings_act_once_or_at_each_stage():
    inputs = clouds(150)
    with torch.no_grad():
        once, each = (tiny(encoding="sincos", add_every_stage=every).eval()(*inputs) for every in (False, True))
    assert not torch.allclose(once, each, atol=1e-3)


def test_order_of_curves():
    feat, coord, cells, offset = clouds(150)
    net = tiny(encoding="none").eval()
    with torch.no_grad():
        seeded = [net(feat, coord, cells, offset) for _ in range(2)]
        assert torch.equal(*seeded)  # evaluation draws once for all
        net.eval_seed = None
        listed = net(feat, coord, cells, offset)
        assert torch.equal(listed, net(feat, coord, cells, offset, rows=[range(4)] * 3))
        assert not torch.equal(listed, seeded[0])
        net.train()
        drawn = [net.draw_rows() for _ in range(20)]
        assert len({str(rows) for rows in drawn}) > 10
        assert all(sorted(row) == [0, 1, 2, 3] for rows in drawn for row in rows)
        state = torch.get_rng_state()
        first = net.draw_rows()
        torch.set_rng_state(state)
        assert net.draw_rows() == first  # the global seed decides, so a step can be repeated
        net.shuffle = False
        assert net.draw_rows() == [[0, 1, 2, 3]] * 3


def test_points_in_another_order_get_the_same_logits():
    feat, coord, cells, offset = clouds(150)
    net, order = tiny(encoding="pape", cpe="xcpe").eval(), torch.randperm(150)
    with torch.no_grad():
        logits = net(feat, coord, cells, offset)
        torch.testing.assert_close(
            net(feat[order], coord[order], cells[order], offset), logits[order], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (2, 70), (32,), (33,)])
@pytest.mark.parametrize("task", TASKS)
def test_clouds_of_few_points(lengths, task):
    net = tiny(encoding="pape", cpe="xcpe", task=task)
    for training in (True, False):
        logits = net.train(training)(*clouds(*lengths))
        assert logits.isfinite().all()
        logits.sum().backward()


def test_coincident_points():
    feat, coord, cells, offset = clouds(60)
    cells[:] = cells[:5].repeat(12, 1)
    net = tiny(encoding="pape", cpe="xcpe").train()
    found = [net(feat, coord, cells, offset, rows=[range(4)] * 3) for _ in range(2)]
    assert torch.equal(*found)
    found[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_patches_of_encoder_and_decoder_may_differ():
    inputs = clouds(200)
    with torch.no_grad():
        same, other = (tiny(encoding="pape", dec_patch=size).eval()(*inputs) for size in (None, 64))
        whole = tiny(encoding="pape", patch=512).eval()(*inputs)
    assert other.isfinite().all()
    assert not torch.allclose(same, other, atol=1e-4)
    assert not torch.allclose(same, whole, atol=1e-4)


def test_training_repeats_bit_by_bit():
    inputs = clouds(90, 150)

    def train():
        net = tiny(encoding="pape", cpe="xcpe", drop_path=0.2).train()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        for step in range(3):
            torch.manual_seed(step)
            net(*inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    first, second = train(), train()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_running_statistics_are_those_of_pytorch():
    torch.manual_seed(0)
    ours, theirs = BatchNorm(4, 1e-3, 0.01).train(), torch.nn.BatchNorm1d(4, 1e-3, 0.01).train()
    for _ in range(3):
        x = torch.randn(20, 4) * 3 + 1
        torch.testing.assert_close(ours(x), theirs(x))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    before = ours.running_mean.clone()
    torch.testing.assert_close(ours.train()(x[:1]), ours.eval()(x[:1]))  # one row has no variance
    assert torch.equal(ours.running_mean, before)


def test_cells_can_be_counted_by_the_network():
    feat, coord, cells, offset = clouds(80, 30)
    starts = torch.tensor([cells[:80].amin(0).tolist()] * 80 + [cells[80:].amin(0).tolist()] * 30)
    net = tiny(encoding="pape", grid_size=0.02).eval()
    with torch.no_grad():
        assert torch.equal(net(feat, coord + 5, None, offset), net(feat, coord + 5, cells - starts, offset))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"feat": torch.zeros(9, 5)}, r"feat must be \(10, 6\)"),
        ({"coord": torch.full((10, 3), torch.nan)}, "finite"),
        ({"grid_coord": torch.zeros(10, 3)}, "grid_coord must be integers"),
        ({"grid_coord": torch.full((10, 3), 2**16)}, "larger cells"),
        ({"grid_coord": torch.full((10, 3), -1)}, "larger cells"),
        ({"offset": torch.tensor([4, 9])}, "number of points 10"),
        ({"offset": torch.tensor([4, 4, 10])}, "at least one"),
        ({"offset": torch.tensor([4.0, 10.0])}, "offset must be integers"),
    ],
)
def test_bad_batches(change, told):
    batch = dict(zip(("feat", "coord", "grid_coord", "offset"), clouds(4, 6), strict=True))
    with pytest.raises(ValueError, match=told):
        tiny(encoding="none")(**{**batch, **change})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"task": "detection"}, "task must be one of"),
        ({"cpe": "yes"}, "cpe must be one of"),
        ({"task": "classification", "dec_dims": (32, 32)}, "no decoder"),
        ({"dec_dims": (32,), "dec_depths": (1,)}, "one less than the encoder"),
        ({"enc_dims": (16, 24, 64)}, "multiples of head_dim"),
        ({"enc_depths": (1, 0, 2)}, r"enc_depths\[1\]"),
        ({"unpool_conv_input": "skip"}, "no effect"),
        ({"pos_unit": "cell"}, "pos_unit must be one of"),
        ({"curves": ()}, "at least one"),
        ({"grid_size": 0.0}, "positive"),
        ({"pos_dim": 2}, "pos_dim of points is 3"),
        ({"parabola": 3, "encoding": "pape"}, "did you mean 'parabolas'"),
    ],
)
def test_bad_options(options, told):
    with pytest.raises((ValueError, TypeError), match=told):
        tiny(**{"encoding": "none", **options})


def test_nano_serves_both_tasks():
    for task in TASKS:
        net = create_model("ptv3_nano", task=task, num_classes=4).eval()
        assert count(net) < 1_500_000
        with torch.no_grad():
            assert net(*clouds(300, 40)).shape == ((340, 4) if task == "segmentation" else (2, 4))


def test_half_precision_training():
    net = tiny(encoding="pape", cpe="xcpe").train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(*clouds(90, 20)).float().square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
