# %% [markdown]
# # Event cameras
#
# After this page you have trained a transformer on the events of a camera, without making frames of them. A spiking
# patch gives a token whenever enough happened in it, so tokens lie anywhere in (x, y, t). PaPE does not need a grid.

# %%
import sys
import tempfile
from pathlib import Path

from parapos.cli import main

folder = Path(tempfile.mkdtemp())
train = f"train dvsgesture_smoke --data.root {folder}/gestures --out {folder}/run --optim.epochs 1"
for line in (f"prepare dvsgesture --synthetic --root {folder}/gestures", train, f"eval {folder}/run"):
    print(f"\n$ parapos {line}")
    if main(line.split()):
        sys.exit(f"parapos {line} failed")

# %% [markdown]
# With DVS128 Gesture itself: `parapos prepare dvsgesture --root FOLDER`, then `parapos train dvsgesture`. GEN1, with
# cars and pedestrians, is the same with `gen1`.
