"""Run folders without training, for tests of what comes after it."""

import torch

from parapos.training import checkpoint, recipe


def make_run(folder, encoding="pape", *, source="digits_smoke", seed=0, classes=10, **changes):
    """The folder of a run of a tiny model with random weights, classifier included."""
    options = {key.replace("__", "."): value for key, value in changes.items()}
    wanted = recipe.load(source, {"model.encoding": encoding, **options})
    torch.manual_seed(seed)
    model = wanted.model.build({"num_classes": classes})
    torch.nn.init.normal_(model.classifier.weight)
    checkpoint.write(folder / "recipe.toml", wanted.dumps().encode())
    about = dict(model=wanted.model.name, encoding=encoding, options=wanted.model.chosen, classes=classes)
    checkpoint.export(folder / "weights.safetensors", model.state_dict(), **about, size=wanted.data.size)
    return folder
