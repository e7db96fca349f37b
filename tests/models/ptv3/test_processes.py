"""Running statistics do not depend on how many processes share the parts of a step."""

import pytest
import torch

from parapos.models.ptv3.norm import update_statistics

from .clouds import clouds, tiny

PARTS = [(60, 20), (90,), (40, 7), (33,)]


def train(parts):
    """Buffers after these parts, in evaluation order."""
    net = tiny(encoding="pape").train()
    for part in parts:
        net(*clouds(*part, seed=len(part)), rows=[range(4)] * 3)
    return dict(net.named_buffers())


def work(rank, world, file):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{file}.store", rank=rank, world_size=world)
    torch.save(train(PARTS[rank::world]), f"{file}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.full
def test_two_processes_end_with_the_statistics_of_one(tmp_path):
    torch.multiprocessing.spawn(work, (2, tmp_path / "buffers"), 2)
    alone = train(PARTS)
    for rank in range(2):
        shared = torch.load(tmp_path / f"buffers.{rank}")
        assert shared.keys() == alone.keys()
        assert all(torch.equal(shared[name], value) for name, value in alone.items())


def test_statistics_move_once_per_pass():
    net = tiny(encoding="none").train()
    net(*clouds(50))
    norm = net.backbone.embedding["stem"].norm
    moved = norm.running_mean.clone()
    update_statistics(net)  # nothing new was seen
    assert torch.equal(norm.running_mean, moved)
    assert (norm.num_batches_tracked, bool(moved.any())) == (1, True)
