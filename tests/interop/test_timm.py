"""PaPE in timm models: real small configurations of the installed library, random weights."""

import copy
import json
import warnings

import pytest
import torch

import parapos
from parapos.interop.swapping import placement_of

timm = pytest.importorskip("timm")
swapped = pytest.importorskip("parapos.interop.timm")
SwapError = swapped.SwapError

SMALL = dict(embed_dim=48, depth=2, num_heads=3, num_classes=5)
FIXED, LARGE = (64, 64), (80, 112)
# name, options, whether it takes another size than it was made for
FAMILIES = {
    "vit": ("vit_tiny_patch16_224", dict(img_size=64), False),
    "vit-dynamic": ("vit_tiny_patch16_224", dict(img_size=64, dynamic_img_size=True), True),
    "vit-registers": ("vit_small_patch14_reg4_dinov2", dict(img_size=56, patch_size=14, dynamic_img_size=True), True),
    "vit-qk-norm-gap": (
        "vit_tiny_patch16_224",
        dict(img_size=64, qk_norm=True, class_token=False, global_pool="avg", dynamic_img_size=True),
        True,
    ),
    "eva": ("eva02_tiny_patch14_224", dict(img_size=56), False),
    "eva-dinov3": ("vit_small_patch16_dinov3", dict(img_size=64, dynamic_img_size=True), True),
    "eva-rope-mixed": ("vit_small_patch16_rope_mixed_224", dict(img_size=64, dynamic_img_size=True), True),
    "naflex": ("naflexvit_base_patch16_gap", {}, True),
    "naflex-rope": ("naflexvit_base_patch16_gap", dict(rope_type="axial", class_token=True, pos_embed="none"), True),
}
families = pytest.mark.parametrize("family", FAMILIES)


def make(family, **more):
    """A model none of whose parameters is zero or one, so that every path shows in the outputs."""
    torch.manual_seed(0)
    name, options, _ = FAMILIES[family]
    model = timm.create_model(name, **{**SMALL, **options, **more})
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (0.02 if "patch" in name else 0.1))
    return model.eval()


def side(family):
    return 56 if "patch14" in FAMILIES[family][0] else 64


def images(family, size=None, batch=2):
    torch.manual_seed(1)
    h, w = (side(family),) * 2 if size is None else size
    return torch.randn(batch, 3, h, w)


def larger(family):
    patch = 14 if "patch14" in FAMILIES[family][0] else 16
    return (5 * patch, 7 * patch)


def learn(model, x, steps):
    """The names of new parameters that have a gradient in each of so many steps, and all new names.

    The loss hears every token. A pooled class token alone is no test of the last layer: it has no position."""
    names = {id(p): n for n, p in model.named_parameters()}
    new = swapped.new_parameters(model)
    optimizer, moved = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        model.forward_features(x).square().sum().backward()
        moved.append({names[id(p)] for p in new if p.grad is not None and bool(p.grad.any())})
        optimizer.step()
    return moved, {names[id(p)] for p in new}


@families
@pytest.mark.parametrize("other_size", [False, True])
def test_the_identity_swap_changes_nothing(family, other_size):
    if other_size and not FAMILIES[family][2]:
        pytest.skip("this configuration of timm has one size")
    model, x = make(family), images(family, larger(family) if other_size else None)
    with torch.no_grad():
        before = model(x)
        assert swapped.swap(model) is model
        after = model(x)
    assert before.std() > 1e-2
    assert (after - before).abs().max() <= 1e-6
    with torch.no_grad():  # the terms are there: another W_p gives other outputs
        for p in swapped.new_parameters(model):
            p.add_(torch.randn_like(p) * 0.3)
        assert (model(x) - before).abs().max() > 1e-3


@families
def test_it_learns_from_the_first_step_on(family):
    model = swapped.swap(make(family))
    moved, new = learn(model, images(family), 2)
    assert moved[0] == {name for name in new if name.endswith("w_p")}
    assert moved[1] == new
    assert len(new) == 3 * SMALL["depth"]


@pytest.mark.parametrize("family", [f if f == "vit" else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES])
def test_it_compiles_without_graph_breaks(family):
    """One graph; timm's learned position embedding of NaFlex is what cannot be compiled, so there it goes."""
    keep = "replace" if family == "naflex" else "add"
    model, x = swapped.swap(make(family, depth=1), keep=keep, init="default"), images(family)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        assert (compiled(x) - model(x)).abs().max() < 1e-4


@families
def test_bfloat16_autocast(family):
    """Outputs in half precision stay as near to float32 as those of the model before the swap."""
    model, x = make(family), images(family)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
    with torch.no_grad():
        own = (plain.float() - model(x)).abs().max()
        swapped.swap(model, init="default")
        exact = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            half = model(x)
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).abs().max() <= 4 * own + 1e-3


