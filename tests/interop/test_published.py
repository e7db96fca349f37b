"""Folders that the authors published: what they load to, and the runs that are made of them."""

import json

import numpy as np
import pytest
import torch

from parapos import cli
from parapos.interop import official, published
from parapos.interop.official import CheckpointError
from parapos.training import checkpoint, fit, recipe
from tests.golden import FOLDER as GOLDEN
from tests.interop.test_official import CASES, CLASSES, DEPTH, DIM, HEAD, HEADS, HIDDEN, OWN, PARABOLAS, weights

POSITIONAL = {"sincos": "absolute", "none": "nope"}
DATASET = {"image": "imagenet", "video": "ucf101"}


def config_of(dataset, encoding, *, depth=DEPTH, hidden=HIDDEN, dim=DIM, parabolas=PARABOLAS, **more):
    sizes = {"_hidden_size": dim, "_num_heads": HEADS, "_head_size": HEAD, "_num_layers": depth}
    return {
        "dataset": dataset,
        "positional": POSITIONAL.get(encoding, encoding),
        "model": {**sizes, "_intermediate_size": hidden},
        "pape": {"parabolas": parabolas},
        "batch_size": 64,
        "seed": 3,
        **more,
    }


def publish(folder, config, state):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(state, folder / "model.pt")
    return folder


def event_state(encoding="pape"):
    """The network of DvsGesture: a convolution that sees a whole patch of counts once."""
    state = weights(encoding, "video")
    for name in ("weight", "bias"):
        stem = state.pop(f"embedding.{name}")
        state[f"embedding.projection.{name}"] = torch.randn(DIM, 20, 16, 16) * 0.02 if name == "weight" else stem
    return state


@pytest.mark.parametrize(("encoding", "task"), CASES, ids=[f"{e}-{task}" for e, task in CASES])
def test_a_folder_gives_what_its_weights_give(encoding, task, tmp_path):
    state = weights(encoding, task)
    net = official.load(publish(tmp_path, config_of(DATASET[task], encoding), state))
    want = official.load(state, task=task, heads=HEADS, encoding=None if encoding in OWN else encoding)
    x = torch.rand(2, 3, 32, 48) if task == "image" else torch.rand(2, 3, 4, 32, 48)
    assert not net.training
    with torch.no_grad():
        assert torch.equal(net(x), want(x))
    rate = {layer.drop_path.rate for layer in net.encoder.layers}
    assert rate == {0.1}


@pytest.mark.parametrize("key", ["rope", "absolute"])
def test_the_base_of_frequencies_counts(key, tmp_path):
    encoding = {"rope": "rope", "absolute": "sincos"}[key]
    x, found = torch.rand(1, 3, 48, 48), []
    for base in (10000, 50):
        folder = publish(
            tmp_path / str(base), config_of("imagenet", encoding, **{key: {"base": base}}), weights(encoding)
        )
        with torch.no_grad():
            found.append(official.load(folder)(x))
    assert (found[0] - found[1]).abs().max() > 1e-4


def recorded(pattern):
    paths = [p for p in sorted(GOLDEN.glob(pattern)) if not p.stem.endswith(("-input", "-common", "-labels"))]
    return paths or [pytest.param(None, marks=pytest.mark.skip(reason=f"no {pattern} in {GOLDEN}"))]


def arrays(path):
    kind, found = path.stem.partition("-")[0], {}
    for file in (*(path.with_name(f"{kind}-{name}.npz") for name in ("common", "input")), path):
        if file.exists():
            with np.load(file) as data:
                found |= {key: torch.from_numpy(data[key]) for key in data.files}
    return found


def golden_folder(path, folder, dataset, **more):
    """A published folder of a recorded network; sizes are read from its weights."""
    data = arrays(path)
    state = {key[2:]: x.float() for key, x in data.items() if key.startswith("w:")}
    names = sorted([*published.POSITIONAL.values()], key=len, reverse=True)
    stem = path.stem.partition("-")[2].replace("-", "_")
    encoding = next(name for name in names if f"{stem}_".startswith(f"{name}_"))
    first = "encoder.layers.0."
    w_p = state.get(first + "attention.position_encoder.position.weight")
    sizes = dict(
        dim=state[first + "norm1.weight"].shape[0],
        depth=1 + max(int(key.split(".")[2]) for key in state if key.startswith("encoder.layers.")),
        hidden=state[first + "ffn.fc1.weight"].shape[0],
        parabolas=PARABOLAS if w_p is None else w_p.shape[0] // HEADS,
    )
    return publish(folder, config_of(dataset, encoding, **sizes, **more), state), data


