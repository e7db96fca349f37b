"""`parapos predict`: what is read, what is written, and what is said of files that cannot be read."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from parapos import cli
from parapos.predict import PredictError, files
from tests.predict.conftest import make_detector


def run(*words):
    return cli.main(["predict", *map(str, words)])


def read(out):
    return json.loads((out / "predictions.json").read_text())


def test_a_folder_of_images(digits_run, pictures, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(digits_run, pictures, "--out", out, "--batch", 2) == 0
    found = read(out)
    assert found["task"] == "classification"
    assert [entry["file"] for entry in found["files"]] == [
        str(pictures / name) for name in ("a.png", "b.jpg", "deep/a.png")
    ]
    for entry in found["files"]:
        scores = [answer["score"] for answer in entry["classes"]]
        assert len(scores) == 5
        assert scores == sorted(scores, reverse=True)
        assert 0 < sum(scores) <= 1.00001
        with Image.open(entry["file"]) as given, Image.open(out / entry["picture"]) as drawn:
            assert (entry["width"], entry["height"]) == given.size
            assert drawn.height > given.height
    assert len({entry["picture"] for entry in found["files"]}) == 3
    assert [entry["file"] for entry in found["skipped"]] == [str(pictures / "broken.png")]
    told, errors = capsys.readouterr()
    assert "3 of 4 files predicted, 1 with problems" in told
    assert f"could not read {pictures / 'broken.png'}: not an image" in errors
    assert "4 of 4" in errors  # progress


def test_what_is_written_is_not_read_again(digits_run, pictures):
    out = pictures / "found"
    for _ in range(2):
        assert run(digits_run, pictures, "--out", out) == 0
        assert len(read(out)["files"]) == 3


def test_patterns_and_files_count_once(digits_run, pictures, tmp_path):
    out = tmp_path / "out"
    words = [pictures / "a.png", f"{pictures}/**/a.png", pictures / "b.jpg", "--no-pictures", "--out", out]
    assert run(digits_run, *words) == 0
    assert [entry["file"] for entry in read(out)["files"]] == [
        str(pictures / name) for name in ("a.png", "deep/a.png", "b.jpg")
    ]
    assert not (out / "pictures").exists()


def test_without_out_it_goes_to_the_run(pictures, tmp_path):
    from tests.run_folders import make_run

    folder = make_run(tmp_path / "run")
    assert run(folder, pictures / "a.png") == 0
    assert (folder / "predictions" / "pictures" / "a.png").is_file()


def test_nothing_readable_is_a_failure(digits_run, pictures, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(digits_run, pictures / "broken.png", "--out", tmp_path / "out")
    assert stop.value.code == 1
    assert "0 of 1 files predicted, 1 with problems" in capsys.readouterr().out
    assert read(tmp_path / "out")["files"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{pictures}/missing.png"], "missing.png: no such file or folder"),
        (["{pictures}/*.gif"], "no file matches this pattern"),
        (["{empty}"], "no file in this folder ends in .jpeg, .jpg"),
        (["{pictures}", "--size", "30"], "size must be a multiple of the model's patch size 4, got 30 x 30"),
        (["{pictures}", "--threshold", "2"], "expected a number from 0 to 1, got '2'"),
        (["{pictures}", "--every", "0"], "expected a positive number of milliseconds, got '0'"),
        (["{pictures}", "--device", "tpu"], "invalid choice: 'tpu'"),
        ([], "required: INPUT"),
    ],
)
def test_mistakes_are_one_line(words, message, digits_run, pictures, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    words = [word.format(pictures=pictures, empty=empty) for word in words]
    assert run(digits_run, *words) == 2
    told, errors = capsys.readouterr()
    assert message in errors
    assert (told, errors.count("\n")) == ("", 1)


def test_an_error_of_the_model_is_not_blamed_on_a_file(digits_run, pictures, tmp_path, monkeypatch):
    from parapos.predict import views

    def broken(*args):
        raise ValueError("shapes do not fit")

    monkeypatch.setattr(views.Classes, "answers", broken)
    with pytest.raises(ValueError, match="shapes do not fit"):
        run(digits_run, pictures / "a.png", "--out", tmp_path / "out")


def test_without_pyav_videos_are_refused(digits_run, tmp_path, monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "v.mp4").write_bytes(b"x")
    assert run(digits_run, tmp_path / "v.mp4", "--out", tmp_path / "out") == 2
    assert "install it with: pip install 'parapos[video]'" in capsys.readouterr().err


def test_a_folder_that_is_no_run(pictures, tmp_path, capsys):
    assert run(tmp_path, pictures) == 2
    assert "not a run, it has no recipe.toml" in capsys.readouterr().err


def test_boxes_in_pixels_of_the_picture(detector_run, pictures, tmp_path):
    out = tmp_path / "out"
    assert run(detector_run, pictures, "--out", out, "--threshold", "0.3") == 0
    found = read(out)
    assert found["threshold"] == 0.3
    assert sum(len(entry["boxes"]) for entry in found["files"]) > 0
    for entry in found["files"]:
        scores = [box["score"] for box in entry["boxes"]]
        assert scores == sorted(scores, reverse=True)
        assert min(scores, default=1) >= 0.3
        for box in entry["boxes"]:
            left, top, right, bottom = box["box"]
            assert 0 <= left < right <= entry["width"]
            assert 0 <= top < bottom <= entry["height"]
            assert box["name"] == ["cat", "dog", "ufo"][box["class"]]
        with Image.open(out / entry["picture"]) as drawn, Image.open(entry["file"]) as given:
            factor = drawn.width / given.width
            assert drawn.height == factor * given.height
            if entry["boxes"]:
                plain = given.convert("RGB").resize(drawn.size, Image.Resampling.NEAREST)
                assert (np.array(drawn) != np.array(plain)).any()


def test_a_threshold_leaves_answers_out(detector_run, pictures, tmp_path):
    def scores(threshold):
        assert run(detector_run, pictures, "--out", tmp_path, "--threshold", threshold, "--no-pictures") == 0
        return [box["score"] for entry in read(tmp_path)["files"] for box in entry["boxes"]]

    everything = scores(0)
    middle = sorted(everything)[len(everything) // 2] + 1e-6
    assert scores(middle) == [score for score in everything if score >= middle]
    assert 0 < len(scores(middle)) < len(everything)
    assert scores(1) == []


def test_names_that_differ_only_in_case_do_not_collide(tmp_path):
    paths = [tmp_path / name for name in ("x.png", "X.jpg", "x-2.png")]
    assert sorted(files._names(paths).values()) == ["X-2", "x", "x-2-2"]


def test_listing_refuses_what_stands_for_nothing(tmp_path):
    with pytest.raises(PredictError, match="no such file"):
        files.list_files([tmp_path / "none"], [".png"])


def test_options_are_those_of_the_documentation(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    told = capsys.readouterr().out
    for option in ("--out", "--threshold", "--size", "--every", "--batch", "--device", "--no-pictures"):
        assert option in told


@pytest.mark.parametrize("fit", ["stretch", "inside", "pad"])
def test_odd_pictures_are_predicted_and_others_named(fit, tmp_path):
    folder, out = tmp_path / "odd", tmp_path / "out"
    folder.mkdir()
    plain = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    plain.convert("CMYK").save(folder / "cmyk.jpg")
    plain.convert("P").save(folder / "palette.png")
    plain.convert("1").save(folder / "bits.png")
    Image.fromarray(np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 21).save(folder / "deep.png")
    plain.save(folder / "moving.gif", save_all=True, append_images=[plain.transpose(Image.Transpose.ROTATE_180)])
    plain.resize((1, 1)).save(folder / "one.png")
    plain.resize((5000, 20)).save(folder / "wide.png")
    (folder / "cut.png").write_bytes((folder / "wide.png").read_bytes()[:300])
    (folder / "text.jpg").write_text("no picture")
    (folder / "empty.png").write_bytes(b"")
    assert run(make_detector(tmp_path / "run", fit=fit), folder, "--out", out, "--threshold", "0.1") == 0
    found = read(out)
    sizes = {Path(entry["file"]).name: (entry["width"], entry["height"]) for entry in found["files"]}
    odd = dict.fromkeys(("cmyk.jpg", "palette.png", "bits.png", "deep.png", "moving.gif"), (64, 48))
    assert sizes == {**odd, "one.png": (1, 1), "wide.png": (5000, 20)}
    assert all((out / entry["picture"]).is_file() for entry in found["files"])
    for entry in found["files"]:
        assert entry["boxes"]
        for box in entry["boxes"]:
            assert all(0 <= x <= most for x, most in zip(box["box"], sizes[Path(entry["file"]).name] * 2, strict=True))
    assert {Path(entry["file"]).name for entry in found["skipped"]} == {"cut.png", "text.jpg", "empty.png"}