@families
def test_unswap_leaves_no_trace(family):
    model, x = make(family), images(family)
    keys, text = list(model.state_dict()), repr(model)
    with torch.no_grad():
        before = model(x)
        for keep in ("add", "replace"):
            swapped.swap(model, "pape", keep=keep, init="default")
            assert (model(x) - before).abs().max() > 1e-4
            assert swapped.unswap(model) is model
            assert torch.equal(model(x), before)
    assert (list(model.state_dict()), repr(model)) == (keys, text)
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(SwapError, match="was not swapped"):
        swapped.unswap(model)


@families
def test_replace_takes_the_models_own_positions_out(family):
    """Without positions, and without an encoding, patches may be shuffled; with PaPE they may not."""
    model, x = swapped.swap(make(family), "none", keep="replace", init="default"), images(family)
    shuffled = x.flip(-1).unflatten(-1, (-1, side(family) // 4)).flip(-1).flatten(-2)  # patches in reverse order
    with torch.no_grad():
        assert (model(x) - model(shuffled)).abs().max() < 1e-5
        swapped.unswap(model)
        swapped.swap(model, "pape", keep="replace", init="default")
        assert (model(x) - model(shuffled)).abs().max() > 1e-4


@families
def test_save_and_load(family, tmp_path):
    options = FAMILIES[family][1]
    model, x = swapped.swap(make(family), init="default", options={"parabolas": 4}), images(family)
    swapped.save(model, tmp_path, model_args={**SMALL, **options})
    again = swapped.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    assert not again.training
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "parapos.json"]
    with pytest.raises(SwapError, match="makes another model"):
        swapped.save(model, tmp_path, model_args={**SMALL, **options, "mlp_ratio": 2.0})


def test_a_pooled_class_token_leaves_the_last_layer_unheard():
    """It has no position, so the encoding of the last layer, where only it asks, gets a gradient of zero, not none."""
    model = swapped.swap(make("vit"), init="default")
    model(images("vit")).square().sum().backward()
    first, last = (block.attn.encoding for block in model.blocks)
    assert all(bool(p.grad.any()) for p in first.parameters())
    assert not any(bool(p.grad.any()) for p in last.parameters())


@pytest.mark.parametrize("encoding", [e for e in parapos.list_encodings() if e not in ("sincos", "none")])
def test_every_encoding_of_attention_swaps(encoding):
    model = make("vit-dynamic", num_heads=12)
    with torch.no_grad():
        before = model(images("vit-dynamic"))
        swapped.swap(model, encoding, init="default")
        assert (model(images("vit-dynamic")) - before).abs().max() > 1e-4
    assert len(swapped.new_parameters(model)) == len(
        [p for layer in model.blocks for p in layer.attn.encoding.parameters()]
    )


@pytest.mark.parametrize("family", ["vit-dynamic", "vit-registers", "eva-dinov3", "naflex", "naflex-rope"])
def test_patches_of_a_wide_image_have_their_columns_as_x(family):
    model = swapped.swap(make(family))
    with torch.no_grad():
        model(images(family, larger(family)))
    r, prefix = placement_of(model)[1].positions.r[0], model.num_prefix_tokens
    assert torch.equal(r[prefix:], parapos.grid_positions(5, 7))
    assert r[:prefix].isnan().all()


@pytest.mark.parametrize("family", ["eva-dinov3", "naflex-rope"])
def test_patch_dropout_takes_positions_along(family):
    """What stays keeps its position: with one patch dropped at a time the outputs are those of that subset."""
    model = swapped.swap(make(family, patch_drop_rate=0.5), init="default").train()
    torch.manual_seed(3)
    kept = []
    model.patch_drop.register_forward_hook(lambda module, args, output: kept.append(output[1]))
    model(images(family))
    r = placement_of(model)[1].positions.r
    prefix = model.num_prefix_tokens
    grid = parapos.grid_positions(4, 4)
    assert r.shape == (2, prefix + 8, 2)
    assert torch.equal(r[:, prefix:], grid[kept[0]])
    assert r[:, :prefix].isnan().all()


def test_reentrant_checkpointing_is_refused():
    from timm.layers import set_reentrant_ckpt

    model = swapped.swap(make("vit"), init="default").train()
    model.set_grad_checkpointing(True)
    set_reentrant_ckpt(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = model(images("vit").requires_grad_()).square().sum()
        with pytest.raises(SwapError, match="use_reentrant=False"):
            loss.backward()
    finally:
        set_reentrant_ckpt(False)


def test_a_copy_is_a_model_of_its_own():
    model = swapped.swap(make("vit-dynamic"), init="default")
    twin = copy.deepcopy(model)
    x, wide = images("vit-dynamic"), images("vit-dynamic", (64, 96))
    with torch.no_grad():
        want = twin(x)
        model(wide)
        assert placement_of(twin)[1].positions.r.shape[1] == 17
        assert torch.equal(twin(x), want)
        swapped.unswap(twin)
        assert torch.equal(model(x), want)


def test_what_cannot_be_right_is_refused():
    x = images("vit")
    with pytest.raises(SwapError, match="only 'pape' does"):
        swapped.swap(make("vit"), "rope")
    with pytest.raises(SwapError, match="form='parabolas'"):
        swapped.swap(make("vit"), options={"form": "direct"})
    with pytest.raises(SwapError, match="form='parabolas' with projection and direction"):
        swapped.swap(make("vit"), options={"direction": False})
    with pytest.raises(SwapError, match="adds to tokens"):
        swapped.swap(make("vit"), "sincos", init="default")
    with pytest.raises(ValueError, match="adds nothing"):
        swapped.swap(make("vit"), "none", init="default")
    with pytest.raises(ValueError, match="keep must be one of add, replace"):
        swapped.swap(make("vit"), keep="both")
    with pytest.raises(ValueError, match="options: init"):
        swapped.swap(make("vit"), options={"init": "wide"})
    with pytest.raises(TypeError, match="parabola"):
        swapped.swap(make("vit"), options={"parabola": 3})
    with pytest.raises(SwapError, match="families VisionTransformer, Eva, NaFlexVit, got ResNet"):
        swapped.swap(timm.create_model("resnet18"))
    with pytest.raises(SwapError, match="parallel blocks have none"):
        swapped.swap(make("vit", block_fn=timm.models.vision_transformer.ParallelScalingBlock))
    with pytest.raises(SwapError, match="parallel blocks have none"):
        swapped.swap(make("vit", block_fn=timm.models.vision_transformer.ParallelThingsBlock))
    with pytest.raises(SwapError, match="grouped heads"):
        swapped.swap(make("eva-dinov3", num_heads=4, num_kv_heads=2, qkv_fused=False, attn_type="rope"))
    with pytest.raises(SwapError, match="which patches stay"):
        swapped.swap(make("vit", patch_drop_rate=0.5))
    model = swapped.swap(make("vit", attn_drop_rate=0.1))
    assert model(x).isfinite().all()
    with pytest.raises(SwapError, match=r"attention dropout of 0\.1"):
        model.train()(x)
    with pytest.raises(SwapError, match="causal"):
        model.eval()(x, is_causal=True)
    with pytest.raises(SwapError, match="swapped before"):
        swapped.swap(model)
    with pytest.raises(SwapError, match="this one adds other numbers"):
        model(x, attn_mask=torch.randn(17, 17))
    with pytest.raises(SwapError, match="expected positions of 17 tokens, got none"):
        swapped.swap(make("vit")).blocks(torch.randn(2, 17, 48))


def test_masks_of_a_vit():
    """A mask hides patches as timm's own attention does, whatever its form."""
    model, x = make("vit"), images("vit")
    shown = torch.rand(17, 17) > 0.4
    shown[:, 0] = True
    additive = torch.zeros(17, 17).masked_fill(~shown, -torch.inf)
    with torch.no_grad():
        want = model(x, attn_mask=additive)
        swapped.swap(model)
        for mask in (shown, additive, shown[None, None]):
            assert (model(x, attn_mask=mask) - want).abs().max() <= 1e-6


def test_files_that_were_tampered_with(tmp_path):
    model = swapped.swap(make("vit"), options={"parabolas": 2})
    swapped.save(model, tmp_path, model_args={**SMALL, "img_size": 64})
    path = tmp_path / "parapos.json"
    about = json.loads(path.read_text())

    def refused(match, **changes):
        path.write_text(json.dumps({**about, **changes}))
        with pytest.raises(SwapError, match=match):
            swapped.load(tmp_path)

    refused("has no model 'hf-hub:evil/model'", model="hf-hub:evil/model")
    refused("args.checkpoint_path is not allowed", args={**about["args"], "checkpoint_path": "../../x.pth"})
    refused("args.pretrained is not allowed", args={**about["args"], "pretrained": True})
    refused("weight .*: expected", args={**about["args"], "embed_dim": 3 << 14})
    refused("no model can be built", args={**about["args"], "embed_dim": "wide"})
    refused("whole numbers up to 1024, got 1000000000", args={**about["args"], "depth": 10**9})
    refused("far more than there are weights", args={**about["args"], "depth": 1 << 10})
    refused("model: expected str", model=3)
    refused("format 1", library="transformers")
    refused("weight blocks.0.attn.encoding.w_p", options={"parabolas": 3})
    path.write_text("{" * 10)
    with pytest.raises(SwapError, match="not JSON"):
        swapped.load(tmp_path)
    path.write_text(json.dumps(about))
    swapped.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(SwapError, match="not safetensors"):
        swapped.load(tmp_path)
