"""What is learned and how it is judged: a model, its loss on a part of a batch, its metrics.

`Task` knows how a step is put together from parts and what a checkpoint must hold besides weights and optimizer: the
step, and sums that are on their way to the metrics file. `Classification` knows labels; the model names what it is
given of a batch.

B samples of a part, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from ..data.sampling import EvalBatches, Plan, step_seed
from .optim import Average, learning_rate, make_optimizer
from .recipe import Recipe


class NonFiniteLoss(RuntimeError):
    """The loss is not a number any more. The message has the step, the samples and the last good checkpoint."""


@dataclass
class Progress:
    """How far training is: all of a run's state that is neither weight nor optimizer."""

    step: int = 0  # optimizer steps done
    validated: int = 0  # epochs whose validation is done
    loss_sum: float = 0.0  # of the steps since the last row of the metrics
    loss_steps: int = 0
    rows: int = 0  # of the metrics file
    best: float = float("-inf")
    best_step: int = 0


class Task(LightningModule):
    """A model in training. Subclasses give `losses`, `judge`, `score` and `best_metric`."""

    best_metric: str
    metric_names: tuple[str, ...]

    def __init__(self, model: nn.Module, recipe: Recipe, classes: int) -> None:
        super().__init__()
        self.model, self.recipe, self.classes, self.progress = model, recipe, classes, Progress()
        self.plan: Plan | None = None
        self.eval_batches: EvalBatches | None = None
        self.average = Average(model, recipe.optim.ema) if recipe.optim.ema else None
        self.results: dict[str, float] = {}
        self._parts: list[tuple[Tensor, Tensor]] = []  # losses and ids of this step's parts

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        """Training losses (B,)."""
        raise NotImplementedError

    def judge(self, batch: dict[str, Tensor]) -> None:
        """Takes an evaluated batch into the metrics."""
        raise NotImplementedError

    def score(self) -> dict[str, float]:
        """The metrics over all processes, and a fresh start."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        assert self.plan is not None
        return self.plan.steps * self.recipe.optim.epochs

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.recipe.optim)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert self.plan is not None
        if batch_idx % self.plan.accumulate == 0:
            self._parts = []
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = learning_rate(self.recipe.optim, self.progress.step + 1, self.steps)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The part's share of the mean loss of the step, times what Lightning and the processes divide by."""
        plan, step = self.plan, self.progress.step
        assert plan is not None
        part = plan.part_of(batch_idx)
        torch.manual_seed(step_seed(plan.seed, step, part))
        losses = self.losses(batch)
        if not plan.keys(step, part):
            losses = losses * 0  # a stand-in, so that every process has something to do
        self._parts.append((losses.detach(), batch["id"]))
        return losses.sum() / plan.size(step) * (plan.accumulate * plan.world)

    def finish_step(self, stop: int) -> tuple[float, int]:
        """Counts a step. Gives its mean loss, and the largest of all processes' `stop`."""
        assert self.plan is not None
        total = sum(float(losses.double().sum()) for losses, _ in self._parts)
        if self.plan.world > 1:
            both = torch.tensor([total, float(stop)], dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(gathered := both.clone())
            torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX)
            total, stop = float(gathered[0]), int(both[1])
        loss = total / self.plan.size(self.progress.step)
        self.progress.step += 1
        self.progress.loss_sum += loss
        self.progress.loss_steps += 1
        if self.average is not None:
            self.average.update(self.progress.step)
        return loss, stop

    def bad_samples(self) -> list[int]:
        """Ids of the samples of the last step whose loss is not finite, from all processes."""
        found = [int(i) for losses, ids in self._parts for i in ids[~losses.isfinite()].tolist()]
        if self.plan is not None and self.plan.world > 1:
            lists: list[list[int]] = [[] for _ in range(self.plan.world)]
            torch.distributed.all_gather_object(lists, found)
            found = [i for part in lists for i in part]
        return found

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert self.eval_batches is not None
        if self.eval_batches.real(batch_idx):
            self.judge(batch)
        elif self.recipe.run.strategy == "fsdp":
            self(batch)  # gathers weights from all processes, which must all take part

    def on_validation_epoch_end(self) -> None:
        self.results = self.score()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.plan is not None
        del checkpoint["loops"]  # where training goes on follows from the step
        checkpoint["global_step"] = self.progress.step
        checkpoint["epoch"] = self.progress.step // self.plan.steps
        checkpoint["parapos"] = {
            "progress": asdict(self.progress),
            "average": self.average.values if self.average is not None else None,
            "recipe": self.recipe.dumps(),
            "samples": self.plan.samples,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.progress = Progress(**checkpoint["parapos"]["progress"])
        if self.average is not None:
            self.average.values = dict(checkpoint["parapos"]["average"])


class Classification(Task):
    """Softmax cross-entropy over C classes, on mixed and smoothed labels; judged by accuracy and friends.

    subset: some classes; accuracy is then also counted with answers among them alone, as top1_<their number>.
    """

    best_metric = "top1"
    metric_names: tuple[str, ...] = ("loss", "top1", "precision", "recall", "f1")

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        classes: int,
        position_scale: float = 1.0,
        subset: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model, recipe, classes)
        from torchmetrics import MeanMetric, MetricCollection
        from torchmetrics.classification import (
            MulticlassAccuracy,
            MulticlassF1Score,
            MulticlassPrecision,
            MulticlassRecall,
        )

        self.position_scale = position_scale
        self.inputs: tuple[str, ...] = getattr(model, "inputs", ("image",))
        self.mixers = _mixers(recipe, classes)
        self.loss = MeanMetric(nan_strategy="disable").set_dtype(torch.float64)
        self.metrics = MetricCollection(
            {
                "top1": MulticlassAccuracy(classes, average="micro"),
                "precision": MulticlassPrecision(classes, average="macro"),
                "recall": MulticlassRecall(classes, average="macro"),
                "f1": MulticlassF1Score(classes, average="macro"),
            }
        )
        self.subset, self.among = subset, None
        if subset is not None:
            self.among = MulticlassAccuracy(classes, average="micro")
            self.metric_names = (*self.metric_names, f"top1_{len(subset)}")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits (B, C)."""
        given = [batch[name] for name in self.inputs]
        return self.model(*given) if self.position_scale == 1 else self.model(*given, self.position_scale)

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["label"]
        if self.mixers:
            images, labels = self.mixers[int(torch.randint(len(self.mixers), ()))](batch["image"], labels)
            batch = {**batch, "image": images}
        return F.cross_entropy(self(batch), labels, label_smoothing=self.recipe.augment.smoothing, reduction="none")

    def judge(self, batch: dict[str, Tensor]) -> None:
        logits = self(batch).float()
        if "readable" in batch:  # a file that cannot be read is answered wrongly
            wrong = F.one_hot((batch["label"] + 1) % self.classes, self.classes).to(logits)
            logits = torch.where(batch["readable"].bool()[:, None], logits, wrong)
        self.loss.update(F.cross_entropy(logits, batch["label"], reduction="none"))
        self.metrics.update(logits, batch["label"])
        if self.among is not None:
            few = torch.full_like(logits, -torch.inf)
            few[:, self.subset] = logits[:, self.subset]
            self.among.update(few, batch["label"])

    def score(self) -> dict[str, float]:
        found = {"loss": self.loss.compute(), **self.metrics.compute()}
        self.loss.reset()
        self.metrics.reset()
        if self.among is not None:
            found[self.metric_names[-1]] = self.among.compute()
            self.among.reset()
        return {name: float(found[name]) for name in self.metric_names}


def _mixers(recipe: Recipe, classes: int) -> list[Any]:
    """MixUp and CutMix, those that are on. Each has one weight per part, and partners are neighbours."""
    chosen = [(name, getattr(recipe.augment, name.lower())) for name in ("MixUp", "CutMix")]
    if not any(alpha for _, alpha in chosen):
        return []
    from torchvision.transforms import v2  # type: ignore[import-untyped]

    return [getattr(v2, name)(alpha=alpha, num_classes=classes) for name, alpha in chosen if alpha]
