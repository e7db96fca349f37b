"""Training and evaluation of a run. A run is a folder:

recipe.toml           the recipe with every default written out
versions.json         what it ran on, one entry per change
metrics.csv           loss, rate and validation metrics by step
tensorboard/          the same for TensorBoard
checkpoints/          where to go on from: the newest, and those before it
weights.safetensors   the weights that did best in validation, with what is needed to build the model
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger

from .. import __version__
from .. import plugins as extensions
from ..data import Dataset
from ..data.roots import check_root
from ..data.sampling import EvalBatches, Plan, TrainBatches
from ..tasks import Metric, Task
from . import checkpoint, recipe, state
from .callbacks import Display, Engine, EvaluationBar, Recorder, Stopped
from .loading import Loader, count_skipped
from .lock import FolderLock
from .machine import as_possible, make_trainer, own_signals, plain_errors, quiet
from .machine import is_first as is_first  # for callers of this module
from .module import Progress, TrainingModule
from .recipe import Recipe, RecipeError
from .schema import Bad, Run

OURS = (".recipe.toml.tmp", ".lock")  # what a run that was killed at its start leaves
PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "safetensors", "numpy")


def train(wanted: Recipe, folder: Path, *, must_exist: bool = False) -> str:
    """Trains in a folder, from its newest checkpoint if it has one. Says how it ended.

    Raises RecipeError before any data is read, CheckpointError, NonFiniteLoss, OSError, or Stopped after a signal.
    """
    extensions.load(wanted.plugins)
    wanted = _absolute(wanted)
    lock = FolderLock(folder)
    try:
        with plain_errors():
            return _train(wanted, folder, must_exist, lock)
    finally:
        lock.release()


def _train(wanted: Recipe, folder: Path, must_exist: bool, lock: FolderLock) -> str:
    known = (folder / "recipe.toml").is_file()
    if known:
        _acquire(lock, folder)
    resumed, held, progress, samples = _take_up(wanted, folder, must_exist)
    if progress.validated == wanted.optim.epochs:
        return f"{folder} is finished: {_best(wanted, progress)}"
    lent = _lent(wanted) if wanted.model.init and not resumed else None
    loggers = _loggers(wanted.run, folder, progress.step)
    with quiet(wanted.run), own_signals():
        trainer = make_trainer(wanted.run, logger=loggers or False, gradient_clip_val=wanted.optim.clip or None)
        world, rank = trainer.world_size, trainer.global_rank
        part = wanted.optim.part or max(1, wanted.optim.batch // world)
        if wanted.optim.batch % (part * world):
            reason = f"a multiple of {world} devices x optim.part {part} = {world * part}"
            raise RecipeError(f"optim.batch: expected {reason}, got {wanted.optim.batch}")

        training, validation = (wanted.dataset(split) for split in ("train", "val"))
        plan = Plan(
            samples=len(training), batch=wanted.optim.batch, part=part, seed=wanted.run.seed, world=world, rank=rank
        )
        if resumed and samples != len(training):
            reason = f"{samples} training samples as when the run began, got {len(training)}"
            raise RecipeError(f"data: expected {reason}")
        task, judge = wanted.make_task(training), wanted.make_task(validation)
        try:
            judge.adapt(task.learned())
        except ValueError as error:
            raise RecipeError(f"data: the validation split {error}") from None
        wanted = dataclasses.replace(wanted, learned=_learned(wanted, training, task))
        before = load_run(folder).learned.get("targets") if known else None
        if before not in (None, wanted.learned["targets"]):
            raise RecipeError(f"data: expected the same {', '.join(before)} as when the run began")
        outputs = task.outputs(training)
        _check_memory(wanted, outputs)
        torch.manual_seed(wanted.run.seed)
        model = wanted.model.build(outputs)
        if lent is not None:
            _borrow(model, lent, wanted)
        module = TrainingModule(model, task, wanted)
        module.plan, module.judge = plan, judge
        if wanted.run.precision == "64-true":
            module.double()  # Lightning does so after it has loaded a checkpoint, which would be rounded
        if resumed:
            state.check(held, resumed, module)
            held = {}
        recorder = display = None
        if rank == 0:
            _acquire(lock, folder)
            if not known and (folder / "recipe.toml").exists():
                raise RecipeError(f"{folder}: another process began to train there; run the same command again")
            _begin(wanted, folder, world)
            recorder = Recorder(folder / "metrics.csv", [m.name for m in task.metrics], loggers, task.parts)
            validated = progress.validated * plan.steps
            expected = progress.step // wanted.run.log_every + progress.validated
            if lost := recorder.rewind(progress.step, validated, expected):
                print(lost, file=sys.stderr)
            if resumed is not None:
                print(f"resuming {folder} at step {progress.step} of {module.steps}", file=sys.stderr)
            display = Display(module.steps, progress.step)
        if wanted.run.compile:
            module.model.compile()
        done = progress.step // plan.steps  # epochs whose steps are all done
        trainer.accumulate_grad_batches = plan.accumulate
        trainer.num_sanity_val_steps = float("inf") if done > progress.validated else 0  # a validation is still due
        trainer.fit_loop.max_epochs = wanted.optim.epochs - done
        trainer.callbacks.append(Engine(folder, outputs, recorder, display))  # type: ignore[attr-defined]
        batches = TrainBatches(plan, lambda: module.progress.step)
        loader = Loader(training, batches, wanted.data.workers, task.collate)
        module.eval_batches = EvalBatches(samples=len(validation), batch=wanted.data.eval_batch, world=world, rank=rank)
        judged = Loader(validation, module.eval_batches, wanted.data.workers, judge.collate)
        try:
            trainer.fit(module, loader, judged, ckpt_path=resumed and str(resumed))
        except Stopped:  # all processes stop together; after another error they may not be there to count
            _tell_skipped(training, validation)
            raise
        _tell_skipped(training, validation)
    return f"{folder} is finished: {_best(wanted, module.progress)}"


def evaluate(
    folder: Path,
    *,
    split: str = "test",
    size: int | tuple[int, int] | None = None,
    position_scale: float = 1.0,
    root: str | None = None,
    data: str | None = None,
    batch: int | None = None,
    relabel: str = "",
    predictions: Path | None = None,
    changes: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Metrics of a run's weights on a split. Needs the folder, and the data where its recipe or `root` says it is.

    data: another dataset, at its own root. position_scale multiplies positions; trained size / size interpolates them.
    batch: samples at a time on each device, by default that of the recipe. relabel: what to do if the data mean
    something else than what was learned, as the task's `adapt` has it. predictions: a folder for what the model
    answered, in the format of the benchmark. changes: of the run's recipe, as `recipe.load` takes them.
    """
    wanted = load_run(folder, changes)
    asked = {key: value for key, value in (("size", size), ("root", root)) if value is not None}
    model, about = checkpoint.load_weights(folder / "weights.safetensors")
    patch = getattr(model, "patch", 1)
    if size is not None and any(side < 1 or side % patch for side in ((size,) if isinstance(size, int) else size)):
        raise RecipeError(f"size: expected a multiple of the model's patch size {patch}, got {size}")
    dataset = wanted.judged(split, data, **asked)
    task = wanted.make_task(dataset)
    try:
        task.adapt(about.get("learned", {}).get("targets", checkpoint.outputs_of(about)), relabel)
    except ValueError as error:
        raise RecipeError(f"dataset {data or wanted.data.name}: {error}") from None
    run = as_possible(wanted.run)
    with plain_errors(), quiet(run):
        trainer = make_trainer(run, logger=False, callbacks=[EvaluationBar()])
        module = TrainingModule(model, task, wanted, position_scale)
        module.average, module.keep_predictions = None, predictions is not None
        world, rank = trainer.world_size, trainer.global_rank
        batch = batch or wanted.data.eval_batch
        module.eval_batches = EvalBatches(samples=len(dataset), batch=batch, world=world, rank=rank)
        loader = Loader(dataset, module.eval_batches, wanted.data.workers, task.collate)
        trainer.validate(module, loader, verbose=False)
        _tell_skipped(dataset)
    if predictions is not None and is_first():
        assert module.evaluator is not None
        for path in task.export(module.evaluator, predictions):
            print(f"wrote {path}", file=sys.stderr)
    return {"samples": float(len(dataset)), **module.results}


