"""Tasks by name: what is learned and how it is judged. `base` says what a task is."""

from __future__ import annotations

import inspect
from typing import Any

from ..text import nearest
from .base import Evaluator, Loss, Metric, Task, answer
from .classification import Classification
from .detection import Detection
from .detection3d import Detection3D
from .segmentation import Segmentation

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "detection": Detection,
    "detection3d": Detection3D,
    "segmentation": Segmentation,
}

__all__ = [
    "TASKS",
    "Evaluator",
    "Loss",
    "Metric",
    "Task",
    "answer",
    "create_task",
    "list_tasks",
    "register_task",
    "task_class",
    "task_options",
]


def list_tasks() -> list[str]:
    """The names that `create_task` knows."""
    return list(TASKS)


def register_task(name: str, cls: type[Task]) -> None:
    """Makes a task known to recipes by a name. A name that is taken is an error."""
    if TASKS.get(name, cls) is not cls:
        raise ValueError(f"task {name!r} is taken by {TASKS[name].__qualname__}, expected a new name")
    TASKS[name] = cls


def task_class(name: str) -> type[Task]:
    """A task that is not yet on any data: its metrics and its headline stand there."""
    if name not in TASKS:
        known = list_tasks()
        raise ValueError(f"unknown task {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    return TASKS[name]


def task_options(cls: type[Task]) -> list[str]:
    """Names of the options that a task takes besides its data set."""
    return list(inspect.signature(cls).parameters)[1:]


def create_task(name: str, dataset: Any, **options: Any) -> Task:
    """A task on a data set. Options are those of the task; unknown ones are errors."""
    cls = task_class(name)
    known = task_options(cls)
    for option in options:
        if option not in known:
            message = f"expected some of {', '.join(known)}" if known else "it has none"
            raise ValueError(f"task {name} has no option {option!r}, {message}{nearest(option, known)}")
    return cls(dataset, **options)
