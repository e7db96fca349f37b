"""UCF101 as a dataset: which frames, which clips, what is random, what happens to bad files; on generated clips."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from parapos.data import FormatError, clips
from parapos.data.batch import collate
from parapos.data.clips import complete_tubelets, frame_indices, read_clip, resize, scale_pixels, unscale_pixels
from parapos.data.readers.ucf101_lists import FOLDS, SPLITS
from parapos.data.readers.video import Frames, read_frames, write_video
from parapos.data.sampling import Key
from parapos.data.ucf101 import Augment, Videos, ucf101
from parapos.data.video_tree import make_ucf101
from parapos.training import recipe

SHARED = Path(os.environ.get("PARAPOS_SHARED", Path(__file__).resolve().parents[3] / "shared"))
SAMPLES = SHARED / "samples" / "ucf101"
SMALL = dict(height=24, width=32, complete=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tree of 3 classes, 4 groups, 2 clips each; read only."""
    root = tmp_path_factory.mktemp("ucf101")
    make_ucf101(root, classes=3, groups=4, clips=2, frames=(30, 44))
    return root


@pytest.fixture
def tree(tmp_path):
    """A tree that a test may damage: 2 classes, 4 groups, one clip each, so 4, 2 and 2 clips."""
    make_ucf101(tmp_path, classes=2, groups=4, clips=1, frames=(42, 42), size=(32, 24))
    return tmp_path


def grey(number, height=8, width=8):
    return np.full((height, width, 3), 5 * number, np.uint8)


def test_which_frames():
    frames = (0, 1, 2, 11, 12, 21, 22, 29, 31, 32, 41, 42, 50, 127)
    assert [complete_tubelets(n) for n in frames] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 5]
    assert frame_indices() == (0, 1, 10, 11, 20, 21, 30, 31, 40, 41)


def test_which_frames_with_ten_unused_ones_between_tubelets():
    frames = (0, 1, 2, 13, 14, 25, 26, 49, 50, 127)
    assert [complete_tubelets(n, "gaps") for n in frames] == [0, 0, 1, 1, 2, 2, 3, 4, 5, 5]
    assert frame_indices("gaps") == (0, 1, 12, 13, 24, 25, 36, 37, 48, 49)


@pytest.mark.parametrize("spacing", ["starts", "gaps"])
@pytest.mark.parametrize("count", [1, 2, 11, 12, 13, 14, 41, 42, 50])
def test_clips_of_all_lengths(count, spacing, tmp_path):
    write_video(tmp_path / "a.avi", [grey(i) for i in range(count)])
    frames, problem = read_clip(tmp_path / "a.avi", spacing)
    shown = [round(float(frame.float().mean()) / 5) for frame in frames]
    want = frame_indices(spacing)[: 2 * complete_tubelets(count, spacing)]
    assert shown == ([0, 0] if count == 1 else list(want))
    assert (frames.dtype, frames.shape[1:], problem) == (torch.uint8, (3, 8, 8), "")
    video = Videos(tmp_path, ["a.avi"], [0], classes=1, height=8, width=8, spacing=spacing)[0]
    assert video["tubelets"] == len(frames) // 2
    assert torch.equal(video["video"][:, : len(frames)].transpose(0, 1), frames.float())
    assert not video["video"][:, len(frames) :].any()


@pytest.mark.parametrize(("height", "width"), [(3, 5), (1, 1)])
def test_the_smallest_pictures(height, width, tmp_path):
    av = pytest.importorskip("av")
    picture = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.height, stream.width, stream.pix_fmt = height, width, "bgr0"
        for _ in range(12):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    frames, problem = read_clip(tmp_path / "a.mkv")
    assert (frames.shape, problem) == ((4, 3, height, width), "")
    assert np.array_equal(frames[0].permute(1, 2, 0).numpy(), picture)
    train = Videos(tmp_path, ["a.mkv"], [0], classes=1, height=24, width=32, augment=Augment())
    assert all(train[Key(0, epoch)]["video"].isfinite().all() for epoch in range(20))


def test_frames_of_other_sizes_follow_the_first(monkeypatch):
    images = {i: grey(i, 8 + 2 * (i > 1), 12) for i in (0, 1, 10, 11)}
    monkeypatch.setattr(clips, "read_frames", lambda path, indices: Frames(images, 12))
    frames, _ = read_clip("a.avi")
    assert frames.shape == (4, 3, 8, 12)
    assert [round(float(frame.float().mean())) for frame in frames] == [0, 5, 50, 55]


