"""PaPE in vision models of transformers: real small configurations of the installed library, random weights."""

import json

import pytest
import torch

import parapos
from parapos.interop.swapping import placement_of

transformers = pytest.importorskip("transformers")
swapped = pytest.importorskip("parapos.interop.transformers")
SwapError = swapped.SwapError

SMALL = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64, patch_size=8)
TEXT = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64, vocab_size=99)


def vision(config, cls, **more):
    return lambda: getattr(transformers, cls)(getattr(transformers, config)(**{**SMALL, "image_size": 32, **more}))


def clip_pair():
    config = transformers.CLIPConfig(vision_config={**SMALL, "image_size": 32}, text_config=TEXT, projection_dim=16)
    return transformers.CLIPModel(config)


# how it is made, whether sizes are changed by interpolate_pos_encoding=True, or need nothing said (None)
FAMILIES = {
    "vit": (vision("ViTConfig", "ViTModel"), True),
    "vit-classifier": (vision("ViTConfig", "ViTForImageClassification"), True),
    "deit": (vision("DeiTConfig", "DeiTModel"), True),
    "dinov2": (vision("Dinov2Config", "Dinov2Model", mlp_ratio=2), None),
    "dinov2-registers": (vision("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", mlp_ratio=2), None),
    "dinov3": (vision("DINOv3ViTConfig", "DINOv3ViTModel", num_register_tokens=2), None),
    "ijepa": (vision("IJepaConfig", "IJepaModel"), True),
    "siglip": (vision("SiglipVisionConfig", "SiglipVisionModel"), True),
    "siglip2": (vision("Siglip2VisionConfig", "Siglip2VisionModel", num_patches=16), None),
    "clip": (vision("CLIPVisionConfig", "CLIPVisionModel"), True),
    "clip-pair": (clip_pair, True),
}
families = pytest.mark.parametrize("family", FAMILIES)


