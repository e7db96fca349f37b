"""What `parapos prepare imagenet` says of a copy of ImageNet."""

import pytest

from parapos import cli
from parapos.data.imagenet import check

from .imagenet_trees import CLS_LOC


def test_check_counts_and_reads(copied):
    seen = []
    found = check(copied, complete=False, progress=lambda items, name: seen.append(name) or items)
    rows = {what.strip(): count for what, count, _ in found.rows}
    assert found.problems == []
    assert rows["classes"] == "12"
    assert rows["train images"] == "240"
    assert rows["of them for validation"] == "12"
    assert rows["test images"] == "24"
    assert rows["ImageNet-R images"] == "8"
    assert rows["ImageNetV2 top-images images"] == "not there"
    assert len(seen) == 4
    (copied / CLS_LOC / "val" / "ILSVRC2012_val_00000002.JPEG").write_bytes(b"\xff\xd8broken")
    (problem,) = check(copied, complete=False).problems
    assert problem.startswith("unreadable: ")
    assert "ILSVRC2012_val_00000002.JPEG" in problem
    assert check(copied, complete=False, sample=0).problems == []


def test_check_knows_the_true_counts(copied):
    problems = "\n".join(check(copied, sample=1).problems)
    assert "classes: found 12, expected 1,000" in problems
    assert "train images: found 240, expected 1,281,167" in problems
    assert "test images: found 24, expected 50,000" in problems
    assert "1000 classes have not 50 images each; class 0 has 2" in problems
    assert "top-images" not in problems
    rows = {what.strip(): expected for what, _, expected in check(copied, sample=0).rows}
    assert (rows["of them for training"], rows["of them for validation"]) == ("1,268,356", "12,811")


def test_check_tells_broken_metadata(copied):
    (copied / "imagenet_class_index.json").write_text("{")
    (problem,) = check(copied).problems
    assert "not JSON" in problem


def test_command(tmp_path, capsys):
    root = str(tmp_path / "new")
    assert cli.main(["prepare", "imagenet", "--synthetic", "--root", root]) == 0
    out, err = capsys.readouterr()
    assert "| train images" in out
    assert "validation.txt, sha256" in out
    assert "train images: 240 of 240" in err
    held = (tmp_path / "new" / "validation.txt").read_text().splitlines()
    assert len(held) == 12
    (tmp_path / "new" / "validation.txt").unlink()
    assert cli.main(["prepare", "imagenet", "--check", "--partial", "--sample", "3", "--root", root]) == 0
    assert not (tmp_path / "new" / "validation.txt").exists()
    with pytest.raises(SystemExit) as stop:
        cli.main(["prepare", "imagenet", "--root", root])
    assert stop.value.code == 1
    assert "found 240, expected 1,281,167" in capsys.readouterr().out
    assert not (tmp_path / "new" / "validation.txt").exists()
    assert cli.main(["prepare", "imagenet", "--synthetic", "--root", root]) == 2
    assert capsys.readouterr().err.endswith("not empty, expected a new folder\n")
    assert cli.main(["prepare", "imagenet", "--synthetic", "--check"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err
