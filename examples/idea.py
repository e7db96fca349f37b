# %% [markdown]
# # The idea in ten minutes
#
# After this page you know what PaPE adds to attention, and you have seen it extrapolate: a model trained on one grid
# size is run on a larger one without any change.
#
# Attention compares queries with keys. It does not know where tokens are. PaPE tells it: the score between a query at
# `r_i` and a key at `r_j` gets a concave parabola of their offset `D = r_j - r_i`,
#
#     S_ij = D^T M_i D + g_i . D + q_i . k_j
#
# `M_i` says how fast attention fades with distance, and along which axis. `g_i` pushes attention in a direction. Both
# are read from the token `x_i`, so a token in the sky may look far while one on an edge looks along it.

# %%
import torch

import parapos

torch.manual_seed(0)
encoding = parapos.create_encoding("pape", dim=32, heads=2, head_dim=16, pos_dim=2, parabolas=8)
r = parapos.grid_positions(5, 5)  # (25, 2): (x, y), counted from 1
x = torch.randn(1, 25, 32)
q, k, v = torch.randn(3, 1, 2, 25, 16)
q, k, terms = encoding(x, q, k, r)
(term,) = terms
print("M of the token in the middle, head 1:\n", term.M[0, 0, 12].detach())
print("g of the token in the middle, head 1:", term.g[0, 0, 12].detach())

# %% [markdown]
# `M` is negative definite: the score falls in every direction. That is why nothing explodes when the grid grows.
#
# `attend` adds the term inside PyTorch's fused attention. The reference kernel writes the same formula down plainly:

# %%
fast = parapos.attend(q, k, v, terms, scale=encoding.scale)
plain = parapos.attend(q, k, v, terms, scale=encoding.scale, kernel="reference")
print(f"largest difference: {(fast - plain).abs().max():.1e}")
assert torch.allclose(fast, plain, atol=1e-4)

# %% [markdown]
# Only offsets matter. Move all positions, and nothing changes:

# %%
_, _, moved = encoding(x, q, k, r + torch.tensor([100.0, -40.0]))
assert torch.allclose(fast, parapos.attend(q, k, v, moved, scale=encoding.scale), atol=1e-4)

# %% [markdown]
# So a whole model takes any image size. `position_scale` interpolates: it pulls the positions of a larger image back
# into the range that was trained.

# %%
net = parapos.create_model("vit_nano_patch4", encoding="pape", num_classes=10, parabolas=16).eval()
with torch.no_grad():
    for size in (32, 48, 128):
        as_they_are = net(torch.rand(1, 3, size, size))
        interpolated = net(torch.rand(1, 3, size, size), position_scale=32 / size)
        print(size, "pixels:", tuple(as_they_are.shape), tuple(interpolated.shape))

# %% [markdown]
# Does it still work there? The package brings small ViTs that were trained on digits of 24 x 24 pixels. Here are two of
# them at twice that size, with positions as they are (this needs the extra `train`):

# %%
from parapos.experiments.demo import shipped_folder  # noqa: E402
from parapos.training.fit import evaluate  # noqa: E402

for name in ("pape", "rope"):
    scores = [evaluate(shipped_folder() / name, split="test", size=size)["top1"] for size in (24, 48)]
    print(f"{name}: {scores[0]:.1%} right at 24 pixels, {scores[1]:.1%} at 48")

# %% [markdown]
# Where to go next: `parapos explore` writes a page in which you drag a query over an image and see the three parts of
# its scores; `parapos demo` compares four encodings at up to four times their resolution.
