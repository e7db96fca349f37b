"""The table of what each encoding promises, made from the code. Run it: python -m tools.claims"""

from __future__ import annotations

from dataclasses import fields

from parapos.encodings import ENCODINGS, Claims

HEADINGS = {"unbounded": "any p, any points"}


def table() -> str:
    """Markdown, one row per encoding, one column per property."""
    names = [field.name for field in fields(Claims)]
    lines = ["| encoding | " + " | ".join(HEADINGS.get(name, name) for name in names) + " | quirks with compat |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for name, cls in ENCODINGS.items():
        marks = ["yes" if getattr(cls.claims, field) else "no" for field in names]
        lines.append(f"| `{name}` | " + " | ".join(marks) + f" | {cls.quirks} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
