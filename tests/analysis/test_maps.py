"""What a query sees through time: every number stands at its place, is written whole, and is drawn where it belongs."""

import json

import numpy as np
import pytest
import torch

import parapos
from parapos.analysis import maps as analysis_maps
from parapos.analysis import plot as analysis_plot
from parapos.analysis import scores as analysis_scores
from parapos.cli import main
from parapos.experiments.sweep import ReportError

from ..run_folders import make_run

SIZE = dict(dim=16, heads=2, depth=2, mlp_dim=16, parabolas=3)
PARTS = analysis_maps.PARTS


def video_model(**options):
    torch.manual_seed(0)
    return parapos.create_model("vivit_nano_patch16", patch=4, num_classes=3, **{**SIZE, **options}).eval()


def event_model(**options):
    torch.manual_seed(0)
    return parapos.create_model("event_vit_nano_patch16", patch=4, num_classes=3, **{**SIZE, **options}).eval()


# Tokens on a grid of 3 x 4 patches in 10 ms; two columns divide them at 5 ms.
X = torch.tensor([0, 3, 0, 3, 1, 0])
Y = torch.tensor([0, 2, 0, 2, 1, 0])
T = torch.tensor([0, 1000, 4999, 5000, 7000, 10000])


def events(model):
    codes = torch.randint(0, 2 * model.buckets * model.patch**2, (6, 5), generator=torch.Generator().manual_seed(3))
    return {"codes": codes.short(), "x": X, "y": Y, "t": T, "length": 6, "label": 1, "id": 0}


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_video_strip(pool):
    model, video = video_model(pool=pool), torch.rand(3, 8, 8, 12) * 255
    strip = analysis_maps.make_video_strip(model, video, 3, layer=2, head=1, query=(3, 2, 1), pixel_scale="raw255")
    with analysis_scores.watch(model) as found:
        model(video[None], torch.tensor([3]))
    first = int(pool == "cls")
    at = first + (2 * 2 + 1) * 3 + 0  # of 3 x 2 x 3 real tokens, in the order tubelet, row, column
    for part in PARTS:
        row = getattr(found[1].parts(), part)[0, 0, at]
        assert torch.equal(getattr(strip, part), row[first : first + 18].view(3, 2, 3))
    assert strip.query == (2, 1, 0)
    assert strip.distance[strip.query] == strip.direction[strip.query] == 0
    assert (strip.distance.flatten() < 0).sum() == 17
    assert strip.query_name == "tubelet 3, row 2, column 1"
    assert strip.names == ("tubelet 1", "tubelet 2", "tubelet 3")
    torch.testing.assert_close(strip.pictures[1], video[:, 2] / 255)
    torch.testing.assert_close(strip.shares, strip.attention.sum((1, 2)))
    on_class = float(found[1].parts().attention[0, 0, at, 0]) if first else 0.0
    assert float(strip.shares.sum()) + on_class == pytest.approx(1)


