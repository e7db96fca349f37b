# %% [markdown]
# # A new encoding from outside the package
#
# After this page your own encoding runs in every model, kernel, table and plot of parapos. An encoding is a class with
# one method: it gets tokens, queries, keys and positions, and returns score terms.
#
# Ours is a Gaussian window with a learned width per head: `score_ij = q.k - |D|^2 / (2 width^2)`. That is a quadratic
# term with `M` a multiple of the identity, so fused attention can run it.

# %%
import torch
from torch import nn

import parapos
from parapos.encodings import Claims


class Window(parapos.Encoding):
    claims = Claims(translation=True, rotation=True, decay=True, direction=False, context=False)

    def __init__(self, *, width: float = 3.0, **common) -> None:
        super().__init__(**common)
        self.log_width = nn.Parameter(torch.full((self.heads,), width).log())

    def encode(self, x, q, k, r, keys):
        steepness = -0.5 * torch.exp(-2 * self.log_width) / self.scale  # (H,); terms are scaled as q.k is
        m = steepness[None, :, None].expand(x.shape[0], -1, x.shape[1])  # (B, H, N)
        return q, k, (parapos.Quadratic(m, None, r, keys),)


parapos.register_encoding("window", Window, label="window", color="#117733")

# %% [markdown]
# From here on it is an encoding as any other, and an option of it is an option of the model:

# %%
torch.manual_seed(0)
net = parapos.create_model("vit_nano_patch4", encoding="window", num_classes=10, width=2.0)
print(net(torch.rand(2, 3, 32, 48)).shape)
x, r = torch.randn(1, 49, 32), parapos.grid_positions(7, 7)
layer = parapos.Attention(32, heads=2, encoding="window", pos_dim=2).eval()
reference = parapos.Attention(32, heads=2, encoding=layer.encoding, kernel="reference")
reference.load_state_dict(layer.state_dict())
assert torch.allclose(layer(x, r), reference(x, r), atol=1e-4)
layer(x, r).sum().backward()
print("the width learns:", layer.encoding.log_width.grad)

# %% [markdown]
# Commands know it too: save the class as `my_window.py` and add `--plugin my_window`, for example
# `parapos train digits --plugin my_window --model.encoding window`. The guide on extending has models, data sets and
# tasks.
