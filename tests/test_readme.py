"""What the README says beyond its generated tables is what committed results, the code and other packages show."""

from __future__ import annotations

import importlib.util
import re
import statistics
from pathlib import Path

import pytest

from parapos.encodings import ENCODINGS, create_encoding
from parapos.experiments import demo, render
from parapos.recipes import paper
from tools import blocks, figures

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def mean(seeds, name, column):
    return statistics.fmean(seeds.values(name, column))


def test_sentences_on_the_demo():
    """If new results turn the story round, the sentences must be written anew."""
    seeds = demo.committed()
    assert (
        "PaPE and LookHere keep most of their accuracy at twice the size; RoPE and sin-cos lose most of theirs"
        in README
    )
    for name in ("pape", "lookhere"):
        assert mean(seeds, name, "2x") > 0.85 * mean(seeds, name, "1x")
    for name in ("rope", "sincos"):
        assert mean(seeds, name, "2x") < 0.5 * mean(seeds, name, "1x")
    assert "With interpolated positions the encodings come much closer" in README
    for column in ("2x", "4x"):
        gaps = [
            max(mean(seeds, name, kind) for name in demo.ENCODINGS)
            - min(mean(seeds, name, kind) for name in demo.ENCODINGS)
            for kind in (column, f"{column} interpolated")
        ]
        assert gaps[1] < 0.7 * gaps[0]
    assert "LookHere is ahead of PaPE in these models" in README
    for group in render.groups(seeds.grid):
        beyond = {name: statistics.fmean(seeds.beyond(name, group)) for name in demo.ENCODINGS}
        assert max(beyond, key=lambda name: beyond[name]) == "lookhere"
        if group.caption.endswith("interpolated"):
            gap = abs(beyond["rope"] - beyond["pape"])
            errors = [statistics.variance(seeds.beyond(name, group)) / seeds.seeds for name in ("rope", "pape")]
            assert gap < sum(errors) ** 0.5, "the README calls them level"
    assert "RoPE is level with PaPE on average: behind it at 2x, ahead at 4x" in README
    assert mean(seeds, "rope", "2x interpolated") < mean(seeds, "pape", "2x interpolated")
    assert mean(seeds, "rope", "4x interpolated") > mean(seeds, "pape", "4x interpolated")
    assert "at four times the size all of them degrade sharply" in README
    assert all(mean(seeds, name, "4x") < 0.6 * mean(seeds, name, "1x") for name in demo.ENCODINGS)
    words = {4: "four", 8: "eight"}
    assert f"mean and range of {words[seeds.seeds]} seeds" in README
    assert f"what {words[seeds.seeds]} seeds gave, mean" in README


def test_lookhere_is_bound_to_a_grid():
    assert "LookHere, which is defined for 2D grids of image patches only" in README
    for dimensions in (1, 3):
        with pytest.raises(ValueError, match="lookhere needs pos_dim 2"):
            create_encoding("lookhere", dim=24, heads=12, head_dim=2, pos_dim=dimensions)
        create_encoding("pape", dim=24, heads=12, head_dim=2, pos_dim=dimensions)


def test_sentences_on_the_paper():
    at_224 = [row[0] for row in paper()["extrapolation"]["rows"].values()]
    assert "In the paper it is behind PaPE at every size" in README
    rows = paper()["extrapolation"]["rows"]
    assert all(ours > theirs for ours, theirs in zip(rows["pape"], rows["lookhere"], strict=True))
    assert f"within {max(at_224) - min(at_224):.1f} points of each other" in README


def test_width_that_pape_adds():
    text = (ROOT / "benchmarks" / "precision-bf16.txt").read_text()
    extra = {form: re.search(rf"\| {form} +\| init +\| +(\d+)", text)[1] for form in ("parapos", "released")}
    assert f"| {extra['parapos']} | - | - | {extra['released']} |" in README
    assert ENCODINGS["alibi"].quirks == "the padding mask is ignored"


@pytest.mark.parametrize(
    ("package", "has"), [("timm", "RotaryEmbeddingMixed"), ("x_transformers", "AlibiPositionalBias")]
)
def test_what_other_packages_have(package, has):
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {package}")
    sources = "\n".join(path.read_text() for path in Path(spec.submodule_search_locations[0]).rglob("*.py"))
    assert has in sources
    assert not re.search(r"lookhere|parabolic", sources, re.IGNORECASE)
    if package == "x_transformers":
        assert not re.search(r"mixed.?(rope|rotary)|(rope|rotary).?mixed", sources, re.IGNORECASE)
    if package == "timm":
        assert not re.search(r"\balibi\b", sources, re.IGNORECASE)


def test_citation_is_that_of_the_file():
    cited = (ROOT / "CITATION.cff").read_text()
    for family in re.findall(r'family-names: "([^"]+)"', cited):
        plain = family.replace("Ø", "{\\O}").replace("ø", "{\\o}").replace("ü", '{\\"u}')
        assert plain in README, family
    title = re.search(r'  title: "([^"]+)"', cited)[1]
    assert title in README


def test_the_blocks_are_used():
    used = set(re.findall(r"<!-- made: (\w+) -->", "\n".join(page.read_text() for page in blocks.pages())))
    assert used == set(figures.MADE)