def test_video_does_not_see_padding():
    model, video = video_model(), torch.rand(3, 8, 8, 12)
    other = video.clone()
    other[:, 4:] = torch.nan
    strips = [analysis_maps.make_video_strip(model, v, 2, layer=2, head=2) for v in (video, other)]
    assert strips[0].distance.shape == (2, 2, 3)
    for part in ("pictures", "shares", *PARTS):
        assert torch.equal(getattr(strips[0], part), getattr(strips[1], part))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(query=(3, 1, 1)), "tubelet of the query must be from 1 to 2 at this size, got 3"),
        (dict(query=(1, 1, 4)), "column of the query must be from 1 to 3"),
        (dict(query=(1, 2)), "query must be tubelet,row,col counted from 1, got '1,2'"),
        (dict(query=(1, 1.5, 1)), "query must be tubelet,row,col counted from 1, got '1,1.5,1'"),
        (dict(tubelets=0), "the video of 8 frames has no complete tubelet"),
        (dict(tubelets=5), "the video of 8 frames has no 5 tubelets"),
        (dict(layer=3), "layer must be from 1 to 2, got 3"),
        (dict(head=0), "head must be from 1 to 2, got 0"),
    ],
)
def test_video_refuses(change, message):
    options = {"tubelets": 2, "layer": 1, "head": 1, **change}
    with pytest.raises(ReportError, match=message):
        analysis_maps.make_video_strip(video_model(), torch.rand(3, 8, 8, 12), **options)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_event_strip(pool):
    model = event_model(pool=pool)
    sample = events(model)
    strip = analysis_maps.make_event_strip(model, sample, layer=2, head=2, query=(3,), columns=2, grid=(3, 4))
    with analysis_scores.watch(model) as found:
        model(*(torch.as_tensor(sample[name])[None] for name in model.inputs))
    first = int(pool == "cls")
    for part in PARTS:
        row = getattr(found[1].parts(), part)[0, 1, first + 2, first:]
        want = torch.full((2, 3, 4), torch.nan, dtype=torch.float64)
        for column, y, x, token in ((0, 0, 0, 2), (0, 2, 3, 1), (1, 2, 3, 3), (1, 1, 1, 4), (1, 0, 0, 5)):
            want[column, y, x] = row[token]
        assert torch.equal(getattr(strip, part).nan_to_num(99), want.nan_to_num(99))
        assert torch.equal(strip.data[f"token_{part}"], row)
    assert strip.query == (0, 0, 0)
    assert strip.distance[strip.query] == 0
    assert strip.data["shown"].tolist()[0] == [[2, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, 1]]
    assert strip.data["edges"].tolist() == [0, 5000, 10000]
    assert strip.names == ("0 to 5 ms", "5 to 10 ms")
    assert strip.query_name == "token 3 of 6, x 1, y 1, 5 ms"
    shares = strip.data["token_attention"].view(2, 3).sum(1)  # also of tokens that newer ones hide
    torch.testing.assert_close(strip.shares, shares)
    on_class = float(found[1].parts().attention[0, 1, 3, 0]) if first else 0.0
    assert float(strip.shares.sum()) + on_class == pytest.approx(1)


def test_a_query_that_a_newer_token_hides_is_told():
    model = event_model()
    strip = analysis_maps.make_event_strip(model, events(model), layer=1, head=1, query=(1,), columns=2)
    assert strip.query_name == "token 1 of 6, x 1, y 1, 0 ms; its cell shows a newer token"
    assert strip.data["token_distance"][0] == 0
    assert strip.distance[strip.query] == strip.data["token_distance"][2] < 0


def test_events_at_one_time_and_the_least_grid():
    model = event_model()
    sample = {**events(model), "t": torch.full((6,), 70_000.0, dtype=torch.float64)}
    strip = analysis_maps.make_event_strip(model, sample, layer=1, head=1, columns=3)
    assert strip.distance.shape == (3, 3, 4)
    assert (~strip.distance.isnan()).sum((1, 2)).tolist() == [0, 0, 3]
    assert strip.data["query_token"] == 2  # the middle one


def test_nearest_token_in_the_models_units():
    """Token 5 is a patch away in x and in y and 3 ms later than the place; token 4 is 1 ms later, but elsewhere."""
    model = event_model(time_scale=1e6)
    find = lambda *query: int(  # noqa: E731
        analysis_maps.make_event_strip(model, events(model), layer=1, head=1, query=query).data["query_token"]
    )
    assert find(1, 1, 0) == 0
    assert find(1, 1, 10) == 5
    assert find(4, 3, 2.9) == 1
    assert find(4, 3, 3.1) == 3
    assert find(1, 2, 4) == 2  # one patch from tokens 1, 3, 6 and 5; token 3 is next in time
    model.time_scale = 1e-3
    assert find(4, 3, 0) == 0  # time decides
    for number in range(1, 7):
        assert find(number) == number - 1


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ((0,), "query must be a token from 1 to 6, got '0'"),
        ((7,), "query must be a token from 1 to 6, got '7'"),
        ((1.5,), "query must be a token from 1 to 6, got '1.5'"),
        ((1, 2), "query must be the number of a token or x,y,milliseconds, got '1,2'"),
        ((5, 1, 0), "column of the query must be from 1 to 4"),
        ((1, 4, 0), "row of the query must be from 1 to 3"),
    ],
)
def test_events_refuse(query, message):
    model = event_model()
    with pytest.raises(ReportError, match=message):
        analysis_maps.make_event_strip(model, events(model), layer=1, head=1, query=query, grid=(3, 4))


def test_no_token_nothing_looks():
    model = event_model()
    none = {name: value[:0] for name, value in events(model).items() if name in ("codes", "x", "y", "t")}
    with pytest.raises(ReportError, match="has no token"):
        analysis_maps.make_event_strip(model, none, layer=1, head=1)


