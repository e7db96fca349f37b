"""What this machine has and what runs on it. Needs nothing but torch."""

from __future__ import annotations

import platform
import re
from importlib import metadata

import torch

from .. import __version__, text
from ..attention import KERNELS, KernelError, attend
from ..encodings import create_encoding
from ..machine import cpu_name
from ..positions import grid_positions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def devices() -> dict[str, str]:
    """Every device that torch can use, with a description."""
    names = {"cpu": f"{cpu_name()}, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        what = torch.cuda.get_device_properties(i)
        names[f"cuda:{i}"] = f"{what.name}, {what.total_memory / 2**30:.0f} GiB, sm_{what.major}{what.minor}"
    if torch.backends.mps.is_available():
        names["mps"] = "Apple GPU"
    return names


def extras() -> dict[str, dict[str, str | None]]:
    """The packages of each extra with their version, None if missing. Nothing is imported.

    Empty if parapos is not installed as a distribution, for then nobody knows what it requires.
    """
    try:
        required = metadata.requires("parapos") or []
    except metadata.PackageNotFoundError:
        return {}
    out: dict[str, dict[str, str | None]] = {}
    for line in required:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)", line)
        if name and extra and extra[1] not in ("all", "dev"):
            try:
                version: str | None = metadata.version(name[0])
            except metadata.PackageNotFoundError:
                version = None
            out.setdefault(extra[1], {})[name[0]] = version
    return out


def try_kernel(kernel: str, device: str, dtype: torch.dtype) -> str:
    """Run PaPE on a tiny input, forward and backward: "ok", or the first line of what went wrong."""
    step = "forward"
    try:
        pape = create_encoding("pape", dim=16, heads=2, head_dim=8, pos_dim=2, parabolas=4).to(device)
        x = torch.randn(1, 10, 16, device=device, dtype=dtype)
        qkv = torch.randn(3, 1, 2, 10, 8, device=device, dtype=dtype, requires_grad=True)
        q, k, terms = pape(x, qkv[0], qkv[1], grid_positions(3, 3, cls=True, device=device))
        out = attend(q, k, qkv[2], terms, scale=pape.scale, kernel=kernel)
        assert isinstance(out, torch.Tensor)
        step = "backward"
        out.sum().backward()
        grads = [x.grad for x in (qkv, *pape.parameters())]
        finite = out.isfinite().all() and all(g is not None and g.isfinite().all() for g in grads)
        return "ok" if finite else "not finite"
    except KernelError as error:
        return f"no: {str(error).split(': ', 1)[-1]}"
    except Exception as error:  # whatever a driver or compiler may raise is what this is to find
        message = (str(error) or type(error).__name__).splitlines()[0]
        return f"{step}: {message}"


def _summary(kernel: str, device: str) -> str:
    """One result if all types agree, else each."""
    results = {str(dtype)[6:]: try_kernel(kernel, device, dtype) for dtype in DTYPES}
    if len(set(results.values())) > 1:
        return "; ".join(f"{dtype} {result}" for dtype, result in results.items())
    result = next(iter(results.values()))
    return f"ok in {', '.join(results)}" if result == "ok" else result


def report() -> str:
    """Everything, as text with three tables."""
    facts = [
        ("parapos", __version__),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__}, built for CUDA {torch.version.cuda or 'none'}"),
        *devices().items(),
    ]
    packages = [
        (
            extra,
            ", ".join(f"{name} {version}" for name, version in found.items() if version) or "-",
            ", ".join(name for name, version in found.items() if not version) or "-",
        )
        for extra, found in sorted(extras().items())
    ]
    kernels = [(name, device, _summary(name, device)) for device in devices() for name in KERNELS]
    return "\n\n".join(
        [
            text.table(("", "found"), facts, left=2),
            "Optional packages, by the extra that brings them: pip install 'parapos[EXTRA]'",
            text.table(("extra", "present", "missing"), packages, left=3)
            if packages
            else "unknown: parapos is not installed as a distribution",
            "Attention kernels, tried forward and backward with PaPE:",
            text.table(("kernel", "device", "result"), kernels, left=3),
            "Next:\n" + "\n".join(f"  {line}" for line in next_steps(extras())),
        ]
    )


def next_steps(found: dict[str, dict[str, str | None]]) -> list[str]:
    """What to type next, given the packages of each extra."""
    missing = [name for name in ("train", "report") if any(v is None for v in found.get(name, {}).values())]
    steps = [f"pip install 'parapos[{','.join(missing)}]'   to train, draw and run the demo"] if missing else []
    steps += [] if missing else ["parapos demo                shipped models first, then the same trained here"]
    steps += [] if missing else ["parapos explore             a page to see what attention is made of"]
    steps.append("parapos doctor precision    how exact PaPE's scores are in bfloat16 on this machine")
    steps.append("parapos --help              all commands, with an example each")
    return steps
