"""Two generated keyframes learned by heart, and what is left without one of the sensors.

    python docs/results/nuscenes-heart/learn.py          # writes table.md beside it; minutes of one core

A small UniTR sees two keyframes of the generated copy of nuScenes again and again, as they are, and is then judged on
them: with both sensors, with black images, without images, and without LiDAR points. The keyframes are twins: a LiDAR
sees the same in both, and only the cameras tell a truck from a construction vehicle.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import parapos
from parapos.data import create_dataset, nuscenes_prepare, preparations
from parapos.data.nuscenes_tree import write_tiny
from parapos.tasks import create_task
from parapos.text import table

ENCODINGS = {"pape": {"parabolas": 8}, "rope": {}}
STEPS, RATE = 300, 3e-3
COLUMNS = ["encoding", "first loss", "last loss", "fall in %", "mAP", "black images", "no images", "no LiDAR", "NDS"]


def frames(root: Path):
    """The two keyframes as a data set."""
    write_tiny(root, keyframes=1, twins=True)
    preparations.prepare(nuscenes_prepare, preparations.Job(root, complete=False))
    near = (-21.6, -21.6, -5.0, 21.6, 21.6, 3.0)
    options = dict(size=(64, 176), tables="v1.0-mini", complete=False, sweeps=2, point_range=near)
    return create_dataset("nuscenes", "train", root=root, **options).as_judged()


def judge(task, model, batch) -> dict[str, float]:
    evaluator = task.evaluator()
    with torch.no_grad():
        evaluator.update(model, batch)
    return evaluator.compute()


def learn(data, encoding: str, steps: int = STEPS) -> list[float]:
    """First and last loss, its fall in percent, mAP in percent of the four cases, and NDS."""
    torch.manual_seed(0)
    task = create_task("detection3d", data)
    model = parapos.create_model("unitr_nano", encoding=encoding, **ENCODINGS.get(encoding, {}))
    batch = task.collate([data[0], data[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.03, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.4, div_factor=10)
    losses = []
    for _ in range(steps):
        loss = task.loss(model, batch)
        mean = loss.total / loss.weight
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        losses.append(float(mean.detach()))
    model.eval()
    dark = {**batch, "images": torch.zeros_like(batch["images"])}
    blind = {**dark, "image_mask": torch.zeros_like(batch["image_mask"])}
    deaf = {**batch, "points": batch["points"][:0], "offset": torch.zeros_like(batch["offset"])}
    found = [judge(task, model, one) for one in (batch, dark, blind, deaf)]
    fall = 100 * (1 - losses[-1] / losses[0])
    return [losses[0], losses[-1], fall, *(100 * one["map"] for one in found), 100 * found[0]["nds"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "table.md")
    out = parser.parse_args().out
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = frames(Path(folder) / "nuscenes")
        for encoding in ENCODINGS:
            start = time.perf_counter()
            rows.append([encoding, *(f"{value:.1f}" for value in learn(data, encoding))])
            print(rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    text = (
        f"{table(COLUMNS, rows)}\n\n{STEPS} steps on both keyframes, seed 0; mAP and NDS in % of the same keyframes.\n"
    )
    out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
