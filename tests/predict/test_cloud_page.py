"""The page of a cloud in a real browser: it draws, turns, colours, picks, and shows errors and attention, offline."""

import json
import re

import numpy as np
import pytest

from parapos import predict
from parapos.data.readers import ply
from parapos.predict import cloud_page
from parapos.predict.albums import ALBUMS

from ..browser import Browser, needs_browser
from .points import make_object_run, make_scene_run, write_room, write_shape

WIDTH, HEIGHT = 900, 600
MIDDLE = (300, 300)
INK = """(() => { const p = new Uint32Array(image.data.buffer);
    let n = 0, h = 0; const seen = new Set();
    for (const v of p) if (v !== p[0]) { n++; h = (h * 31 + v) | 0; seen.add(v); } else h = (h * 31) | 0;
    return [n, h, seen.size]; })()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A room with labels in a name that must not end a script, a room in pieces, and an object."""
    folder = tmp_path_factory.mktemp("pages")
    scenes, objects = make_scene_run(folder / "rooms"), make_object_run(folder / "shapes", "rope")
    write_room(folder / "a.ply", step=0.15)
    write_shape(folder / "b.off")
    made = {}
    for name, run, file, options in (
        ("</script><b>room", scenes, "a.ply", {}),
        ("pieces", scenes, "a.ply", {"cells": 200}),
        ("object", objects, "b.off", {}),
    ):
        album = ALBUMS["cloud"](folder / name.replace("/", "_"), name)
        album.add(predict.load(run, **options)(folder / file))
        made[name] = album.path
    return list(made.values())


def data_of(path):
    text = re.search(r"const data = (\{.*\});\n", path.read_text(encoding="utf-8")).group(1)
    return json.loads(text)


def test_pages_hold_all_they_need(pages):
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert "http" not in text
        assert text.count("</script>") == 1
        assert not re.search(r"\b(src|href)=", text)
        assert path.stat().st_size < 10_000_000
    room, pieces, solid = map(data_of, pages)
    assert room["title"] == "</script><b>room"
    assert {"prediction", "label", "color", "score"} <= set(room["arrays"])
    assert {"prediction", "label", "color"}.isdisjoint(solid["arrays"])
    assert [layer["level"] for layer in room["layers"]] == [0, 1, 0]
    assert len(solid["layers"]) == 2
    assert pieces["about"]["pieces"] > 1


def unpack(data, name):
    import base64

    entry = data["arrays"][name]
    return np.frombuffer(base64.b64decode(entry["data"]), f"<{entry['type']}")


def test_attention_of_pieces_names_cells_of_the_whole(pages):
    data = data_of(pages[1])
    count = data["cells"]
    assert np.array_equal(unpack(data, "level0"), np.arange(count))
    for number, layer in enumerate(data["layers"]):
        level = unpack(data, f"level{layer['level']}")
        queries, keys = unpack(data, f"queries{number}"), unpack(data, f"keys{number}")
        weights = unpack(data, f"weights{number}").reshape(-1, layer["top"]) / 65535
        assert len(keys) == len(queries) * layer["top"]
        assert np.isin(queries, level).all()
        assert len(np.unique(queries)) == len(queries)
        assert np.isin(level, queries).mean() > 0.5  # most points are queries of so small a cloud
        assert (np.diff(weights, axis=1) <= 0).all()
        assert 0.2 < weights.sum(1).mean() <= 1.001


@needs_browser
def test_a_room_in_a_browser(pages, tmp_path):
    with Browser(WIDTH, HEIGHT) as page:
        page.open(pages[0])
        pictures = {}

        def look(name):
            pictures[name] = page.run(INK)
            assert pictures[name][0] > 500, name
            return pictures[name]

        def text(id):
            return page.run(f"document.getElementById('{id}').textContent")

        assert text("title") == page.run("document.title") == "</script><b>room"
        assert "miou" in text("about")
        first = look("first")
        modes = page.run("[...document.getElementById('mode').options].map(o => o.value)")
        assert modes == ["prediction", "errors", "label", "score", "color", "height", "attention"]
        for mode in modes[1:]:
            page.choose("mode", mode)
            look(mode)
        assert len({hash for _, hash, _ in pictures.values()}) == len(pictures)  # each draws something else
        assert pictures["errors"][2] in (1, 2)  # right and wrong
        assert pictures["attention"][2] == 1  # nothing is picked yet
        assert "click a point" in text("scale")
        page.click(*MIDDLE)
        lit = look("lit")
        assert lit[2] > 3
        assert re.search(r"looks at \d+ cells with \d+% of its attention", text("picked"))
        assert re.match(r"\w+, \d+%\nx -?\d", text("picked"))
        before = text("picked")
        page.choose("layer", "1")
        assert look("coarse")[1] != lit[1]
        assert text("picked") != before
        page.choose("mode", "prediction")
        page.drag(*MIDDLE, 80, 30)
        turned = look("turned")
        page.drag(*MIDDLE, 40, 0, modifiers=8)
        assert look("moved")[1] != turned[1]
        page.wheel(*MIDDLE, -300)
        assert look("zoomed")[0] != turned[0]
        page.run("document.getElementById('canvas').focus()")
        page.key("ArrowLeft")
        assert look("key")[1] != pictures["zoomed"][1]
        page.choose("size", "2")
        assert look("small")[0] < pictures["key"][0]
        page.choose("size", page.run("document.getElementById('size').defaultValue"))
        page.run("document.getElementById('reset').click()")
        page.settle()
        hide = "document.querySelector('#legend input').click()"
        page.run(f"document.getElementById('size').value = 5; {hide}")
        page.settle()
        assert look("hidden")[1] != first[1]
        page.run(hide)
        page.settle()
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 5000
        assert page.problems == []
        assert all(url.startswith(("file:", "data:")) for url in page.requests)


