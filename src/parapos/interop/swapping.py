"""What a swap into any host model needs: where its tokens are, one encoding per attention layer, and the way back.

B batch, N tokens, D width. A host model computes positions nowhere, so a hook on its patch embedding writes them to a
`Placement`, and the attention layers read them from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Term, attend
from ..encodings import Encoding, create_encoding
from ..encodings.parabolic import PaPE
from ..positions import Positions, grid_positions

KEEP = ("add", "replace")
INIT = ("identity", "default")
ATTRIBUTE = "parapos_placement"  # of the module that was swapped
ASIDE = "parapos_set_aside"  # what names of weights begin with that a swap set aside


class SwapError(ValueError):
    """This model, or this call of a swapped model, cannot be served. The message says why."""


class Placement:
    """The positions of the tokens of the running forward pass, and what a swap did to its model.

    settings: what `swap` was given, as plain values. handles: hooks. removed: what keep="replace" took out, as
    the path of its module, its name and its value.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.handles: list[Any] = []
        self.removed: list[tuple[str, str, Any]] = []
        self.positions: Positions | None = None
        self.task = -1  # the backward pass that `positions` were restored for

    def put(self, r: Tensor, prefix: int = 0) -> None:
        """Positions (N, 2) or (B, N, 2) of patches, behind `prefix` tokens without one."""
        r = r[None] if r.ndim == 2 else r
        if prefix:
            r = torch.cat([r.new_full((r.shape[0], prefix, r.shape[2]), torch.nan), r], dim=1)
        self.positions = Positions(r, unplaced=bool(prefix))

    def put_grid(self, rows: int, cols: int, prefix: int, device: torch.device) -> None:
        """Positions of a grid of patches; see `put`."""
        self.put(grid_positions(rows, cols, device=device), prefix)

    def get(self, tokens: int) -> Positions:
        """The positions of so many tokens."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() not in (-1, self.task):
            raise SwapError(
                "positions of this pass are gone: re-entrant gradient checkpointing is not supported, use "
                "use_reentrant=False"
            )
        if self.positions is None or self.positions.r.shape[1] != tokens:
            known = "none" if self.positions is None else f"those of {self.positions.r.shape[1]}"
            raise SwapError(
                f"expected positions of {tokens} tokens, got {known}; call the model as a whole, "
                "because its patch embedding says where tokens are"
            )
        return self.positions

    def restore(self, positions: Positions) -> None:
        """Makes positions those of the present backward pass, in which a block may run once more."""
        self.positions, self.task = positions, torch._C._current_graph_task_id()


class KeepForBackward:
    """A forward hook of blocks: gradient checkpointing runs a block again in the backward pass, and by then another
    forward pass may have written other positions."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def __call__(self, block: nn.Module, args: Any, output: Any) -> None:
        positions, placement = self.placement.positions, self.placement
        if torch.compiler.is_compiling() or not isinstance(output, Tensor) or output.grad_fn is None:
            return
        if positions is not None:
            output.grad_fn.register_prehook(lambda grads: placement.restore(positions))


