"""Plots for the HTML pages: lines as SVG, fields of values as embedded PNG. They survive zeros, NaN and no data."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]  # [rows, columns, 3]

NO_VALUE = (128, 128, 128)
# Dark to bright, with rising lightness, so that it also reads without colour.
_LIGHTS = np.array([(12, 8, 40), (70, 20, 110), (160, 45, 110), (235, 110, 60), (252, 220, 130)], np.float64)
AGREE, DIFFER = (46, 160, 104), (214, 59, 47)
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 190, 70, 26


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: a value for each position 0, 1, 2, …"""

    label: str
    values: Sequence[float]
    color: str = "var(--a)"


def png(pixels: Pixels) -> bytes:
    """An 8-bit RGB image as a PNG file."""
    rows, columns, _ = pixels.shape
    raw = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(pixels))  # filter 0 before each row

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def image(pixels: Pixels, label: str, height_px: int) -> str:
    """An <img> that is stretched to the width of the page, one crisp block per pixel."""
    if not pixels.size:
        return f"<p class='dim'>{escape(label)}: nothing to show</p>"
    data = base64.b64encode(png(pixels)).decode()
    style = f"width:100%;height:{height_px}px;image-rendering:pixelated;display:block"
    return f"<img alt='{escape(label, quote=True)}' style='{style}' src='data:image/png;base64,{data}'>"


def light_map(values: npt.ArrayLike, low: float, high: float) -> Pixels:
    """Values [rows, columns] between `low` (dark) and `high` (bright); NaN is grey."""
    array = np.asarray(values, np.float64)
    span = high - low if high > low else 1.0
    place = np.clip((np.nan_to_num(array, nan=low, posinf=high, neginf=low) - low) / span, 0, 1) * (len(_LIGHTS) - 1)
    below = np.minimum(place.astype(int), len(_LIGHTS) - 2)
    share = (place - below)[..., None]
    colors = _LIGHTS[below] * (1 - share) + _LIGHTS[below + 1] * share
    colors[np.isnan(array)] = NO_VALUE
    return np.asarray(colors.round(), np.uint8)


def agreement_map(equal: npt.ArrayLike) -> Pixels:
    """1 agrees, 0 differs, anything else is grey; [rows, columns]."""
    array = np.asarray(equal, np.float64)
    if array.ndim != 2:
        return np.zeros((0, 0, 3), np.uint8)
    pixels = np.full((*array.shape, 3), NO_VALUE, np.uint8)
    pixels[array == 1], pixels[array == 0] = AGREE, DIFFER
    return pixels


def line_plot(lines: Sequence[Line], x_label: str, y_label: str, limit: float | None = None, log: bool = False) -> str:
    """Curves over their positions; `limit` is a dashed line. On a log scale zeros lie on the floor of the plot."""
    arrays = [np.asarray(line.values, np.float64) for line in lines]
    shown = [a[np.isfinite(a) & ((a > 0) | (not log))] for a in arrays]
    known = np.concatenate([*shown, [limit] if limit is not None and limit > 0 else []]) if lines else np.zeros(0)
    if not known.size:
        return f"<p class='dim'>{escape(y_label)}: no value to plot</p>"
    low, high = float(known.min()), float(known.max())
    if log:
        low, high = np.floor(np.log10(low)), np.ceil(np.log10(high))
    else:
        low = min(low, 0.0)
    high = high if high > low else low + 1
    longest = max((len(a) for a in arrays), default=1)

    def y_of(value: float) -> float:
        level = (np.log10(value) if value > 0 else low) if log else value
        return float(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 8) * np.clip((level - low) / (high - low), 0, 1))

    def x_of(position: int) -> float:
        return LEFT + (WIDTH - LEFT - 8) * position / max(longest - 1, 1)

    parts = [_axis(low, high, log, y_of)]
    if limit is not None and limit > 0:
        y = y_of(limit)
        parts.append(
            f"<line x1='{LEFT}' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='var(--bad)' stroke-dasharray='5 4'/>"
        )
    for line, array in zip(lines, arrays, strict=True):
        parts.append(_curve(line, [(x_of(i), y_of(float(v)) if np.isfinite(v) else None) for i, v in enumerate(array)]))
    parts.append(_text(WIDTH - 8, HEIGHT - 6, f"{x_label} (0 to {longest - 1})", "end"))
    legend = "; ".join(line.label for line in lines)
    label = escape(f"{y_label}: {legend}", quote=True)
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{label}'>{''.join(parts)}</svg>"


def _curve(line: Line, points: list[tuple[float, float | None]]) -> str:
    """One path, lifted where a value is missing; a lonely point is a dot."""
    path, dots, pen = [], [], "M"
    for index, (x, y) in enumerate(points):
        if y is None:
            pen = "M"
            continue
        path.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
        before = points[index - 1][1] if index else None
        after = points[index + 1][1] if index + 1 < len(points) else None
        if before is None and after is None:
            dots.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{line.color}'/>")
    drawn = f"<path d='{''.join(path)}' fill='none' stroke='{line.color}' stroke-width='2'/>" if path else ""
    return drawn + "".join(dots)


def _axis(low: float, high: float, log: bool, y_of: object) -> str:
    assert callable(y_of)
    levels = (
        np.linspace(low, high, 5) if not log or high - low < 2 else np.linspace(low, high, int(min(high - low, 5)) + 1)
    )
    parts = []
    for level in levels:
        value = 10.0**level if log else float(level)
        y = y_of(value)
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='var(--line)'/>")
        parts.append(_text(LEFT - 6, y + 4, f"{value:.3g}", "end"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f"<text x='{x:.0f}' y='{y:.0f}' text-anchor='{anchor}' font-size='11' fill='var(--dim)'>{escape(text)}</text>"
    )
