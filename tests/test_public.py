"""Frozen surfaces: public names, the code of the front page, a light import, the length and layering of files."""

import ast
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import parapos

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "src" / "parapos"
NAMES = {
    "Attention",
    "AttentionPlan",
    "Block",
    "Distance",
    "Encoder",
    "Encoding",
    "KernelError",
    "Polynomial",
    "Positions",
    "Quadratic",
    "Table",
    "ViT",
    "attend",
    "create_encoding",
    "create_model",
    "event_positions",
    "explain",
    "fold",
    "grid_positions",
    "interop",
    "list_encodings",
    "list_models",
    "point_positions",
    "predict",
    "register_dataset",
    "register_encoding",
    "register_kernel",
    "register_model",
    "register_task",
    "tubelet_positions",
}
READING = [  # as the README says
    f"src/parapos/{name}"
    for name in ("encodings/base.py", "encodings/parabolic.py", "attention/terms.py", "attention/reference.py")
]


def test_public_names():
    assert set(parapos.__all__) == NAMES
    assert list(parapos.__all__) == sorted(parapos.__all__)
    found = {
        n for n in vars(parapos) if not n.startswith("_") and not isinstance(getattr(parapos, n), types.ModuleType)
    }
    assert found | {"interop", "predict"} == NAMES
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", parapos.__version__)


def test_registered_names():
    assert set(parapos.list_encodings()) >= {
        "pape",
        "pape_ri",
        "sincos",
        "rope",
        "rope_mixed",
        "alibi",
        "lookhere",
        "none",
        "polynomial",
    }
    assert {"reference", "fused", "triton", "flex"} <= set(parapos.attention.KERNELS)


def test_the_surface_works_as_promised():
    r = parapos.grid_positions(14, 14)
    assert r.shape == (196, 2)
    assert (r.min(), r.max()) == (1, 14)
    assert parapos.grid_positions(14, 14, cls=True)[0].tolist() == [0, 0]
    enc = parapos.create_encoding("pape", dim=768, heads=12, head_dim=64, pos_dim=2, parabolas=50)
    x, (q, k, v) = torch.randn(1, 196, 768), torch.randn(3, 1, 12, 196, 64)
    assert enc.add(x, r) is x
    q, k, terms = enc(x, q, k, r)
    assert q.shape == k.shape == (1, 12, 196, 64)
    assert enc.w_p.shape == (12, 50, 2)
    assert enc.w_a.shape == enc.w_b.shape == (12, 50, 768)
    att = parapos.Attention(768, heads=12, encoding="pape", pos_dim=2)
    assert att(x, r, mask=None).shape == (1, 196, 768)
    assert parapos.Attention(768, heads=12, encoding=enc)(x, r).shape == (1, 196, 768)
    assert parapos.attend(q, k, v, terms=(), mask=None, scale=None, kernel="auto").shape == v.shape
    assert parapos.attend(q, k, v, terms=terms).shape == v.shape
    plan = parapos.explain(q, k, v, terms=terms)
    assert isinstance(plan, parapos.AttentionPlan)
    assert plan.kernel in str(plan)


def test_models_work_as_promised():
    net = parapos.create_model("vit_base_patch16", encoding="pape", num_classes=1000).eval()
    with torch.no_grad():
        assert net(torch.rand(1, 3, 224, 224)).shape == (1, 1000)
        assert net(torch.rand(1, 3, 160, 96), position_scale=224 / 448).shape == (1, 1000)
    assert "vit_base_patch16" in parapos.list_models()
    assert callable(parapos.interop.official.load)
    assert callable(parapos.predict.load)


def packages(statement):
    """Top-level packages in memory after a statement, in a fresh interpreter."""
    code = f"import sys; {statement}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_it_loads_torch_and_nothing_else():
    added = packages("import parapos") - packages("import torch") - set(sys.stdlib_module_names)
    assert {name for name in added if not name.startswith("_")} == {"parapos"}
    forbidden = {"lightning", "torchvision", "torchmetrics", "matplotlib", "rich", "tensorboard", "timm"}
    assert not forbidden & packages("import parapos")


def lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_idea_fits_in_fifteen_minutes():
    found = {name: lines(REPO / name) for name in READING}
    assert sum(found.values()) <= 700, found
    assert all(f"]({name})" in (REPO / "README.md").read_text(encoding="utf-8") for name in READING)


def test_one_idea_per_file():
    files = [PACKAGE / "blocks.py", PACKAGE / "positions.py"]
    files += [f for folder in ("encodings", "attention", "models") for f in (PACKAGE / folder).rglob("*.py")]
    assert len(files) > 10
    assert {f.name: lines(f) for f in files if lines(f) > 400} == {}


@pytest.mark.parametrize("folder", ["encodings", "attention"])
def test_the_core_knows_no_modality(folder):
    words = re.compile(r"images?|imagenet|videos?|\b224\b|pixels?|cameras?|datasets?", re.IGNORECASE)
    for file in (PACKAGE / folder).rglob("*.py"):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            assert not words.search(line), f"{file.name}:{number}: {line.strip()}"


HELPERS = {"__init__", "canvas", "machine", "text", "malloc", "plugins", "processes", "tracing"}  # below all rooms
LAYERS = (  # each may use its own layer's rooms where listed together, and those before it
    {"positions", "relative", "curves"},
    {"encodings", "attention"},
    {"blocks"},
    {"models"},
    {"tokenizers", "data"},
    {"tasks", "metrics", "recipes"},
    {"training"},
    {"predict", "experiments", "interop"},
    {"analysis", "bench"},
    {"commands"},
    {"cli", "__main__"},
)


def rooms_used(file):
    """The top-level rooms of the package that a file imports."""
    here = ("parapos", *file.relative_to(PACKAGE).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        found |= {target[1] for target in targets if target[0] == "parapos" and len(target) > 1}
    return {room for room in found if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file()}


def test_every_room_has_a_layer():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert rooms - HELPERS <= set().union(*LAYERS)


@pytest.mark.parametrize("layer", range(len(LAYERS)), ids=lambda layer: "+".join(sorted(LAYERS[layer])))
def test_layers_look_down_only(layer):
    allowed = HELPERS.union(*LAYERS[: layer + 1])
    for room in LAYERS[layer]:
        files = (PACKAGE / room).rglob("*.py") if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]
        for file in files:
            if file.is_file():
                assert rooms_used(file) <= allowed, file


def test_attention_stays_small():
    """Without the kernels for GPUs and what skips keys."""
    names = ("__init__", "columns", "fused", "kernels", "reference", "scores", "select", "terms")
    lines = sum(len((PACKAGE / f"attention/{name}.py").read_text(encoding="utf-8").splitlines()) for name in names)
    assert lines <= 1100


# What other systems brought to experiments, analysis and bench: files that are not counted below.
OF_OTHERS = {
    "analysis": {"clouds.py", "driving.py", "tiles.py", "explorer"},
    "bench": {"detection.py", "driving.py", "points.py", "sparse.py", "sparse_view.py", "steps.py", "trained.py"},
    "experiments": {"demo_report.py"},
}


def test_experiments_analysis_and_bench_grow_no_more():
    """Only downwards: lower the bound with the count."""
    counted = 0
    for room, others in OF_OTHERS.items():
        for file in (PACKAGE / room).rglob("*"):
            name = file.relative_to(PACKAGE / room).parts[0]
            if file.suffix in (".py", ".toml") and name not in others:
                counted += len(file.read_text(encoding="utf-8").splitlines())
    assert counted <= 4076


def test_helpers_use_no_room():
    for name in HELPERS - {"__init__"}:
        assert rooms_used(PACKAGE / f"{name}.py") <= HELPERS


def test_the_wheel_has_no_mocks():
    for file in PACKAGE.rglob("*.py"):
        assert "unittest" not in file.read_text(encoding="utf-8"), file
