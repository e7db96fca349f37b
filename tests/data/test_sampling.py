"""Every sample once per epoch, the same parts on any number of processes, the same bits from any number of workers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from parapos.data import create_dataset
from parapos.data.batch import collate
from parapos.data.digits import Augment, Digits
from parapos.data.sampling import EvalBatches, Key, Plan, TrainBatches, order_seed, sample_seed, step_seed


def test_seeds_are_what_they_were():
    """Runs are repeated by these numbers; they must never change."""
    assert sample_seed(0, 0, 0) == 9617123944752223253
    assert order_seed(0, 0) == 13932772642666305074
    assert step_seed(0, 0, 0) == 16873826625001147972
    assert len({sample_seed(s, e, i) for s in range(5) for e in range(5) for i in range(5)}) == 125
    assert 0 <= sample_seed(2**62, 10**6, 10**9) < 2**64


@given(
    samples=st.integers(1, 60),
    part=st.integers(1, 4),
    world=st.integers(1, 3),
    turns=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_an_epoch_has_every_sample_once(samples, part, world, turns, seed):
    batch = part * world * turns
    plans = [Plan(samples=samples, batch=batch, part=part, seed=seed, world=world, rank=r) for r in range(world)]
    alone = Plan(samples=samples, batch=batch, part=part, seed=seed)
    for epoch in (0, 3):
        start = epoch * alone.steps
        real = [
            [[key for turn in range(plan.accumulate) for key in plan.keys(step, plan.part_of(turn))] for plan in plans]
            for step in range(start, start + alone.steps)
        ]
        for step, shares in enumerate(real, start):
            union = [key for share in shares for key in share]
            assert len(union) == alone.size(step) <= batch
            assert set(union) == {key for p in range(alone.parts) for key in alone.keys(step, p)}
        every = [key for shares in real for share in shares for key in share]
        assert sorted(every) == [Key(i, epoch) for i in range(samples)]
        for plan in plans:
            turns_taken = list(TrainBatches(plan, lambda start=start: start))
            assert len(turns_taken) == alone.steps * plan.accumulate
            assert all(1 <= len(keys) <= part for keys in turns_taken)


def test_batches_go_on_at_any_step():
    plan = Plan(samples=20, batch=6, part=3)
    assert (plan.steps, plan.parts, plan.accumulate) == (4, 2, 2)
    whole = list(TrainBatches(plan, lambda: 4))
    for step in (4, 5, 6, 7):
        assert list(TrainBatches(plan, lambda step=step: step)) == whole[2 * (step - 4) :]
    assert whole != list(TrainBatches(plan, lambda: 0))
    assert [len(keys) for keys in whole] == [3, 3, 3, 3, 3, 3, 1, 1]


def test_plan_says_what_does_not_fit():
    with pytest.raises(ValueError, match="batch must be a multiple of part 4 x 3 processes = 12, got 16"):
        Plan(samples=9, batch=16, part=4, world=3)
    with pytest.raises(ValueError, match=r"rank must be in 0..1, got 2"):
        Plan(samples=9, batch=16, part=4, world=2, rank=2)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        Plan(samples=0, batch=16, part=4)


@given(samples=st.integers(1, 50), batch=st.integers(1, 7), world=st.integers(1, 5))
def test_evaluation_counts_every_sample_once(samples, batch, world):
    counted = []
    lengths = set()
    for rank in range(world):
        batches = EvalBatches(samples=samples, batch=batch, world=world, rank=rank)
        turns = list(batches)
        lengths.add(len(turns))
        assert len(turns) == len(batches)
        assert all(turns)
        counted += [key.index for turn, keys in enumerate(turns) if batches.real(turn) for key in keys]
    assert sorted(counted) == list(range(samples))
    assert len(lengths) == 1


@pytest.fixture(scope="module")
def digits():
    return Digits("train", size=12, seed=3)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing(digits, workers):
    plan = Plan(samples=len(digits), batch=256, part=128, seed=3)
    batches = TrainBatches(plan, lambda: plan.steps)
    torch.manual_seed(workers)
    loaded = list(DataLoader(digits, batch_sampler=batches, collate_fn=collate, num_workers=workers))
    assert len(loaded) == 10
    for batch, keys in zip(loaded, batches, strict=True):
        assert batch["id"].tolist() == [key.index for key in keys]
    key = list(batches)[3][5]
    assert key.epoch == 1
    assert torch.equal(loaded[3]["image"][5], digits[key]["image"])


def test_digits(digits):
    assert [len(Digits(split)) for split in ("train", "val", "test")] == [1266, 178, 353]
    counts = torch.bincount(torch.tensor(create_dataset("digits", "val").labels))
    assert counts.min() >= 17
    sample = digits[Key(7, 0)]
    assert sample["image"].shape == (3, 12, 12)
    assert 0 <= sample["image"].min() < sample["image"].max() <= 1
    assert (sample["id"], type(sample["label"])) == (7, int)
    assert torch.equal(digits[7]["image"], sample["image"])
    assert not torch.equal(digits[Key(7, 1)]["image"], sample["image"])
    assert not torch.equal(Digits("train", size=12, seed=4)[7]["image"], sample["image"])
    plain = Digits("test", size=8)[0]
    assert torch.equal(plain["image"], Digits("test", size=8)[Key(0, 5)]["image"])
    assert torch.allclose(plain["image"][0], Digits("test").images[0], atol=1e-6)  # 8 x 8 as it came
    still = Digits("train", size=12, augment=Augment(turn=0, shift=0, zoom=0))
    assert torch.equal(still[Key(7, 0)]["image"], still[Key(7, 1)]["image"])
    for key in (-len(digits) - 1, len(digits)):
        with pytest.raises(IndexError):
            digits[key]
    with pytest.raises(ValueError, match="split must be one of train, val, test, got 'dev'"):
        Digits("dev")
    with pytest.raises(ValueError, match="shift must be from 0 to 1, got -1"):
        Augment(shift=-1)


def test_shift_moves_the_picture():
    """A shift alone samples the same strokes a pixel further: the middle of the image agrees."""
    one = Digits("train", size=8, augment=Augment(turn=0, shift=0.125, zoom=0))
    x, y = (2 * torch.rand(4, generator=torch.Generator().manual_seed(sample_seed(0, 0, 0))) - 1)[2:].tolist()
    grid = torch.nn.functional.affine_grid(
        torch.tensor([[[1, 0, -0.25 * x], [0, 1, -0.25 * y]]]), [1, 1, 8, 8], align_corners=False
    )
    want = torch.nn.functional.grid_sample(one.images[:1, None], grid, align_corners=False, padding_mode="border")
    assert torch.allclose(one[0]["image"][:1], want[0], atol=1e-6)


def test_collate_names_what_does_not_fit():
    good = {"image": torch.zeros(3, 2, 2), "label": 1, "id": 4}
    batch = collate([good, good])
    assert (batch["image"].shape, batch["label"].tolist(), batch["id"].tolist()) == ((2, 3, 2, 2), [1, 1], [4, 4])
    with pytest.raises(ValueError, match=r"image of sample 5 is float32 \(3, 2, 3\), sample 4 has float32 \(3, 2, 2\)"):
        collate([good, {**good, "image": torch.zeros(3, 2, 3), "id": 5}])
    with pytest.raises(ValueError, match=r"image of sample 5 is uint8"):
        collate([good, {**good, "image": torch.zeros(3, 2, 2, dtype=torch.uint8), "id": 5}])
    with pytest.raises(ValueError, match="sample 5 has image, id, sample 4 has image, label, id"):
        collate([good, {"image": torch.zeros(3, 2, 2), "id": 5}])


def test_ragged_samples_are_padded_to_the_longest():
    samples = [{"x": torch.ones(n, 2), "length": n, "id": i} for i, n in enumerate([2, 0, 3])]
    batch = collate(samples, ragged=("x",))
    assert batch["x"].shape == (3, 3, 2)
    assert batch["x"].sum((1, 2)).tolist() == [4, 0, 6]
    assert (batch["x"][0, 2] == 0).all()
    assert collate(samples[1:2], ragged=("x",))["x"].shape == (1, 0, 2)
    with pytest.raises(ValueError, match=r"x of sample 2 is float32 \(3, 2\), sample 0 has float32 \(2, 2\)"):
        collate([samples[0], samples[2]])
    with pytest.raises(ValueError, match=r"x of sample 9 is float32 \(3, 4\)"):
        collate([samples[0], {"x": torch.ones(3, 4), "length": 3, "id": 9}], ragged=("x",))
