"""Queries that come one by one, against keys that are kept: causal attention with PaPE, step by step.

A query is one token and the keys are all tokens so far, so queries and keys are different sets. The result equals
attention over the whole sequence with a causal mask.
"""

import torch

import parapos

torch.manual_seed(0)
tokens, dim = 10, 32
attention = parapos.Attention(dim, heads=4, encoding="pape", pos_dim=1, parabolas=8).eval()
x = torch.randn(1, tokens, dim)
r = torch.arange(1.0, tokens + 1)[:, None]  # (tokens, 1): places on a line

with torch.no_grad():
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]  # True: may look
    whole = attention(x, r, mask=causal)

    cache: list[tuple[torch.Tensor, torch.Tensor]] = []
    steps = []
    for i in range(tokens):
        token, place = x[:, i : i + 1], r[i : i + 1]
        q, k, v = attention.project(token)
        cache.append((k, v))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*cache, strict=True))
        q, keys, terms = attention.encoding(token, q, keys, place, keys=r[: i + 1])
        out = parapos.attend(q, keys, values, terms, scale=attention.encoding.scale)
        steps.append(attention.proj(out.transpose(1, 2).flatten(2)))

error = (torch.cat(steps, dim=1) - whole).abs().max()
print(f"{tokens} steps with a cache of keys differ from one causal pass by {error:.1e}")
assert error < 1e-5
