"""Self-contained HTML pages: one look for every report, no network, no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

_STYLE = """
:root { color-scheme: light dark; --fg: #1c2330; --dim: #5c6675; --line: #d5dae1; --bg: #fff; --card: #f5f7fa;
        --good: #18794e; --bad: #b42318; --warn: #9a6700; --a: #2563eb; --b: #d9480f; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6e9ee; --dim: #9aa4b2; --line: #323a46; --bg: #14181f;
        --card: #1c222b; --good: #4cc38a; --bad: #ff7b72; --warn: #e3b341; --a: #7aa2f7; --b: #ff9e64; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); max-width: 66rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 } caption { text-align: left; color: var(--dim) }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--dim); font-weight: 600 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
code, pre { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere }
pre { background: var(--card); padding: .6rem; overflow-x: auto; white-space: pre-wrap }
.verdict { padding: .6rem .9rem; border-left: 5px solid var(--dim); background: var(--card); margin: 1rem 0 }
.good { border-color: var(--good) } .bad { border-color: var(--bad) } .warn { border-color: var(--warn) }
b.good { color: var(--good) } b.bad { color: var(--bad) } b.warn { color: var(--warn) }
svg { width: 100%; height: auto; display: block } audio { width: 100% } .dim { color: var(--dim) }
.wide { overflow-x: auto } .wide td:last-child { min-width: 15rem }
"""


def page(title: str, *parts: str) -> str:
    """A whole page; `parts` are HTML already."""
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def section(title: str, *parts: str) -> str:
    """A heading and what belongs under it."""
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def verdict(kind: str, text: str) -> str:
    """The box that a reader sees first; kind is good, bad or warn."""
    return f"<div class='verdict {kind}'>{escape(text)}</div>"


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{escape(text)}</p>"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """A table of plain values; numbers align right."""

    def cell(value: object) -> str:
        number = _is_number(value)
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return f"<td class='number'>{escape(text)}</td>" if number else f"<td>{escape(text)}</td>"

    numeric = [bool(rows) and _is_number(rows[0][i]) for i in range(len(headers))]
    top = "".join(
        f"<th{' class=number' if right else ''}>{escape(h)}</th>" for h, right in zip(headers, numeric, strict=True)
    )
    body = "\n".join("<tr>" + "".join(cell(v) for v in row) + "</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<tr>{top}</tr>\n{body}</table>"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def waveform_plot(samples: npt.NDArray[np.float32], seconds: float, color: str = "var(--a)", columns: int = 900) -> str:
    """The envelope of one channel [N] as SVG, scaled to full range; survives silence, NaN and an empty signal."""
    width, height = 900, 120
    finite = np.nan_to_num(np.asarray(samples, np.float64), nan=0.0, posinf=1.0, neginf=-1.0)
    parts = [f"<line x1='0' y1='60' x2='{width}' y2='60' stroke='var(--line)'/>"]
    if finite.size:
        edges = np.linspace(0, finite.size, min(columns, finite.size) + 1).astype(int)[:-1]
        top, bottom = np.maximum.reduceat(finite, edges), np.minimum.reduceat(finite, edges)
        x = np.linspace(0, width, len(edges), endpoint=False)
        y_top, y_bottom = (60 - 58 * np.clip(v, -1, 1) for v in (top, bottom))
        path = "".join(f"M{a:.1f} {b:.1f}V{c + 0.5:.1f}" for a, b, c in zip(x, y_top, y_bottom, strict=True))
        parts.append(f"<path d='{path}' stroke='{color}' fill='none'/>")
    label = f"<text x='{width - 4}' y='114' text-anchor='end' font-size='11' fill='var(--dim)'>{seconds:.2f} s</text>"
    return f"<svg viewBox='0 0 {width} {height}' role='img' aria-label='waveform'>{''.join(parts)}{label}</svg>"
