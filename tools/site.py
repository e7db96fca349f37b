"""The docs site: python -m tools.site [OUT]. Prepares the pages, builds them with Zensical, checks every link.

docs/ links to files of the repository, as readers of it want. The site has no such files, so each linked one becomes a
page; tutorials become pages too, and the page of the command line is made from the parser.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
KINDS = {".py": "python", ".toml": "toml", ".csv": "text", ".txt": "text", ".json": "json"}


def prepare(out: Path) -> None:
    """Writes OUT/pages and the configuration beside it."""
    pages = out / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "docs", pages)
    shutil.copyfile(ROOT / "zensical.toml", out / "zensical.toml")
    (pages / "reference" / "commands.md").write_text(commands())
    for path in sorted((ROOT / "examples").glob("*.py")):
        write_tutorial(path, pages)
    waiting, seen = [*pages.rglob("*.md")], set()
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            waiting += _rewrite(page, pages)


def write_tutorial(path: Path, pages: Path) -> None:
    """A script in percent format as a page; a plain script as its text and its code."""
    import jupytext

    target = pages / "examples" / f"{path.stem}.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text()
    if "# %%" in text:
        book = jupytext.reads(text, fmt="py:percent")
        parts = [
            cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```" for cell in book.cells
        ]
        body = "\n\n".join(parts)
    else:
        body = f"# {path.stem}\n\n```python\n{text}```"
    command = f"Run it from a clone: `python examples/{path.name}`."
    target.write_text(f"{body}\n\n{command}\n")


def _rewrite(page: Path, pages: Path) -> list[Path]:
    """Makes links to files outside docs/ lead to pages. Returns the pages that this made."""
    made = []
    home = ROOT / "docs" / page.relative_to(pages)
    if not home.exists():
        folder = pages / "source" if page.is_relative_to(pages / "source") else pages
        home = ROOT / page.relative_to(folder)

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = Path(os.path.normpath(home.parent / target))
        if path.is_relative_to(ROOT / "docs"):
            new = pages / path.relative_to(ROOT / "docs")
        elif path.is_relative_to(ROOT / "examples"):
            new = pages / "examples" / f"{path.stem}.md" if path.suffix == ".py" else pages / "gallery.md"
        elif path == ROOT / "README.md":
            new = pages / "index.md"
        else:
            new = pages / "source" / f"{path.relative_to(ROOT)}{'' if path.suffix == '.md' else '.md'}"
            if path.is_file() and not new.exists():
                new.parent.mkdir(parents=True, exist_ok=True)
                new.write_text(_as_page(path))
                made.append(new)
        return f"]({os.path.relpath(new, page.parent)}{anchor})"

    text = page.read_text()
    parts = re.split(r"(```.*?```)", text, flags=re.S)  # code has no links
    page.write_text("".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts))
    return made


def _as_page(path: Path) -> str:
    text, name = path.read_text(), path.relative_to(ROOT)
    if path.suffix == ".md":
        return text if text.startswith("# ") else f"# {name}\n\n{text}"
    return f"# {name}\n\n````{KINDS.get(path.suffix, 'text')}\n{text}````\n"


def commands() -> str:
    """The help of every command, as a page."""
    from parapos.cli import parser

    os.environ["COLUMNS"] = "100"
    top = parser()
    parts = ["# The command line", f"```text\n{top.format_help()}```"]

    def walk(current: argparse.ArgumentParser) -> None:
        for action in current._actions:
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    parts.append(f"## {child.prog}\n\n```text\n{child.format_help()}```")
                    walk(child)

    walk(top)
    return "\n\n".join(parts) + "\n"


class _Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.anchors, self.loaded = list[str](), set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = dict(attributes)
        for name in ("href", "src"):
            if value := known.get(name):
                self.links.append(value)
                if name == "src" or known.get("rel") in ("stylesheet", "preload", "modulepreload"):
                    self.loaded.append(value)
        self.anchors |= {value for name in ("id", "name") if (value := known.get(name))}


def broken_links(site: Path) -> list[str]:
    """Links of a built site that lead nowhere, and files that a page would load from elsewhere."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in page.links:
            address, anchor = urldefrag(link)
            if "://" in address or address.startswith(("mailto:", "data:", "//")):
                if link in page.loaded and not address.startswith("data:"):
                    found.append(f"{path.relative_to(site)}: {link}: loaded from elsewhere")
                continue
            target = path if not address else Path(os.path.normpath(path.parent / unquote(address)))
            if path.name == "404.html" and address.startswith("/"):
                target = site / address.lstrip("/")
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                found.append(f"{path.relative_to(site)}: {link}")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                found.append(f"{path.relative_to(site)}: {link}: no such heading")
    return found


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "build")
    prepare(out)
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "zensical",
            "build",
            "--clean",
            "--strict",
            "-f",
            str((out / "zensical.toml").resolve()),
        ],
        cwd=out,
        capture_output=True,
        text=True,
    )
    print(result.stdout + result.stderr, end="")
    if result.returncode or "warning" in (result.stdout + result.stderr).lower():
        return 1
    broken = broken_links(out / "site")
    for line in broken:
        print(f"broken link: {line}")
    pages = len(list((out / "site").rglob("*.html")))
    print(f"{out / 'site' / 'index.html'}: {pages} pages, {len(broken)} broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
