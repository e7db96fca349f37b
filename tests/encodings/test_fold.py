"""Folding PaPE for inference: the same answers from fewer parameters, saved and loaded in both directions."""

import pytest
import torch
from torch import nn

import parapos
from parapos import create_encoding


@pytest.mark.parametrize("compat", [None, "official"])
def test_folded_for_inference(compat):
    """The same answers from fewer parameters; what has no W_b stays as it is."""
    torch.manual_seed(0)
    net = parapos.create_model("vit_nano_patch4", encoding="pape", num_classes=3, compat=compat, depth=2).eval()
    nn.init.normal_(net.classifier.weight)
    images = torch.randn(2, 3, 16, 16)
    before, want = sum(p.numel() for p in net.parameters()), net(images)
    assert parapos.fold(net) is net
    torch.testing.assert_close(net(images), want, rtol=1e-5, atol=1e-5)
    encoding = net.encoder.encoding
    assert before - sum(p.numel() for p in net.parameters()) == 2 * encoding.heads * (50 - 2) * encoding.dim
    assert not any(name.endswith("w_b") for name in net.state_dict())
    torch.testing.assert_close(parapos.fold(net)(images), want, rtol=1e-5, atol=1e-5)
    other = parapos.create_encoding("pape", dim=8, heads=2, head_dim=4, pos_dim=2, context=False)
    names = [name for name, _ in parapos.fold(other).named_parameters()]
    assert names == [name for name, _ in other.named_parameters()]
    assert "b" in names


def outputs(net):
    return net.eval()(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3)))


def nano(seed, **options):
    torch.manual_seed(seed)
    net = parapos.create_model("vit_nano_patch4", encoding="pape", num_classes=3, depth=2, parabolas=5, **options)
    nn.init.normal_(net.classifier.weight)
    return net


@pytest.mark.parametrize("compat", [None, "official"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_decide_whether_a_module_is_folded(compat, assign, dtype):
    """Folded weights fold the model that loads them; whole ones make a folded model whole again."""
    whole, folded = nano(0, compat=compat).to(dtype), parapos.fold(nano(0, compat=compat).to(dtype))
    want = outputs(folded.float())
    folded = parapos.fold(nano(0, compat=compat).to(dtype))
    fresh = nano(1, compat=compat).to(dtype)
    fresh.load_state_dict(folded.state_dict(), assign=assign)
    assert list(fresh.state_dict()) == list(folded.state_dict())
    assert [p.dtype for p in fresh.parameters()] == [p.dtype for p in folded.parameters()]
    assert [p.requires_grad for p in fresh.parameters()] == [p.requires_grad for p in folded.parameters()]
    assert torch.equal(outputs(fresh.float()), want)

    folded = parapos.fold(nano(1, compat=compat).to(dtype))
    folded.load_state_dict(whole.state_dict(), assign=assign)
    assert {name for name, _ in folded.named_parameters()} == {name for name, _ in whole.named_parameters()}
    assert all(p.requires_grad and p.dtype == dtype for p in folded.parameters())
    assert torch.equal(outputs(folded.float()), outputs(whole.float()))
    again = parapos.fold(nano(2, compat=compat))
    again.load_state_dict(parapos.fold(nano(0, compat=compat)).state_dict(), assign=assign)
    torch.testing.assert_close(outputs(again), outputs(nano(0, compat=compat)), rtol=1e-5, atol=1e-5)


def test_folded_weights_keep_the_sign_they_were_folded_with():
    """Whole weights take the sign of the module that loads them; folded ones give what they gave before."""
    released = nano(0, compat="official")
    ours = nano(1)
    ours.load_state_dict(released.state_dict())
    assert (outputs(ours) - outputs(released)).abs().max() > 1e-3
    want = outputs(released)
    ours.load_state_dict(parapos.fold(released).state_dict())
    torch.testing.assert_close(outputs(ours), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"projection": False}, {"distance": False}, {"distance": False, "projection": False}]
)
def test_folded_ablations_save_and_load(options):
    def make():
        return create_encoding("pape", dim=8, heads=2, head_dim=4, pos_dim=2, **options)

    whole, folded = make(), parapos.fold(make())
    fresh = make()
    fresh.load_state_dict(folded.state_dict())
    assert all(torch.equal(one, two) for one, two in zip(fresh.parameters(), folded.parameters(), strict=True))
    folded.load_state_dict(whole.state_dict())
    assert all(torch.equal(one, two) for one, two in zip(folded.parameters(), whole.parameters(), strict=True))


def test_weights_of_the_other_form_are_refused():
    for one, other in ((nano(0), nano(0, form="direct")), (nano(0, form="direct"), parapos.fold(nano(0)))):
        names = [name for name, _ in one.named_parameters()]
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*Unexpected key"):
            one.load_state_dict(other.state_dict())
        assert names == [name for name, _ in one.named_parameters()]
