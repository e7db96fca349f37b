"""The command line: what it says, what it returns, and what bad input gets."""

import subprocess
import sys

import pytest

import parapos
from parapos import cli
from parapos.attention import native
from parapos.commands import doctor


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ([], ["doctor", "bench", "--version"]),
        (["doctor"], ["precision", "example: parapos doctor"]),
        (
            ["doctor", "precision"],
            ["--grid", "(default: 64)", "(default: init,3x)", "example: parapos doctor precision"],
        ),
        (["bench", "model"], ["--parabolas", "(default: 2,4,8,16,32,50,64)", "example: parapos bench model"]),
        (["bench", "attention"], ["--quick", "--device", "(default: 300.0)", "example: parapos bench attention"]),
    ],
)
def test_help(command, shown, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(text in out for text in shown)


def test_version_and_module():
    out = subprocess.run([sys.executable, "-m", "parapos.cli", "--version"], capture_output=True, text=True, check=True)
    assert out.stdout == f"parapos {parapos.__version__}\n"


def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("torch" in line and parapos.__version__ not in line for line in lines)
    for kernel in parapos.attention.KERNELS:
        (line,) = (line for line in lines if line.startswith(f"| {kernel}") and "cpu" in line)
        serves = kernel in ("fused", "reference") or (
            kernel == "native" and not isinstance(native.library(), Exception)
        )
        assert ("ok in float32, bfloat16, float16" if serves else "| no: ") in line
    assert any(line.startswith("| train") for line in lines)


def test_doctor_tells_what_went_wrong(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no such instruction\nand a long story")

    monkeypatch.setattr(doctor, "attend", broken)
    assert doctor.try_kernel("features", "cpu", doctor.DTYPES[0]) == "forward: no such instruction"


def test_doctor_reads_extras_without_importing(monkeypatch):
    required = [
        "torch>=2.7",
        "nonexistent-thing>=1; extra == 'train'",
        "torch; (platform_system == 'Linux') and extra == \"kernels\"",
        "pytest; extra == 'dev'",
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: required)
    found = doctor.extras()
    assert set(found) == {"train", "kernels"}
    assert found["train"] == {"nonexistent-thing": None}
    assert found["kernels"]["torch"]


def test_precision(capsys):
    assert cli.main(["doctor", "precision", "--grid", "4", "--dtype", "fp16", "--setting", "3x"]) == 0
    out = capsys.readouterr().out
    assert "4 x 4" in out
    assert "| parapos" in out
    assert "init" not in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "required: COMMAND; see parapos --help"),
        ("trian x", "did you mean 'train'?"),
        ("fly", "invalid choice: 'fly'"),
        ("bench", "required: BENCHMARK"),
        ("doctor --fast", "unrecognized arguments: --fast"),
        ("doctor precision --grid 1", "whole number from 2 to 256, got '1'"),
        ("doctor precision --grid x", "whole number from 2 to 256, got 'x'"),
        ("doctor precision --dtype fp8", "invalid choice: 'fp8'"),
        ("doctor precision --setting init,9x", "unknown '9x'"),
        ("bench attention --seconds -1", "positive number of seconds, got '-1'"),
        ("bench attention --threads 0", "whole number from 1 to 1024, got '0'"),
        ("bench attention --seconds nan", "positive number of seconds, got 'nan'"),
        ("bench model --sizes 224,100", "multiple of 16 from 16 to 8192, got '100'"),
        ("bench model --encodings pape,fourier", "unknown 'fourier'"),
        ("bench model --parabolas 2,0", "whole number from 1 to 1024, got '0'"),
        ("bench model --model resnet", "invalid choice: 'resnet'"),
        ("bench model --rounds 1", "whole number from 2 to 100000, got '1'"),
    ],
)
def test_user_errors_are_one_line(command, message, capsys):
    assert cli.main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("parapos")
    assert err.count("\n") == 1


def test_short_names_of_where_training_runs(monkeypatch, capsys):
    from parapos.training import command

    asked = {}
    monkeypatch.setattr(command, "train", lambda **options: asked.update(options) or 0)
    words = ["train", "digits_smoke", "--devices", "2", "--strategy=ddp", "--num-nodes", "3"]
    assert cli.main(words) == 0
    assert asked["changes"] == {"run.devices": "2", "run.strategy": "ddp", "run.nodes": "3"}
    assert cli.main([*words, "--run.devices", "4"]) == 2
    assert capsys.readouterr().err == "parapos train: expected --devices or --run.devices once\n"
    assert cli.main(["train", "digits_smoke", "--devices"]) == 2
    assert "expected a value after --run.devices" in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["attention", "model"])
def test_missing_device(bench, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["bench", bench, "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_bench_model_passes_its_options_on(monkeypatch, tmp_path, capsys):
    from parapos.bench import measure
    from parapos.bench import model as bench_model
    from parapos.bench import model_view as bench_model_view

    asked = {}
    monkeypatch.setattr(bench_model, "run", lambda **options: asked.update(options) or {})
    monkeypatch.setattr(bench_model_view, "markdown", lambda results: "a table")
    monkeypatch.setattr(measure, "write", lambda results, text, plot, prefix: [prefix])
    words = "--model vit_small_patch16 --encodings rope,pape --parabolas 2,50 --sizes 32,48 --batch 3 --dtype bf16"
    more = ["--rounds=4", "--seconds=9", "--parts=time"]
    assert cli.main(["bench", "model", *words.split(), *more, "--out", f"{tmp_path}/x"]) == 0
    assert asked == dict(
        model="vit_small_patch16",
        encodings=["rope", "pape"],
        parabolas=[2, 50],
        direct=False,
        sizes=[32, 48],
        batch=3,
        dtype="bf16",
        device="cpu",
        parts=["time"],
        seconds=9.0,
        rounds=4,
    )
    out, err = capsys.readouterr()
    assert out == "a table\n"
    assert f"wrote {tmp_path}/x" in err
