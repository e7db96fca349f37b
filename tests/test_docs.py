"""README and docs stay true: their code runs, their links lead somewhere, their tables come from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import blocks, claims, support

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


@pages
@pytest.mark.usefixtures("registries")
def test_code_runs(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), scope)
    assert bool(blocks) == bool(scope)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pages
def test_blocks_are_their_files(page: Path) -> None:
    """What `python -m tools.blocks` would write is what stands there."""
    assert page.read_text() == blocks.filled(page.read_text())


def test_every_block_is_found() -> None:
    """A marker that is misspelt would be passed over in silence."""
    for page in PAGES:
        text = page.read_text()
        assert len(re.findall(r"<!-- /?(?:benchmarks/|made: )", text)) == 2 * len(blocks.BLOCK.findall(text)), page


def test_claims_table_is_the_codes() -> None:
    text = (ROOT / "docs" / "encodings.md").read_text()
    found = re.search(r"<!-- claims -->\n(.*?)\n<!-- /claims -->", text, re.S)
    assert found
    assert found[1] == claims.table()


def test_support_matrix_is_the_codes() -> None:
    text = (ROOT / "docs/kernels.md").read_text()
    found = re.search(r"<!-- support -->\n(.*?)\n<!-- /support -->", text, re.S)
    assert found
    assert found[1] == support.table()


def test_quirks_table_is_the_codes() -> None:
    from parapos.encodings import ENCODINGS

    text = (ROOT / "docs" / "official.md").read_text()
    for name in ("pape", "alibi", "rope"):
        assert f"| `{name}` | {ENCODINGS[name].quirks} |" in text
