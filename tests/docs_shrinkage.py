"""What makes the commands of the docs short enough for a test, and what cannot run here; a reason for each.

Commands are run as they are shown. Recipes of the same names train smaller models (SMALL), tables have one seed
(SEEDS) and one row, some commands get more words (ADDED), and placeholders get values (FILLED).
"""

from __future__ import annotations

import tomllib
from typing import Any

from tests.shown_commands import ROOT

SHORT = {"optim.epochs": 1, "run.threads": 1}
NANO = {
    "model.name": "vit_official_nano_patch16",
    "data.size": 32,
    "data.workers": 0,
    "data.options.complete": False,  # the generated copy has 312 images
    "optim.batch": 120,
    "run.precision": "32-true",
    "run.compile": False,
}
TINY = {"model.options.dim": 32, "model.options.depth": 2, "model.options.mlp_dim": 32, "optim.batch": 256}

FEW_IMAGES = {f"data.options.{split}_images": 60 for split in ("train", "val", "test")} | {
    "data.options.complete": False
}


NOT_TAKEN = ("extends", "data.root", "data.options.tables")  # of a smoke recipe: which copy of the data it reads


def _like(name: str) -> dict[str, Any]:
    """The values of a smoke recipe."""
    values = tomllib.loads((ROOT / f"src/parapos/recipes/{name}.toml").read_text())
    found = {key: value for key, value in _flat(values).items() if key not in NOT_TAKEN}
    return {**found, **SHORT}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


# A recipe of the paper becomes its smoke recipe or a nano model; one of a desk study sees few samples. All: one epoch.
SMALL: dict[str, dict[str, Any]] = {
    "cifar10": {**NANO, "model.name": "vit_nano_patch4", "model.options.dim": 32, "model.options.depth": 1},
    "coco": _like("coco_smoke"),
    "coco_desk": {},
    "coco_smoke": {},
    "demo": TINY,
    "demo_images": TINY,
    "desk_digits": TINY,
    "desk_events": {"optim.batch": 64, "optim.part": 64},
    "desk_fashion": {**TINY, **FEW_IMAGES},
    "desk_video": {"optim.batch": 64, "optim.part": 64},
    "digits": TINY,
    "digits_smoke": {},
    "dvsgesture": _like("dvsgesture_smoke"),
    "dvsgesture_matched": _like("dvsgesture_smoke"),
    "dvsgesture_smoke": {},
    "gen1": _like("gen1_smoke"),
    "gen1_smoke": {},
    "imagenet": NANO,
    "imagenet_ablation": NANO,
    "imagenet_matched": NANO,
    "modelnet40": _like("modelnet40_smoke"),
    "modelnet40_smoke": {},
    "nuscenes": _like("nuscenes_smoke"),
    "nuscenes_smoke": {},
    "rooms_desk": {"data.options.train": 4, "data.options.test": 2},
    "scannet": _like("scannet_smoke"),
    "scannet_smoke": {},
    "shapes_desk": {"data.options.train": 24, "data.options.test": 12},
    "ucf101": {**_like("ucf101_smoke"), "data.options.height": 64, "data.options.width": 80},  # a page asks patch 8, 10
    "ucf101_matched": _like("ucf101_smoke"),
    "ucf101_smoke": {},
}
DESK_IMAGES = {"train": 32, "val": 8, "test": 8}  # that `train coco_desk` draws

SEEDS = ("coco-desk", "demo", "desk", "desk-defaults", "desk-forms", "desk-rates", "points-desk")  # keep the first only
BENCH = {"model": "vit_official_nano_patch16", "parabolas": [2], "sizes": [32], "seconds": 0.5, "rounds": 2}

# What is added to commands: (beginning of the command, words, reason). Of several options the last one counts.

