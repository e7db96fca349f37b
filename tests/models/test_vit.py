"""The Vision Transformer: sizes to the last parameter, structure, resolutions, interpolation, learning."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parapos
from parapos import ViT, create_model, list_models
from parapos.blocks import Attention, DropPath, Encoder
from parapos.encodings import ENCODINGS

from ..marks import full

SIZES = {  # without positional parameters, with PaPE m = 50; 1000 classes
    "vit_base_patch16": (86_417_896, 97_491_496),
    "vit_small_patch16": (21_975_784, 24_747_784),
    "vit_official_small_patch16": (32_433_128, 36_537_128),
    "vit_official_tiny_patch16": (4_144_872, 4_864_472),
    "vit_official_nano_patch16": (757_992, 964_392),
}
EFFICIENCY = [  # ViT-B: encoding, options, positional parameters
    ("none", {}, 0),
    ("sincos", {}, 0),
    ("rope", {}, 0),
    ("alibi", {}, 0),
    ("lookhere", {}, 0),
    ("rope_mixed", {}, 9_216),
    ("pape_ri", {}, 110_592),
    *(("pape", {"parabolas": m}, 221_472 * m) for m in (2, 4, 8, 16, 32, 50, 64)),
]


def count(name, **options):
    with torch.device("meta"):
        return sum(p.numel() for p in create_model(name, **options).parameters())


def small(encoding="pape", **options):
    """Two layers on patches of 4, with a classifier that is no longer blank."""
    heads = 2 if ENCODINGS[encoding].claims.unbounded else 12
    size = dict(dim=24, heads=heads, depth=2, mlp_dim=32, patch=4, num_classes=5, head_dim=8)
    net = ViT(encoding=encoding, **{**size, **options})
    nn.init.normal_(net.classifier.weight)
    return net.eval()


def positions_of(net, images, **options):
    """The positions (N, p) that the encoder is given."""
    seen = []
    hook = net.encoder.register_forward_pre_hook(lambda module, args: seen.append(args[1].r[0]))
    net(images, **options)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    plain, pape = SIZES[name]
    assert count(name, encoding="none") == plain
    assert count(name) == count(name, encoding="pape", parabolas=50) == pape


@pytest.mark.parametrize(("encoding", "options", "positional"), EFFICIENCY, ids=lambda v: str(v))
def test_efficiency_table(encoding, options, positional):
    assert count("vit_base_patch16", encoding=encoding, **options) == 86_417_896 + positional


def test_totals_of_the_efficiency_table():
    """The printed integers, independent of the arithmetic above."""
    totals = {2: 86_860_840, 4: 87_303_784, 8: 88_189_672, 16: 89_961_448, 32: 93_505_000, 64: 100_592_104}
    assert {m: count("vit_base_patch16", parabolas=m) for m in totals} == totals
    assert count("vit_base_patch16", encoding="rope_mixed") == 86_427_112
    assert count("vit_base_patch16", encoding="pape_ri") == 86_528_488


def test_parameter_matching():
    """Query and key heads of 114 instead of 64 cost what PaPE costs."""
    assert count("vit_base_patch16", encoding="rope", qk_dim=114) - 86_417_896 == 11_073_600
    net = small("rope", qk_dim=12)
    attention = net.encoder.layers[0].attention
    assert (attention.qk_dim, attention.head_dim) == (12, 8)
    assert attention.qkv.out_features == 2 * (12 + 12 + 8)
    assert attention.encoding.scale == 12**-0.5
    assert net(torch.rand(1, 3, 8, 8)).shape == (1, 5)


def test_every_model_is_listed():
    assert list_models()[: len(SIZES)] == list(SIZES)
    for name in SIZES:
        with torch.device("meta"):
            assert isinstance(create_model(name), ViT)


def test_predictions_start_uniform():
    net = create_model("vit_official_nano_patch16").eval()
    assert net.classifier.weight.eq(0).all()
    assert net.classifier.bias.tolist() == pytest.approx([-math.log(1000)] * 1000)
    with torch.no_grad():
        probabilities = net(torch.rand(2, 3, 64, 32)).softmax(-1)
    torch.testing.assert_close(probabilities, torch.full((2, 1000), 1e-3))


def test_structure():
    with torch.device("meta"):
        net = create_model("vit_base_patch16")
    assert net.cls.shape == (1, 1, 768)
    assert net.embedding.kernel_size == net.embedding.stride == (16, 16)
    assert net.embedding.bias is not None
    assert isinstance(net.encoder.norm_pre, nn.LayerNorm)
    assert isinstance(net.encoder.norm_post, nn.LayerNorm)
    assert len(net.encoder.layers) == 12
    for layer in net.encoder.layers:
        assert layer.attention.qkv.bias.shape == (2304,)
        assert layer.attention.proj.bias.shape == (768,)
        assert layer.drop_path.rate == 0.1  # constant over layers
        assert layer.norm1.eps == layer.norm2.eps == 1e-5
        assert layer.mlp.fc1.out_features == layer.mlp.fc2.in_features == 3072
    assert (net.encoder.layers[7].attention.encoding.layer, net.encoder.layers[7].attention.encoding.depth) == (7, 12)
    torch.manual_seed(0)
    assert ViT(dim=4096, heads=64, depth=1, mlp_dim=4).cls.std().item() == pytest.approx(0.02, rel=0.1)


def test_forward_is_the_textbook_network():
    """The same numbers from plain operations, so that no norm, residual or GELU can go missing."""
    net = small("none")
    images = torch.rand(2, 3, 8, 12)
    x = F.conv2d(images, net.embedding.weight, net.embedding.bias, stride=4).flatten(2).transpose(1, 2)
    x = torch.cat([net.cls.expand(2, -1, -1), x], 1)
    x = F.layer_norm(x, (24,), net.encoder.norm_pre.weight, net.encoder.norm_pre.bias)
    for layer in net.encoder.layers:
        y = F.layer_norm(x, (24,), layer.norm1.weight, layer.norm1.bias)
        qkv = F.linear(y, layer.attention.qkv.weight, layer.attention.qkv.bias)
        q, k, v = qkv.view(2, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.linear(y, layer.attention.proj.weight, layer.attention.proj.bias)
        y = F.layer_norm(x, (24,), layer.norm2.weight, layer.norm2.bias)
        y = F.linear(F.gelu(F.linear(y, layer.mlp.fc1.weight, layer.mlp.fc1.bias)), layer.mlp.fc2.weight)
        x = x + y + layer.mlp.fc2.bias
    x = F.layer_norm(x, (24,), net.encoder.norm_post.weight, net.encoder.norm_post.bias)
    want = F.linear(x[:, 0], net.classifier.weight, net.classifier.bias)
    torch.testing.assert_close(net(images), want, rtol=1e-4, atol=1e-5)


def test_drop_path_drops_samples_and_scales_the_rest():
    drop, x = DropPath(0.25), torch.ones(4000, 3, 2)
    y = drop(x)
    kept = y[:, 0, 0] != 0
    assert torch.equal(y, x * kept[:, None, None] / 0.75)
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.03)
    assert drop.eval()(x) is x
    net = small(drop_path=0.5)
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(net(images), net(images))
    assert not torch.equal(net.train()(images), net(images))


def test_nano_trains_with(name):
    heads = {} if ENCODINGS[name].claims.unbounded else {"heads": 12, "head_dim": 8}
    net = create_model("vit_official_nano_patch16", encoding=name, num_classes=7, drop_path=0.0, **heads)
    nn.init.normal_(net.classifier.weight)
    logits = net(torch.rand(2, 3, 64, 48))
    assert logits.shape == (2, 7)
    F.cross_entropy(logits, torch.tensor([0, 6])).backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.ne(0).any(), key


def test_one_state_dict_serves_all_resolutions(name):
    net, other = small(name), small(name)
    result = other.load_state_dict(net.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    for height, width in ((8, 8), (16, 16), (8, 20), (20, 8), (4, 4)):
        images = torch.rand(2, 3, height, width)
        logits = net(images)
        assert logits.isfinite().all()
        assert torch.equal(other(images), logits)
        features = net.forward_features(images)
        assert features.shape == (2, 1 + height * width // 16, 24)
        torch.testing.assert_close(net.classifier(features[:, 0]), logits)
        r = positions_of(net, images)
        assert r[1:].amax(0).tolist() == [width // 4, height // 4]
    tall, wide = torch.rand(1, 3, 8, 20), torch.rand(1, 3, 20, 8)
    assert positions_of(net, tall)[2].tolist() == positions_of(net, wide)[2].tolist() == [2, 1]


def test_rows_and_columns_are_not_mixed_up(name):
    """A transposed image is another image, unless positions are ignored; the grid follows the picture."""
    net = small(name).double()
    images = torch.rand(1, 3, 8, 20, dtype=torch.float64)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4)  # (1, 3, 2, 5, 4, 4)
    swapped = patches.transpose(2, 3).permute(0, 1, 2, 4, 3, 5).reshape(1, 3, 20, 8)
    same = torch.allclose(net(swapped), net(images), rtol=1e-9, atol=1e-9)
    symmetric = name in ("none", "alibi", "pape_ri", "rope_mixed")  # see x and y alike, rope_mixed before training
    assert same == symmetric


def test_position_interpolation():
    net = create_model("vit_official_nano_patch16").eval()
    r = positions_of(net, torch.rand(1, 3, 448, 448), position_scale=224 / 448)
    assert r.max() == 14
    assert r[0].tolist() == [0, 0]
    assert r[1].tolist() == [0.5, 0.5]
    assert positions_of(net, torch.rand(1, 3, 224, 224)).max() == 14


@pytest.mark.parametrize("s", [0.5, 0.7, 3.0])
def test_scaling_positions_scales_the_parabolas(s):
    """M by s^2 and g by s, which is W_p by s; PaPE-RI's w_p likewise. Only the positional part changes."""
    for encoding in ("pape", "pape_ri"):
        net = small(encoding).double()
        images = torch.rand(1, 3, 12, 20, dtype=torch.float64)
        scaled = copy.deepcopy(net)
        with torch.no_grad():
            for layer in scaled.encoder.layers:
                layer.attention.encoding.w_p.mul_(s)
        torch.testing.assert_close(net(images, position_scale=s), scaled(images), rtol=1e-5, atol=1e-5)
        assert (net(images, position_scale=s) - net(images)).abs().max() > 1e-3