def test_pictures_have_the_events_of_their_tokens():
    model = event_model()
    sample = events(model)
    strip = analysis_maps.make_event_strip(model, sample, layer=1, head=1, columns=2, grid=(3, 4))
    want = np.zeros((2, 2, 12, 16), int)
    for token in range(6):
        for code in sample["codes"][token].tolist():
            polarity, _, row, col = np.unravel_index(code, (2, model.buckets, 4, 4))
            want[int(T[token] >= 5000), polarity, Y[token] * 4 + row, X[token] * 4 + col] += 1
    assert np.array_equal(strip.data["events"].numpy(), want)
    assert want.sum() == 30
    assert torch.equal(strip.pictures, analysis_maps.paint(strip.data["events"]))


def test_colours_of_events():
    counts = torch.zeros(1, 2, 1, 4, dtype=torch.long)
    counts[0, 0, 0, 1], counts[0, 1, 0, 2], counts[0, 1, 0, 3] = 9, 9, 1  # OFF, ON, less ON
    white, off, on, weak = analysis_maps.paint(counts)[0, :, 0].T
    assert white.tolist() == [1, 1, 1]
    assert off[2] > off[0]  # blue
    assert on[0] > on[2]  # red
    assert (on < weak).all()
    assert (weak < 1).all()


def test_numbers_are_written(tmp_path):
    model = event_model()
    strip = analysis_maps.make_event_strip(model, events(model), layer=1, head=1, columns=2)
    analysis_maps.save(tmp_path / "maps.npz", strip)
    arrays = np.load(tmp_path / "maps.npz")
    for part in PARTS:
        assert np.array_equal(arrays[part], getattr(strip, part).numpy(), equal_nan=True)
    total = arrays["distance"] + arrays["direction"] + arrays["semantics"]
    assert np.array_equal(arrays["sum"], total, equal_nan=True)
    assert arrays["query"].tolist() == list(strip.query)
    for name in ("pictures", "shares", "events", "edges", "shown", "token_x", "token_t", "token_attention"):
        assert name in arrays
    assert arrays["token_t"].tolist() == T.tolist()


def test_drawing(tmp_path, monkeypatch):
    """One colour scale per row, the query in its column and nowhere else, hatches where there is no token."""
    model, figures = event_model(), []
    strip = analysis_maps.make_event_strip(model, events(model), layer=1, head=1, query=(4,), columns=2, grid=(3, 4))
    monkeypatch.setattr(analysis_plot, "save", lambda figure, path: figures.append(figure))
    analysis_plot.draw(tmp_path / "strip.png", strip, title="PaPE, layer 1, head 1")
    figure = figures[0]
    pictures, maps = (
        figure.axes[:2],
        [axis for axis in figure.axes[2:] if axis.images and axis.images[0].get_array().shape == (3, 4)],
    )
    assert len(maps) == 10
    for row in range(5):
        norms = [axis.images[0].norm for axis in maps[2 * row : 2 * row + 2]]
        assert norms[0] is norms[1]
        bars = [axis for axis in figure.axes if getattr(axis, "_colorbar", None) and axis._colorbar.norm is norms[0]]
        assert len(bars) == 1
    for number, axis in enumerate(maps):
        marks = [line.get_xydata().tolist() for line in axis.lines]
        assert marks == ([[[3.0, 2.0]]] if number % 2 == 1 else [])  # token 4: x 3, y 2 in the second column
        assert any(patch.get_hatch() for patch in axis.patches)
        assert axis.images[0].get_array().mask.sum() == (10 if number % 2 == 0 else 9)
    assert [len(axis.patches) for axis in pictures] == [0, 1]
    assert pictures[1].patches[0].get_xy() == (3 * 4 - 0.5, 2 * 4 - 0.5)
    assert [axis.get_title() for axis in pictures] == list(strip.names)
    texts = " ".join(text.get_text() for text in figure.texts)
    assert "PaPE, layer 1, head 1" in texts
    assert "query: token 4 of 6, x 4, y 3, 5 ms" in texts
    assert f"class token {analysis_plot._percent(1 - float(strip.shares.sum()))}" in texts


@pytest.mark.parametrize(
    ("values", "options", "limits"),
    [
        ([0.0, 0.0], dict(centred=True), (-1, 1)),
        ([-3.0, 1.0], dict(centred=True), (-3, 3)),
        ([0.2, 0.4], dict(from_zero=True), (0, 0.4)),
        ([-5.0, float("nan"), 2.0], {}, (-5, 2)),
        ([-500.0, 0.0], {}, (-500, 0)),
    ],
)
def test_colour_scales(values, options, limits):
    from matplotlib.colors import SymLogNorm

    scale = analysis_plot._scale(torch.tensor(values), **options)
    assert (scale.vmin, scale.vmax) == pytest.approx(limits)
    assert isinstance(scale, SymLogNorm) == (max(map(abs, limits)) > 20)


