"""Two generated keyframes learned by heart, and what is left of it without one of the sensors.

    python docs/results/nuscenes-heart/learn.py      # writes cells.csv, losses.csv and table.md beside it

A small UniTR trains on two keyframes of the generated copy of nuScenes, always the same and not augmented. It is then
judged on them: with both sensors, with zeroed images, without images, and without LiDAR points. The keyframes are
twins: their LiDAR points are the same, and boxes of one place have different classes, which only the images tell.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import parapos
from parapos.data import create_dataset, nuscenes_prepare, preparations
from parapos.data.nuscenes_tree import write_tiny
from parapos.tasks import create_task
from parapos.text import table

ENCODINGS: dict[str, dict[str, Any]] = {"pape": {"parabolas": 8}, "rope": {}}
STEPS, RATE, SEED = 300, 3e-3, 0
CASES = ("both sensors", "zeroed images", "no images", "no LiDAR")
CELLS = ["encoding", "sensors", "map", "nds"]
LOSSES = ["encoding", "step", "loss", "cpu_seconds"]


def frames(root: Path) -> Any:
    """The two keyframes as a data set."""
    write_tiny(root, keyframes=1, twins=True)
    preparations.prepare(nuscenes_prepare, preparations.Job(root, complete=False))
    near = (-21.6, -21.6, -5.0, 21.6, 21.6, 3.0)
    options = dict(size=(64, 176), tables="v1.0-mini", complete=False, sweeps=2, point_range=near)
    return create_dataset("nuscenes", "train", root=root, **options).as_judged()


def train(data: Any, encoding: str, steps: int = STEPS) -> tuple[torch.nn.Module, list[tuple[float, float]]]:
    """The trained model; loss before each step, and processor seconds after it."""
    torch.manual_seed(SEED)
    task = create_task("detection3d", data)
    model = parapos.create_model("unitr_nano", encoding=encoding, **ENCODINGS.get(encoding, {}))
    batch = task.collate([data[0], data[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.03, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.4, div_factor=10)
    losses, start = [], time.process_time()
    for _ in range(steps):
        loss = task.loss(model, batch)
        mean = loss.total / loss.weight
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        losses.append((float(mean.detach()), time.process_time() - start))
    return model, losses


def judge(data: Any, model: torch.nn.Module) -> dict[str, dict[str, float]]:
    """Scores of the two keyframes by case."""
    task = create_task("detection3d", data)
    both = task.collate([data[0], data[1]])
    zeroed = {**both, "images": torch.zeros_like(both["images"])}
    blind = {**zeroed, "image_mask": torch.zeros_like(both["image_mask"])}
    deaf = {**both, "points": both["points"][:0], "offset": torch.zeros_like(both["offset"])}
    model.eval()
    scores = {}
    for case, batch in zip(CASES, (both, zeroed, blind, deaf), strict=True):
        evaluator = task.evaluator()
        with torch.no_grad():
            evaluator.update(model, batch)
        scores[case] = evaluator.compute()
    return scores


def page(cells: Sequence[Sequence[str]], losses: Sequence[Sequence[str]]) -> str:
    """The table of cells.csv and losses.csv, given as their rows."""
    rows = []
    for encoding in dict.fromkeys(row[0] for row in cells):
        maps = [row[2] for row in cells if row[0] == encoding]
        curve = [row for row in losses if row[0] == encoding]
        first, last = float(curve[0][2]), float(curve[-1][2])
        minutes = float(curve[-1][3]) / 60
        fall = f"{100 * (1 - last / first):.1f}%"
        rows.append([encoding, f"{first:.1f}", f"{last:.2f}", fall, *maps, f"{minutes:.1f}"])
    return table(["encoding", "first loss", "last loss", "fall", *CASES, "CPU minutes"], rows) + "\n"


def write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def read(path: Path) -> list[list[str]]:
    """Rows of a file that was written before, if there is one."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=ENCODINGS, help="train one encoding, and keep what is known of the others")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="a folder")
    options = parser.parse_args()
    wanted, out = [options.only] if options.only else list(ENCODINGS), options.out
    cells, losses = ([row for row in read(out / f"{name}.csv") if row[0] not in wanted] for name in ("cells", "losses"))
    with tempfile.TemporaryDirectory() as folder:
        data = frames(Path(folder) / "nuscenes")
        for encoding in wanted:
            model, curve = train(data, encoding)
            losses += [[encoding, str(i), f"{loss:.6g}", f"{cpu:.2f}"] for i, (loss, cpu) in enumerate(curve)]
            for case, scores in judge(data, model).items():
                cells.append([encoding, case, f"{100 * scores['map']:.1f}", f"{100 * scores['nds']:.1f}"])
    write(out / "cells.csv", CELLS, cells)
    write(out / "losses.csv", LOSSES, losses)
    text = page(cells, losses)
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
