"""Batches of a dataset, read here or by worker processes. A file that cannot be read is the same error from both."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..data import Dataset, FormatError
from ..data.sampling import EvalBatches, Key, TrainBatches


class WorkerLost(ChildProcessError):
    """A data worker was killed. The message says what to do."""

    def __init__(self) -> None:
        message = "a data worker was killed, perhaps for want of memory"
        again = "run the same command again to resume; a smaller data.workers in the recipe takes less"
        super().__init__(f"{message}; {again}")


class _Samples:
    """A dataset that hands over its errors instead of raising them: torch adds a worker's traceback to those."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[int | Key]) -> list[Any]:
        try:
            if hasattr(self.dataset, "__getitems__"):
                return list(self.dataset.__getitems__(keys))
            return [self.dataset[key] for key in keys]
        except (FormatError, OSError) as error:
            return [error]


class _Collate:
    """The collation of a task, which hands over errors of samples as they are."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        wrong = next((sample for sample in samples if isinstance(sample, Exception)), None)
        return self.collate(samples) if wrong is None else wrong


def _ignore_signals(worker: int) -> None:
    """A signal to the whole process group is for the main process, which saves and then ends its workers."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Loader(DataLoader[Any]):
    """Batches of a dataset as `collate` puts them together."""

    def __init__(
        self,
        dataset: Dataset,
        batches: TrainBatches | EvalBatches,
        workers: int,
        collate: Callable[[Sequence[Any]], Any],
    ) -> None:
        super().__init__(
            _Samples(dataset),  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=_Collate(collate),
            num_workers=workers,
            worker_init_fn=_ignore_signals,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (OSError, EOFError):  # errors of samples are handed over; this is one of the pipe
                if self.num_workers:
                    raise WorkerLost from None
                raise
            if isinstance(batch, Exception):
                raise batch
            yield batch


def count_skipped(dataset: Dataset) -> str | None:
    """How many samples could not be read, over all processes, and the first of them; None if all could."""
    mask = getattr(dataset, "skipped", None)
    if mask is None:
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        mask = mask.to(device, torch.uint8, copy=True)
        torch.distributed.all_reduce(mask, op=torch.distributed.ReduceOp.MAX)
    indices = mask.nonzero().flatten().tolist()
    path = getattr(dataset, "path", None)
    first = f", the first is {path(indices[0])}" if indices and path is not None else ""
    return f"{len(indices)} of {len(dataset)} samples could not be read{first}" if indices else None
