# %% [markdown]
# # PaPE in your own attention: causal, windowed and cross-attention
#
# After this page your own attention layer has PaPE, with whatever mask it needs. You keep your projections; parapos
# gives you two calls: the encoding, which turns tokens and positions into score terms, and `attend`.

# %%
import torch
from torch import nn

import parapos


class MyAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.encoding = parapos.create_encoding(  # the only new line here
            "pape", dim=dim, heads=heads, head_dim=dim // heads, pos_dim=2, parabolas=8
        )

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, h)

    def forward(self, x, r, mask=None, context=None, keys=None):
        other = x if context is None else context
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(other)), self.split(self.to_v(other))
        q, k, terms = self.encoding(x, q, k, r, keys=keys)
        out = parapos.attend(q, k, v, terms, mask, scale=self.encoding.scale)  # instead of scaled_dot_product_attention
        return self.out(out.transpose(1, 2).flatten(2))


torch.manual_seed(0)
layer = MyAttention(dim=64, heads=4).eval()
x, r = torch.randn(2, 36, 64), parapos.grid_positions(6, 6)
print(layer(x, r).shape)

# %% [markdown]
# ## Masks
#
# A mask is boolean and says **True where a token may look**. Padding is `(B, N)`; any other mask is
# `(B or 1, H or 1, queries, keys)`. A query that may look nowhere gets zeros, not NaN.

# %%
padding = torch.ones(2, 36, dtype=torch.bool)
padding[1, 30:] = False  # the second sample has 30 tokens
padded = layer(x, r, padding)
assert torch.allclose(padded[1, :30], layer(x[1:, :30], r[:30])[0], atol=1e-5)

causal = torch.ones(36, 36, dtype=torch.bool).tril()[None, None]
print("causal:", layer(x, r, causal).shape)

# %% [markdown]
# ## Windows
#
# Windows are the batch dimension: gather tokens and positions into windows, attend, and put the result back.
# `Positions.gather` takes the same index as your tokens.

# %%
index = torch.arange(36).view(2, 3, 2, 3).transpose(1, 2).reshape(4, 9)  # 4 windows of 3 x 3
windows = x[:, index].flatten(0, 1)  # (2 * 4, 9, 64)
places = parapos.Positions.of(r).gather(index).r.repeat(2, 1, 1)
windowed = torch.empty_like(x)
windowed[:, index] = layer(windows, places).unflatten(0, (2, 4))

same = (torch.arange(36)[:, None] // 18 == torch.arange(36) // 18) & (
    torch.arange(36)[:, None] % 6 // 3 == torch.arange(36) % 6 // 3
)
assert torch.allclose(windowed, layer(x, r, same[None, None]), atol=1e-5)  # as with a mask, but cheaper

# %% [markdown]
# ## Cross-attention
#
# Queries and keys may be different sets of tokens, each with its own positions: a decoder's queries against an image,
# or a camera against a lidar.

# %%
queries, at = torch.randn(2, 5, 64), torch.rand(5, 2) * 6  # five queries, anywhere
print("cross-attention:", layer(queries, at, context=x, keys=r).shape)

# %% [markdown]
# `parapos.explain(q, k, v, terms)` says which kernel runs and why. See also
# [key_cache.py](key_cache.py): queries that come one by one against a cache of keys.
