"""Shared by the tests of networks whose tokens have three coordinates: what they are given and what comes back.

A network's inputs are a dict in the order of its forward; `lengths` tells how much of each sample is real.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from parapos import create_model
from parapos.encodings import ENCODINGS

NAMES = [name for name, cls in ENCODINGS.items() if cls.claims.unbounded]  # that serve three coordinates
names = pytest.mark.parametrize("name", NAMES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
Inputs = dict[str, Tensor]


def count(name: str, **options: object) -> int:
    """The parameters of a model, which is not made."""
    with torch.device("meta"):
        return sum(p.numel() for p in create_model(name, **options).parameters())


def size(encoding: str) -> dict[str, object]:
    """Options of a network that is small enough for every test."""
    options = dict(encoding=encoding, dim=24, heads=2, depth=2, mlp_dim=32, patch=4, num_classes=5, head_dim=8)
    if encoding == "pape":
        options["parabolas"] = 4  # so few that it does not start out too local for tokens to see one another
    return options


def awake(net: nn.Module) -> nn.Module:
    """The network in evaluation mode with a classifier that is no longer blank."""
    nn.init.normal_(net.classifier.weight)
    return net.eval()


def logits_and_gradients(net: nn.Module, inputs: Inputs, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of sum(logits * weight) by name of parameter; zeros where there is none."""
    logits = net(**inputs)
    grads = torch.autograd.grad((logits * weight).sum(), list(net.parameters()), allow_unused=True)
    named = zip(net.named_parameters(), grads, strict=True)
    return logits.detach(), {name: torch.zeros_like(p) if g is None else g for (name, p), g in named}


def positions_of(net: nn.Module, inputs: Inputs, **options: object) -> Tensor:
    """The positions (B or 1, N, p) that the encoder is given."""
    seen: list[Tensor] = []
    hook = net.encoder.register_forward_pre_hook(lambda module, args: seen.append(args[1].r))
    net(**inputs, **options)
    hook.remove()
    return seen[0]


def assert_padding_never_matters(net: nn.Module, together: Inputs, alone: list[Inputs]) -> None:
    """A padded batch gives the tokens and logits of its samples alone, and the sum of their gradients. In float64."""
    features = net.forward_features(**together)
    for found, inputs in zip(features, alone, strict=True):
        (want,) = net.forward_features(**inputs)
        if not inputs.get("lengths", torch.ones(1)).any():
            want = want[: int(net.cls is not None)]  # the rest is padding
        torch.testing.assert_close(found[: len(want)], want, rtol=1e-9, atol=1e-9)
    g = torch.Generator().manual_seed(7)
    weight = torch.randn(len(alone), net.classifier.out_features, generator=g, dtype=torch.float64)
    logits, grads = logits_and_gradients(net, together, weight)
    parts = [logits_and_gradients(net, inputs, weight[i]) for i, inputs in enumerate(alone)]
    torch.testing.assert_close(logits, torch.cat([part[0] for part in parts]), rtol=1e-9, atol=1e-9)
    for name, grad in grads.items():
        total = torch.stack([part[1][name] for part in parts]).sum(0)
        torch.testing.assert_close(grad, total, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_to_the_bit(net: nn.Module, clean: Inputs, poisoned: Inputs) -> None:
    """Logits and gradients do not know what stands in padding."""
    weight = torch.randn(len(clean["lengths"]), net.classifier.out_features, generator=torch.Generator().manual_seed(8))
    (a, da), (b, db) = (logits_and_gradients(net, inputs, weight) for inputs in (clean, poisoned))
    assert torch.equal(a, b)
    for name, grad in da.items():
        assert torch.equal(grad, db[name]), name


def excess(net: nn.Module, other: nn.Module, inputs: Inputs, dtype: torch.dtype) -> float:
    """The error of `net` over twice that of `other`, both in `dtype`, judged by `other` in float64; root mean square.

    `other` runs the reference kernel with the same weights. Above 1 is a failure.
    """
    other.load_state_dict(net.state_dict())

    def run(module: nn.Module, kind: torch.dtype) -> Tensor:
        cast = {k: v.to(kind) if k == "videos" else v for k, v in inputs.items()}
        with torch.no_grad():
            out = module.to(kind)(**cast)
        assert out.dtype == kind
        assert out.isfinite().all()
        return out.double()

    ours, theirs = run(net, dtype), run(other, dtype)
    truth = run(other, torch.float64)  # of the weights as rounded
    mine, budget = ((x - truth).square().mean().sqrt() for x in (ours, theirs))
    return (mine / (2 * budget + torch.finfo(dtype).eps * truth.abs().max())).item()


def assert_every_parameter_learns(net: nn.Module, inputs: Inputs) -> None:
    _, grads = logits_and_gradients(net, inputs, torch.randn(len(inputs["lengths"]), 5))
    for key, grad in grads.items():
        assert grad.isfinite().all(), key
        assert grad.ne(0).any(), key


def assert_autocast(net: nn.Module, inputs: Inputs, dtype: torch.dtype) -> None:
    """Logits near those in float32, and finite gradients."""
    with torch.autocast("cpu", dtype):
        logits, grads = logits_and_gradients(net, inputs, torch.ones(len(inputs["lengths"]), 5))
    torch.testing.assert_close(logits.float(), net(**inputs), rtol=0, atol=0.1)
    assert all(grad.isfinite().all() for grad in grads.values())


def assert_one_graph(net: nn.Module, batches: list[Inputs]) -> None:
    """One graph for all sizes and lengths."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    for inputs in batches:
        torch.testing.assert_close(compiled(**inputs), net(**inputs))
    assert counter.frame_count == 1


def accuracy_after_training(
    kind: type[nn.Module], encoding: str, inputs: Inputs, labels: Tensor, *, steps: int = 100, **options: int
) -> float:
    """Of a small network on what it learns from; training ends when all is right."""
    torch.manual_seed(0)
    common = dict(dim=32, heads=4, depth=2, mlp_dim=64, patch=4, num_classes=2, drop_path=0.0)
    net = kind(encoding=encoding, **common, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        logits = net(**inputs)
        if (logits.argmax(1) == labels).all():
            return 1.0
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
    return (logits.argmax(1) == labels).float().mean().item()