def test_pixel_scales():
    frames = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    raw, unit, normal = (scale_pixels(frames, scale) for scale in ("raw255", "unit", "imagenet"))
    assert {raw.dtype, unit.dtype, normal.dtype} == {torch.float32}
    assert torch.equal(raw, frames.float())
    torch.testing.assert_close(unit, raw / 255)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(normal, (unit - mean[:, None, None]) / std[:, None, None])
    for scale, scaled in (("raw255", raw), ("unit", unit), ("imagenet", normal)):
        torch.testing.assert_close(unscale_pixels(scaled, scale), raw / 255)
    assert unscale_pixels(torch.tensor([-1.0, 300.0]), "raw255").tolist() == [0, 1]


def test_resizing():
    frames = torch.randint(0, 256, (2, 3, 24, 32), dtype=torch.uint8)
    assert resize(frames, 24, 32) is frames
    want = torch.nn.functional.interpolate(frames.double(), (12, 16), mode="bilinear", antialias=True)
    assert (resize(frames, 12, 16) - want).abs().max() <= 1


def test_folds(made):
    tested = []
    for fold in FOLDS:
        parts = [ucf101(split, root=made, fold=fold, **SMALL) for split in SPLITS]
        assert [len(part) for part in parts] == [12, 6, 6]
        assert {part.classes for part in parts} == {3}
        groups = [{(name.split("/")[0], name.split("_g")[1][:2]) for name in part.files} for part in parts]
        assert sum(map(len, groups)) == len(set.union(*groups)) == 12
        assert {group for _, group in groups[2]} == {f"{fold:02d}"}
        assert {group for _, group in groups[1]} == {"02" if fold == 1 else "01"}
        tested += list(parts[2].files)
        for part in parts:
            names = ["SquareDown", "SquareLeft", "SquareRight"]
            assert [names[label] for label in part.labels] == [name.split("/")[0] for name in part.files]
    assert len(set(tested)) == 18


def test_the_tree_has_the_traps(made):
    lists = (made / "ucfTrainTestlist").iterdir()
    assert sorted(p.name for p in lists) == [
        "classInd.txt",
        *(f"{k}list0{i}.txt" for k in ("test", "train") for i in FOLDS),
    ]
    text = (made / "ucfTrainTestlist" / "testlist01.txt").read_bytes()
    assert text.endswith(b"SquareRight/v_SQuareRight_g01_c02.avi\r\n")
    files = sorted(p.name for p in (made / "UCF-101" / "SquareRight").iterdir())
    assert files[0] == "v_SquareRight_g01_c01.avi"
    assert b"SquareDown/v_SquareDown_g02_c01.avi 1\r\n" in (made / "ucfTrainTestlist" / "trainlist01.txt").read_bytes()


def test_a_class_played_backwards_is_another(tree):
    dataset = ucf101("train", root=tree, augment=Augment(flip=0, ops=0), **SMALL)
    for sample in (dataset[i] for i in range(len(dataset))):
        bright = (sample["video"].mean(0) > 100).float()  # (10, H, W)
        across = (bright.sum(1) * torch.arange(32)).sum(1) / bright.sum((1, 2))
        moves = across.diff()
        assert (moves[1::2] > 1).all() or (moves[1::2] < -1).all()
        assert sample["label"] == int(moves[1] > 0)  # SquareLeft, SquareRight


def test_a_sample(made):
    test = ucf101("test", root=made, height=48, width=64, complete=False)
    sample = test[5]
    assert sample.keys() == {"video", "tubelets", "readable", "label", "id"}
    assert (sample["id"], sample["label"], sample["readable"]) == (5, 2, True)
    assert sample["video"].shape == (3, 10, 48, 64)
    assert sample["video"].dtype == torch.float32
    found = read_frames(made / "UCF-101" / test.files[5], frame_indices())
    count = 2 * complete_tubelets(found.count)
    for place, index in enumerate(frame_indices()[:count]):
        assert np.array_equal(sample["video"][:, place].permute(1, 2, 0).numpy(), found.images[index])
    assert torch.equal(test[Key(5, 9)]["video"], sample["video"])
    batch = collate([test[i] for i in range(len(test))])
    assert batch["video"].shape == (6, 3, 10, 48, 64)
    assert set(batch["tubelets"].tolist()) <= {3, 4, 5}
    assert batch["readable"].all()
    with pytest.raises(IndexError):
        test[6]