def test_scaled_form_and_slope():
    net = small("pape").double()
    encoding, s = net.encoder.layers[0].attention.encoding, 0.7
    x, q = torch.randn(1, 6, 24).double(), torch.zeros(1, 2, 6, 8).double()
    r = torch.randn(6, 2).double()
    (scaled,), (plain,) = (encoding(x, q, q, positions)[2] for positions in (s * r, r))
    form = parapos.Quadratic(plain.M * s**2, plain.g * s, plain.r)
    torch.testing.assert_close(scaled.scores(torch.float64), form.scores(torch.float64), rtol=1e-12, atol=1e-12)


def test_mean_pooling():
    net = small(pool="mean")
    images = torch.rand(2, 3, 8, 12)
    assert net.cls is None
    assert "cls" not in net.state_dict()
    features = net.forward_features(images)
    assert features.shape == (2, 6, 24)
    torch.testing.assert_close(net(images), net.classifier(features.mean(1)))
    assert positions_of(net, images).tolist() == parapos.grid_positions(2, 3).tolist()


def test_class_token_position(name):
    images = torch.rand(2, 3, 8, 12)
    preferred = ENCODINGS[name].cls_token
    found = {None: preferred, "origin": True, "unplaced": "unplaced"}
    for choice, cls in found.items():
        net = small(name, cls_position=choice)
        want = parapos.grid_positions(2, 3, cls=cls)
        torch.testing.assert_close(positions_of(net, images), want, rtol=0, atol=0, equal_nan=True)
        assert net(images).isfinite().all()


