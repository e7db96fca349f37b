# %% [markdown]
# # Video
#
# After this page you have trained a ViViT with PaPE on clips in which only the order of the frames tells the classes
# apart. Positions have three dimensions, (t, y, x), and that is all that changes.

# %%
import sys
import tempfile
from pathlib import Path

import torch

import parapos
from parapos.cli import main

net = parapos.create_model("vivit_nano_patch16", encoding="pape", num_classes=4, parabolas=8)
clip = torch.rand(1, 3, 8, 32, 48)  # batch, channels, frames, height, width
print(net(clip, torch.tensor([4])).shape)  # 4 tubelets of two frames are real

# %% [markdown]
# Generated clips in UCF101's layout: squares that move in one of several directions. With the real data set, leave
# `--synthetic` out and give the folder of the videos.

# %%
folder = Path(tempfile.mkdtemp())
train = f"train ucf101_smoke --data.root {folder}/clips --out {folder}/run --optim.epochs 2"
for line in (f"prepare ucf101 --synthetic --root {folder}/clips", train, f"eval {folder}/run"):
    print(f"\n$ parapos {line}")
    if main(line.split()):
        sys.exit(f"parapos {line} failed")