def make(family):
    """A model whose every parameter is random, so that every path shows in the outputs."""
    torch.manual_seed(0)
    model = FAMILIES[family][0]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def inputs(family, size=(32, 32)):
    torch.manual_seed(1)
    if family == "siglip2":  # two images of other shapes in one padded batch
        rows, cols = (side // 8 for side in size)
        count = rows * cols
        mask = (torch.arange(count) < torch.tensor([[count], [6]])).long()
        shapes = torch.tensor([[rows, cols], [2, 3]])
        return {"pixel_values": torch.randn(2, count, 192), "pixel_attention_mask": mask, "spatial_shapes": shapes}
    found = {"pixel_values": torch.randn(2, 3, *size)}
    if FAMILIES[family][1] and size != (32, 32):
        found["interpolate_pos_encoding"] = True
    if family == "clip-pair":
        found |= {"input_ids": torch.tensor([[1, 5, 98], [4, 7, 98]]), "attention_mask": torch.ones(2, 3).long()}
    return found


def answer(model, given):
    """One tensor that hears every token of the images that is real."""
    out = model(**given)
    if hasattr(out, "vision_model_output"):
        return out.vision_model_output.last_hidden_state
    if hasattr(out, "logits"):
        return out.logits
    x = out.last_hidden_state
    if "pixel_attention_mask" in given:
        x = x * given["pixel_attention_mask"][..., None]
    return x


@families
@pytest.mark.parametrize("size", [(32, 32), (40, 56)])
def test_the_identity_swap_changes_nothing(family, size):
    model, given = make(family), inputs(family, size)
    with torch.no_grad():
        before = answer(model, given)
        assert swapped.swap(model) is model
        after = answer(model, given)
    assert before.std() > 1e-2
    assert (after - before).abs().max() <= 1e-6 * before.abs().max().clamp(min=1)  # another order of summation
    with torch.no_grad():
        for p in swapped.new_parameters(model):
            p.add_(torch.randn_like(p) * 0.3)
        assert (answer(model, given) - before).abs().max() > 1e-3


@families
def test_it_learns_from_the_first_step_on(family):
    model, given = swapped.swap(make(family)), inputs(family)
    names = {id(p): n for n, p in model.named_parameters()}
    new, heard = swapped.new_parameters(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        answer(model, given).square().sum().backward()
        heard.append({names[id(p)] for p in new if bool(p.grad.any())})
        optimizer.step()
    last = family == "vit-classifier"  # its class token, which has no position, is all that the last layer answers for
    layers = {name for name in map(names.get, map(id, new)) if not (last and ".1." in name)}
    assert len(new) == 6
    assert heard[0] == {name for name in layers if name.endswith("w_p")}
    assert heard[1] == layers


COMPILES = [f for f in FAMILIES if f not in ("siglip2", "clip-pair")]  # siglip2 resizes positions sample by sample


@pytest.mark.parametrize("family", [f if f == "vit" else pytest.param(f, marks=pytest.mark.full) for f in COMPILES])
def test_it_compiles_without_graph_breaks(family):
    model, given = swapped.swap(make(family), init="default"), inputs(family)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        assert (answer(compiled, given) - answer(model, given)).abs().max() < 1e-4


@families
def test_bfloat16_autocast(family):
    """Outputs in half precision stay as near to float32 as those of the model before the swap."""
    model, given = make(family), inputs(family)
    with torch.no_grad():
        exact = answer(model, given)
        with torch.autocast("cpu", torch.bfloat16):
            own = (answer(model, given).float() - exact).abs().max()
        swapped.swap(model, init="default")
        exact = answer(model, given)
        with torch.autocast("cpu", torch.bfloat16):
            half = answer(model, given)
    assert (half.float() - exact).abs().max() <= 4 * own + 1e-3


@families
def test_unswap_leaves_no_trace(family):
    model, given = make(family), inputs(family)
    keys, text, trained = list(model.state_dict()), repr(model), [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        before = answer(model, given)
        for keep in ("add", "replace"):
            swapped.swap(model, "pape", keep=keep, init="default")
            assert (answer(model, given) - before).abs().max() > 1e-4
            swapped.unswap(model)
            assert torch.equal(answer(model, given), before)
    assert (list(model.state_dict()), repr(model)) == (keys, text)
    assert [p.requires_grad for p in model.parameters()] == trained
    with pytest.raises(SwapError, match="was not swapped"):
        swapped.unswap(model)


@families
def test_replace_takes_the_models_own_positions_out(family):
    """Without positions, and without an encoding, patches may be shuffled; with PaPE they may not."""
    if family == "clip-pair":
        pytest.skip("the tower is that of clip")
    model, given = swapped.swap(make(family), "none", keep="replace", init="default"), inputs(family)
    x = given["pixel_values"]
    if family == "siglip2":
        given = {**given, "pixel_attention_mask": torch.ones(2, 16).long(), "spatial_shapes": torch.full((2, 2), 4)}
        other = {**given, "pixel_values": x.flip(1)}
    else:
        other = {**given, "pixel_values": x.unflatten(-1, (4, 8)).flip(-2).flatten(-2)}  # columns of patches reversed

    def pooled():
        return [answer(model, one).reshape(2, -1, answer(model, one).shape[-1]).sum(1) for one in (given, other)]

    with torch.no_grad():
        a, b = pooled()
        assert (a - b).abs().max() < 1e-4
        swapped.unswap(model)
        swapped.swap(model, "pape", keep="replace", init="default")
        a, b = pooled()
        assert (a - b).abs().max() > 1e-3


@families
def test_save_and_load(family, tmp_path):
    model, given = swapped.swap(make(family), init="default", options={"parabolas": 4}), inputs(family)
    with torch.no_grad():
        want = answer(model, given)
        swapped.save(model, tmp_path)
        assert torch.equal(answer(model, given), want)  # saving changes nothing
        again = swapped.load(tmp_path)
        assert torch.equal(answer(again, given), want)
    assert type(again) is type(model)
    assert not again.training
    assert not list(tmp_path.glob("*.bin"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["parapos"]["encoding"] == "pape"
    assert config.get("_attn_implementation") != "parapos"


def test_masks_are_heard():
    """An attention function that is not registered for masks gets none, without a word."""
    model, given = make("siglip2"), inputs("siglip2")
    swapped.swap(model, init="default")
    torch.manual_seed(3)
    noise = given["pixel_values"].clone()
    noise[1, 6:] = torch.randn_like(noise[1, 6:]) * 5
    with torch.no_grad():
        want = model(**given)
        found = model(**{**given, "pixel_values": noise})
        assert (found.pooler_output - want.pooler_output).abs().max() < 1e-5
        alone = {
            "pixel_values": given["pixel_values"][1:, :6],
            "pixel_attention_mask": torch.ones(1, 6).long(),
            "spatial_shapes": given["spatial_shapes"][1:],
        }
        assert (model(**alone).pooler_output - want.pooler_output[1:]).abs().max() < 1e-4


def test_class_and_register_tokens_have_no_position():
    model = swapped.swap(make("dinov3"))
    with torch.no_grad():
        model(**inputs("dinov3", (16, 24)))
    r = placement_of(model)[1].positions.r[0]
    assert r[:3].isnan().all()
    assert torch.equal(r[3:], parapos.grid_positions(2, 3))


def test_each_image_of_a_batch_has_its_own_grid():
    model = swapped.swap(make("siglip2"))
    with torch.no_grad():
        model(**inputs("siglip2", (24, 40)))
    r = placement_of(model)[1].positions.r
    assert torch.equal(r[0], parapos.grid_positions(3, 5))
    assert torch.equal(r[1, :6], parapos.grid_positions(2, 3))


def test_gradient_checkpointing_of_several_passes():
    model = swapped.swap(make("siglip2"), init="default").train()
    first = inputs("siglip2")
    second = {**first, "spatial_shapes": torch.tensor([[2, 8], [3, 2]])}

    def gradients(late):
        model.zero_grad()
        losses = [answer(model, given).square().sum() for given in (first, second)] if late else []
        for given in () if late else (first, second):
            answer(model, given).square().sum().backward()
        if late:
            sum(losses).backward()
        return [p.grad.clone() for p in swapped.new_parameters(model)]

    want = gradients(late=False)
    model.gradient_checkpointing_enable()
    for found, grad in zip(gradients(late=True), want, strict=True):
        assert (found - grad).abs().max() <= 1e-4 * max(1.0, grad.abs().max())


def test_what_cannot_be_right_is_refused():
    with pytest.raises(SwapError, match="only 'pape' does"):
        swapped.swap(make("vit"), "alibi")
    with pytest.raises(SwapError, match="image tower of clip_vision_model"):
        swapped.swap(transformers.BertModel(transformers.BertConfig(**{**TEXT, "num_hidden_layers": 1})))
    with pytest.raises(SwapError, match="swapped before"):
        swapped.swap(swapped.swap(make("vit")))
    model = vision("ViTConfig", "ViTModel", attention_probs_dropout_prob=0.1)().eval()
    swapped.swap(model)
    model(**inputs("vit"))
    with pytest.raises(SwapError, match=r"attention dropout of 0\.1"):
        model.train()(**inputs("vit"))
    model = make("vit")
    first, second = (layer.attention for layer in model.layers)
    first.is_causal = True
    with pytest.raises(SwapError, match="is causal, expected attention that looks both ways"):
        swapped.swap(model)
    first.is_causal = False
    second.k_proj = torch.nn.Linear(48, 16)
    with pytest.raises(SwapError, match="got widths 48 and 16: grouped heads"):
        swapped.swap(model)
    with pytest.raises(SwapError, match="no weights to give"):
        swapped.swap(make("vit"))(**inputs("vit"), output_attentions=True)


def test_the_plain_loader_runs_without_and_ours_is_strict(tmp_path):
    model, given = swapped.swap(make("vit"), init="default"), inputs("vit")
    swapped.save(model, tmp_path)
    plain, report = transformers.ViTModel.from_pretrained(tmp_path, output_loading_info=True)
    assert any("encoding.w_p" in name for name in report["unexpected_keys"])
    with torch.no_grad():
        assert (answer(plain.eval(), given) - answer(model, given)).abs().max() > 1e-3
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())

    def refused(match, **changes):
        path.write_text(json.dumps({**values, **changes}))
        with pytest.raises(SwapError, match=match):
            swapped.load(tmp_path)

    refused("expected what parapos.interop.transformers.save writes", parapos=None)
    refused("has no model 'Pipelin'", parapos={**values["parapos"], "model": "Pipelin"})
    refused("expected a model of .*, got pipeline", parapos={**values["parapos"], "model": "pipeline"})
    refused("auto_map = .* is not allowed", auto_map={"AutoModel": "evil--code.Model"})
    refused("weight .*encoding.w_p: expected", parapos={**values["parapos"], "options": {"parabolas": 3}})
    refused("weight .*: expected", hidden_size=3 << 14)
    refused("no model can be built", hidden_size="wide")
    refused("whole numbers up to 1024, got 1000000000", num_hidden_layers=10**9)
    refused("far more than there are weights", num_hidden_layers=1 << 10)