@pytest.mark.parametrize(
    "path", recorded("imagenet-*.npz") + recorded("ucf101-*.npz"), ids=lambda p: p.stem if p else ""
)
def test_golden_logits_of_a_folder(path, tmp_path):
    dataset = path.stem.partition("-")[0]
    folder, data = golden_folder(path, tmp_path, dataset)
    x = data["x"].float() / 255
    with torch.no_grad():
        net = official.load(folder)
        found = net(x) if dataset == "imagenet" else net(x, lengths=data["lengths"])
    assert (found - data["logits"]).abs().max() <= 1e-4


@pytest.mark.parametrize("path", recorded("coco-*.npz"), ids=lambda p: p.stem if p else "")
def test_golden_boxes_of_a_folder(path, tmp_path):
    neck = {"fpn_size": int(arrays(path)["w:fpn2.0.weight"].shape[0]), "reg_max": 16}
    folder, data = golden_folder(path, tmp_path, "coco", detection=neck)
    with torch.no_grad():
        raw = official.load(folder)(data["image"].float() / 255)
    for level, got in enumerate(raw.o2o):
        assert (got - data[f"o2o_{level}"]).abs().max() <= 1e-4


@pytest.mark.parametrize("path", recorded("gen1-*.npz"), ids=lambda p: p.stem if p else "")
def test_golden_tokens_of_an_event_folder(path, tmp_path):
    stem = arrays(path)["w:embedding.projection.weight"].shape
    more = {"events": {"time_scale": 100000, "buckets": stem[1] // 2}, "detection": {"reg_max": 16}}
    more["detection"]["fpn_size"] = int(arrays(path)["w:fpn2.0.weight"].shape[0])
    folder, data = golden_folder(path, tmp_path, "gen1", patch_size=int(stem[-1]), **more)
    rows, cols = data["grid"].shape[2:]
    net = official.load(folder, sensor=(rows * stem[-1], cols * stem[-1]))
    mask = torch.arange(data["x"].shape[1]) < data["lengths"][:, None]
    with torch.no_grad():
        tokens = net.encode_counts(data["patches"].float().flatten(2), data["x"], data["y"], data["t"], mask)
    assert ((tokens - data["tokens"]).abs().amax(-1) * mask).max() <= 1e-4


def test_the_network_of_dvsgesture(tmp_path):
    state = event_state()
    net = official.load(publish(tmp_path, config_of("dvsgesture", "pape", events={"time_scale": 70000}), state))
    assert (net.buckets, net.time_scale, net.patch) == (10, 70000.0, 16)
    assert torch.equal(net.embedding.weight, state["embedding.projection.weight"].flatten(1))
    codes, (x, y), t = torch.randint(5120, (2, 6, 9)), torch.randint(8, (2, 2, 6)), torch.arange(6).expand(2, 6) * 9000
    counts = torch.zeros(2, 6, 20, 16, 16)
    for b in range(2):
        for n in range(6):
            counts[b, n] = torch.bincount(codes[b, n], minlength=5120).reshape(20, 16, 16)
    with torch.no_grad():
        found = net.counts(codes, torch.ones(2, 6, dtype=torch.bool))
        assert torch.equal(found, counts.flatten(2))
        assert net(codes, x, y, t).shape == (2, CLASSES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "../../etc/passwd"}, "dataset: expected one of coco, dvsgesture"),
        ({"dataset": None}, "dataset: expected one of .* got nothing"),
        ({"dataset": ["imagenet"]}, "dataset: expected one of"),
        ({"positional": "papee"}, "positional: expected one of .* did you mean"),
        ({"normalize": True}, "normalize: .* not supported"),
        ({"normalize": "yes"}, "normalize: expected true or false"),
        ({"patch_size": 1 << 40}, "patch_size: expected a whole number from 1 to 65536"),
        ({"patch_size": 16.0}, "patch_size: expected a whole number"),
        ({"patch_size": True}, "patch_size: expected a whole number"),
        ({"patch_size": 10**4000}, "patch_size: expected a whole number"),
        ({"rope": {"base": 10**400}}, "rope.base: expected a number"),
        ({"rope": {"base": float("inf")}}, "rope.base: expected a number"),
        ({"patch_size": 8}, "patch_size: config.json says 8, the weights are those of 16"),
        ({"model": {"size": "huge"}}, "model.size: expected one of nano"),
        ({"model": 3}, "model: expected a dictionary, got int"),
        ({"model": {"_num_layers": 10**9}}, "model._num_layers: expected a whole number"),
        ({"model": {"_num_layers": 60000}}, "model._num_layers: expected at most 1024"),
        ({"model": {"_num_heads": 0}}, "model._num_heads: expected a positive number"),
        ({"model": {"_num_heads": 7}}, "7 heads do not divide"),
        ({"model": {"size": "nano"}}, "heads do not divide|config.json says"),
        ({"model": {"_hidden_size": 1 << 16, "_num_heads": 12}}, "model._hidden_size: config.json says 65536"),
        ({"model": {"drop_path": 60000}}, "model.drop_path: expected a number from 0 to less than 1, got 60000"),
        ({"model": {"drop_path": 1.0}}, "model.drop_path: expected a number from 0 to less than 1, got 1.0"),
        ({"pape": {"parabolas": 7}}, "pape.parabolas: config.json says 7, the weights are those of 6"),
        ({"pape": {"parabolas": float("nan")}}, "pape.parabolas: expected a whole number"),
        ({"positional": "rope_mixed"}, "positional: config.json says rope_mixed, the weights are those of pape"),
        ({"positional": "nope"}, "are those of 'pape', but encoding='none'"),
        ({"dataset": "ucf101"}, "try task='image'"),
        ({"dataset": "coco"}, "fpn2|detection"),
    ],
)
def test_bad_configs(change, message, tmp_path):
    good = config_of("imagenet", "pape")
    if isinstance(change.get("model"), dict):
        change = {"model": {**good["model"], **change["model"]}}
        if change["model"].get("size") == "nano":
            change = {"model": {"size": "nano"}}
    folder = publish(tmp_path, {**good, **change}, weights("pape"))
    with pytest.raises(CheckpointError, match=message):
        official.load(folder)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "[" * 100_000, '"' + "x" * (1 << 21) + '"', "\ud800"])