def metrics_of(folder: Path) -> tuple[Metric, ...]:
    """The metrics that the task of a run is judged by."""
    return load_run(folder).task_class.metrics


def headline_of(folder: Path) -> Metric:
    """The metric that decides which weights of a run are best."""
    cls = load_run(folder).task_class
    return cls.metric(cls.headline)


def _acquire(lock: FolderLock, folder: Path) -> None:
    """The first process holds the lock for all of them."""
    try:
        if is_first() and not lock.acquire():
            raise RecipeError(f"{folder}: another process trains there; wait for it or take another --out")
    except PermissionError:
        pass  # a finished run may be read; writing tells


def _learned(wanted: Recipe, dataset: Any, task: Task) -> dict[str, Any]:
    """What the weights of a run mean, and how samples were prepared."""
    size = {"size": wanted.data.size} if wanted.data.size else {}
    return {
        "data": wanted.data.name,
        "task": wanted.task_name,
        "preprocessing": {**size, **getattr(dataset, "preprocessing", {})},
        "targets": task.learned(),
    }


def _lent(wanted: Recipe) -> dict[str, torch.Tensor]:
    """The weights of the run that `model.init` names."""
    folder = Path(wanted.model.init)
    try:
        load_run(folder)  # with its plug-ins
        lender, about = checkpoint.load_weights(folder / "weights.safetensors")
    except (RecipeError, checkpoint.CheckpointError) as error:
        raise RecipeError(f"model.init: {error}") from None
    if about["encoding"] != wanted.model.encoding:
        expected = f"expected a run with model.encoding = {wanted.model.encoding!r}"
        raise RecipeError(f"model.init: {expected}, {folder} has {about['encoding']!r}")
    return lender.state_dict()


