# %% [markdown]
# # Your own images, from a folder to predictions
#
# After this page you have trained a ViT with PaPE on your own images and applied it to new files. You need a folder
# with `train`, `val` and `test`, each with a folder of images per class. Here we write a few generated images instead.

# %%
import sys
import tempfile
from pathlib import Path

import torch
from torchvision.transforms.v2 import functional as F

from parapos.cli import main
from parapos.data.synthetic import pattern


def run(line: str) -> None:
    """The same as typing `parapos ...` in a shell."""
    print(f"\n$ parapos {line}")
    if main(line.split()):
        sys.exit(f"parapos {line} failed")


folder = Path(tempfile.mkdtemp())
draw = torch.Generator().manual_seed(0)
for split, count in (("train", 24), ("val", 6), ("test", 6)):
    for label, name in enumerate(("stripes", "dots", "rings")):
        (folder / "images" / split / name).mkdir(parents=True)
        for i in range(count):
            image = F.to_pil_image(pattern(label, 3, (48, 48), draw))
            image.save(folder / "images" / split / name / f"{i}.png")

# %% [markdown]
# `demo_images` is a recipe for small models on image folders. Any value of a recipe can be changed on the command line;
# here training is cut to seconds. What a recipe can say is in the guide on training.

# %%
short = "--optim.epochs 4 --optim.batch 24 --optim.part 24"
run(f"train demo_images --data.root {folder}/images --out {folder}/run {short}")

# %% [markdown]
# The folder of the run is all you need from now on. Judge it on the test images, at the trained size and at twice that:

# %%
run(f"eval {folder}/run")
run(f"eval {folder}/run --size 64 --position-scale interpolate")

# %% [markdown]
# And apply it to files. `predictions.json` has names and scores; the pictures show them.

# %%
run(f"predict {folder}/run {folder}/images/test/dots --out {folder}/found")
print(sorted(path.name for path in (folder / "found").iterdir())[:4])

# %% [markdown]
# `parapos analyze RUN` draws what its heads look at, and `parapos explore RUN` writes a page in which the model runs.

# %%
run(f"explore {folder}/run --out {folder}/explore.html")
