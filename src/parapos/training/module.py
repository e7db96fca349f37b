"""The one LightningModule: a model and a task side by side, and what a checkpoint holds besides weights and optimizer.

A task gives the loss of a part as a sum and a weight. The gradient of a step is that of all sums over all weights, of
all parts and processes, so a step is the same however its batch is cut, also where the weight is only known once every
part was looked at (boxes of the whole batch, say). Each part is therefore divided by the number of samples of the
step, which is known before the first backward pass, and gradients are multiplied by samples / weight when they are
complete, before they are clipped. Where the weight is the number of samples, that factor is 1 and nothing is done.
Dividing by the samples first keeps gradients of half precision in range.

Running statistics, as of BatchNorm, are treated alike: each part starts from those at the beginning of the step, and
the step ends with their mean over its samples. So they move once a step, however its batch is cut.

B samples of a part, W weights of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..data.sampling import EvalBatches, Plan, step_seed
from ..tasks import Evaluator, Task
from .optim import Average, make_optimizer, make_schedule
from .recipe import Recipe, RecipeError


class NonFiniteLoss(RuntimeError):
    """The loss is not a number any more. The message has the step, the samples and the last good checkpoint."""


@dataclass
class Progress:
    """How far training is: all of a run's state that is neither weight nor optimizer."""

    step: int = 0  # optimizer steps done
    validated: int = 0  # epochs whose validation is done
    loss_sum: float = 0.0  # of the steps since the last row of the metrics
    loss_steps: int = 0
    best: float = float("-inf")
    best_step: int = 0
    part_sums: dict[str, float] = field(default_factory=dict)  # as loss_sum, of the named parts of the loss


class ScaledPositions:
    """A model that multiplies its positions. Tasks call it as they call the model."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        self.model, self.scale = model, scale
        self.inputs: tuple[str, ...] = getattr(model, "inputs", ("image",))

    def __call__(self, *inputs: Any) -> Any:
        return self.model(*inputs, self.scale)


class RunningStatistics:
    """What normalisation layers of a model remember of the batches that they saw, over a step of several parts."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        self._start: list[Tensor] = []
        self._sum: list[Tensor] = []

    @property
    def _buffers(self) -> list[Tensor]:
        return [b for layer in self._layers for b in layer.buffers(recurse=False)]  # they may have moved to a device

    def begin_step(self) -> None:
        self._start = [b.clone() for b in self._buffers]
        self._sum = [torch.zeros_like(b, dtype=torch.float64) for b in self._start]

    @torch.no_grad()
    def begin_part(self) -> None:
        for buffer, start in zip(self._buffers, self._start, strict=True):
            buffer.copy_(start)

    @torch.no_grad()
    def end_part(self, samples: int) -> None:
        """After the forward pass of a part, which counts as much as its samples."""
        for total, buffer in zip(self._sum, self._buffers, strict=True):
            total += samples * buffer.double()

    @torch.no_grad()
    def end_step(self, samples: int, shared: bool) -> None:
        """samples: of all parts. shared: with other processes."""
        if self._layers and shared:
            flat = torch.cat([total.flatten() for total in self._sum])
            torch.distributed.all_reduce(flat)
            sizes = [total.numel() for total in self._sum]
            self._sum = [x.reshape(b.shape) for x, b in zip(flat.split(sizes), self._start, strict=True)]
        for total, buffer in zip(self._sum, self._buffers, strict=True):
            buffer.copy_(total / samples)