def test_configs_that_are_no_dictionary(text, tmp_path):
    folder = publish(tmp_path, {}, weights("pape"))
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config\.json: (not JSON|expected)"):
        official.load(folder)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        official.load(tmp_path)
    folder = publish(tmp_path, config_of("imagenet", "pape"), weights("pape"))
    (folder / "model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"model\.pt: no such file"):
        official.load(folder)
    with pytest.raises(TypeError, match="heads is read from config"):
        official.load(folder, heads=12)


def imported(folder, out):
    assert cli.main(["import", str(folder), "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("dataset", ["imagenet", "ucf101", "dvsgesture"])
def test_an_imported_run_is_a_run(dataset, tmp_path, capsys):
    task = {"imagenet": "image", "ucf101": "video", "dvsgesture": "event"}[dataset]
    state = event_state() if task == "event" else weights("pape", task)
    config = config_of(dataset, "pape", colour="blue", fold=2, events={"ref_ms": 2, "threshold": 99})
    folder = publish(tmp_path / "published", config, state)
    run = imported(folder, tmp_path / "run")
    told = capsys.readouterr()
    assert "config.json: 'colour': unknown key" in told.err
    assert f"pape on {dataset}" in told.out
    wanted = fit.load_run(run)
    net, about = checkpoint.load_weights(run / "weights.safetensors")
    again = official.load(folder)
    assert {k: tuple(v.shape) for k, v in net.state_dict().items()} == {
        k: tuple(v.shape) for k, v in again.state_dict().items()
    }
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True))
    assert net.encoder.encoding.compat == "official"
    assert wanted.model.chosen == about["options"]
    assert wanted.data.name == dataset
    if dataset == "ucf101":
        assert wanted.data.options["fold"] == 2
    if dataset == "dvsgesture":
        assert (wanted.data.options["threshold"], wanted.data.options["refractory_us"]) == (99, 2000)
    notes = json.loads((run / "official.json").read_text())
    assert notes["training"] == {"batch_size": 64, "seed": 3, "fold": 2}
    assert notes["unknown"] == ["colour"]
    assert cli.main(["import", str(folder), "--out", str(run)]) == 2
    assert "new or empty" in capsys.readouterr().err


@pytest.mark.parametrize("path", recorded("coco-*.npz") + recorded("gen1-*.npz"), ids=lambda p: p.stem if p else "")
def test_golden_detectors_import(path, tmp_path):
    dataset, data = path.stem.partition("-")[0], arrays(path)
    more = {"detection": {"fpn_size": int(data["w:fpn2.0.weight"].shape[0]), "max_det": 30}}
    if dataset == "gen1":
        stem = data["w:embedding.projection.weight"].shape
        more |= {"events": {"time_scale": 100000, "buckets": stem[1] // 2}, "patch_size": int(stem[-1])}
    folder, _ = golden_folder(path, tmp_path / "published", dataset, **more)
    run = imported(folder, tmp_path / "run")
    wanted = fit.load_run(run)
    assert wanted.task.options["max_det"] == 30
    net, _ = checkpoint.load_weights(run / "weights.safetensors")
    assert not (net.pad if dataset == "coco" else False)


def test_errors_of_the_command(tmp_path, capsys):
    folder = publish(tmp_path / "a", config_of("imagenet", "pape"), weights("pape"))
    (folder / "model.pt").write_bytes(b"harm")
    assert cli.main(["import", str(folder), "--out", str(tmp_path / "run")]) == 2
    assert "model.pt: not a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    publish(folder, config_of("ucf101", "pape", video={"frame_step": 4}), weights("pape", "video"))
    assert cli.main(["import", str(folder), "--out", str(tmp_path / "run")]) == 2
    assert "video.frame_step" in capsys.readouterr().err


def test_what_a_config_says_cannot_drive_the_terminal(tmp_path, capsys):
    config = config_of("imagenet", "pape", **{"\x1b]0;title\x07" + "x" * 500: 1})
    imported(publish(tmp_path / "a", config, weights("pape")), tmp_path / "run")
    message = capsys.readouterr().err
    assert r"config.json: '\x1b]0;title\x07xxx" in message
    assert "\x1b" not in message
    assert len(message.splitlines()[0]) < 160


def test_values_that_a_model_refuses_are_errors_of_the_folder(tmp_path):
    folder = publish(tmp_path, config_of("imagenet", "pape"), weights("pape"))
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}: .*rate"):
        official.load(folder, drop_path=7.0)


def test_an_imported_run_is_used_like_our_own(tmp_path, capsys):
    """On a generated copy of ImageNet: eval and sweep as it is, predict a file, export it, train from its weights."""
    root = tmp_path / "imagenet"
    assert cli.main(["prepare", "imagenet", "--synthetic", "--root", str(root)]) == 0
    state = weights("pape")
    state["classifier.weight"], state["classifier.bias"] = torch.randn(12, DIM), torch.zeros(12)
    run = imported(publish(tmp_path / "published", config_of("imagenet", "pape"), state), tmp_path / "run")
    changes = {"data.options.complete": "false", "data.root": str(root), "data.workers": "0", "data.size": "32"}
    changes |= {"run.precision": "32-true", "run.compile": "false", "optim.batch": "60"}
    changes |= {"optim.epochs": "1", "optim.lr": "1e-9", "run.threads": "1"}
    small = recipe.load(run / "recipe.toml", changes)
    (run / "recipe.toml").write_text(small.dumps())
    assert cli.main(["eval", str(run)]) == 0
    assert "top1" in capsys.readouterr().out
    image = next(root.rglob("*.JPEG"))
    assert cli.main(["predict", str(run), str(image), "--out", str(tmp_path / "found"), "--no-pictures"]) == 0
    assert "1 of 1 files predicted" in capsys.readouterr().out
    assert cli.main(["sweep", str(run), "--sizes", "32,64", "--out", str(tmp_path / "sweep")]) == 0
    assert any((tmp_path / "sweep").iterdir())
    capsys.readouterr()
    assert cli.main(["export", str(run), "--format", "pt2", "--size", "32", "--out", str(tmp_path / "net.pt2")]) == 0
    assert "largest difference to PyTorch" in capsys.readouterr().out
    tuned = tmp_path / "tuned"
    assert cli.main(["train", str(run / "recipe.toml"), "--model.init", str(run), "--out", str(tuned)]) == 0
    net, _ = checkpoint.load_weights(tuned / "weights.safetensors")
    first, _ = checkpoint.load_weights(run / "weights.safetensors")
    name = "encoder.layers.0.attention.qkv.weight"
    assert (net.state_dict()[name] - first.state_dict()[name]).abs().max() < 1e-5  # it began from them