QUICK = "takes minutes; --quick runs the same code on small sizes"
FEW = "measures ViT-B for ten minutes; the same code on a nano model"
PART = "a generated copy has fewer files than the true data set"
ADDED: list[tuple[str, str, str]] = [
    ("bench attention", "--quick", QUICK),
    ("bench detection", "--quick", QUICK),
    ("bench points", "--quick", QUICK),
    ("bench tokenizer", "--quick", QUICK),
    (
        "bench model --model unitr",
        "--parts gflop --sizes 64 --encodings none",
        "UniTR takes minutes and GBs; here GFLOP",
    ),
    ("bench model", "--model vit_official_nano_patch16 --sizes 32 --seconds 1 --parabolas 2 --parts gflop,time", FEW),
    ("bench sparse", "--data digits --factors 1,2 --samples 4 --seconds 0.1 --parts shares,predictions", QUICK),
    ("demo", "--quick", "trains four models for minutes; tests/experiments/test_demo.py trains them in full"),
    ("prepare imagenet --root", "--partial", PART),
    ("prepare ucf101 --root", "--partial", PART),
    ("prepare dvsgesture --root", "--partial", PART),
    ("prepare gen1", "--partial", PART),
    ("prepare coco --root", "--partial", PART),
    ("prepare scannet --root", "--partial", PART),
    ("prepare modelnet40 --root", "--partial --points 200", PART),
    ("prepare nuscenes --root", "--partial", PART),
    ("analyze", "--samples 4", "scores heads on up to 1000 samples"),
]

# What stands for the placeholders of a command; RUN is runs/digits-pape where nothing else is said

OF_BOXES = {"RUN": "runs/coco_desk", "DIR": "boxes"}
FILLED: dict[str, dict[str, str]] = {
    "parapos eval RUN --predictions DIR": OF_BOXES,
    "parapos eval RUN --task.options.max_det 300": OF_BOXES,
    "parapos eval RUN --split val": OF_BOXES,
    "parapos sweep RUN --sizes 192,256,384": OF_BOXES,
    "parapos eval RUN --data imagenet_r": {"RUN": "runs/imagenet-pape"},
    "parapos eval RUN --data other --root FOLDER": {"other": "images", "FOLDER": "digits_folder"},
    "parapos import FOLDER": {"FOLDER": "published/imagenet-pape --out runs/imported"},
    "parapos prepare dvsgesture --root FOLDER": {"FOLDER": "data/dvsgesture"},
    "parapos demo --data FOLDER": {"FOLDER": "photos_by_class"},
    "parapos figure 2 --run RUN --image FILE": {"FILE": "photo.jpg"},
}
ELSEWHERE = {"/usr/share/datasets/fashion-mnist": "data/fashion_mnist"}  # generated, in the true format

# Commands that need several processes are started anew, with two of them

PROCESSES = (
    "parapos train imagenet --data.root data/imagenet --run.devices 8",
    "torchrun --nproc-per-node 8 -m parapos.cli train imagenet --data.root data/imagenet",
)
ONE_WORKER = "--workers 1"  # for --workers 8: processes take longer to start than the work takes
ONE_DEVICE = "--run.devices 1"  # for the others with eight: what differs is covered by PROCESSES

# Commands that cannot run here, and why.

CANNOT_RUN: dict[str, str] = {}

# Commands of other programs: the test that does the same, or why there is none

OTHER_PROGRAMS = {
    "make bench": "tests/test_docs_commands_run.py::test_commands_run",  # is `parapos bench attention`
    "make demo": "tests/experiments/test_demo_promises.py::test_the_first_table_comes_within_a_minute",
    "make docs": "tests/tools/test_site.py::test_the_site_builds_without_warnings",
    "make test": "is what runs the tests",
    "make test-full": "is what runs the tests",
    "ovc": "the page says that it was not run: OpenVINO is not here",
    "pip install": "tests/test_wheel.py::test_the_demo_runs_from_the_wheel",
    "pytest -m full tests/promises/test_devkit.py": "tests/promises/test_devkit.py::test_the_devkit_agrees",
    "python -m tools.claims": "tests/test_docs.py::test_claims_table_is_the_codes",
    "python -m tools.demo_models": "tests/tools/test_demo_models.py::test_runs_that_are_not_finished_are_not_stored",
    "python -m tools.export_bench": "tests/tools/test_interop_studies.py::test_the_table_of_exports",
    "python -m tools.support": "tests/test_docs.py::test_support_matrix_is_the_codes",
    "python -m tools.swap_study": "tests/tools/test_interop_studies.py::test_the_study_for_real",
    "python docs/results/desk-forms/decay.py": "tests/test_docs_commands_run.py::test_the_study_of_forms_runs",
    "python docs/results/nuscenes-heart/learn.py": "tests/test_driving_page.py::test_both_sensors_are_needed",
    "trtexec": "the page says that it was not run: it needs a GPU",
}
