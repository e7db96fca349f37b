# %% [markdown]
# # Detection
#
# After this page you have trained a detector with PaPE on generated boxes, judged it by COCO's mAP, and drawn what it
# finds in a picture.

# %%
import sys
import tempfile
from pathlib import Path

from parapos.cli import main

folder = Path(tempfile.mkdtemp())
train = f"train coco_smoke --data.root {folder}/boxes --out {folder}/run --optim.epochs 1"
for line in (f"prepare coco --synthetic --root {folder}/boxes", train, f"eval {folder}/run"):
    print(f"\n$ parapos {line}")
    if main(line.split()):
        sys.exit(f"parapos {line} failed")

# %% [markdown]
# One epoch teaches it nothing yet; the recipe's forty take a minute. Prediction works the same for a good model:

# %%
image = next(path for path in sorted((folder / "boxes").rglob("*")) if path.suffix in (".jpg", ".png"))
if main(["predict", str(folder / "run"), str(image), "--out", str(folder / "found")]):
    sys.exit("predict failed")
