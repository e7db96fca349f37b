"""What happens beside the steps, in one order: count, record, save, stop.

A checkpoint is written between steps only, and after a validation, never before one that is due, unless a signal asks
for it; then the validation is done first when the run goes on. The metrics file is written through before a checkpoint,
so it has at least the rows up to the checkpoint's step.
"""

from __future__ import annotations

import csv
import io
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger

from . import checkpoint, rows
from .module import NonFiniteLoss, TrainingModule

SHOWN = 8  # samples that an error names


class Stopped(Exception):
    """A signal ended training after a checkpoint. Its number is `signal`."""

    def __init__(self, number: int, path: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; saved {path}")
        self.signal = number


class Recorder:
    """metrics.csv, and loggers that get the same rows. Numbers are written so that they read back as they were."""

    def __init__(
        self, path: Path, metrics: Sequence[str], loggers: Sequence[Logger] = (), parts: Sequence[str] = ()
    ) -> None:
        self.path, self.loggers = path, loggers
        trained = ["train_loss", *(f"train_{name}" for name in parts)]
        self.columns = ["step", "epoch", "lr", *trained, *(f"val_{name}" for name in metrics)]

    def rewind(self, step: int, validated: int, expected: int) -> str | None:
        """Keeps the rows that a checkpoint knows, and makes the file if there is none. Says what is missing.

        step, validated: the last step that was trained, and the last one after which a validation was done. expected:
        how many rows there should be.
        """
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        header = f"{','.join(self.columns)}\n".encode()
        if lines and lines[0] != header:
            raise checkpoint.CheckpointError(f"{self.path}: expected the columns {','.join(self.columns)}")
        whole = [line for line in lines[1:] if line.endswith(b"\n")]
        read = rows.parse(self.path, b"".join([header, *whole]), self.columns, numbers=self.columns)
        kept: dict[tuple[int, bool], bytes] = {}  # a step has at most one row of training and one of validation
        for row, line in zip(read, whole, strict=True):
            trained = "lr" in row
            if row.get("step", 0) <= (step if trained else validated):
                kept.setdefault((row.get("step", 0), trained), line)
        checkpoint.write(self.path, b"".join([header, *kept.values()]))
        missing = len(kept) < expected
        return f"{self.path}: has {len(kept)} of {expected} rows; the others are lost" if missing else None

    def add(self, row: dict[str, Any]) -> None:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, lineterminator="\n").writerow(row)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text.getvalue())
        numbers = {key: value for key, value in row.items() if key != "step"}
        for logger in self.loggers:
            logger.log_metrics(numbers, row["step"])

    def flush(self) -> None:
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())


class Display:
    """A bar in a terminal, plain lines elsewhere; always on stderr."""

    def __init__(self, steps: int, start: int) -> None:
        self.steps, self.start, self.began = steps, start, time.monotonic()
        self.bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")]
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=steps, completed=start)
            self.bar.start()

    def line(self, text: str) -> None:
        if self.bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self.bar.console.print(text, highlight=False, markup=False)

    def step(self, step: int, loss: float) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=f"loss {loss:.4f}")

    def row(self, row: dict[str, Any], epochs: int) -> None:
        if "train_loss" in row and self.bar is not None:
            return
        left = (time.monotonic() - self.began) / max(1, row["step"] - self.start) * (self.steps - row["step"])
        message = [f"{key} {value:.4g}" for key, value in row.items() if key not in ("step", "epoch")]
        place = f"epoch {row['epoch']}/{epochs} step {row['step']}/{self.steps}"
        self.line(", ".join([place, *message, f"left {timedelta(seconds=round(left))}"]))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class EvaluationBar(Callback):
    """The batches of an evaluation as a bar, in a terminal alone."""

    def __init__(self) -> None:
        self.bar: Any = None

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("evaluating", total=sum(trainer.num_val_batches))
            self.bar.start()

    def on_validation_batch_end(self, *given: Any, **options: Any) -> None:
        if self.bar is not None:
            self.bar.advance(self.task)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.on_validation_end(trainer, pl_module)


