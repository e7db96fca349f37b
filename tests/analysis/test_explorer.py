"""The explorer's page: its numbers are PyTorch's, its interactions change what is drawn, and it stays small."""

from __future__ import annotations

import base64
import json
import re
from itertools import product

import pytest
import torch

from parapos import cli, create_model
from parapos.analysis import explorer
from parapos.analysis.explorer.export import describe, pack
from parapos.analysis.maps import make_maps
from parapos.analysis.scores import watch
from parapos.blocks import Attention
from parapos.encodings import ENCODINGS
from parapos.experiments import demo
from parapos.experiments.store import ReportError
from parapos.training import checkpoint

from .chromium import BROWSER, WHY, Page

browser = pytest.mark.skipif(BROWSER is None, reason=WHY)
FOUR = [("up-left", 0.5), ("right", 0.5), ("down", 0.25), ("all", 0.25)]
CASES = {
    "pape": dict(parabolas=5),
    "pape cls": dict(parabolas=3, pool="cls", qk_dim=6),
    "pape unplaced": dict(parabolas=3, pool="cls", cls_position="unplaced"),
    "pape direct": dict(form="direct"),
    "pape ablated": dict(context=False, activation=False),
    "pape wide": dict(init="wide", direction=False),
    "pape_ri": {},
    "rope": dict(qk_dim=6),
    "rope_mixed": {},
    "alibi": dict(pool="cls"),
    "lookhere": dict(directions=FOUR, pool="cls"),
    "sincos": dict(dim=26, head_dim=6),
    "none": {},
}


def small(case):
    """A model with random weights everywhere, also where training starts from zero."""
    options = dict(dim=24, heads=4, depth=2, mlp_dim=16, num_classes=5, patch=4, pool="mean") | CASES[case]
    model = create_model("vit_nano_patch4", encoding=case.split()[0], **options).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "frequencies" not in name and "l_0" not in name:
                p.add_(torch.randn_like(p) * (0.3 if "classifier" in name else 0.05))
    return model


def as_page(models, folder):
    """A page of models that belong to no run."""
    data = []
    for name, model in models.items():
        about = describe(model, name)
        about |= dict(name=name, encoding="pape", label=name, colour="#888888", trained=16, positional=None)
        data.append(about | dict(classes=list("abcde"), mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7]))
    png = explorer._png(torch.rand(3, 64, 64), data[0])
    path = folder / "page.html"
    path.write_text(explorer.page({"models": data, "samples": [{"label": "a", "png": png}], "largest": 4}))
    return path


def text(x):
    return base64.b64encode(x.contiguous().numpy().astype("<f4").tobytes()).decode()


RUN = """(async () => {
  const bytes = Uint8Array.from(atob("%s"), (c) => c.charCodeAt(0)), image = new Float32Array(bytes.buffer);
  const { logits } = await explorer.ask("run", { model: %d, image, height: %d, width: %d, scale: %r });
  const looks = [];
  for (const [layer, head, query] of %s) {
    const parts = await explorer.ask("look", { model: %d, layer, head, query });
    const names = ["distance", "direction", "bias", "semantics", "scores", "attention"];
    looks.push(names.map((name) => Array.from(parts[name].slice(parts.first), (v) => Number.isFinite(v) ? v : null)));
  }
  return { logits, looks };
})()"""


def in_browser(page, index, image, scale, asked):
    height, width = image.shape[1:]
    return page.run(RUN % (text(image), index, height, width, scale, json.dumps(asked), index))