def test_padding_is_zero_in_every_scale(made):
    for scale in ("raw255", "unit", "imagenet"):
        dataset = ucf101("train", root=made, pixel_scale=scale, **SMALL)
        samples = [dataset[Key(i, 1)] for i in range(len(dataset))]
        assert min(s["tubelets"] for s in samples) < 5
        for s in samples:
            assert not s["video"][:, 2 * s["tubelets"] :].any()
            assert s["video"][:, : 2 * s["tubelets"]].any()


def test_a_sample_is_a_function_of_seed_epoch_and_index(made):
    def draw(key, seed=1):
        return ucf101("train", root=made, seed=seed, **SMALL)[key]["video"]

    dataset = ucf101("train", root=made, seed=1, **SMALL)
    first = draw(Key(3, 5))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for key in (0, Key(5, 5), Key(3, 4)):
        dataset[key]
    assert torch.equal(dataset[Key(3, 5)]["video"], first)
    assert torch.equal(torch.get_rng_state(), state)
    assert any(not torch.equal(draw(Key(3, epoch)), first) for epoch in (6, 7, 8))
    assert any(not torch.equal(draw(Key(3, 5), seed=seed), first) for seed in (2, 3, 4))
    assert torch.equal(draw(3), draw(Key(3, 0)))


def test_workers_change_nothing(made):
    dataset = ucf101("train", root=made, **SMALL)
    keys = [Key(i, 1) for i in (5, 2, 0, 4, 1, 3)]
    loaded = [list(DataLoader(dataset, sampler=keys, num_workers=n, collate_fn=collate)) for n in (0, 1, 2)]
    for alone, one, two in zip(*loaded, strict=True):
        assert torch.equal(alone["video"], one["video"])
        assert torch.equal(alone["video"], two["video"])
        assert alone["id"] == one["id"] == two["id"]


def test_augmentation_is_for_training_and_before_resizing(made):
    flip = Augment(flip=1, ops=0)
    plain, turned = (ucf101("train", root=made, augment=a, **SMALL) for a in (Augment(flip=0, ops=0), flip))
    frames = plain.frames(2)
    want = resize(frames.flip(-1), 24, 32).transpose(0, 1).float()
    assert torch.equal(turned[2]["video"][:, : len(frames)], want)
    assert torch.equal(plain[2]["video"][:, : len(frames)], resize(frames, 24, 32).transpose(0, 1).float())
    test = [ucf101("test", root=made, augment=a, **SMALL) for a in (None, flip)]
    assert torch.equal(test[0][1]["video"], test[1][1]["video"])


def break_clip(dataset, index, data=b"broken"):
    dataset.path(index).write_bytes(data)


def test_corrupt_clips_are_errors_or_skipped_and_counted(tree):
    train = ucf101("train", root=tree, corrupt="skip", **SMALL)
    assert len(train) == 4
    break_clip(train, 1)
    with pytest.raises(FormatError, match=rf"{train.path(1).name}: cannot be decoded"):
        ucf101("train", root=tree, **SMALL)[1]
    assert train[1]["id"] == 2
    assert torch.equal(train[1]["video"], train[2]["video"])
    train.skipped.zero_()
    assert [int(b["id"]) for b in DataLoader(train, num_workers=2, collate_fn=collate)] == [0, 2, 2, 3]
    assert train.skipped.nonzero().flatten().tolist() == [1]
    for i in range(4):
        break_clip(train, i)
    with pytest.raises(FormatError, match="in a row"):
        train[0]


def test_an_evaluation_counts_corrupt_clips_as_wrong(tree):
    test = ucf101("test", root=tree, corrupt="skip", **SMALL)
    assert len(test) == 2
    break_clip(test, 0)
    sample = test[0]
    assert (sample["id"], sample["label"], sample["tubelets"], sample["readable"]) == (0, 0, 0, False)
    assert not sample["video"].any()
    assert sample["video"].shape == test[1]["video"].shape
    assert collate([test[0], test[1]])["readable"].tolist() == [False, True]
    assert test.skipped.tolist() == [True, False]
    with pytest.raises(FormatError, match="cannot be decoded"):
        ucf101("test", root=tree, **SMALL)[0]