@needs_browser
def test_pieces_and_objects_in_a_browser(pages):
    with Browser(WIDTH, HEIGHT) as page:
        for path, modes in ((pages[1], 7), (pages[2], 2)):
            page.open(path)
            assert page.run("document.getElementById('mode').options.length") == modes
            assert page.run(INK)[0] > 300
            page.choose("mode", "attention")
            dark = page.run(INK)
            page.run("pick(5)")
            page.settle()
            assert page.run(INK)[2] > dark[2] == 1
            assert "of its attention" in page.run("document.getElementById('picked').textContent")
        assert page.run("document.querySelectorAll('#legend tr').length") == 5
        assert page.problems == []


@needs_browser
def test_the_page_shows_what_the_arrays_say(pages):
    data = data_of(pages[0])
    prediction, label = unpack(data, "prediction"), unpack(data, "label")
    with Browser(WIDTH, HEIGHT) as page:
        page.open(pages[0])

        def shown(mode):
            page.choose("mode", mode)
            return np.array(page.run("Array.from(colors)")).reshape(-1, 3)

        colors = np.array(data["colors"])
        assert np.array_equal(shown("prediction"), colors[prediction])
        assert np.array_equal(shown("label"), colors[label])
        assert np.array_equal(shown("color"), unpack(data, "color").reshape(-1, 3))
        right, wrong = page.run("[RIGHT, WRONG]")
        assert np.array_equal(shown("errors"), np.where((prediction == label)[:, None], right, wrong))
        page.choose("mode", "attention")
        for number, layer in enumerate(data["layers"]):
            page.choose("layer", str(number))
            level, queries = unpack(data, f"level{layer['level']}"), unpack(data, f"queries{number}")
            keys = unpack(data, f"keys{number}").reshape(-1, layer["top"])
            weights = unpack(data, f"weights{number}").reshape(-1, layer["top"]) / 65535
            for point in (3, 50):
                page.run(f"pick({point})")
                page.settle()
                asked, light = page.run("[asked, Array.from(light)]")
                assert asked == point or level[point] not in queries
                (row,) = np.flatnonzero(queries == level[asked])
                share = dict(zip(keys[row].tolist(), weights[row].tolist(), strict=True))
                assert np.allclose(light, [share.get(group, 0) for group in level.tolist()], atol=1e-6)
        page.run("hidden.add(data.answers[0].class); paint()")
        page.settle()
        assert np.array_equal(page.run("Array.from(visible)"), prediction != data["answers"][0]["class"])
        assert page.problems == []


@needs_browser
def test_a_narrow_window(pages):
    with Browser(400, 700) as page:
        page.open(pages[0])
        assert page.run(INK)[0] > 300
        assert page.run("document.documentElement.scrollWidth") <= 400
        assert page.problems == []


def test_large_clouds_show_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(cloud_page, "SHOWN", 100)
    monkeypatch.setattr(cloud_page, "PAIRS", 5000)
    write_room(tmp_path / "a.ply")
    found = predict.load(make_scene_run(tmp_path / "run"))(tmp_path / "a.ply")
    album = ALBUMS["cloud"](tmp_path / "a-page", "a")
    album.add(found)
    data = data_of(album.path)
    assert len(unpack(data, "prediction")) == 100 < data["cells"]
    assert all(len(unpack(data, f"keys{i}")) < 5000 for i in range(3))
    assert len(ply.read(album.paths[1]).vertex["x"]) == found.frame.about["points"]  # the file has all
