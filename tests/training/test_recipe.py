"""Recipes: those on the shelf load, and what is wrong with one is told before any data is read."""

import dataclasses
import re

import pytest

from parapos import data
from parapos.data import register_dataset
from parapos.encodings import ENCODINGS
from parapos.training import recipe
from parapos.training.recipe import RecipeError

MINIMAL = """
[model]
name = "vit_nano_patch4"
[data]
name = "digits"
size = 16
[optim]
epochs = 1
batch = 8
lr = 1e-3
"""


@pytest.fixture
def write(tmp_path):
    def put(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return put


@pytest.fixture(autouse=True)
def _no_data(monkeypatch):
    """Reading data is a failure here."""

    def read(*args, **options):
        raise AssertionError("data was read")

    monkeypatch.setattr(data, "create_dataset", read)
    monkeypatch.setattr(recipe, "create_dataset", read)


@pytest.mark.parametrize("name", list(recipe.shelf()))
def test_the_shelf_loads_and_tells(name):
    recipe.load(name, {"data.root": "somewhere"} if "imagenet" in name else {})
    header = "".join(line for line in recipe.shelf()[name].open() if line.startswith("#")).lower()
    for word in ("command", "cost", "score", f"parapos train {name}"):
        assert word in header


def test_what_is_written_down_reads_back(write):
    found = recipe.load(
        write(MINIMAL + '[augment.sample]\nturn = 5\n[run]\nwandb = "a \\"b\\" c"\n'),
        {"model.options.parabolas": "3", "optim.betas": "[0.5, 0.75]", "model.options.kernel": "reference"},
    )
    assert found.optim.betas == (0.5, 0.75)
    assert found.model.options == {"parabolas": 3, "kernel": "reference"}
    assert recipe.load(write(found.dumps(), "again.toml")) == found
    for section in dataclasses.fields(found):
        assert f"[{section.name}]" in found.dumps() or section.name == "plugins"


def test_changes_have_the_type_of_the_key(write):
    path = write(MINIMAL)
    assert recipe.load(path, {"optim.lr": "1"}).optim.lr == 1.0
    assert recipe.load(path, {"run.wandb": "7"}).run.wandb == "7"
    assert recipe.load(path, {"run.compile": "true"}).run.compile is True
    assert recipe.load(path, {"model.encoding": "rope"}).model.encoding == "rope"


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "lookhere"])  # which wants 12 or 16 heads
def test_an_encoding_is_chosen_by_its_name(encoding):
    model = recipe.load("digits", {"model.encoding": encoding}).model
    assert ("parabolas" in model.chosen) == (encoding == "pape")
    assert model.chosen["drop_path"] == 0.05


def test_an_option_may_not_be_given_in_vain():
    with pytest.raises(RecipeError, match=r"model.options.parabolas: has no effect, model.encodings.pape.parabolas"):
        recipe.load("digits", {"model.options.parabolas": "3"})
    assert recipe.load("digits", {"model.encodings.pape.parabolas": "3"}).model.chosen["parabolas"] == 3


