"""NaFlex models of timm after a swap: batches of images of several sizes, told by coordinates and masks."""

import pytest
import torch

from parapos.interop.swapping import placement_of
from tests.interop.test_timm import make, swapped


def naflex_batch():
    """Two images of 3 x 4 and 2 x 5 patches, padded to 13 tokens, and the same each alone."""
    torch.manual_seed(2)
    grids, most = [(3, 4), (2, 5)], 13
    patches, coord, valid = torch.randn(2, most, 768), torch.zeros(2, most, 2, dtype=torch.long), []
    for b, (rows, cols) in enumerate(grids):
        n = rows * cols
        coord[b, :n] = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
        valid.append(torch.arange(most) < n)
    batch = {"patches": patches, "patch_coord": coord, "patch_valid": torch.stack(valid)}
    alone = [{k: v[b : b + 1, : rows * cols] for k, v in batch.items()} for b, (rows, cols) in enumerate(grids)]
    return batch, alone


@pytest.mark.parametrize("family", ["naflex", "naflex-rope"])
@pytest.mark.parametrize("key_only", [False, True])
def test_naflex_padding_and_coordinates(family, key_only):
    model = make(family, use_key_only_attn_mask=key_only)
    batch, alone = naflex_batch()
    with torch.no_grad():
        before = model(batch)
        swapped.swap(model)
        assert (model(batch) - before).abs().max() <= 1e-6
        for p in swapped.new_parameters(model):
            p.add_(torch.randn_like(p) * 0.3)
        together = model(batch)
        each = torch.cat([model(sample) for sample in alone])
        assert (together - each).abs().max() < 1e-5
        wide = dict(alone[0], patch_coord=alone[0]["patch_coord"].flip(-1))  # 4 x 3 instead of 3 x 4
        assert (model(wide) - each[:1]).abs().max() > 1e-3


def test_naflex_tokens_may_come_in_any_order():
    """Coordinates count, not the place in the sequence; timm's own position embeddings go by the latter."""
    model = swapped.swap(make("naflex"), keep="replace", init="default")
    sample = naflex_batch()[1][0]
    order = torch.randperm(12)
    with torch.no_grad():
        mixed = model({key: value[:, order] for key, value in sample.items()})
        assert (mixed - model(sample)).abs().max() < 1e-5


def test_naflex_positions_stay_exact_in_half_precision():
    """Coordinates beyond 256 have no number of their own in bfloat16."""
    model = swapped.swap(make("naflex", class_token=True).bfloat16(), keep="replace", init="default")
    batch, _ = naflex_batch()
    batch["patches"] = batch["patches"].bfloat16()
    batch["patch_coord"][0, :12, 1] += 300
    with torch.no_grad():
        model(batch)
    r = placement_of(model)[1].positions.r
    assert r.dtype == torch.float32
    prefix = model.num_prefix_tokens
    assert r[0, prefix : prefix + 12, 0].unique().tolist() == [301, 302, 303, 304]
    assert r[0, :prefix].isnan().all()


@pytest.mark.full
def test_naflex_full_graph_with_coordinates():
    model = swapped.swap(make("naflex", depth=1), keep="replace", init="default")
    batch, _ = naflex_batch()
    with torch.no_grad():
        want = model(batch)
        found = torch.compile(model, fullgraph=True, backend="eager")(batch)
    assert (found - want).abs().max() < 1e-4


def gradients(model, batches, late):
    """Gradients of the sum of losses; late: all forward passes first."""
    model.zero_grad()
    losses = []
    for x in batches:
        loss = model(x).square().sum()
        if late:
            losses.append(loss)
        else:
            loss.backward()
    if late:
        sum(losses).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradient_checkpointing_of_several_passes():
    """Two passes with as many tokens and other coordinates, then one backward pass: each block meets its own."""
    model = swapped.swap(make("naflex"), init="default").train()
    first, _ = naflex_batch()
    second = dict(first, patch_coord=first["patch_coord"].flip(-1) * 2)
    want = gradients(model, [first, second], late=False)
    model.set_grad_checkpointing(True)
    found = gradients(model, [first, second], late=True)
    assert found.keys() == want.keys()
    for name, grad in want.items():
        assert (found[name] - grad).abs().max() <= 1e-4 * max(1.0, grad.abs().max()), name