def _borrow(model: torch.nn.Module, lent: Mapping[str, torch.Tensor], wanted: Recipe) -> None:
    take = getattr(model, "load_backbone", None)
    if take is None:
        raise RecipeError(f"model.init: {wanted.model.name} has no load_backbone, expected nothing")
    try:
        take(lent)
    except ValueError as error:
        raise RecipeError(f"model.init: {wanted.model.init}: {error}") from None


def _check_memory(wanted: Recipe, outputs: Mapping[str, Any]) -> None:
    """Refuses weights that the memory of this machine cannot hold: the system would end the process without a word."""
    with torch.device("meta"):
        size = sum(p.numel() * p.element_size() for p in wanted.model.build(outputs).parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise RecipeError(f"model: its weights take {size / 1e9:.1f} GB, this machine has {memory / 1e9:.1f} GB")


def _tell_skipped(*datasets: Dataset) -> None:
    for dataset in datasets:
        if (reason := count_skipped(dataset)) and is_first():
            print(reason, file=sys.stderr)


def load_run(folder: Path, changes: Mapping[str, str] | None = None) -> Recipe:
    """The recipe of a run, with changes as `recipe.load` takes them."""
    if not (folder / "recipe.toml").is_file():
        made = "expected a folder that parapos train or parapos import made"
        raise RecipeError(f"{folder}: not a run, it has no recipe.toml; {made}")
    return recipe.load(folder / "recipe.toml", changes)


def _take_up(
    wanted: Recipe, folder: Path, must_exist: bool
) -> tuple[Path | None, dict[str, Any], Progress, int | None]:
    """The checkpoint to go on from, what it holds, how far it is and of how many samples; without one, None, nothing
    and the start. A folder of another recipe is refused."""
    known = folder / "recipe.toml"
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"{folder}: expected a folder for the run, got a file")
    if not known.exists():
        if must_exist:
            raise RecipeError(f"{folder}: nothing to resume, it has no recipe.toml")
        if is_first() and folder.exists() and any(path.name not in OURS for path in folder.iterdir()):
            raise RecipeError(f"{folder}: expected an empty folder or a run, it has no recipe.toml")
        return None, {}, Progress(), None
    if change := recipe.difference(load_run(folder), wanted):
        raise RecipeError(f"{folder}: holds a run of another recipe ({change}); take another --out or the same recipe")
    path, messages = checkpoint.latest(folder / "checkpoints")
    for message in messages if is_first() else ():
        print(message, file=sys.stderr)
    if path is not None:
        return path, *state.load(path)
    if must_exist:
        raise RecipeError(f"{folder}: nothing to resume, it has no checkpoints")
    if (folder / "metrics.csv").exists() and is_first():
        print(f"{folder}: has no checkpoints, starting over", file=sys.stderr)
    return None, {}, Progress(), None


