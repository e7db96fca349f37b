"""Weights of the authors' release give the release's logits: recorded ones, and those of a small re-statement here."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import parapos
from parapos.interop import official
from parapos.interop.official import CheckpointError
from tests.golden import FOLDER as GOLDEN

REPO = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
KERNELS = ["reference", "fused"]
ENCODINGS = ["pape", "pape_ri", "sincos", "rope", "rope_mixed", "alibi", "lookhere", "none"]
HEADS, HEAD, DIM, DEPTH, HIDDEN, PARABOLAS, PATCH, TUBELET, CLASSES = 12, 8, 96, 3, 128, 6, 16, 2, 10
OWN = {"pape", "pape_ri", "rope_mixed"}  # encodings that show in the weights
CASES = [(e, task) for task in ("image", "video") for e in ENCODINGS if (e, task) != ("lookhere", "video")]
tasks = pytest.mark.parametrize(("encoding", "task"), CASES, ids=[f"{e}-{task}" for e, task in CASES])


def golden(encoding, task="image"):
    """Weights, inputs (images, or videos and lengths) and logits recorded from the release."""
    data = {"image": "imagenet", "video": "ucf101"}[task]
    path, pictures = GOLDEN / f"{data}-{encoding}.npz", GOLDEN / f"{data}-input.npz"
    if not path.exists() or not pictures.exists():
        pytest.skip(f"no recorded outputs in {GOLDEN}")
    with np.load(path) as file:
        state = {key[2:]: torch.from_numpy(file[key]) for key in file.files if key.startswith("w:")}
        logits = torch.from_numpy(file["logits"])
        lengths = [torch.from_numpy(file["lengths"])] if task == "video" else []
    with np.load(pictures) as file:
        inputs = (torch.from_numpy(file["x"]).float() / 255, *lengths)
    return state, inputs, logits


def distance(net, inputs, logits):
    images, *lengths = inputs
    with torch.no_grad():
        found = net(images, lengths=lengths[0]) if lengths else net(images)
    return (found - logits).abs().max().item()


def ours(state, encoding, **options):
    return official.load(state, heads=HEADS, encoding=None if encoding in OWN else encoding, **options)


@tasks
@pytest.mark.parametrize("kernel", KERNELS)
def test_recorded_logits(encoding, kernel, task):
    state, inputs, logits = golden(encoding, task)
    assert distance(ours(state, encoding, kernel=kernel, task=task), inputs, logits) <= TOLERANCE


@pytest.mark.parametrize(("encoding", "task"), [("pape", "image"), ("alibi", "image"), ("pape", "video")])
def test_recorded_logits_of_something_else_are_noticed(encoding, task):
    state, inputs, logits = golden(encoding, task)
    plain = {key: x for key, x in state.items() if "position_encoder" not in key}
    for other in ("none", "rope", "sincos", "lookhere", "alibi"):
        if other != encoding and (other, task) in CASES:
            assert distance(ours(plain, other, task=task), inputs, logits) > TOLERANCE, other
    if encoding == "pape":
        net = ours(state, encoding, task=task)
        if task == "video":  # all tubelets, or one too many
            assert distance(net, inputs[:1], logits) > TOLERANCE
            assert distance(net, (inputs[0], (inputs[1] + 1).clamp(max=5)), logits) > TOLERANCE
        for layer in net.encoder.layers:  # the paper's sign of b
            layer.attention.encoding.compat = None
        assert distance(net, inputs, logits) > TOLERANCE


def weights(encoding, task="image", seed=0):
    """A state dict of the release's shapes, with random values and nothing symmetric about them."""
    g = torch.Generator().manual_seed(seed)
    stem, p = {"image": ((3, PATCH, PATCH), 2), "video": ((3, TUBELET, PATCH, PATCH), 3)}[task]

    def uniform(*shape):
        bound = math.prod(shape[1:]) ** -0.5
        return (2 * torch.rand(shape, generator=g) - 1) * bound

    def norm(name):
        return {
            f"{name}.weight": 1 + 0.2 * torch.randn(DIM, generator=g),
            f"{name}.bias": 0.2 * torch.randn(DIM, generator=g),
        }

    def linear(name, out, into):
        return {f"{name}.weight": uniform(out, into), f"{name}.bias": 0.1 * torch.randn(out, generator=g)}

    state = {"cls": torch.randn(1, 1, DIM, generator=g)}
    state |= {"embedding.weight": uniform(DIM, *stem), "embedding.bias": torch.randn(DIM, generator=g) * 0.1}
    state |= norm("encoder.norm_pre") | norm("encoder.norm_post")
    for i in range(DEPTH):
        stem = f"encoder.layers.{i}."
        state |= norm(stem + "norm1") | norm(stem + "norm2")
        state |= linear(stem + "attention.qkv_proj", 3 * HEADS * HEAD, DIM)
        state |= linear(stem + "attention.out_proj", DIM, HEADS * HEAD)
        state |= linear(stem + "ffn.fc1", HIDDEN, DIM) | linear(stem + "ffn.fc2", DIM, HIDDEN)
        stem += "attention.position_encoder."
        if encoding == "pape":
            state[stem + "position.weight"] = uniform(HEADS * PARABOLAS, p)
            state[stem + "ab.weight"] = uniform(2 * HEADS * PARABOLAS, DIM)
        elif encoding == "pape_ri":
            state[stem + "position_scales"] = (2 * torch.rand(HEADS, generator=g) - 1) * 2**-0.5
            state[stem + "a.weight"] = uniform(HEADS, DIM)
        elif encoding == "rope_mixed":
            state[stem + "frequencies"] = 0.5 + 3 * torch.rand(HEADS, p, HEAD // 2, generator=g)
    return state | linear("classifier", CLASSES, DIM)


def released_scores(encoding, w, x, q, k, r):
    """Logits (B, H, N, N) of one layer, as the release computes them. w: this layer's position_encoder weights."""

    def per_head(t):
        return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (B, H, N, .)

    def turned(t, angles):
        first, second = t.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    bias = 0.0
    if encoding == "pape":  # 3m + 2 extra components; the linear term is <b, P_i - P_j>
        a, b = (per_head(t) for t in (x @ w["ab.weight"].T).chunk(2, dim=-1))
        a, spot = F.softplus(a), per_head(r @ w["position.weight"].T)
        one = torch.ones_like(spot[..., :1])
        q = [q, -(a * spot**2).sum(-1, keepdim=True), a, 2 * a * spot, (b * spot).sum(-1, keepdim=True), b]
        b_size = x.shape[0]
        k = [k, *(t.expand(b_size, -1, -1, -1) for t in (one, -(spot**2), spot, one, -spot))]
        q, k = torch.cat(q, dim=-1), torch.cat(k, dim=-1)
    elif encoding == "pape_ri":  # 2p + 1 extra components
        a = F.softplus(per_head(x @ w["a.weight"].T))
        spot = (r[:, None] * w["position_scales"].view(1, HEADS, 1, 1)).expand(x.shape[0], -1, -1, -1)
        q = torch.cat([q, -(a * spot**2).sum(-1, keepdim=True), a.expand_as(spot), 2 * a * spot], dim=-1)
        k = torch.cat([k, torch.ones_like(spot[..., :1]), -(spot**2), spot], dim=-1)
    elif encoding == "rope":
        p = r.shape[-1]
        size = math.ceil(HEAD / (2 * p)) * 2 * p  # padded to this, and cut again
        divisors = torch.tensor([10000 ** (2 * p * n / size) for n in range(size // (2 * p))]).to(r)
        angles = torch.cat([r[..., u : u + 1] / divisors for u in range(p)], dim=-1)[:, None]
        q, k = (turned(F.pad(t, (0, size - HEAD)), angles)[..., :HEAD] for t in (q, k))
    elif encoding == "rope_mixed":
        angles = (r[:, None, :, :, None] / w["frequencies"][None, :, None]).sum(-2)
        q, k = turned(q, angles), turned(k, angles)
    elif encoding in ("alibi", "lookhere"):
        d = r[:, None, :, :] - r[:, :, None, :]
        length, (dx, dy) = d.square().sum(-1).sqrt(), d.unbind(-1)[:2]
        if encoding == "alibi":
            slopes = [2.0**-t for t in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)]
            bias = torch.stack([-s * length for s in slopes], dim=1)
        else:
            fields = [(dy <= 0) & (dx <= 0), (dy <= 0) & (dx >= 0), (dy >= 0) & (dx <= 0), (dy >= 0) & (dx >= 0)]
            fields += [-dy >= dx.abs(), dy >= dx.abs(), -dx >= dy.abs(), dx >= dy.abs()]
            fields += [torch.ones_like(dx, dtype=torch.bool)] * 4
            slopes = [1 / 2] * 8 + [1 / 4, 1 / 16, 1 / 64, 1 / 256]
            parts = [torch.where(f, -3.0 * s * length, -math.inf) for f, s in zip(fields, slopes, strict=True)]
            bias = torch.stack(parts, dim=1)
            bias[:, :, 0] = bias[:, :, :, 0] = 0
    return q @ k.transpose(-1, -2) / math.sqrt(HEAD) + bias


def released(state, inputs, encoding):
    """The release's network in float64: conv stem, class token at 0, pre-norm, pre-norm blocks, classifier.

    Images have (x, y); videos have (t, y, x), and keys beyond their lengths are hidden unless by nD-ALiBi.
    """
    w, images = {key: x.double() for key, x in state.items()}, inputs[0].double()

    def norm(x, name):
        return F.layer_norm(x, (DIM,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    stem = w["embedding.weight"]
    p = stem.ndim - 2
    x = (F.conv2d if p == 2 else F.conv3d)(images, stem, w["embedding.bias"], stride=stem.shape[2:])
    grid = x.shape[2:]
    x = torch.cat([w["cls"].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1)
    places = [[n + 1 for n in at] for at in product(*map(range, grid))]
    r = torch.tensor([[[0] * p] + [at[::-1] if p == 2 else at for at in places]], dtype=torch.float64)
    hidden = torch.zeros(len(x), x.shape[1], dtype=torch.bool)
    if len(inputs) > 1 and encoding != "alibi":
        hidden = torch.arange(x.shape[1]) >= 1 + inputs[1][:, None] * grid[1] * grid[2]
    if encoding == "sincos":
        size = DIM // p
        divisors = torch.tensor([10000 ** (2 * n / size) for n in range(size // 2)]).double()
        x = x + torch.cat([f(r[..., u : u + 1] / divisors) for u in range(p) for f in (torch.sin, torch.cos)], dim=-1)
    x = norm(x, "encoder.norm_pre")
    for i in range(sum(key.endswith("ffn.fc1.weight") for key in w)):
        stem = f"encoder.layers.{i}."
        y = norm(x, stem + "norm1")
        q, k, v = linear(y, stem + "attention.qkv_proj").unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        prefix = stem + "attention.position_encoder."
        own = {key.removeprefix(prefix): value for key, value in w.items() if key.startswith(prefix)}
        scores = released_scores(encoding, own, y, q, k, r)
        out = scores.masked_fill(hidden[:, None, None], -math.inf).softmax(-1) @ v
        x = x + linear(out.transpose(1, 2).flatten(2), stem + "attention.out_proj")
        x = x + linear(F.gelu(linear(norm(x, stem + "norm2"), stem + "ffn.fc1")), stem + "ffn.fc2")
    return linear(norm(x, "encoder.norm_post")[:, 0], "classifier").float()


PICTURES = torch.rand(2, 3, 80, 64, generator=torch.Generator().manual_seed(5))
CLIPS = torch.rand(2, 3, 6, 48, 32, generator=torch.Generator().manual_seed(6))  # padding is not empty
INPUTS = {"image": (PICTURES,), "video": (CLIPS, torch.tensor([3, 2]))}


@tasks
@pytest.mark.parametrize("kernel", KERNELS)
def test_restated_logits(encoding, kernel, task):
    state, inputs = weights(encoding, task), INPUTS[task]
    net = ours(state, encoding, kernel=kernel, task=task)
    assert not net.training
    assert distance(net, inputs, released(state, inputs, encoding)) <= TOLERANCE


@tasks
def test_restated_logits_of_something_else_are_noticed(encoding, task):
    state, inputs = weights(encoding, task), INPUTS[task]
    want = released(state, inputs, encoding)
    plain = {key: x for key, x in state.items() if "position_encoder" not in key}
    for other in ENCODINGS:
        if other != encoding and other not in OWN and (other, task) in CASES:
            assert distance(ours(plain, other, task=task), inputs, want) > TOLERANCE, other
    if encoding == "lookhere":
        assert distance(ours(state, encoding, schedule="linear"), inputs, want) > TOLERANCE
        # The class token is free wherever it is declared to be.
        assert distance(ours(state, encoding, cls_position="origin"), inputs, want) <= TOLERANCE
    if task == "video" and encoding in ("pape", "rope", "alibi"):  # their quirks are the release's, not ours
        net = ours(state, encoding, task=task)
        for layer in net.encoder.layers:
            layer.attention.encoding.compat = None
        assert distance(net, inputs, want) > TOLERANCE


@pytest.mark.parametrize(("encoding", "task"), [("pape", "image"), ("alibi", "image"), ("pape", "video")])
def test_the_restatement_itself_agrees_with_the_record(encoding, task):
    state, inputs, logits = golden(encoding, task)
    assert (released(state, inputs, encoding) - logits).abs().max() <= TOLERANCE


def test_lookhere_has_no_videos():
    with pytest.raises(ValueError, match="pos_dim 2"):
        official.load(weights("none", "video"), task="video", heads=HEADS, encoding="lookhere")


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("prefix", ["", "classifier.", "classifier._orig_mod.", "_orig_mod."])
def test_training_checkpoints(prefix, wrap):
    state = weights("pape")
    inner = {prefix + key: x for key, x in state.items()}
    if prefix.startswith("classifier."):  # a training module has more than the network
        inner["loss.weight"] = torch.ones(3)
    checkpoint = {"epoch": 3, "state_dict": inner, "hyper_parameters": {"lr": 1e-3}} if wrap else inner
    net = official.load(checkpoint, task="image", heads=HEADS)
    with torch.no_grad():
        assert torch.equal(net(PICTURES), official.load(state, heads=HEADS)(PICTURES))


@tasks
def test_what_is_read_from_the_weights(encoding, task):
    net = ours(weights(encoding, task), encoding, task=task)
    found = net.encoder.layers[1].attention.encoding
    assert type(found) is parapos.encodings.ENCODINGS[encoding]
    assert (found.heads, found.head_dim, found.dim, found.layer, found.depth) == (HEADS, HEAD, DIM, 1, DEPTH)
    assert found.compat == "official"
    assert net.patch == PATCH
    assert task == "image" or (net.tubelet, found.pos_dim) == (TUBELET, 3)
    assert net.classifier.out_features == CLASSES
    assert net.encoder.layers[0].mlp.fc1.out_features == HIDDEN
    if encoding == "pape":
        assert found.parabolas == PARABOLAS
    assert official.load(weights(encoding, task), task=task, heads=HEADS, encoding=encoding) is not None


def test_weights_are_copied_as_they_are():
    state = weights("pape")
    net = official.load(state, heads=HEADS)
    stem = "encoder.layers.1.attention.position_encoder."
    encoding = net.encoder.layers[1].attention.encoding
    w_a, w_b = state[stem + "ab.weight"].chunk(2)
    assert torch.equal(encoding.w_p.flatten(0, 1), state[stem + "position.weight"])
    assert torch.equal(encoding.w_a.flatten(0, 1), w_a)
    assert torch.equal(encoding.w_b.flatten(0, 1), w_b)
    with torch.no_grad():
        encoding.w_p.zero_()
    assert state[stem + "position.weight"].ne(0).any()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_missing_key_is_a_clear_error(encoding):
    state = weights(encoding)
    for key in state:
        short = {k: x for k, x in state.items() if k != key}
        with pytest.raises(CheckpointError):
            ours(short, encoding)


@pytest.mark.parametrize(
    ("change", "options", "word"),
    [
        ({}, {"heads": 7}, "7 heads do not divide"),
        ({"encoder.layers.0.attention.position_encoder.position.weight": torch.ones(71, 2)}, {}, "71 rows"),
        ({"encoder.layers.0.surprise": torch.ones(2)}, {}, "surprise"),
        ({"classifier.bias": torch.ones(3)}, {}, "classifier.bias"),
        ({"classifier.bias": "text"}, {}, "classifier.bias must be a tensor, got str"),
        ({"classifier.bias": None}, {}, "classifier.bias must be a tensor, got NoneType"),
        ({"embedding.weight": torch.ones(DIM, 3, 2, PATCH, PATCH)}, {}, r"4 dimensions.*2, 16, 16\); try task='video'"),
        ({}, {"task": "video"}, r"5 dimensions.*16, 16\); try task='image'"),
        ({"embedding.weight": torch.ones(DIM, 3, 2, PATCH, PATCH)}, {"task": "video"}, "w_p"),
        ({"embedding.weight": torch.ones(DIM, 3, 0, PATCH)}, {}, r"not empty, got \(96, 3, 0, 16\)$"),
        ({}, {"encoding": "rope"}, "those of 'pape'.*'rope'"),
        ({"state_dict": [1, 2]}, {}, "mapping.*list"),
    ],
)
def test_bad_checkpoints(change, options, word):
    with pytest.raises(CheckpointError, match=word):
        official.load({**weights("pape"), **change}, **{"heads": HEADS, **options})


def test_encodings_that_cannot_be_told():
    state = weights("none")
    with pytest.raises(CheckpointError, match="cannot be told; pass encoding='sincos'"):
        official.load(state, heads=HEADS)
    for name in OWN:
        with pytest.raises(CheckpointError, match=rf"{name}.*not in the checkpoint"):
            official.load(state, heads=HEADS, encoding=name)
    with pytest.raises(ValueError, match="rop"):
        official.load(state, heads=HEADS, encoding="rop")


def test_bad_arguments():
    state = weights("pape")
    with pytest.raises(ValueError, match=r"task.*'audio'"):
        official.load(state, task="audio", heads=HEADS)
    with pytest.raises(ValueError, match=r"heads.*0"):
        official.load(state, heads=0)
    for option in ("parabolas", "compat", "tubelet"):
        with pytest.raises(TypeError, match=f"{option} is read from the checkpoint"):
            official.load(weights("pape", "video"), task="video", heads=HEADS, **{option: 2})
    for nothing in ({}, {"state_dict": {}}):
        with pytest.raises(CheckpointError, match=r"embedding\.weight.*nothing"):
            official.load(nothing, heads=HEADS)
    with pytest.raises(CheckpointError, match=r"it has fc\.weight"):
        official.load({"fc.weight": torch.ones(2)}, heads=HEADS)
    assert issubclass(CheckpointError, ValueError)


@pytest.mark.parametrize("encoding", ["pape_ri", "rope_mixed"])
@pytest.mark.parametrize("heads", [6, 4])
def test_wrong_heads_do_not_load(encoding, heads):
    with pytest.raises(CheckpointError):
        official.load(weights(encoding), heads=heads)
