"""Shared by all tests: seeds, hypothesis settings, and small attention modules built from the registry.

B batch, N tokens, H heads, p position dims. Helpers are session fixtures, so hypothesis may use them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import parapos
from parapos.encodings import ENCODINGS

settings.register_profile("parapos", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("parapos")

CASES = [(name, p) for name, cls in ENCODINGS.items() for p in (1, 2, 3, 4) if cls.claims.unbounded or p == 2]
CASES += [("pape-direct", p) for p in (1, 2, 3, 4)]


@pytest.fixture(autouse=True, scope="module")
def _threads():
    """Tiny tensors lose more to thread barriers than they win, and test processes share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _plugins():
    """What one test names on the command line is not given to the next."""
    from parapos import plugins

    before = list(plugins.given)
    yield
    plugins.given[:] = before


def pytest_generate_tests(metafunc):
    """`name` is every encoding, unless a test lists its own; `case` also has every position dimension it serves."""
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "name" in metafunc.fixturenames and not any("name" in names for names in own):
        metafunc.parametrize("name", list(ENCODINGS))
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=[f"{name}-{p}" for name, p in CASES])


@pytest.fixture
def registries():
    """What a test registers is forgotten after it."""
    from parapos.attention import KERNELS
    from parapos.data import DATASETS
    from parapos.encodings.looks import LOOKS
    from parapos.models import MODELS
    from parapos.predict import cloud_page, driving, points  # noqa: F401 - they register what they have on import
    from parapos.predict.albums import ALBUMS
    from parapos.predict.sources import SOURCES
    from parapos.predict.views import VIEWS
    from parapos.tasks import TASKS

    known = (ENCODINGS, LOOKS, MODELS, DATASETS, TASKS, KERNELS, ALBUMS, SOURCES, VIEWS)
    before = [dict(registry) for registry in known]
    yield
    for registry, entries in zip(known, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture(scope="session")
def make():
    """make(name, p, **options): an Attention module of 3 heads (12 where an encoding has fixed layouts).

    "pape-direct" is PaPE with form="direct".
    """

    def build(name, p, *, dtype=None, kernel="reference", seed=0, **options):
        torch.manual_seed(seed)
        if name == "pape-direct":
            name, options = "pape", {"form": "direct", **options}
        heads = 3 if ENCODINGS[name].claims.unbounded else 12
        if name == "pape" and options.get("projection", True):  # else m = p
            options = {"parabolas": 5, **options}
        return parapos.Attention(26, heads, name, p, head_dim=8, kernel=kernel, **options).to(dtype)

    return build


@pytest.fixture(scope="session")
def inputs():
    """inputs(module, B, N): tokens (B, N, D) in the module's dtype and positions (B, N, p), float64 for float64."""

    def build(module, batch=2, tokens=7, *, dtype=torch.float64, seed=1):
        g = torch.Generator().manual_seed(seed)
        encoding = module.encoding
        x = torch.randn(batch, tokens, encoding.dim, generator=g, dtype=torch.float64).to(dtype)
        r = 2 * torch.randn(batch, tokens, encoding.pos_dim, generator=g, dtype=torch.float64)
        return x, r if dtype == torch.float64 else r.float()

    return build


@pytest.fixture(scope="session")
def run():
    """run(module, x, r): what a model does with an encoding, the addition to the tokens included."""
    return lambda module, x, r, mask=None: module(module.encoding.add(x, r), r, mask)


@pytest.fixture(scope="session")
def scores():
    """scores(encoding, x, q, k, r): all logits (B, H, N, N)."""

    def logits(encoding, x, q, k, r):
        q, k, terms = encoding(x, q, k, r)
        total = q @ k.transpose(-1, -2) * encoding.scale
        for term in terms:
            total = total + term.scores(q.dtype) * (encoding.scale if term.scaled else 1.0)
        return total

    return logits


@pytest.fixture(scope="session")
def qk():
    """qk(module, x): the module's queries and keys, (B, H, N, h) each."""

    def project(module, x):
        size = module.heads * module.qk_dim
        q, k = module.qkv(x).split([size, size, module.heads * module.head_dim], dim=-1)[:2]
        return [t.unflatten(-1, (module.heads, -1)).transpose(1, 2) for t in (q, k)]

    return project


@pytest.fixture(scope="session")
def environment():
    """One thread per process: tests share the cores, and bits must not depend on how many there are. The plug-in of the
    tests can be imported."""
    toy = str(Path(__file__).with_name("plugins") / "toy_boxes")
    paths = os.pathsep.join(filter(None, [toy, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}


@pytest.fixture(scope="session")
def forked(environment):
    """forked("train", ..., log=path, **death): runs a command in a process that dies as zygote.py says; gives its exit
    code and what it said. Processes are forked from one that stays, so imports are paid for once. With processes=2 the
    code is a list."""
    script = Path(__file__).with_name("zygote.py")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    with subprocess.Popen([sys.executable, "-P", str(script)], **pipes) as process:
        assert process.stdout.readline() == "ready\n"

        def run(*argv, log, **death):
            start = log.stat().st_size if log.exists() else 0
            process.stdin.write(json.dumps({"argv": [str(a) for a in argv], "log": str(log), **death}) + "\n")
            process.stdin.flush()
            codes = json.loads(process.stdout.readline())
            return codes if len(codes) > 1 else codes[0], log.read_bytes()[start:].decode() if log.exists() else ""

        yield run
        process.stdin.close()
