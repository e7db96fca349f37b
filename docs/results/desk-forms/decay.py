"""How far the heads of trained runs can see, and what becomes of the runs if no token may see further than a limit.

    python docs/results/desk-forms/decay.py runs/desk_digits-direct-no-floor-30 runs/desk_digits-m-16-30

For each run, on its validation images at the trained size: by layer, the 1, 10 and 50% quantiles over tokens and heads
of the smallest eigenvalue of -M, the decay in the direction in which a token sees furthest. Then top-1 at one, two and
four times the trained size, positions as they are, with smaller eigenvalues of -M raised to a limit after training.
"""

import dataclasses
import sys
from pathlib import Path

import torch

from parapos.encodings.parabolic import PaPE
from parapos.training import checkpoint, fit

LIMITS, FACTORS, QUANTILES = (0.0, 0.03, 0.1, 0.2, 0.3, 0.5), (1, 2, 4), (0.01, 0.1, 0.5)
TOKENS = 4096  # at a time


def samples(run: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All validation images (S, C, size, size) and labels (S) of a run."""
    items = list(fit.load_run(run).judged("val", None, size=size))
    return torch.stack([x["image"] for x in items]), torch.tensor([int(x["label"]) for x in items])


def judge(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, limit: float) -> tuple[float, list]:
    """Top-1 in percent, and for each layer the eigenvalues (..., p) of -M as they were."""
    values: dict[torch.nn.Module, list[torch.Tensor]] = {m: [] for m in model.modules() if isinstance(m, PaPE)}

    def raise_eigenvalues(module, args, output):
        q, k, (term,) = output
        eigenvalues, axes = torch.linalg.eigh(-term.M)
        values[module].append(eigenvalues)
        form = (axes * eigenvalues.clamp_min(limit)[..., None, :]) @ axes.mT
        return q, k, (dataclasses.replace(term, M=-form if limit else term.M),)

    hooks = [module.register_forward_hook(raise_eigenvalues) for module in values]
    count = max(1, TOKENS * model.patch**2 // images.shape[-1] ** 2)
    right = sum(
        (model(x).argmax(1) == y).sum().item() for x, y in zip(images.split(count), labels.split(count), strict=True)
    )
    for hook in hooks:
        hook.remove()
    return 100 * right / len(labels), [torch.cat(part) for part in values.values()]


@torch.no_grad()
def main(folders: list[str]) -> None:
    print("run,what,at,1%,10%,50%,1x,2x,4x")
    for run in map(Path, folders):
        model = checkpoint.load_weights(run / "weights.safetensors")[0].eval()
        trained = fit.load_run(run).data.size
        data = [samples(run, trained * factor) for factor in FACTORS]
        for layer, eigenvalues in enumerate(judge(model, *data[0], 0.0)[1]):
            smallest = eigenvalues[..., 0].flatten().quantile(torch.tensor(QUANTILES))
            print(f"{run.name},layer,{layer + 1},{','.join(f'{x:.3f}' for x in smallest.tolist())},,,", flush=True)
        for limit in LIMITS:
            accuracy = [judge(model, *some, limit)[0] for some in data]
            print(f"{run.name},limit,{limit},,,,{','.join(f'{x:.1f}' for x in accuracy)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
