"""The docs site: links to files of the repository become pages, and the link check finds what is broken."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tools import site

ROOT = Path(__file__).parent.parent.parent


def test_links_out_of_docs_become_pages(tmp_path):
    pytest.importorskip("jupytext")
    site.prepare(tmp_path)
    pages = tmp_path / "pages"
    index = (pages / "index.md").read_text()
    assert "](examples/idea.md)" in index
    assert (pages / "examples" / "idea.md").read_text().startswith("# The idea in ten minutes\n")
    kernels = (pages / "kernels.md").read_text()
    assert "](source/benchmarks/attention.md)" in kernels
    assert (pages / "source" / "benchmarks" / "attention.md").is_file()
    assert "```toml\n" in (pages / "source/src/parapos/recipes/demo.toml.md").read_text()
    commands = (pages / "reference" / "commands.md").read_text()
    assert "## parapos bench attention" in commands
    for page in pages.rglob("*.md"):
        for target in site.LINK.findall(page.read_text()):
            assert "://" in target[0] or (page.parent / target[0]).exists(), f"{page}: {target[0]}"


def test_broken_links_are_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="sub/">ok</a><a href="#top">ok</a><a href="gone.html">no</a>'
        '<a href="sub/index.html#none">no</a><img src="a.png"><a href="https://example.org/x">not looked at</a>'
        '<script src="https://cdn.example.org/x.js"></script><link rel="stylesheet" href="//fonts.example.org/a.css">'
    )
    (tmp_path / "sub" / "index.html").write_text('<a href="../index.html#top">ok</a>')
    assert site.broken_links(tmp_path) == [
        "index.html: gone.html",
        "index.html: sub/index.html#none: no such heading",
        "index.html: a.png",
        "index.html: https://cdn.example.org/x.js: loaded from elsewhere",
        "index.html: //fonts.example.org/a.css: loaded from elsewhere",
    ]


@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="needs the extra docs")
def test_the_site_builds_without_warnings(tmp_path):
    words = [sys.executable, "-m", "tools.site", str(tmp_path)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken links" in result.stdout