def test_where_the_class_token_is_matters():
    """At the origin it looks at one corner; unplaced it has no favourite."""
    nets = [small(cls_position=choice) for choice in ("origin", "unplaced")]
    nets[1].load_state_dict(nets[0].state_dict())
    images = torch.rand(2, 3, 16, 16)
    assert (nets[0](images) - nets[1](images)).abs().max() > 1e-3


@pytest.mark.parametrize("kernel", ["reference", "fused"])
def test_kernels_agree_through_the_network(name, kernel):
    net, other = small(name), small(name, kernel=kernel)
    other.load_state_dict(net.state_dict())
    images = torch.rand(2, 3, 16, 20)
    torch.testing.assert_close(other(images), net(images), rtol=1e-4, atol=1e-4)


def quadrants():
    """64 pictures of 16 x 16: one bright patch, four brightnesses; the class is the quadrant it lies in."""
    images, labels = torch.zeros(64, 3, 16, 16), torch.zeros(64, dtype=torch.long)
    for i in range(64):
        row, col = divmod(i % 16, 4)
        images[i, :, 4 * row : 4 * row + 4, 4 * col : 4 * col + 4] = 1 + i // 16
        labels[i] = 2 * (row // 2) + col // 2
    return images, labels


def losses(encoding, steps=100):
    torch.manual_seed(0)
    net = ViT(dim=32, heads=4, depth=2, mlp_dim=64, patch=4, num_classes=4, encoding=encoding, drop_path=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    images, labels = quadrants()
    out = []
    for _ in range(steps):
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


@pytest.mark.parametrize("encoding", ["pape", full("sincos"), full("rope"), full("polynomial")])
def test_learns_where_things_are(encoding):
    found = losses(encoding, steps=200)
    assert found[0] == pytest.approx(math.log(4), rel=1e-4)
    assert min(found) < 0.2 * found[0]


@pytest.mark.parametrize("encoding", ["pape_ri", full("rope_mixed"), full("alibi")])
def test_learns_in_part_where_things_are(encoding):
    """These see x and y alike, rope_mixed at its start, so two of the four quadrants look the same to them."""
    found = losses(encoding)
    assert 0.2 * found[0] < min(found) < 0.6 * found[0]


def test_cannot_learn_where_things_are_without_an_encoding():
    assert min(losses("none", steps=20)) > math.log(4) - 1e-3


@pytest.mark.parametrize(
    ("error", "options", "word"),
    [
        (ValueError, {"pool": "max"}, "pool.*max"),
        (ValueError, {"cls_position": "centre"}, "cls_position.*centre"),
        (ValueError, {"cls_position": "origin", "pool": "mean"}, "no effect"),
        (ValueError, {"num_classes": 0}, "num_classes.*0"),
        (ValueError, {"pos_dim": 3}, "pos_dim"),
        (ValueError, {"drop_path": 1.0}, r"drop path.*1\.0"),
        (ValueError, {"drop_path": -0.1}, r"drop path.*-0\.1"),
        (ValueError, {"depth": 0}, "depth.*0"),
        (ValueError, {"dim": 100, "heads": 3}, "100.*heads 3"),
        (ValueError, {"encoding": "papr"}, "did you mean 'pape'"),
        (ValueError, {"encoding": "lookhere"}, "12 or 16"),
        (TypeError, {"parabola": 3}, "did you mean 'parabolas'"),
        (TypeError, {"encoding": "rope", "parabolas": 3}, "'rope' has no option 'parabolas'"),
        (TypeError, {"encoding": parapos.create_encoding("none", dim=128, heads=4, head_dim=32, pos_dim=2)}, "name"),
        (TypeError, {"layer": 1}, "layer"),
    ],
)
def test_bad_options(error, options, word):
    with pytest.raises(error, match=word):
        create_model("vit_official_nano_patch16", **options)


def test_unknown_models_and_kernels():
    with pytest.raises(ValueError, match=r"'vit_base_patch'.*did you mean 'vit_base_patch16'"):
        create_model("vit_base_patch")
    with pytest.raises(ValueError, match="unknown kernel 'fast'"):
        small(kernel="fast")(torch.rand(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ((1, 3, 8, 10), "patch size 4, got 8 x 10"),
        ((1, 3, 7, 8), "patch size 4, got 7 x 8"),
        ((1, 3, 0, 8), "patch size 4, got 0 x 8"),
        ((1, 1, 8, 8), r"\(B, 3, H, W\).*\(1, 1, 8, 8\)"),
        ((3, 8, 8), r"\(3, 8, 8\)"),
    ],
)
def test_bad_images(shape, word):
    with pytest.raises(ValueError, match=word):
        small()(torch.rand(shape))


def test_attention_takes_an_encoding_that_fits():
    encoding = parapos.create_encoding("pape", dim=24, heads=2, head_dim=8, pos_dim=3, parabolas=3)
    attention = Attention(24, 2, encoding, head_dim=8)
    assert attention(torch.randn(2, 5, 24), torch.randn(5, 3)).shape == (2, 5, 24)
    with pytest.raises(ValueError, match="dim=24, heads=3, head_dim=8"):
        Attention(24, 3, encoding)
    with pytest.raises(TypeError, match="parabolas"):
        Attention(24, 2, encoding, head_dim=8, parabolas=3)


@pytest.mark.parametrize("encoding", ["pape", "lookhere", "rope"])
def test_positions_are_prepared_once(encoding, monkeypatch):
    """All layers get the same prepared positions."""
    cls = ENCODINGS[encoding]
    prepared, prepare = [], cls.prepare

    def spy(self, r):
        prepared.append(prepare(self, r))
        return prepared[-1]

    monkeypatch.setattr(cls, "prepare", spy)
    small(encoding, depth=4)(torch.rand(1, 3, 8, 8))
    assert len(prepared) == 5
    assert len(set(map(id, prepared))) == 1


def test_padding_reaches_every_layer(name):
    """An encoder with masked tokens gives the others what it gives without them."""
    heads = 2 if ENCODINGS[name].claims.unbounded else 12
    encoder = Encoder(24, 2, 32, heads=heads, head_dim=8, encoding=name, pos_dim=2).double().eval()
    x, r = torch.randn(2, 7, 24).double(), torch.randn(2, 7, 2).double()
    mask = torch.arange(7) < torch.tensor([[5], [5]])
    whole, short = encoder(x, r, mask), encoder(x[:, :5], r[:, :5])
    torch.testing.assert_close(whole[:, :5], short, rtol=1e-9, atol=1e-9)
