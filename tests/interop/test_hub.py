"""Runs for the hub: a folder with weights, recipe and card. No network: the hub is a folder that a stand-in fills."""

import shutil
import tomllib

import pytest
import torch
from safetensors.torch import load_file, save_file

from parapos.interop import hub
from parapos.training import checkpoint
from tests.run_folders import make_run

EVALUATIONS = """data,split,size,position_scale,loss,top1,top5,samples
digits,test,32,1.0,0.51,0.9632,0.9972,353
digits,test,64,0.5,0.93,0.7110,0.9802,353
other,val,32,1.0,0.50,0.5000,0.9000,100
"""


class LocalHub:
    """What `push_to_hub` needs of huggingface_hub.HfApi, with a folder for repositories."""

    def __init__(self, root):
        self.root, self.private = root, {}

    def create_repo(self, *, repo_id, private, exist_ok):
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        self.private[repo_id] = private

    def upload_folder(self, *, repo_id, folder_path, allow_patterns):
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return f"local/{repo_id}"


@pytest.fixture
def run(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "evaluations.csv").write_text(EVALUATIONS)
    return folder


def test_a_run_goes_to_a_hub_and_back(run, tmp_path):
    api = LocalHub(tmp_path / "hub")
    assert hub.push_to_hub(run, "me/digits", private=True, license="apache-2.0", api=api) == "local/me/digits"
    assert api.private == {"me/digits": True}
    folder = tmp_path / "hub" / "me" / "digits"
    assert sorted(path.name for path in folder.iterdir()) == sorted(hub.FILES)
    model = hub.from_pretrained(folder)
    want, _ = checkpoint.load_weights(run / "weights.safetensors")
    x = torch.rand(2, 3, 32, 48)
    with torch.no_grad():
        assert torch.equal(model(x), want(x))
    assert not model.training


def test_the_card_says_what_was_done(run, tmp_path):
    card = (hub.save(run, tmp_path / "out", license="mit") / "README.md").read_text()
    head = card.split("---")[1]
    assert "library_name: parapos" in head
    assert "license: mit" in head
    assert "pipeline_tag: image-classification" in head
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    assert f"{recipe['optim']['epochs']} epochs of batches of {recipe['optim']['batch']}" in card
    command = "`parapos eval RUN --split test --size 64 --position-scale 0.5`"
    assert f"| digits | test | 64 | 0.9300 | 0.7110 | 0.9802 | {command} |" in card
    assert "--data other" in card
    assert "@article" in card
    (run / "evaluations.csv").unlink()
    card = (hub.save(run, tmp_path / "none") / "README.md").read_text()
    assert "This run was not evaluated." in card
    assert "license" not in card.split("---")[1]


def test_the_card_is_one_that_the_hub_reads(run, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    folder = hub.save(run, tmp_path / "out", license="mit")
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.library_name == "parapos"
    assert "pape" in card.data.tags


def test_weights_are_loaded_strictly(run, tmp_path):
    folder = hub.save(run, tmp_path / "out")
    path = folder / "weights.safetensors"
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    state = load_file(path)
    save_file({**state, "extra": torch.zeros(1)}, path, metadata=about)
    with pytest.raises(checkpoint.CheckpointError, match="extra"):
        hub.from_pretrained(folder)
    save_file(dict(list(state.items())[1:]), path, metadata=about)
    with pytest.raises(checkpoint.CheckpointError, match="expected"):
        hub.from_pretrained(folder)
    path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"harm")
    with pytest.raises(checkpoint.CheckpointError, match="no such file"):
        hub.from_pretrained(folder)
    with pytest.raises(ValueError, match="revision is for repositories"):
        hub.from_pretrained(folder, revision="main")


def test_a_run_that_does_not_load_is_not_published(run, tmp_path):
    (run / "weights.safetensors").write_bytes(b"broken")
    api = LocalHub(tmp_path / "hub")
    with pytest.raises(checkpoint.CheckpointError):
        hub.push_to_hub(run, "me/digits", api=api)
    assert not (tmp_path / "hub").exists()