class TrainingModule(LightningModule):
    """A model in training or under evaluation, of a task that it never looks into."""

    def __init__(self, model: nn.Module, task: Task, recipe: Recipe, position_scale: float = 1.0) -> None:
        super().__init__()
        self.model, self.task, self.recipe, self.progress = model, task, recipe, Progress()
        self.position_scale, self.judge = position_scale, task  # judge: the task of what the model is judged by
        self.plan: Plan | None = None
        self.eval_batches: EvalBatches | None = None
        self.average = Average(model, recipe.optim.ema) if recipe.optim.ema else None
        self.keep_predictions = False
        self.evaluator: Evaluator | None = None
        self.results: dict[str, float] = {}
        self._schedule: Callable[[int], dict[str, Any]] | None = None
        self._sums: Tensor = torch.zeros(())  # (2 + parts, W), of this step's parts: total, weight, named parts
        self._running = RunningStatistics(model)
        self._bad: list[int] = []  # samples of this step whose loss is not finite

    @property
    def judged(self) -> Any:
        """The model as an evaluation calls it."""
        return self.model if self.position_scale == 1 else ScaledPositions(self.model, self.position_scale)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        assert self.plan is not None
        return self.plan.steps * self.recipe.optim.epochs

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.recipe.optim)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        assert self.plan is not None
        if batch_idx % self.plan.accumulate == 0:
            self.begin_step()
            self._schedule = self._schedule or make_schedule(self.recipe.optim, self.steps)
            now = self._schedule(self.progress.step + 1)
            for group in self.trainer.optimizers[0].param_groups:
                group.update({**now, "lr": now["lr"] * group.get("factor", 1.0)})

    def begin_step(self) -> None:
        shape = (2 + len(self.task.parts), self.task.normalizers)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self._bad = []
        assert self.plan is not None
        if self.plan.parts > 1:
            self._running.begin_step()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The part's sum over the samples of the step, times what Lightning and the processes divide by."""
        plan, step = self.plan, self.progress.step
        assert plan is not None
        part = plan.part_of(batch_idx)
        torch.manual_seed(step_seed(plan.seed, step, part))
        if plan.parts > 1:
            self._running.begin_part()
        with self._needs(batch):
            loss = self.task.loss(self.model, batch)
        total, size = loss.total, len(plan.keys(step, part))
        if plan.parts > 1:
            self._running.end_part(size)
        if size:
            by_sample = None if loss.by_sample is None else loss.by_sample.detach().reshape(len(batch["id"]), -1)
            sums = [total.detach() if by_sample is None else by_sample.double().sum(0), loss.weight]
            sums += [loss.parts[name].detach() for name in self.task.parts]
            self._sums = self._sums + torch.stack([value.to(self._sums).reshape(-1) for value in sums])
            finite = total.detach().isfinite().all() if by_sample is None else by_sample.isfinite().all(1)
            self._bad += batch["id"][~finite.expand(len(batch["id"]))].tolist()
        else:
            total = total * 0  # a stand-in, so that every process has something to do
        return total.sum() / plan.size(step) * (plan.accumulate * plan.world)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients of all parts are there, but not clipped yet."""
        assert self.plan is not None
        size = self.plan.size(self.progress.step)
        if self.plan.world > 1:
            torch.distributed.all_reduce(self._sums)
        if self.plan.parts > 1:
            self._running.end_step(size, self.plan.world > 1)
        for number, weight in enumerate(self._weights()):
            if (factor := size * self.task.gain(size) / weight) != 1:
                torch._foreach_mul_(self._gradients(number), factor)

    def _gradients(self, normalizer: int) -> list[Tensor]:
        """Gradients of the parameters that learn from a share of the loss."""
        named = ((name.replace("_fsdp_wrapped_module.", ""), p.grad) for name, p in self.model.named_parameters())
        return [g for name, g in named if g is not None and self.task.normalizer_of(name) == normalizer]

    def _weights(self) -> list[float]:
        return [max(weight, self.task.least_weight) or 1.0 for weight in self._sums[1].tolist()]

    def finish_step(self, stop: int) -> tuple[float, int]:
        """Counts a step. Gives its loss, and the largest of all processes' `stop`."""
        assert self.plan is not None
        if self.plan.world > 1:
            most = torch.tensor(stop, device=self.device)
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
            stop = int(most)
        divided = (self._sums.cpu() / torch.tensor(self._weights(), dtype=torch.float64)).sum(1).tolist()
        loss, parts = divided[0], divided[2:]
        progress = self.progress
        progress.step += 1
        progress.loss_sum += loss
        progress.loss_steps += 1
        for name, value in zip(self.task.parts, parts, strict=True):
            progress.part_sums[name] = progress.part_sums.get(name, 0.0) + value
        if self.average is not None:
            self.average.update(progress.step)
        return loss, stop

    def bad_samples(self) -> list[int]:
        """Ids of the samples of the last step whose loss is not finite, from all processes."""
        return [i for part in self._gather(self._bad) for i in part]

    def _gather(self, value: Any) -> list[Any]:
        """A value of each process, in the order of ranks."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return [value]
        values: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(values, value)
        return values

    def on_validation_epoch_start(self) -> None:
        self.evaluator = self.judge.evaluator(keep_predictions=self.keep_predictions)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        assert self.eval_batches is not None
        assert self.evaluator is not None
        with self._needs(batch):
            if self.eval_batches.real(batch_idx):
                self.evaluator.update(self.judged, batch)
            elif self.recipe.run.strategy == "fsdp":  # gathers weights from all processes, which must all take part
                self.judge.evaluator().update(self.judged, batch)

    @contextmanager
    def _needs(self, batch: dict[str, Any]) -> Iterator[None]:
        """An entry that the task looks for and samples do not have is a mistake of the recipe."""
        try:
            yield
        except KeyError as error:
            if error.args[0] in batch:
                raise
            message = f"expected samples with {error.args[0]!r}, they have {', '.join(batch)}"
            raise RecipeError(f"task {self.recipe.task_name}: {message}; change task.name or data.name") from error

    def on_validation_epoch_end(self) -> None:
        assert self.evaluator is not None
        self.evaluator.merge(self._gather(self.evaluator.state()))
        self.results = self.evaluator.compute()

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
        known = checkpoint["parapos"]["progress"]
        self.progress = Progress(**{name: known[name] for name in Progress.__dataclass_fields__ if name in known})
        if self.average is not None:
            self.average.values = dict(checkpoint["parapos"]["average"])
