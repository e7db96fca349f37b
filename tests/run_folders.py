"""Run folders without training, for tests of what comes after it."""

import torch

from parapos.training import checkpoint, recipe


def make_run(folder, encoding="pape", *, source="digits_smoke", seed=0, classes=10, learned=None, **changes):
    """The folder of a run of a tiny model with random weights, classifier included."""
    options = {key.replace("__", "."): value for key, value in changes.items()}
    wanted = recipe.load(source, {"model.encoding": encoding, **options})
    torch.manual_seed(seed)
    model = wanted.model.build({"num_classes": classes})
    if hasattr(model, "classifier"):
        torch.nn.init.normal_(model.classifier.weight)
    elif hasattr(model, "head"):  # a detector, which is to be sure of some boxes
        for parameter in model.head.parameters():
            if parameter.shape[:1] == (classes,):
                torch.nn.init.normal_(parameter, std=0.5)
    else:  # of points
        head = model.seg_head if hasattr(model, "seg_head") else model.cls_head[-1]
        torch.nn.init.normal_(head.weight)
    checkpoint.write(folder / "recipe.toml", wanted.dumps().encode())
    about = dict(model=wanted.model.name, encoding=encoding, options=wanted.model.chosen, classes=classes)
    about["learned"] = learned or {}
    checkpoint.export(folder / "weights.safetensors", model.state_dict(), **about, size=wanted.data.size)
    return folder
