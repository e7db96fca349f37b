"""How encodings are shown: display name and colour of curves, by name. `register_encoding` adds to it."""

from __future__ import annotations

LOOKS: dict[str, tuple[str, str]] = {
    "pape": ("PaPE", "#D55E00"),
    "pape_ri": ("PaPE-RI", "#E69F00"),
    "sincos": ("sin-cos", "#7A7A7A"),
    "rope": ("RoPE", "#0072B2"),
    "rope_mixed": ("RoPE-Mixed", "#56B4E9"),
    "alibi": ("ALiBi", "#009E73"),
    "lookhere": ("LookHere", "#CC79A7"),
    "none": ("none", "#B8B8B8"),
    "polynomial": ("polynomial", "#8C6D31"),
}


def label(name: str) -> str:
    """The display name of an encoding; a name that is none stays as it is."""
    return LOOKS[name][0] if name in LOOKS else name
