"""What a swap does to a timm ViT beyond its resolution: python -m tools.swap_study, for one seed --seed 0.

A small ViT of timm learns the digits at 32 pixels. Then it is trained on at the same size: as it is, with PaPE added to
its own positions, and with PaPE instead of them. All are tested at sizes that they never met. Writes
benchmarks/swap_digits.json, which keeps the seeds that are there, and the table benchmarks/swap_digits.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parapos.data.digits import Augment, Digits
from parapos.data.sampling import Key
from parapos.interop import timm as swapped
from parapos.text import table

RESULTS = Path(__file__).parent.parent / "benchmarks" / "swap_digits.json"
SIZES = (32, 48, 64, 96)
EPOCHS, MORE, BATCH = 24, 8, 64
MODEL = dict(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2.0, num_classes=10)
PARABOLAS = 16
RATE, TUNED_RATE, NEW_RATE = 2e-3, 1e-3, 4e-3
ROWS = {
    "trained": "ViT of timm, {epochs} epochs",
    "longer": "and {more} epochs more",
    "add": "and {more} epochs with PaPE added",
    "replace": "and {more} epochs with PaPE instead of its positions",
}


def make_model() -> nn.Module:
    make: Any = timm.create_model
    return make("vit_tiny_patch16_224", dynamic_img_size=True, **MODEL)


def draw(data: Digits, order: list[int], epoch: int) -> tuple[Tensor, Tensor]:
    samples = [data[Key(index, epoch)] for index in order]
    return torch.stack([s["image"] for s in samples]), torch.tensor([s["label"] for s in samples])


def learn(model: nn.Module, data: Digits, groups: list[dict[str, Any]], epochs: int, first: int, seed: int) -> None:
    """AdamW along half a cosine after a tenth of warm-up, from the epoch `first` of the data."""
    steps = epochs * -(-len(data) // BATCH)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)

    def factor(step: int) -> float:
        return min((step + 1) / (0.1 * steps), 0.5 * (1 + math.cos(math.pi * step / steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    for epoch in range(first, first + epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()
        for start in range(0, len(order), BATCH):
            images, labels = draw(data, order[start : start + BATCH], epoch)
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


@torch.no_grad()
def judge(model: nn.Module) -> dict[str, float]:
    """Top-1 in % of the test digits, by size."""
    model.eval()
    found = {}
    for size in SIZES:
        data = Digits("test", size=size)
        images, labels = draw(data, list(range(len(data))), 0)
        right = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(64), labels.split(64), strict=True)
        )
        found[str(size)] = 100 * right / len(data)
    return found


def study(seed: int, epochs: int = EPOCHS, more: int = MORE) -> dict[str, dict[str, float]]:
    """Top-1 by row and size for one seed."""
    torch.manual_seed(seed)
    data = Digits("train", size=32, seed=seed, augment=Augment(turn=0.0, shift=0.0, zoom=0.0, area=(0.15, 1.0)))
    model = make_model()
    learn(model, data, [{"params": list(model.parameters()), "lr": RATE}], epochs, 0, seed)
    state, rows = model.state_dict(), {"trained": judge(model)}
    for name in ("longer", "add", "replace"):
        model = make_model()
        model.load_state_dict(state)
        new: list[nn.Parameter] = []
        if name != "longer":
            swapped.swap(model, "pape", keep=name, options={"parabolas": PARABOLAS})
            new = swapped.new_parameters(model)
        known = {id(p) for p in new}
        groups = [{"params": [p for p in model.parameters() if id(p) not in known], "lr": TUNED_RATE}]
        groups += [{"params": new, "lr": NEW_RATE}] if new else []
        learn(model, data, groups, more, epochs, seed)
        rows[name] = judge(model)
    return rows


def markdown(results: dict[str, Any]) -> str:
    """Mean and sample deviation over the seeds that are there."""
    seeds = results["seeds"]
    lines = []
    for row, label in ROWS.items():
        cells = []
        for size in SIZES:
            values = [found[row][str(size)] for found in seeds.values()]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}")
        lines.append([label.format(epochs=results["epochs"], more=results["more"]), *cells])
    head = ["top-1, % of 353 test digits, by pixels", *map(str, SIZES)]
    text = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)]
    return (
        "\n".join([*text, "", f"Mean and deviation over seeds {', '.join(sorted(seeds))}; trained at 32 pixels."])
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, action="append", help="one seed; without it 0, 1 and 2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for seed in args.seed or (0, 1, 2):
        rows = study(seed)
        known = json.loads(args.out.read_text()) if args.out.exists() else {"seeds": {}}
        results = {"epochs": EPOCHS, "more": MORE, "seeds": {**known["seeds"], str(seed): rows}}
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(results))
        print(f"seed {seed}")
        print(
            table(["", *map(str, SIZES)], [[name, *(f"{v:.1f}" for v in row.values())] for name, row in rows.items()])
        )


if __name__ == "__main__":
    main()