def test_extends(write):
    write(MINIMAL, "base.toml")
    path = write('extends = "base.toml"\n[optim]\nlr = 5e-3\n[model.options]\ndepth = 1\n')
    found = recipe.load(path)
    assert (found.optim.lr, found.optim.batch, found.model.options) == (5e-3, 8, {"depth": 1})
    assert recipe.load(write('extends = "digits"\n')).data.name == "digits"
    with pytest.raises(RecipeError, match=r"mine.toml: extends: 'mine.toml' leads back to itself"):
        recipe.load(write('extends = "mine.toml"\n'))
    with pytest.raises(RecipeError, match=r"unknown recipe 'digit'.*did you mean 'digits'"):
        recipe.load(write('extends = "digit"\n'))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.lrr", "1", r"optim.lrr: unknown key, .*did you mean 'lr'"),
        ("optims.lr", "1", r"--optims.lr: expected a section .*did you mean 'optim'"),
        ("lr", "1", r"--lr: expected a section"),
        ("optim.lr", "fast", r"optim.lr: expected a number, got 'fast'"),
        ("optim.lr", "nan", r"optim.lr: expected a finite number, got nan"),
        ("optim.lr", "-1", r"optim.lr: expected a positive number, got -1.0"),
        ("optim.final_lr", "9", r"optim.final_lr: expected from 0 to optim.lr, got 9.0"),
        ("optim.epochs", "1.5", r"optim.epochs: expected a whole number, got 1.5"),
        ("optim.epochs", "true", r"optim.epochs: expected a whole number, got True"),
        ("optim.betas", "[1, 2, 3]", r"optim.betas: expected a list of 2 numbers, got \[1, 2, 3\]"),
        ("optim.part", "3", r"optim.part: expected a divisor of optim.batch = 8, got 3"),
        ("optim.decay", "none", r"optim.decay: expected one of all, matrices"),
        ("optim.warmup", "1", r"optim.warmup: expected at least 0 and below 1"),
        ("run.compile", "1", r"run.compile: expected true or false, got 1"),
        ("run.precision", "16", r"run.precision: expected one of 32-true"),
        ("run.keep", "1", r"run.keep: expected at least 2"),
        ("model.name", "vit_nano_patch8", r"model.name: .*did you mean 'vit_nano_patch4'"),
        ("model.encoding", "papa", r"model.encoding: .*did you mean 'pape'"),
        ("model.options.parabola", "3", r"model: .*did you mean 'parabolas'"),
        ("model.encodings.pap.parabolas", "3", r"model.encodings.pap: .*did you mean 'pape'"),
        ("model.encodings.pape.parabola", "3", r"model: .*did you mean 'parabolas'"),
        ("model.encodings.pape", "3", r"model.encodings.pape: expected a table, got 3"),
        ("model.options.dim", "abc", r"model.options.dim: expected a whole number, got 'abc'"),
        ("model.options.dim", "-4", r"model: .*negative dimension -4"),
        ("model.options.drop_path", "often", r"model.options.drop_path: expected a number, got 'often'"),
        ("model.options.strict", "1", r"model.options.strict: expected true or false, got 1"),
        ("model.options.parabolas", "2.5", r"model.options.parabolas: expected a whole number, got 2.5"),
        ("run.threads", "100000", r"run.threads: expected from 0 to 1024, got 100000"),
        ("data.workers", "100000", r"data.workers: expected from 0 to 1024, got 100000"),
        ("model.options.num_classes", "3", r"model.options.num_classes: not an option"),
        ("model.name.x", "3", r"model.name.x: model.name is not a table"),
        ("data.name", "digit", r"data.name: .*did you mean 'digits'"),
        ("data.size", "18", r"data.size: expected a multiple of the model's patch size 4, got 18"),
        ("data.size", "0", r"data.size: missing, expected the side in pixels of the samples of dataset digits"),
        ("data.root", "/x", r"data.root: dataset digits has no root"),
        ("data.options.crop", "1", r"data.options.crop: dataset digits has no such option"),
        ("augment.sample.trun", "1", r"augment.sample.trun: unknown key, .*did you mean 'turn'"),
        ("augment.sample.turn", "-1", r"augment.sample: turn must be from 0 to 180, got -1"),
        ("augment.smoothing", "1", r"augment.smoothing: expected at least 0 and below 1, got 1.0"),
    ],
)
def test_bad_values_are_told(key, value, message, write):
    with pytest.raises(RecipeError, match=message) as told:
        recipe.load(write(MINIMAL), {key: value})
    assert key.startswith(("lr", "optims")) or str(told.value).startswith("mine.toml: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run.accelerator": "cpu", "run.precision": "16-mixed"}, "run.precision: 16-mixed needs a GPU"),
        ({"run.accelerator": "cpu", "run.strategy": "fsdp"}, "run.strategy: fsdp needs GPUs"),
        ({"optim.ema": "0.9", "run.strategy": "fsdp"}, "optim.ema: cannot be combined with run.strategy = 'fsdp'"),
    ],
)
def test_impossible_combinations_are_told(changes, message, write):
    with pytest.raises(RecipeError, match=re.escape(f"mine.toml: {message}")):
        recipe.load(write(MINIMAL), changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model", "mine.toml: not TOML: "),
        ("model = 3", "mine.toml: model: expected a section [model], got 3"),
        ("[model]", "mine.toml: model.name: missing, expected a text"),
        (
            "[modle]",
            "mine.toml: [modle]: unknown section, expected one of model, data, optim, augment, task, run; did you mean",
        ),
        ("extends = 3", "mine.toml: extends: expected the name or path of a recipe, got 3"),
    ],
)
def test_bad_files_are_told(text, message, write):
    with pytest.raises(RecipeError, match=re.escape(message)):
        recipe.load(write(text))


