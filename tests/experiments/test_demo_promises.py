"""What the demo promises of its figures: the same on a busy machine, similar on another CPU, and a table soon."""

import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from parapos.experiments import demo
from parapos.training import fit

PROCESSES = 2  # at a time, of one thread each, as the demo has them


@pytest.fixture(scope="module")
def seeds():
    return demo.committed()


def train(folder, name, *changes, **variables):
    """A model of the demo, trained by a process of its own."""
    words = [sys.executable, "-m", "parapos", "train", "demo", "--model.encoding", name, "--out", str(folder), *changes]
    environment = {**os.environ, **variables}
    done = subprocess.run(words, env=environment, cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def evaluations(seeds, name):
    return {column: spec.evaluation(name, 24) for column, spec in seeds.grid.table.columns.items()}


def top1(folder, evaluation):
    metrics = fit.evaluate(folder, split="test", size=evaluation.size, position_scale=evaluation.position_scale)
    return 100 * metrics["top1"]


@pytest.mark.full
def test_training_on_a_cpu_without_vector_units_lies_in_the_interval(seeds, tmp_path):
    """Such a CPU sums in another order, so its weights differ from the shipped ones."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        made = {
            name: pool.submit(train, tmp_path / name, name, ATEN_CPU_CAPABILITY="default") for name in demo.ENCODINGS
        }
    outside = []
    for name in demo.ENCODINGS:
        folder = made[name].result()
        shipped = demo.shipped_folder() / name / "weights.safetensors"
        assert (folder / "weights.safetensors").read_bytes() != shipped.read_bytes(), "vector units were used"
        for column, evaluation in evaluations(seeds, name).items():
            value = top1(folder, evaluation)
            if not seeds.holds(name, column, value):
                outside.append((name, column, value, seeds.interval(name, column)))
    assert not outside


@pytest.mark.full
@pytest.mark.parametrize("name", demo.ENCODINGS)
def test_a_busy_machine_trains_the_same_bits(name, tmp_path):
    """Two processes that never rest, more threads than cores, or neither: weights and figures are the same."""
    short = ("--optim.epochs", "2")
    idle = train(tmp_path / "idle", name, *short)
    loop = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(loop) as one, subprocess.Popen(loop) as other:
        try:
            busy = train(tmp_path / "busy", name, *short, OMP_NUM_THREADS="5")
        finally:
            one.kill()
            other.kill()
    for file in ("weights.safetensors", "metrics.csv"):
        assert (idle / file).read_bytes() == (busy / file).read_bytes(), file


@pytest.mark.full
def test_the_first_table_comes_within_a_minute(tmp_path):
    """Of processor time on each core that the demo uses; the clock would also count what else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "parapos", "demo", "--out", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "start_new_session": True}
    with subprocess.Popen(words, **pipes) as process:
        has_table = any(line.startswith("|") for line in process.stdout)
        os.killpg(process.pid, signal.SIGKILL)
    assert has_table
    assert (tmp_path / "shipped" / "extrapolation.png").is_file()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds / min(PROCESSES, os.cpu_count() or 1) < 60
