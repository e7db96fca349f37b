"""Draws curve.png, mAP50 on validation images by training step, from the metrics of the runs, which are beside it as
metrics-ENCODING.csv: python docs/results/coco-desk/curve.py"""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.figure import Figure

from parapos.encodings.looks import LOOKS

FOLDER = Path(__file__).parent

figure = Figure(figsize=(6, 4), layout="constrained")
axes = figure.subplots()
for path in sorted(FOLDER.glob("metrics-*.csv")):
    with open(path, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["val_map50"]]
    shown, color = LOOKS[path.stem.removeprefix("metrics-")]
    values = [100 * float(row["val_map50"]) for row in rows]
    axes.plot([int(row["step"]) for row in rows], values, marker="o", color=color, label=shown)
axes.set(xlabel="step of 16 images", ylabel="mAP50 on 200 validation images in %", xlim=(0, None), ylim=(0, 100))
axes.legend()
figure.savefig(FOLDER / "curve.png", dpi=120)