def normal(image, mean, std):
    return (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def close(a, b, message):
    """To 1e-4, also where scores are in the hundreds; so PyTorch computes in float64, whose float32 is less exact."""
    assert b.dtype == torch.float64
    error = float((torch.tensor(a, dtype=torch.float64) - b).abs().max())
    assert error <= 1e-4, f"{message}: off by {error:.1e}, the largest is {b.abs().max():.1f}"


@pytest.fixture(scope="module")
def one_page(tmp_path_factory):
    """A browser for all tests of this file."""
    folder = tmp_path_factory.mktemp("explorer")
    torch.manual_seed(0)
    models = {case: small(case) for case in CASES}
    page = Page(as_page(models, folder).as_uri(), folder / "profile")
    settle(page)
    yield page, models
    page.close()


@browser
@pytest.mark.parametrize("kind", CASES)
def test_every_encoding_runs_as_in_pytorch(kind, one_page):
    page, models = one_page
    model, index = models[kind].double(), list(models).index(kind)
    g = torch.Generator().manual_seed(index)
    for height, width, scale in ((16, 16, 1.0), (24, 40, 0.4)):
        image = torch.rand(3, height, width, generator=g)
        given = normal(image, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]).double()
        rows, cols = height // 4, width // 4
        queries = torch.randint(rows * cols, (2,), generator=g).tolist()
        asked = [[layer, head, query] for layer, head, query in product(range(2), range(4), queries)]
        answer = in_browser(page, index, image, scale, asked)
        with torch.no_grad():
            close(answer["logits"], model(given[None], scale)[0], f"{kind} logits")
        if kind.startswith("pape") and scale == 1:
            for (layer, head, query), parts in zip(asked, answer["looks"], strict=True):
                maps = make_maps(
                    model, given, layer=layer + 1, head=head + 1, query=(query // cols + 1, query % cols + 1)
                )
                known = (maps.distance, maps.direction, torch.zeros_like(maps.distance), maps.semantics)
                for name, a, b in zip(("distance", "direction", "bias", "content"), parts[:4], known, strict=True):
                    close(a, b.flatten(), f"{kind} {name} of layer {layer}, head {head}")
                if model.cls is None:
                    close(parts[5], maps.attention.flatten(), f"{kind} attention")
    assert not page.errors


def test_the_matrix_has_every_encoding_or_refuses_it():
    known = {case.split()[0] for case in CASES}
    for name in ENCODINGS:
        if name not in known:
            model = create_model("vit_nano_patch4", encoding=name, num_classes=3)
            with pytest.raises(ReportError, match=r"the page knows pape, .*, got Polynomial"):
                describe(model, name)
    with pytest.raises(ReportError, match="expected a ViT that classifies images, got ViViT"):
        describe(create_model("vivit_nano_patch16", num_classes=3), "video")


def dense_scores(model, images, scale):
    """The scores of each layer of a model without score terms: (B, H, N, N)."""
    scores = []
    encodings = [module.encoding for module in model.modules() if isinstance(module, Attention)]
    hooks = [
        encoding.register_forward_hook(lambda module, _, out: scores.append(out[0] @ out[1].mT * module.scale))
        for encoding in encodings
    ]
    with torch.no_grad():
        model(images, scale)
    for hook in hooks:
        hook.remove()
    assert len(scores) == len(encodings)
    return scores


@browser
@pytest.mark.parametrize("images", [2, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["pape", "rope"])
def test_the_shipped_models_run_as_in_pytorch(name, images, tmp_path):
    """Random images, all layers and heads, at the trained size and at four times that."""
    folder = demo.shipped_folder()
    path = explorer.build([folder / "pape", folder / "rope"], tmp_path / "page.html")
    assert path.stat().st_size <= 3e6
    model, _ = checkpoint.load_weights(folder / name / "weights.safetensors")
    model.double()
    page = Page(path.as_uri(), tmp_path / "profile")
    settle(page)
    g = torch.Generator().manual_seed(0)
    for number in range(images):
        for size, scale in ((24, 1.0), (96, 0.25 if number % 2 else 1.0)):
            image, query = torch.rand(3, size, size, generator=g), number * (size // 4) ** 2 // images
            asked = [[layer, head, query] for layer, head in product(range(3), range(4))]
            answer = in_browser(page, ["pape", "rope"].index(name), image, scale, asked)
            with torch.no_grad():
                close(answer["logits"], model(image[None].double(), scale)[0], f"{name}, image {number}, {size} px")
            if name == "pape":
                with watch(model) as layers:
                    model(image[None].double(), scale)
                    for (layer, head, _), parts in zip(asked, answer["looks"], strict=True):
                        known = layers[layer].parts(rows=slice(query, query + 1))
                        for place, part in ((0, "distance"), (1, "direction"), (3, "semantics"), (5, "attention")):
                            close(parts[place], getattr(known, part)[0, head, 0], f"{part}, image {number}, {size} px")
            else:
                scores = dense_scores(model, image[None].double(), scale)
                for (layer, head, _), parts in zip(asked, answer["looks"], strict=True):
                    row = scores[layer][0, head, query]
                    close(parts[3], row, f"scores, image {number}, {size} px")
                    close(parts[5], row.softmax(-1), f"attention, image {number}, {size} px")
    assert not page.errors
    page.close()


@browser
def test_resizing_is_pytorchs(one_page):
    page, _ = one_page
    image = torch.rand(3, 31, 31)
    for to in (8, 20, 31, 64):
        script = f"""(() => {{ const b = Uint8Array.from(atob("{text(image)}"), (c) => c.charCodeAt(0));
            return Array.from(explorer.resize(new Float32Array(b.buffer), 31, 31, {to}, {to})); }})()"""
        want = torch.nn.functional.interpolate(image[None].double(), size=(to, to), mode="bilinear", antialias=True)[0]
        close(page.run(script), want.flatten(), f"31 to {to}")


@pytest.fixture(scope="module")
def shipped_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explore")
    assert cli.main(["explore", "--out", str(folder / "explore.html")]) == 0
    page = Page((folder / "explore.html").as_uri(), folder / "profile")
    settle(page)
    yield page
    page.close()


def settle(page):
    page.wait("document.getElementById('status').textContent.includes(':')")
    page.run("explorer.settled()")


def seen(page):
    """What is drawn: sums of all maps of the first model, the image's pixels, the prediction."""
    return page.run(
        """({ maps: Object.values(explorer.panels[0].canvases).map(({ canvas }) => canvas.dataset.sum),
             beside: Object.values(explorer.panels[1].canvases).map(({ canvas }) => canvas.dataset.sum),
             image: document.getElementById("image").toDataURL(), logits: explorer.panels[0].logits,
             picture: explorer.picture().toDataURL().length, hash: location.hash })"""
    )


def centre_of(page, selector):
    box = page.run(f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect(); "
                   "return [b.left, b.top, b.width, b.height]; })()")  # fmt: skip
    return box


@browser
def test_what_people_do_changes_what_is_drawn(shipped_page):
    page = shipped_page

    def after(act):
        before = seen(page)
        act()
        settle(page)
        return before, seen(page)

    left, top, width, height = centre_of(page, "#image")

    def drag():
        page.mouse("mousePressed", left + 0.2 * width, top + 0.9 * height)
        page.mouse("mouseMoved", left + 0.8 * width, top + 0.1 * height)
        page.mouse("mouseReleased", left + 0.8 * width, top + 0.1 * height)

    old, new = after(drag)
    assert new["maps"] != old["maps"]
    assert new["beside"] != old["beside"]
    assert new["image"] != old["image"]
    assert new["logits"] == old["logits"], "a query changes no prediction"
    assert re.search(r"x=0\.8\d*&y=0\.[01]", new["hash"])
    page.run("document.getElementById('image').focus()")
    old, new = after(lambda: page.key("ArrowDown"))
    assert new["maps"] != old["maps"]
    old, new = after(lambda: page.key("]"))
    assert new["maps"] != old["maps"]
    old, new = after(lambda: page.key("+"))
    assert "size=28" in new["hash"]
    assert new["logits"] != old["logits"]
    change = (
        "(() => {{ const s = document.getElementById('{0}'); s.value = {1}; s.dispatchEvent(new Event('{2}')); }})()"
    )
    old, new = after(lambda: page.run(change.format("size", 96, "input")))
    assert "size=96" in new["hash"]
    assert new["logits"] != old["logits"]
    old, new = after(lambda: page.run("document.querySelector('[name=positions][value=\"1\"]').click()"))
    assert new["logits"] != old["logits"]
    assert "interpolate=1" in new["hash"]
    old, new = after(lambda: page.run("document.querySelectorAll('#samples button')[3].click()"))
    assert new["logits"] != old["logits"]
    old, new = after(lambda: page.run("document.querySelectorAll('.heads button')[5].click()"))
    assert new["maps"] != old["maps"]
    old, new = after(lambda: page.run(change.format("slider-gx", 1.5, "input")))
    assert new["maps"][2:3] == old["maps"][2:3], "what content says stays"
    assert new["maps"][1] != old["maps"][1]
    assert new["maps"][-1:] == old["maps"][-1:] or new["image"] != old["image"]  # attention sums to one
    assert "form=" in new["hash"]
    old, new = after(lambda: page.run("document.getElementById('reset').click()"))
    assert "form=" not in new["hash"]
    old, new = after(lambda: page.run("document.getElementById('invert').click()"))
    assert new["logits"] != old["logits"]
    old, new = after(lambda: page.run("document.getElementById('theme').click()"))
    assert new["image"] == old["image"] or new["hash"] != old["hash"]
    assert new["picture"] > 10000
    assert not page.errors


@browser
def test_handles_are_dragged(shipped_page):
    """The arrow's tip follows the mouse, and the push is what the place says."""
    page = shipped_page
    page.open(page.run("location.href.split('#')[0]") + "#size=24&x=0.4&y=0.4&layer=1&head=1")
    settle(page)
    before = page.run("explorer.state.form")
    left, top, width, _ = centre_of(page, "#image")
    x, y = page.run(
        """(() => { const side = document.getElementById("image").width, patch = side / 6;
             return handles(drawn.form, 2.5 * patch, 2.5 * patch, patch).push.map((v) => v / side); })()"""
    )
    page.mouse("mousePressed", left + x * width, top + y * width)
    page.mouse("mouseMoved", left + 0.9 * width, top + 0.4167 * width)
    page.mouse("mouseReleased", left + 0.9 * width, top + 0.4167 * width)
    settle(page)
    form = page.run("explorer.state.form")
    assert before is None
    push_x, push_y = page.run("[shape(explorer.state.form).gx, shape(explorer.state.form).gy]")
    assert push_x == pytest.approx((0.9 * 6 - 2.5) / 6, abs=0.02)
    assert push_y == pytest.approx(0, abs=0.02)
    again = page.run("unshape(shape(explorer.state.form))")
    assert again == pytest.approx(form, rel=1e-6), "an ellipse and an arrow are all of a form"
    assert not page.errors


@browser
def test_the_address_keeps_the_state(shipped_page):
    page = shipped_page
    base = page.run("location.href.split('#')[0]")
    page.open(f"{base}#image=2&size=48&interpolate=1&layer=2&head=3&x=0.3&y=0.6&theme=dark")
    settle(page)
    first = seen(page)
    page.open(f"{base}#image=0")
    settle(page)
    assert seen(page) != first
    page.open(base + first["hash"])
    settle(page)
    assert seen(page) == first
    state = page.run("explorer.state")
    assert (state["layer"], state["head"], state["size"], state["interpolate"]) == (1, 2, 48, True)
    page.open(f"{base}#image=99&size=1e9&layer=-4&x=nan&theme=pink&form=1,2")  # nonsense is put right
    settle(page)
    state = page.run("explorer.state")
    assert (state["image"], state["size"], state["layer"], state["form"]) == (9, 96, 0, None)
    assert not page.errors


@browser
def test_ones_own_image(shipped_page):
    page = shipped_page
    before = seen(page)["logits"]
    png = explorer._png(torch.rand(3, 70, 50), dict(mean=[0.0] * 3, std=[1.0] * 3))
    page.run(f"""(async () => {{ const bytes = Uint8Array.from(atob("{png}"), (c) => c.charCodeAt(0));
        const data = new DataTransfer(); data.items.add(new File([bytes], "a.png", {{ type: "image/png" }}));
        dispatchEvent(Object.assign(new DragEvent("drop", {{ dataTransfer: data, cancelable: true }})));
        await new Promise((r) => setTimeout(r, 300)); await explorer.settled(); }})()""")
    settle(page)
    assert seen(page)["logits"] != before
    page.run("(async () => { await explorer.take(new File(['no'], 'a.txt')); })()")
    assert "no image" in page.run("document.getElementById('status').textContent")
    assert not [e for e in page.errors if "decode" not in e]


@browser
@pytest.mark.parametrize("width", [390, 1280])
def test_no_sideways_scrolling(width, shipped_page):
    shipped_page.resize(width, 844)
    assert shipped_page.run("document.documentElement.scrollWidth") <= width
    shipped_page.resize(1280, 900)


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    folder = demo.shipped_folder()
    page = explorer.build([folder / "pape"], tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|@import|url\(", page)


def test_pages_have_a_limit(tmp_path, monkeypatch, capsys):
    folder = demo.shipped_folder()
    sizes = {}
    for dtype in ("float32", "float16", "int8"):
        sizes[dtype] = explorer.build([folder / "pape"], tmp_path / dtype, dtype=dtype).stat().st_size
    assert sizes["float32"] > 1.4 * sizes["int8"]
    monkeypatch.setattr(explorer, "LIMIT", sizes["int8"] + 1000)
    words = ["explore", str(folder / "pape"), "--out", str(tmp_path / "x.html")]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert re.search(r"the page would have 0\.\d MB, expected at most 0\.\d+ MB; try --dtype int8", err)
    assert not (tmp_path / "x.html").exists()
    assert cli.main([*words, "--dtype", "int8"]) == 0


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0.0), ("float16", 1e-3), ("int8", 1e-2)])
def test_packing(dtype, error):
    x = torch.randn(7, 5)
    blob, places = pack({"a": torch.randn(3), "b": x}, dtype)
    about, data = places["b"], base64.b64decode(blob)
    kind = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}[about["dtype"]]
    start = about["offset"] + (4 * 7 if dtype == "int8" else 0)
    found = torch.frombuffer(bytearray(data[start:]), dtype=kind)[:35].view(7, 5).float()
    if dtype == "int8":
        factors = data[about["offset"] : about["offset"] + 4 * 7]
        found = found * torch.frombuffer(bytearray(factors), dtype=torch.float32)[:, None]
    assert float((found - x).abs().max()) <= error * float(x.abs().max())


def test_runs_that_do_not_go_together(tmp_path):
    folder = demo.shipped_folder()
    with pytest.raises(ReportError, match="dtype must be one of float32, float16, int8, got 'float64'"):
        explorer.build([folder / "pape"], tmp_path / "x.html", dtype="float64")
