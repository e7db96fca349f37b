"""What is on the shelf is found by name, and the paper's figures by section, row and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from parapos import recipes


def test_a_figure_that_the_paper_has():
    assert recipes.published("generality", "pape", "ucf101") == 49.5
    assert recipes.published("efficiency", "pape m=50", "inference_time") == 1.6


@pytest.mark.parametrize(
    "place",
    [
        ("generality", "lookhere", "ucf101"),  # not a number in the file
        ("generality", "lookhere", "mnist"),
        ("generality", "nobody", "ucf101"),
        ("", "pape", "ucf101"),
    ],
    ids=lambda place: "-".join(place),
)
def test_a_figure_that_the_paper_does_not_have(place):
    assert recipes.published(*place) is None


def test_names_are_found_in_their_folder_and_paths_stay():
    assert recipes.find("demo") == recipes.shelf()["demo"]
    assert recipes.find("demo", "tables", "table") == recipes.shelf("tables")["demo"] != recipes.find("demo")
    assert recipes.find("my/own.toml") == Path("my/own.toml")
    with pytest.raises(LookupError, match=r"unknown table 'deom', expected .* did you mean 'demo'\?"):
        recipes.find("deom", "tables", "table")