def check_choice(
    model: nn.Module, keep: str, init: str, encoding: str, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The settings of a swap of a model that has none yet, as plain values."""
    if is_swapped(model):
        raise SwapError("this model was swapped before; call unswap(model) first")
    for name, value, known in (("keep", keep, KEEP), ("init", init, INIT)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    options = dict(options or {})
    for name in ("layer", "depth", "compat"):
        if name in options:
            raise TypeError(f"options: {name} is set by the swap and cannot be given")
    if encoding == "none" and keep == "add":
        raise ValueError("encoding='none' adds nothing; with keep='replace' it takes the model's own positions out")
    if init == "identity" and encoding != "pape":
        raise SwapError(
            f"{encoding!r} has no parameters that leave every score as it was and still learn; only 'pape' does, "
            "with W_p = 0. Pass init='default' and expect other outputs until the model is trained again"
        )
    if init == "identity" and "init" in options:
        raise ValueError("options: init draws W_p, which init='identity' sets to zero; pass init='default' to use it")
    return {"encoding": encoding, "keep": keep, "init": init, "options": options}


def make_encodings(settings: Mapping[str, Any], layers: Sequence[tuple[Tensor, int, int, int]]) -> list[Encoding]:
    """One encoding for each attention layer, which is told by one of its weights, its width, heads and head size."""
    depth = len(layers)
    return [
        make_encoding(settings, like, dim=dim, heads=heads, head_dim=head_dim, layer=number, depth=depth)
        for number, (like, dim, heads, head_dim) in enumerate(layers)
    ]


def make_encoding(settings: Mapping[str, Any], like: Tensor, **sizes: int) -> Encoding:
    """The encoding of one attention layer, on the device and in the type of `like`."""
    made = create_encoding(settings["encoding"], pos_dim=2, **sizes, **settings["options"])
    if type(made).add is not Encoding.add:
        raise SwapError(
            f"{settings['encoding']!r} adds to tokens and not to attention, so there is nothing to swap; add "
            "create_encoding(...).add(tokens, positions) where the model embeds its patches"
        )
    if settings["init"] == "identity":
        assert isinstance(made, PaPE)
        if made.w_p is None or not made.direction:
            raise SwapError(
                "init='identity' is W_p = 0 with a linear term to learn from: it needs form='parabolas' with "
                "projection and direction; pass init='default' for this form"
            )
        with torch.no_grad():
            made.w_p.zero_()
    return made.to(like.device, like.dtype)


def attention(
    encoding: Encoding,
    placement: Placement,
    tokens: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention (B, H, N, h) of a host's q, k, v (B, H, N, h) made from tokens (B, N, D), with the encoding's terms.

    mask: boolean, True = may look, or a host's additive mask of zeros and of the least number or minus infinity.
    """
    if scale != encoding.scale:
        raise SwapError(f"expected the scale head_dim ** -0.5 = {encoding.scale}, the host's is {scale}")
    terms: tuple[Term, ...]
    q, k, terms = encoding(tokens, q, k, placement.get(tokens.shape[1]))
    if not (q.dtype == k.dtype == v.dtype):  # autocast leaves norms and rotations in float32
        q, k = q.to(v.dtype), k.to(v.dtype)
    out = attend(q, k, v, terms, None if mask is None else visible(mask, q), encoding.scale)
    assert isinstance(out, Tensor)
    return out


def visible(mask: Tensor, q: Tensor) -> Tensor:
    """A host's mask in the form that `attend` takes: (B, N) for padding, (B or 1, H or 1, n, N) otherwise."""
    while mask.ndim < 4:
        mask = mask[None]
    if mask.dtype != torch.bool:
        least = torch.finfo(mask.dtype).min / 2
        only_hides, wrong = ((mask == 0) | (mask <= least)).all(), "attention masks must hide or show keys, this one"
        wrong += " adds other numbers to scores"
        if torch.compiler.is_compiling():  # a graph cannot raise our error
            torch._assert_async(only_hides, wrong)
        elif not only_hides:
            raise SwapError(wrong)
        mask = mask > least
    if mask.shape[1] == 1 and (mask.shape[2] == 1 or mask.stride(2) == 0):  # the same for all queries
        return mask[:, 0, 0].expand(q.shape[0], -1)
    return mask


def placement_of(model: nn.Module) -> tuple[nn.Module, Placement]:
    """The module that was swapped, the model itself or one inside it, and its placement."""
    for module in model.modules():
        if isinstance(found := getattr(module, ATTRIBUTE, None), Placement):
            return module, found
    raise SwapError(f"{type(model).__name__} was not swapped; call swap(model) first")


def is_swapped(model: nn.Module) -> bool:
    return any(isinstance(getattr(module, ATTRIBUTE, None), Placement) for module in model.modules())


def new_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a swap added, for an optimizer's groups."""
    placement_of(model)
    return [p for module in model.modules() if isinstance(module, Encoding) for p in module.parameters()]


def set_aside(model: nn.Module, path: str, placement: Placement, new: Any = None) -> None:
    """Sets an attribute of the model to another value, such as a parameter to None, and remembers the old one."""
    owner_path, _, name = path.rpartition(".")
    owner = model.get_submodule(owner_path)
    placement.removed.append((owner_path, name, getattr(owner, name)))
    setattr(owner, name, new)


def full_state(model: nn.Module, keep_vars: bool = False) -> dict[str, Tensor]:
    """The weights of a swapped model, and those that keep="replace" set aside, under names of their own."""
    state = dict(model.state_dict(keep_vars=keep_vars))
    for path, name, held in placement_of(model)[1].removed:
        place = ".".join(part for part in (ASIDE, path, name) if part)
        if isinstance(held, nn.Module):
            state |= held.state_dict(prefix=f"{place}.", keep_vars=keep_vars)
        elif isinstance(held, Tensor):
            state[place] = held if keep_vars else held.detach()
    return state


def undo(model: nn.Module, placement: Placement) -> None:
    """Removes hooks and brings back what keep="replace" took out."""
    like = next(model.parameters())
    for handle in placement.handles:
        handle.remove()
    for path, name, held in placement.removed:
        if isinstance(held, nn.Parameter):
            held = nn.Parameter(held.detach().to(like), held.requires_grad)
        setattr(model.get_submodule(path), name, held.to(like) if isinstance(held, nn.Module) else held)
    delattr(model, ATTRIBUTE)