RECIPE = """
[model]
name = "{model}"
encoding = "pape"
[model.options]
dim = 16
heads = 2
depth = 2
mlp_dim = 16
parabolas = 3
[data]
name = "{data}"
root = "{root}"
[data.options]
complete = false
{options}
[optim]
epochs = 1
batch = 4
lr = 1e-3
"""


def test_command_for_videos(tmp_path, capsys):
    pytest.importorskip("av")
    from parapos.data.video_tree import make_ucf101

    make_ucf101(tmp_path / "data", classes=2, groups=4, clips=1, frames=(21, 21))
    recipe = RECIPE.format(
        model="vivit_nano_patch16", data="ucf101", root=tmp_path / "data", options="height = 48\nwidth = 64"
    )
    (tmp_path / "recipe.toml").write_text(recipe)
    run = make_run(tmp_path / "run", source=tmp_path / "recipe.toml", classes=2)
    assert main(f"analyze {run} --samples 2 --query 2,3,4 --layer 2 --head 1".split()) == 0
    arrays = np.load(run / "analysis" / "maps.npz")
    assert arrays["distance"].shape == (2, 3, 4)  # clips of 21 frames have two tubelets of five
    assert arrays["query"].tolist() == [1, 2, 3]
    from parapos.data.ucf101 import ucf101

    frames = ucf101("test", root=tmp_path / "data", complete=False).frames(0)  # (4, 3, 48, 64), 0 to 255
    np.testing.assert_allclose(arrays["pictures"], frames[::2].numpy() / 255, atol=1e-6)
    told = json.loads((run / "analysis" / "heads.json").read_text())
    assert (told["samples"], told["size"], np.array(told["z"]).shape) == (2, None, (2, 2))
    assert (run / "analysis" / "maps.png").read_bytes()[1:4] == b"PNG"
    capsys.readouterr()
    for words, message in (
        ("--size 64", "size is for models of images, got 64 for vivit_nano_patch16"),
        ("--image some.png", "image is for models of images, got some.png for vivit_nano_patch16"),
        ("--columns 3", "columns is for models of events, got 3"),
        ("--query 3,1,1", "tubelet of the query must be from 1 to 2"),
        ("--query 1,1", "query must be tubelet,row,col counted from 1, got '1,1'"),
        ("--layer 3", "layer must be from 1 to 2, got 3"),
    ):
        assert main(["analyze", str(run), *words.split()]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert "heads:" not in err  # told before heads are scored


def test_command_for_events(tmp_path, capsys):
    pytest.importorskip("numba")
    from parapos.data.events_tree import make_dvsgesture

    make_dvsgesture(tmp_path / "data", users=(1, 21, 24), lights=("led",))
    recipe = RECIPE.format(
        model="event_vit_nano_patch16", data="dvsgesture", root=tmp_path / "data", options="threshold = 64"
    )
    (tmp_path / "recipe.toml").write_text(recipe)
    run = make_run(tmp_path / "run", source=tmp_path / "recipe.toml", classes=11)
    assert main(f"analyze {run} --samples 2 --index 3 --query 4,5,300 --columns 4".split()) == 0
    arrays = np.load(run / "analysis" / "maps.npz")
    assert arrays["distance"].shape == (4, 8, 8)
    assert arrays["events"].shape == (4, 2, 128, 128)
    assert arrays["events"].sum() == 64 * len(arrays["token_t"])
    assert np.isnan(arrays["distance"]).any()
    told = json.loads((run / "analysis" / "heads.json").read_text())
    assert (told["samples"], np.array(told["z"]).shape) == (2, (2, 2))
    assert (run / "analysis" / "maps.png").read_bytes()[1:4] == b"PNG"
    capsys.readouterr()
    for words, message in (
        ("--query 1,1", "query must be the number of a token or x,y,milliseconds, got '1,1'"),
        ("--query 9,1,0", "column of the query must be from 1 to 8"),
        ("--size 64", "size is for models of images"),
        ("--columns 0", "expected a whole number from 1 to 24, got '0'"),
    ):
        assert main(["analyze", str(run), *words.split()]) == 2
        assert message in capsys.readouterr().err
