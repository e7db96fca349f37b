"""Answers on pictures, with Pillow alone: bars of classes, boxes with names, strips through time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

LEAST, MOST = 320, 1920  # pixels of the longer side of a picture; others are enlarged, for names, or reduced
COLOURS = (  # of classes, one after the other
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#8B0000", "#6A5ACD", "#2F4F4F", "#E69F00"),
    *("#556B2F", "#C71585"),
)
INK, GREY, BAR, PAPER = "#1a1a1a", "#777777", "#9ecae1", "#ffffff"
COLUMNS, CELLS = 6, 48  # of a strip


def to_image(picture: Tensor) -> Image.Image:
    """uint8 (3, H, W) as a Pillow image."""
    return Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _resized(picture: Image.Image) -> tuple[Image.Image, float]:
    """The picture, large enough and not too large, and the factor. One that is enlarged keeps its pixels as squares."""
    longer = max(picture.size)
    if longer > MOST:
        factor = MOST / longer
        size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
        return picture.resize(size, Image.Resampling.LANCZOS), factor
    whole = -(-LEAST // longer)
    size = (picture.width * whole, picture.height * whole)
    return (picture if whole == 1 else picture.resize(size, Image.Resampling.NEAREST)), whole


def add_bars(picture: Image.Image, bars: Sequence[tuple[str, float]], lines: int) -> Image.Image:
    """The picture with room for so many names, scores and bars of their length below it."""
    picture, _ = _resized(picture)
    width = max(picture.width, 200)
    size = min(36, max(12, width // 26))
    line, edge = round(1.45 * size), size // 2
    page = Image.new("RGB", (width, picture.height + lines * line + edge), PAPER)
    page.paste(picture, ((width - picture.width) // 2, 0))
    draw, font = ImageDraw.Draw(page), _font(size)
    for place, (name, score) in enumerate(bars):
        top = picture.height + edge // 2 + place * line
        told = f"{score:.1%}"
        room = width - 3 * edge - draw.textlength(told, font)
        length = score * (width - 2 * edge)
        draw.rectangle((edge, top + 2, edge + length, top + line - 2), fill=BAR)
        draw.text((edge + 4, top + line / 2), _shortened(draw, name, font, room), INK, font, anchor="lm")
        draw.text((width - edge - 4, top + line / 2), told, INK, font, anchor="rm")
    return page


def _shortened(draw: ImageDraw.ImageDraw, text: str, font: object, room: float) -> str:
    if draw.textlength(text, font) <= room:  # type: ignore[arg-type]
        return text
    while text and draw.textlength(f"{text}...", font) > room:  # type: ignore[arg-type]
        text = text[:-1]
    return f"{text}..."


def add_boxes(picture: Image.Image, boxes: Sequence[tuple[Sequence[float], int, str, float]]) -> Image.Image:
    """The picture with boxes (left, top, right, bottom), each with a class for its colour, a name and a score; the
    last are drawn first."""
    picture, factor = _resized(picture)
    page = picture.copy()
    draw = ImageDraw.Draw(page)
    size = min(28, max(11, max(page.size) // 45))
    font, line = _font(size), max(2, max(page.size) // 300)
    for box, label, _, _ in reversed(boxes):
        left, top, right, bottom = (edge * factor for edge in box)
        colour = COLOURS[label % len(COLOURS)]
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=line)
    for box, label, name, score in reversed(boxes):  # names above all boxes
        left, top = box[0] * factor, box[1] * factor
        told = f"{name}: {score:.2f}"
        wide, high = draw.textlength(told, font) + 6, size + 5
        left = max(0, min(left, page.width - wide))
        top = top - high if top >= high else top
        draw.rectangle((left, top, left + wide, top + high), fill=COLOURS[label % len(COLOURS)])
        draw.text((left + 3, top + high / 2), told, "white", font, anchor="lm")
    return page


def make_strip(cells: Sequence[tuple[str, Image.Image]], title: str) -> Image.Image:
    """Pictures of one size in rows from left to right, each below its name."""
    columns = min(COLUMNS, len(cells))
    wide, high = cells[0][1].size
    gap, head = 8, 26
    rows = -(-len(cells) // columns)
    page = Image.new("RGB", (gap + columns * (wide + gap), 34 + rows * (high + head + gap)), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((gap, 19), _shortened(draw, title, _font(17), page.width - 2 * gap), INK, _font(17), anchor="lm")
    for place, (name, picture) in enumerate(cells):
        left, top = gap + place % columns * (wide + gap), 34 + place // columns * (high + head + gap)
        draw.text((left + wide / 2, top + head / 2), name, INK, _font(15), anchor="mm")
        page.paste(picture, (left, top + head))
        draw.rectangle((left - 1, top + head - 1, left + wide, top + head + high), outline=GREY)
    return page
