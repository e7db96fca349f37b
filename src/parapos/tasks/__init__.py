"""Tasks by name: what is learned and how it is judged."""

from __future__ import annotations

from .base import Evaluator, Loss, Metric, Task

__all__ = ["Evaluator", "Loss", "Metric", "Task"]
