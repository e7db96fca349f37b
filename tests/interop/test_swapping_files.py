"""Folders of swapped models: what would fetch or run other things is refused, and what is loaded is what was saved."""

import json
import socket
import time

import pytest
import torch

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
of_timm = pytest.importorskip("parapos.interop.timm")
of_transformers = pytest.importorskip("parapos.interop.transformers")
SwapError = of_timm.SwapError

ARGS = dict(img_size=64, embed_dim=48, depth=2, num_heads=3, num_classes=5)
SIZES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64, patch_size=8)


def vit(library):
    torch.manual_seed(0)
    if library == "timm":
        return timm.create_model("vit_tiny_patch16_224", **ARGS).eval()
    return transformers.ViTModel(transformers.ViTConfig(image_size=64, **SIZES)).eval()


def save(library, model, folder):
    if library == "timm":
        return of_timm.save(model, folder, model_args=ARGS)
    return of_transformers.save(model, folder)


def answer(model, x):
    with torch.no_grad():
        out = model(x)
    return out if isinstance(out, torch.Tensor) else out.last_hidden_state


LIBRARIES = {"timm": of_timm, "transformers": of_transformers}
libraries = pytest.mark.parametrize("library", LIBRARIES)
X = torch.linspace(-2, 2, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64).sin()


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Loads a folder of transformers whose config.json was changed, and fails if the network is asked."""
    of_transformers.save(of_transformers.swap(vit("transformers")), tmp_path)
    path = tmp_path / "config.json"
    values, asked = json.loads(path.read_text()), []

    def ask(*args, **kwargs):
        asked.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(socket, "create_connection", ask)

    def load(model=None, **changes):
        about = {**values["parapos"], **({"model": model} if model else {})}
        path.write_text(json.dumps({**values, "parapos": about, **changes}))
        try:
            return of_transformers.load(tmp_path)
        finally:
            assert not asked

    return load


FETCHING = {
    "kernel": dict(_attn_implementation="evil/kernel"),
    "kernel-2": dict(attn_implementation="evil/kernel"),
    "kernel-3": dict(_attn_implementation_internal="evil/kernel"),
    "kernel-by-part": dict(_attn_implementation={"": "evil/kernel"}),
    "kernel-below": dict(vision_config={"deep": [{"attn_implementation": "evil/kernel"}]}),
    "flash": dict(_attn_implementation="flash_attention_2"),
    "backbone": dict(backbone="evil/repo"),
    "backbone-below": dict(backbone_config={"backbone": "evil/repo"}),
    "pretrained": dict(use_pretrained_backbone=True),
    "auto_map": dict(text_config={"auto_map": {"AutoModel": "evil--code.Model"}}),
    "quantization": dict(quantization_config={"load_in_8bit": True}),
}


@pytest.mark.parametrize("what", FETCHING)
def test_a_config_that_would_fetch_code_is_refused(edited, what):
    with pytest.raises(SwapError, match="is not allowed, it could fetch or run other things"):
        edited(**FETCHING[what])


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("DPTForDepthEstimation", {}),
        ("TimmBackbone", {}),
        ("TimmWrapperModel", dict(architecture="hf-hub:evil/repo")),
        ("LlavaForConditionalGeneration", {}),
        ("PreTrainedModel", {}),
    ],
)
def test_models_of_other_families_are_not_built(edited, model, changes):
    with pytest.raises(SwapError, match="expected a model of"):
        edited(model, **changes)


def test_harmless_settings_are_taken(edited):
    loaded = edited(_attn_implementation="eager", backbone=None, use_pretrained_backbone=False)
    assert answer(loaded, X).isfinite().all()


def test_a_model_that_load_would_refuse_is_not_saved(tmp_path):
    tower = {**SIZES, "image_size": 64, "model_type": "clip_vision_model"}
    text = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=64, vocab_size=99)
    config = transformers.LlavaConfig(vision_config=tower, text_config={**text, "model_type": "llama"})
    model = of_transformers.swap(transformers.LlavaForConditionalGeneration(config))
    with pytest.raises(SwapError, match="expected a model of"):
        of_transformers.save(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@libraries
def test_unswap_of_a_loaded_model_brings_its_own_positions_back(library, tmp_path):
    swapped, model = LIBRARIES[library], vit(library)
    before = answer(model, X)
    swapped.swap(model, keep="replace", init="default")
    save(library, model, tmp_path)
    torch.manual_seed(7)
    again = swapped.load(tmp_path)
    assert torch.equal(answer(again, X), answer(model, X))
    save(library, again, tmp_path)
    torch.manual_seed(8)
    last = swapped.load(tmp_path)
    assert (answer(last, X) - before).abs().max() > 1e-3
    for found in (again, last):
        assert torch.equal(answer(swapped.unswap(found), X), before)


def test_learned_rotations_that_were_set_aside_come_back(tmp_path):
    args = {**ARGS, "dynamic_img_size": True}
    model = timm.create_model("vit_small_patch16_rope_mixed_224", **args).eval()
    before = answer(model, X)
    of_timm.swap(model, keep="replace", init="default")
    again = of_timm.load(of_timm.save(model, tmp_path, model_args=args))
    assert torch.equal(answer(of_timm.unswap(again), X), before)


@libraries
def test_weights_come_back_in_their_own_types(library, tmp_path):
    swapped = LIBRARIES[library]
    model = swapped.swap(vit(library), init="default").bfloat16()
    for p in swapped.new_parameters(model):
        p.data = torch.randn(p.shape)
    save(library, model, tmp_path)
    again = swapped.load(tmp_path).state_dict()
    types = {name: x.dtype for name, x in model.state_dict().items()}
    assert len(set(types.values())) == 2
    assert {name: x.dtype for name, x in again.items()} == types
    assert all(torch.equal(x, again[name]) for name, x in model.state_dict().items())


def test_large_numbers_cost_no_time(edited, tmp_path):
    folder = of_timm.save(of_timm.swap(vit("timm")), tmp_path / "timm", model_args=ARGS)
    about = json.loads((folder / "parapos.json").read_text())
    start = time.perf_counter()
    for depth in (4_000_000, 65_536, 1025):
        (folder / "parapos.json").write_text(json.dumps({**about, "args": {**about["args"], "depth": depth}}))
        with pytest.raises(SwapError, match=f"whole numbers up to .*, got {depth}"):
            of_timm.load(folder)
        with pytest.raises(SwapError, match=f"whole numbers up to .*, got {depth}"):
            edited(num_hidden_layers=depth)
    with pytest.raises(SwapError, match="whole numbers up to 65536, got 4000000"):
        edited(num_labels=4_000_000)
    assert time.perf_counter() - start < 2


def test_large_vocabularies_are_legal(tmp_path):
    """A text model beside the tower may know more words than any layer is wide."""
    text = dict(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=16, vocab_size=256_000)
    config = transformers.SiglipConfig(
        vision_config={**SIZES, "image_size": 64}, text_config={**text, "eos_token_id": 255_999}
    )
    of_transformers.save(of_transformers.swap(transformers.SiglipModel(config)), tmp_path)
    assert of_transformers.load(tmp_path).config.text_config.vocab_size == 256_000


def test_a_refused_swap_leaves_no_hook():
    model = timm.create_model("vit_tiny_patch16_224", **ARGS, patch_drop_rate=0.5)
    with pytest.raises(SwapError, match="which patches stay"):
        of_timm.swap(model)
    assert not any(module._forward_hooks for module in model.modules())


def masks():
    shown = torch.rand(17, 17, generator=torch.Generator().manual_seed(0)) > 0.4
    shown[:, 0] = True
    hides = torch.zeros(17, 17).masked_fill(~shown, -torch.inf)
    return hides, torch.zeros(17, 17).index_fill(1, torch.tensor([3]), -1.0)


COMPILED = [(backend, learn) for backend in ("eager", "aot_eager", "inductor") for learn in (False, True)]


@pytest.mark.parametrize(
    ("backend", "learn"), [COMPILED[0], *(pytest.param(*one, marks=pytest.mark.full) for one in COMPILED[1:])]
)
def test_masks_that_add_are_refused_in_compiled_models_too(backend, learn):
    model = of_timm.swap(vit("timm"), init="default")
    hides, adds = masks()
    want = answer(lambda x: model(x, attn_mask=hides), X)
    compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    with torch.set_grad_enabled(learn):
        assert (compiled(X, attn_mask=hides) - want).abs().max() < 1e-4
        with pytest.raises(RuntimeError, match="this one adds other numbers"):
            compiled(X, attn_mask=adds)