def test_a_clip_that_ends_too_early_gives_what_it_has(tree):
    test = ucf101("test", root=tree, **SMALL)
    whole = test[0]
    content = test.path(0).read_bytes()
    break_clip(test, 0, content[: len(content) // 2])
    cut = test[0]
    frames = 2 * cut["tubelets"]
    assert 0 < frames < 10
    assert torch.equal(cut["video"][:, :frames], whole["video"][:, :frames])
    assert not cut["video"][:, frames:].any()


def test_what_is_missing_is_told(tree):
    with pytest.raises(
        FormatError, match=r"2 clips for test in fold 1 and 2 classes, expected 3783 and 101; complete=False"
    ):
        ucf101("test", root=tree)
    ucf101("test", root=tree, **SMALL).path(0).unlink()
    assert len(ucf101("test", root=tree, **SMALL)) == 1
    with pytest.raises(FormatError, match="none: no folder ucfTrainTestlist, expected the folder of UCF101"):
        ucf101("test", root=tree / "none", **SMALL)
    ucf101("test", root=tree, **SMALL).path(0).unlink()
    with pytest.raises(FormatError, match="no clips"):
        ucf101("test", root=tree, **SMALL)


def test_missing_clips_of_a_complete_copy_are_told(tree, monkeypatch):
    monkeypatch.setattr("parapos.data.ucf101.COUNTS", {1: (4, 2, 2)})
    monkeypatch.setattr("parapos.data.ucf101.CLASSES", 2)
    assert len(ucf101("test", root=tree)) == 2
    (tree / "UCF-101" / "SquareLeft" / "v_SquareLeft_g01_c01.avi").unlink()
    told = r"UCF-101: 1 of 2 clips for test are not there, the first is SquareLeft/v_SquareLeft_g01_c01\.avi"
    with pytest.raises(FormatError, match=told):
        ucf101("test", root=tree)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"split": "dev"}, "split must be one of train, val, test, got 'dev'"),
        ({"fold": 0}, "fold must be 1, 2 or 3, got 0"),
        ({"pixel_scale": "byte"}, "pixel_scale must be one of raw255, unit, imagenet, got 'byte'"),
        ({"corrupt": "hide"}, "corrupt must be 'error' or 'skip', got 'hide'"),
        ({"height": 0}, "height must be from 1 to 4096, got 0"),
    ],
)
def test_bad_options(options, told, made):
    with pytest.raises(ValueError, match=told):
        ucf101(**{"split": "train", "root": made, **SMALL, **options})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"classes": 1}, "classes must be from 2 to 8, got 1"),
        ({"groups": 3}, "expected 4 to 99 groups .* got groups=3"),
        ({"frames": (5, 4)}, r"frames=\(5, 4\)"),
    ],
)
def test_bad_trees(options, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        make_ucf101(tmp_path / "new", **options)
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="not empty, expected a new folder"):
        make_ucf101(tmp_path)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="no sample videos here")
def test_a_real_clip():
    with pytest.raises(FormatError, match="9008 of 9009 clips for train are not there"):
        ucf101("train", root=SAMPLES)
    dataset = ucf101("train", root=SAMPLES, complete=False, augment=Augment(flip=0, ops=0))
    assert (len(dataset), dataset.classes) == (1, 101)
    sample = dataset[0]
    assert sample["video"].shape == (3, 10, 240, 320)
    assert (sample["tubelets"], sample["label"]) == (5, 83)  # SoccerJuggling is class 84
    assert 50 < sample["video"].mean() < 200


def test_recipes(made):
    main = recipe.load("ucf101")
    assert (main.optim.epochs, main.optim.batch, main.optim.lr, main.optim.final_lr) == (200, 32, 3e-5, 0)
    assert (main.optim.warmup, main.optim.weight_decay, main.optim.decay, main.optim.clip) == (0.1, 0.05, "all", 0)
    assert (main.run.precision, main.run.compile, main.augment.smoothing) == ("16-mixed", True, 0)
    assert main.model.options == {"drop_path": 0.1}
    matched = recipe.load("ucf101_matched")
    assert matched.model.options == {"drop_path": 0.1, "qk_dim": 114}
    assert matched.optim == main.optim
    small = recipe.load("ucf101_smoke", {"data.root": str(made)})
    train = small.dataset("train")
    assert train[0]["video"].shape == (3, 10, 24, 32)
    model = small.model.build({"num_classes": train.classes})
    batch = collate([train[i] for i in range(4)])
    logits = model(*(batch[name] for name in model.inputs))
    assert torch.allclose(logits, torch.full((4, 3), -np.log(3.0)).float())