@pytest.mark.usefixtures("registries")
def test_a_dataset_of_an_unknown_task_is_told(write):
    register_dataset("dreams", lambda split: [], task="oneiromancy")
    with pytest.raises(RecipeError, match=r"data.name: dreams is for oneiromancy, which parapos cannot train yet"):
        recipe.load(write(MINIMAL), {"data.name": "dreams"})


def test_a_missing_recipe_is_told(tmp_path):
    with pytest.raises(RecipeError, match="no such file"):
        recipe.load(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match="did you mean 'digits'"):
        recipe.load("digit")


def test_what_may_change_on_the_way():
    old = recipe.load("digits")
    assert recipe.difference(old, old) is None
    assert recipe.difference(old, recipe.load("digits", {"run.devices": "4", "data.workers": "3"})) is None
    assert recipe.difference(old, recipe.load("digits", {"run.seed": "4"})) == "run.seed: 0, now 4"


def test_tokens_are_of_the_models_patches():
    with pytest.raises(RecipeError, match=r"data.options.patch: expected the model's patch size 16, got 8"):
        recipe.load("dvsgesture_smoke", {"data.options.patch": "8"})
    recipe.load("dvsgesture_smoke", {"data.options.patch": "8", "model.options.patch": "8"})


@pytest.mark.parametrize(
    ("name", "option", "value", "good"),
    [
        ("ucf101", "tubelet", "1", "2"),
        ("ucf101", "tubelet", "3", "2"),
        ("ucf101", "tubelet", "5", "2"),
        ("dvsgesture", "buckets", "20", "10"),
    ],
)
def test_models_cut_as_the_data_does(name, option, value, good):
    told = rf"model.options.{option}: expected {good}, which dataset {name} is made for, got {value}"
    with pytest.raises(RecipeError, match=told):
        recipe.load(name, {f"model.options.{option}": value})
    recipe.load(name, {f"model.options.{option}": good})


@pytest.mark.parametrize(("key", "value"), [("height", "25"), ("width", "8"), ("height", "0"), ("width", "wide")])
def test_sides_of_frames_are_multiples_of_the_patch(key, value):
    told = rf"data.options.{key}: expected a multiple of the model's patch size 16, got '?{value}"
    with pytest.raises(RecipeError, match=told):
        recipe.load("ucf101", {f"data.options.{key}": value})
    recipe.load("ucf101", {f"data.options.{key}": "32"})


@pytest.mark.parametrize(
    ("name", "model", "told"),
    [
        ("ucf101", "event_vit_nano_patch16", "codes, x, y, t, length, dataset ucf101 gives video, tubelets"),
        ("dvsgesture", "vivit_nano_patch16", "video, tubelets, dataset dvsgesture gives codes, x, y, t, length"),
        ("digits", "vivit_nano_patch16", "video, tubelets, dataset digits gives image"),
    ],
)
def test_a_model_takes_what_the_data_gives(name, model, told, write):
    text = f'extends = "{name}"\n[model]\nname = "{model}"\n'
    with pytest.raises(RecipeError, match=rf"model.name: {model} takes {told}"):
        recipe.load(write(text))
