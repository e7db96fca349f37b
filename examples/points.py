# %% [markdown]
# # Point clouds
#
# After this page you have trained a Point Transformer V3 with PaPE. Its attention works in patches of points along
# space-filling curves; positions are the coordinates of the points, in units of the grid.

# %%
import sys
import tempfile
from pathlib import Path

from parapos.cli import main

folder = Path(tempfile.mkdtemp())
train = f"train modelnet40_smoke --data.root {folder}/objects --out {folder}/run --optim.epochs 1"
prepare = f"prepare modelnet40 --synthetic --points 200 --root {folder}/objects"
for line in (prepare, train, f"eval {folder}/run"):
    print(f"\n$ parapos {line}")
    if main(line.split()):
        sys.exit(f"parapos {line} failed")

# %% [markdown]
# `parapos train rooms_desk` segments generated rooms and `parapos train shapes_desk` classifies generated shapes; both
# need no download and take minutes. ScanNet and ModelNet40 are `scannet` and `modelnet40`.