def _begin(wanted: Recipe, folder: Path, world: int) -> None:
    """Writes down what is run and on what, and removes what a killed process left half written."""
    checkpoint.write(folder / "recipe.toml", wanted.dumps().encode())
    for name in (folder, folder / "checkpoints"):
        for path in name.glob(".*.tmp"):
            path.unlink(missing_ok=True)
    versions = folder / "versions.json"
    try:
        history = json.loads(versions.read_bytes()) if versions.exists() else []
    except ValueError as error:
        raise checkpoint.CheckpointError(f"{versions}: not JSON: {error}") from None
    if not isinstance(history, list):
        raise checkpoint.CheckpointError(f"{versions}: expected a list, got {type(history).__name__}")
    now = {**_versions(), "processes": world}
    if not history or history[-1] != now:
        if history:
            change = "machine, software or number of processes changed; resuming is not exact to the bit"
            print(f"{versions}: {change}", file=sys.stderr)
        checkpoint.write(versions, (json.dumps([*history, now], indent=2) + "\n").encode())


def _versions() -> dict[str, Any]:
    versions = {"parapos": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        versions[name] = metadata.version(name)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    cpu = {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    return {**versions, "gpu": gpu, **cpu}


def _best(wanted: Recipe, progress: Progress) -> str:
    return f"best val_{wanted.task_class.headline} {progress.best:.4f} at step {progress.best_step}"


def _absolute(wanted: Recipe) -> Recipe:
    """With a root and a run to start from that still are there from another folder."""
    if wanted.model.init:
        init = str(Path(wanted.model.init).expanduser().absolute())
        wanted = dataclasses.replace(wanted, model=dataclasses.replace(wanted.model, init=init))
    if not wanted.data.root:
        return wanted
    root = str(check_root(wanted.data.root))
    try:
        return dataclasses.replace(wanted, data=dataclasses.replace(wanted.data, root=root))
    except Bad as bad:
        raise RecipeError(f"data.{bad.key}: {bad.message}") from None


def _loggers(run: Run, folder: Path, step: int) -> list[Logger]:
    """TensorBoard and Weights & Biases, if asked for; they are imported only then. What came after `step` is hidden."""
    loggers: list[Logger] = []
    if not is_first():
        return loggers
    try:
        if run.tensorboard:
            from lightning.pytorch.loggers import TensorBoardLogger

            loggers.append(TensorBoardLogger(folder, name=None, version="tensorboard", purge_step=step + 1))
        if run.wandb:
            from lightning.pytorch.loggers import WandbLogger

            name = folder.resolve().name
            loggers.append(WandbLogger(project=run.wandb, name=name, id=name, save_dir=folder, resume="allow"))
    except ModuleNotFoundError as error:
        raise RecipeError(f"run.{'wandb' if run.wandb else 'tensorboard'}: {error}") from None
    return loggers