class Engine(Callback):
    """Runs everything that is not the step itself. `folder` is the run's; only the first process writes there. outputs:
    options of the model that the data decided."""

    def __init__(
        self, folder: Path, outputs: Mapping[str, Any], recorder: Recorder | None, display: Display | None
    ) -> None:
        self.folder, self.outputs, self.recorder, self.display = folder, outputs, recorder, display
        self.signal = 0
        self._before: dict[int, Any] = {}

    def _listen(self) -> None:
        """Takes SIGTERM and SIGINT from Lightning, which would leave at once. A second one does leave at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if number not in self._before and threading.current_thread() is threading.main_thread():
                self._before[number] = signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._listen()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._listen()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module: TrainingModule = pl_module
        assert module.plan is not None
        if (batch_idx + 1) % module.plan.accumulate:
            return
        loss, stop = module.finish_step(self.signal)
        progress, run = module.progress, module.recipe.run
        if not math.isfinite(loss):
            raise NonFiniteLoss(self._not_finite(module, loss))
        if self.display is not None:
            self.display.step(progress.step, loss)
        if progress.step % run.log_every == 0:
            self._row(module, lr=trainer.optimizers[0].param_groups[0]["lr"])
        due = run.save_every and progress.step % run.save_every == 0 and progress.step % module.plan.steps
        if due or stop:
            path = self._save(trainer, module)
            if stop:
                raise Stopped(stop, path)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.average is not None:
            pl_module.average.swap(True)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if self.signal and pl_module.plan.world == 1:  # several processes agree after the validation
            if pl_module.average is not None:
                pl_module.average.swap(False)
            raise Stopped(self.signal, self._save(trainer, pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        module: TrainingModule = pl_module
        assert module.plan is not None
        progress, metric = module.progress, module.task.metric(module.task.headline)
        progress.validated = progress.step // module.plan.steps
        self._check_weights(trainer, module)
        self._row(module, **{f"val_{name}": value for name, value in module.results.items()})
        value = module.results[metric.name]
        if not progress.best_step or metric.better(value, progress.best):
            progress.best, progress.best_step = value, progress.step
            self._export(trainer, module)
        if module.average is not None:
            module.average.swap(False)
        path = self._save(trainer, module)
        if self.signal and module.plan.world == 1 and progress.step < module.steps:
            raise Stopped(self.signal, path)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self.display is not None:
            self.display.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _row(self, module: TrainingModule, **values: float) -> None:
        """Adds a row to the metrics. One with a learning rate also has the mean loss since the last such row."""
        progress = module.progress
        assert module.plan is not None
        row: dict[str, Any] = {"step": progress.step, "epoch": -(-progress.step // module.plan.steps), **values}
        if "lr" in values:
            row["train_loss"] = progress.loss_sum / progress.loss_steps
            row |= {f"train_{name}": value / progress.loss_steps for name, value in progress.part_sums.items()}
            progress.loss_sum, progress.loss_steps, progress.part_sums = 0.0, 0, {}
        if self.recorder is not None:
            self.recorder.add(row)
        if self.display is not None:
            self.display.row(row, module.recipe.optim.epochs)

    def _check_weights(self, trainer: Trainer, module: TrainingModule) -> None:
        finite = checkpoint.not_finite(module.model) is None
        if not trainer.strategy.reduce_boolean_decision(finite):
            good = checkpoint.latest(self.folder / "checkpoints")[0]
            message = f"weights are not finite after step {module.progress.step}"
            raise NonFiniteLoss(f"{message}; last good checkpoint: {good or 'none yet'}")

    def _save(self, trainer: Trainer, module: TrainingModule) -> Path:
        folder = self.folder / "checkpoints"
        path = checkpoint.step_path(folder, module.progress.step)
        self._check_weights(trainer, module)
        if self.recorder is not None:
            self.recorder.flush()
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            checkpoint.prune(folder, module.recipe.run.keep)
        return path

    def _export(self, trainer: Trainer, module: TrainingModule) -> None:
        weights = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            model, recipe = module.recipe.model, module.recipe
            checkpoint.export(
                self.folder / "weights.safetensors",
                {k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")},
                model=model.name,
                encoding=model.encoding,
                options=model.chosen,
                outputs=self.outputs,
                plugins=list(recipe.plugins),
                learned=recipe.learned,
                size=recipe.data.size,
                step=module.progress.step,
                **{f"val_{name}": value for name, value in module.results.items()},
            )

    def _not_finite(self, module: TrainingModule, loss: float) -> str:
        bad = module.bad_samples()
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        who = f"samples {', '.join(map(str, bad[:SHOWN]))}{more}" if bad else "no single sample, only their sum"
        good = checkpoint.latest(self.folder / "checkpoints")[0]
        return f"loss is {loss} at step {module.progress.step}, from {who}; last good checkpoint: {good or 'none yet'}"
