"""Rotary encodings against complex numbers, and the law of their frequencies."""

import pytest
import torch

import parapos
from parapos import create_encoding, tubelet_positions

DOUBLE = torch.float64


def rope(h, p, name="rope", heads=2, **options):
    return create_encoding(name, dim=8, heads=heads, head_dim=h, pos_dim=p, **options).double()


def qk(encoding, n, batch=1):
    return torch.randn(2, batch, encoding.heads, n, encoding.head_dim, dtype=DOUBLE)


def turn(encoding, q, k, r):
    """Turned queries and keys; neither the tokens nor score terms play a part."""
    q, k, terms = encoding(torch.zeros(q.shape[0], q.shape[2], 8, dtype=DOUBLE), q, k, r)
    assert terms == ()
    return q, k


def logits(encoding, q, k, r):
    q, k = turn(encoding, q, k, r)
    return q @ k.transpose(-1, -2) * encoding.scale


def angles(encoding, r):
    """The angles (H, N, h+/2) by which components turn at positions r, read off from a probe."""
    probe = torch.zeros(1, encoding.heads, len(r), encoding.head_dim, dtype=DOUBLE)
    probe[..., : encoding.head_dim // 2] = 1
    cos, sin = turn(encoding, probe, probe, r)[0][0].chunk(2, dim=-1)
    return torch.atan2(sin, cos)


def as_complex(x, width):
    """Half-split pairs: component i is the real part, i + width/2 the imaginary one."""
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    return torch.complex(*x.chunk(2, dim=-1))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("h", [16, 64, 114])
def test_axial_turns_are_complex_products(h, p):
    encoding = rope(h, p)
    width = -(-h // (2 * p)) * 2 * p
    count = width // (2 * p)
    r = torch.randn(2, 9, p, dtype=DOUBLE) * 20
    divisors = torch.tensor([10000 ** (2 * p * k / width) for k in range(count)], dtype=DOUBLE)
    theta = torch.cat([r[..., u : u + 1] / divisors for u in range(p)], dim=-1)[:, None]  # (B, 1, N, width/2)
    q, k = qk(encoding, 9, batch=2)
    for x, got in zip((q, k), turn(encoding, q, k, r), strict=True):
        assert got.shape[-1] == width
        want = as_complex(x, width) * torch.polar(torch.ones_like(theta), theta)
        torch.testing.assert_close(got, torch.cat([want.real, want.imag], dim=-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"param": "frequency"}, {"param": "frequency", "init": "rotated"}], ids=str)
def test_mixed_turns_are_complex_products(p, options):
    encoding = rope(16, p, "rope_mixed", heads=3, **options)
    with torch.no_grad():
        encoding.frequencies.add_(torch.rand_like(encoding.frequencies))  # heads and axes all different
    frequencies = encoding.frequencies if options else 1 / encoding.frequencies
    r = torch.randn(2, 9, p, dtype=DOUBLE) * 5
    theta = torch.einsum("bnp,hpk->bhnk", r, frequencies)
    q, k = qk(encoding, 9, batch=2)
    for x, got in zip((q, k), turn(encoding, q, k, r), strict=True):
        want = as_complex(x, 16) * torch.polar(torch.ones_like(theta), theta)
        torch.testing.assert_close(got, torch.cat([want.real, want.imag], dim=-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["rope", "rope_mixed"])
def test_scores_see_differences_only(name, p):
    encoding = rope(64, p, name)
    r = torch.randn(12, p, dtype=DOUBLE) * 10
    q, k = qk(encoding, 12)
    want = logits(encoding, q, k, r)
    torch.testing.assert_close(logits(encoding, q, k, r + 7.3), want, rtol=1e-11, atol=1e-11)
    assert (logits(encoding, q, k, r * 1.1) - want).abs().max() > 1e-2
    torch.testing.assert_close(logits(encoding, q, k, 0 * r), q @ k.transpose(-1, -2) / 8)


def test_padding_is_kept_and_the_release_cuts_it():
    """64 components in three dimensions need 66. Cutting the two again makes scores slightly absolute."""
    r = tubelet_positions(5, 15, 20).double()
    shift = torch.tensor([3.0, 5.0, 4.0])
    ours, official = rope(64, 3), rope(64, 3, compat="official")
    q, k = qk(ours, len(r))
    assert turn(ours, q, k, r)[0].shape[-1] == 66
    assert turn(official, q, k, r)[0].shape[-1] == 64
    torch.testing.assert_close(turn(official, q, k, r)[0], turn(ours, q, k, r)[0][..., :64])

    def change(encoding):
        return (logits(encoding, q, k, r + shift) - logits(encoding, q, k, r)).abs().max().item()

    assert change(ours) < 1e-12
    assert 1e-9 < change(official) < 1e-4
    # Where nothing is padded there is nothing to cut.
    assert torch.equal(turn(rope(64, 2, compat="official"), q, k, r[:, :2])[0], turn(rope(64, 2), q, k, r[:, :2])[0])
    assert ours.scale == official.scale == 1 / 8


def test_frequencies_of_the_standard_head():
    """h = 64, p = 2: exponents 0, 4, ..., 60 over 64, first for x, then the same for y."""
    found = angles(rope(64, 2), torch.eye(2, dtype=DOUBLE))  # at x = 1, then at y = 1
    want = torch.tensor([10000 ** (-e / 64) for e in range(0, 64, 4)], dtype=DOUBLE)
    none = torch.zeros(16, dtype=DOUBLE)
    for head in found:
        torch.testing.assert_close(head[0], torch.cat([want, none]), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(head[1], torch.cat([none, want]), rtol=1e-12, atol=1e-15)
    slower = angles(rope(64, 2, base=100.0), torch.eye(2, dtype=DOUBLE))
    torch.testing.assert_close(slower[0, 0, 15].item(), 100 ** (-60 / 64))


def test_far_positions_keep_their_angles_in_float32():
    """float32 tables must come from exact angles: at a million, float32 arithmetic misses by tenths of a turn."""
    encoding = create_encoding("rope", dim=8, heads=1, head_dim=16, pos_dim=1)
    r = torch.tensor([[1_000_003.0], [999_998.0], [16_000_001.0]])
    q, k = torch.randn(2, 1, 1, 3, 16)
    exact = turn(encoding.double(), q.double(), k.double(), r.double())[0]
    q2, _, _ = encoding(torch.zeros(1, 3, 8), q, k, r)
    torch.testing.assert_close(q2.double(), exact, rtol=1e-5, atol=1e-5)


def test_mixed_counts_and_starts_like_the_release():
    with torch.device("meta"):
        mixed, none = (parapos.create_model("vit_base_patch16", encoding=e) for e in ("rope_mixed", "none"))
    count = [sum(p.numel() for p in net.parameters()) for net in (mixed, none)]
    assert count[0] - count[1] == 9216
    r = torch.tensor([[0.3, 0.2], [-0.1, 0.7], [0.0, 0.0]], dtype=DOUBLE)
    found = angles(rope(64, 2, "rope_mixed", heads=12), r)
    assert found.shape == (12, 3, 32)
    for k in range(32):
        want = r.sum(-1) / 100 ** (2 * k / 64)
        torch.testing.assert_close(found[:, :, k], want.expand(12, 3), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"param": "frequency"}, {"param": "frequency", "init": "rotated"}], ids=str)
def test_mixed_frequencies_learn(options):
    encoding = rope(16, 3, "rope_mixed", **options)
    assert encoding.frequencies.shape == (2, 3, 8)
    r, (q, k) = torch.randn(6, 3, dtype=DOUBLE), qk(encoding, 6)
    weight = torch.randn(1, 2, 6, 6, dtype=DOUBLE)

    def loss(frequencies):
        state = {"frequencies": frequencies}
        x = torch.zeros(1, 6, 8, dtype=DOUBLE)
        q2, k2, _ = torch.func.functional_call(encoding, state, (x, q, k, r))
        return (q2 @ k2.transpose(-1, -2) * weight).sum()

    assert torch.autograd.gradcheck(loss, encoding.frequencies)
    (grad,) = torch.autograd.grad(loss(encoding.frequencies), encoding.frequencies)
    assert grad.ne(0).all()


@pytest.mark.parametrize(("h", "p"), [(64, 2), (64, 3), (24, 4), (8, 1)])
def test_rotated_start_gives_each_magnitude_orthonormal_directions(h, p):
    encoding = rope(h, p, "rope_mixed", heads=5, param="frequency", init="rotated")
    frequencies = encoding.frequencies.detach()
    for first in range(0, h // 2 - p + 1, p):
        magnitude = 10 ** (-2 * p * (first // p) / h)
        axes = frequencies[..., first : first + p] / magnitude  # (H, p, p), directions in columns
        eye = torch.eye(p, dtype=DOUBLE).expand(5, p, p)
        torch.testing.assert_close(axes.transpose(-1, -2) @ axes, eye, rtol=0, atol=1e-5)
        torch.testing.assert_close(axes, frequencies[..., :p], rtol=0, atol=1e-5)  # the same axes for all
    left = (h // 2) % p
    if left:
        magnitude = 10 ** (-2 * p * (h // 2 // p) / h)
        torch.testing.assert_close(frequencies[..., -left:] / magnitude, frequencies[..., :left], rtol=0, atol=1e-5)
    if p > 1:
        assert not torch.allclose(frequencies[0], frequencies[1])


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("rope", {"base": 0}, "base"),
        ("rope", {"base": -3.0}, "base"),
        ("rope_mixed", {"base": 0.0}, "base"),
        ("rope_mixed", {"base": -3.0}, "base"),
        ("rope_mixed", {"param": "angle"}, "param.*angle"),
        ("rope_mixed", {"init": "random"}, "init.*random"),
        ("rope_mixed", {"init": "rotated"}, "frequency"),
        ("rope_mixed", {"head_dim": 7}, "head_dim.*7"),
    ],
)
def test_bad_options(name, options, word):
    with pytest.raises(ValueError, match=word):
        create_encoding(name, **{"dim": 8, "heads": 2, "head_dim": 8, "pos_dim": 2, **options})
