"""Charts as inline SVG: line charts, and horizontal bar charts with error bars.

Functions return the text of one <svg> element, well-formed XML without scripts. Colours are CSS
variables of the page (`sabia.core.page`), which defines them for light and dark mode. Coordinates
have a precision of 0.1 pixels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

SERIES_COLOURS = 8  # --series-1 … --series-8 in the page's style
WIDTH = 720
_CHARACTER = 6.4  # width in pixels of a 12-pixel character, to reserve space for labels
_ROW = 18
_LONGEST_LABEL = 34


@dataclass(frozen=True)
class Series:
    """A line: points (x, y), sorted by x; a y that is not finite breaks the line."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """A bar with an optional interval; `series` determines the colour and the legend entry."""

    series: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class BarGroup:
    """Bars under one label."""

    label: str
    bars: Sequence[Bar]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that cover [low, high]."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number as an axis label: 0.25, 1.5, 20k."""
    for factor, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor and abs(value) >= 1e4:
            return f"{value / factor:g}{suffix}"
    return f"{value:.6g}"


def _colour(index: int) -> str:
    return f"var(--series-{index % SERIES_COLOURS + 1})"


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "label") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img" aria-label={quoteattr(title)}>'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def _legend(names: Sequence[str]) -> tuple[list[str], float]:
    """Legend entries in rows below the title, and the y coordinate below them."""
    parts, x, y = [], 12.0, 40.0
    for index, name in enumerate(names):
        label = _truncated(name, 60)
        width = 24 + len(label) * _CHARACTER
        if x + width > WIDTH and x > 12:
            x, y = 12.0, y + _ROW
        parts += [
            f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" '
            f'fill="{_colour(index)}"/>',
            _text(x + 15, y, label),
        ]
        x += width + 10
    return parts, y + _ROW


def _truncated(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def line_chart(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    height: int = 320,
    y_range: tuple[float, float] | None = None,
) -> str:
    """A line chart with linear axes; the y axis covers the data, or `y_range`.

    Raises ValueError if no series has a finite point.
    """
    points = [p for s in series for p in s.points if all(map(math.isfinite, p))]
    if not points:
        raise ValueError(f"chart {title!r}: no finite point")
    legend, top = _legend([s.name for s in series])
    top += 8  # between the label of the y axis and its highest tick
    xs = ticks(min(p[0] for p in points), max(p[0] for p in points), 8)
    low, high = y_range or (min(p[1] for p in points), max(p[1] for p in points))
    ys = ticks(low, high)
    left = 22 + max(len(short(y)) for y in ys) * _CHARACTER
    to_x = _scale(min(p[0] for p in points), max(p[0] for p in points), left, WIDTH - 14)
    to_y = _scale(ys[0], ys[-1], height - 44, top)
    parts = [_text(12, 18, title, kind="title"), *legend]
    for y in ys:
        parts.append(_line(left, to_y(y), WIDTH - 14, to_y(y), "grid"))
        parts.append(_text(left - 6, to_y(y) + 4, short(y), "end", "tick"))
    for x in xs:
        if left - 1 <= to_x(x) <= WIDTH - 13:
            parts.append(_line(to_x(x), height - 44, to_x(x), height - 40, "axis"))
            parts.append(_text(to_x(x), height - 27, short(x), "middle", "tick"))
    parts.append(_line(left, height - 44, WIDTH - 14, height - 44, "axis"))
    parts.append(_text((left + WIDTH) / 2, height - 8, x_label, "middle"))
    parts.append(_text(12, top - 13, y_label))
    parts += [_path(s, i, to_x, to_y) for i, s in enumerate(series)]
    return _svg(height, title, parts)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _path(
    series: Series, index: int, to_x: Callable[[float], float], to_y: Callable[[float], float]
) -> str:
    """The line of one series; a single point becomes a dot."""
    steps, drawing, finite = [], False, 0
    for x, y in series.points:
        if not (math.isfinite(x) and math.isfinite(y)):
            drawing = False
            continue
        steps.append(f"{'L' if drawing else 'M'}{to_x(x):.1f} {to_y(y):.1f}")
        drawing, finite = True, finite + 1
    if finite == 1:
        left, top = steps[0][1:].split()
        return f'<circle cx="{left}" cy="{top}" r="3.5" fill="{_colour(index)}"/>'
    return f'<path d="{"".join(steps)}" fill="none" stroke="{_colour(index)}" stroke-width="2"/>'


def bar_chart(
    groups: Sequence[BarGroup],
    title: str,
    x_label: str,
    x_range: tuple[float, float] | None = None,
    form: str = ".3g",
) -> str:
    """A horizontal bar chart by group, with error bars and the value as text.

    `form` is the format of the values. Raises ValueError if there is no bar.
    """
    bars = [bar for group in groups for bar in group.bars]
    if not bars:
        raise ValueError(f"chart {title!r}: no bar")
    names = list(dict.fromkeys(bar.series for bar in bars))
    legend, top = _legend(names)
    ends = [v for bar in bars for v in (bar.value, bar.low, bar.high) if v is not None]
    ends = [v for v in ends if math.isfinite(v)]
    low, high = x_range or (min([0.0, *ends]), max([0.0, *ends]))
    xs = ticks(low, high)
    left = 20 + min(_LONGEST_LABEL, max(len(g.label) for g in groups)) * _CHARACTER
    to_x = _scale(xs[0], xs[-1], left, WIDTH - 70)
    bottom = top + sum(len(g.bars) * _ROW + 10 for g in groups)
    parts = [_text(12, 18, title, kind="title"), *legend]
    for x in xs:
        parts.append(_line(to_x(x), top - 6, to_x(x), bottom, "grid"))
        parts.append(_text(to_x(x), bottom + 16, short(x), "middle", "tick"))
    y = top
    for group in groups:
        middle = y + len(group.bars) * _ROW / 2
        parts.append(_text(left - 8, middle + 4, _truncated(group.label, _LONGEST_LABEL), "end"))
        for bar in group.bars:
            parts += _bar(bar, names.index(bar.series), y, to_x, form)
            y += _ROW
        y += 10
    parts.append(_line(to_x(max(xs[0], 0)), top - 6, to_x(max(xs[0], 0)), bottom, "axis"))
    parts.append(_text((left + WIDTH - 70) / 2, bottom + 34, x_label, "middle"))
    return _svg(bottom + 42, title, parts)


def _bar(bar: Bar, colour: int, y: float, to_x: Callable[[float], float], form: str) -> list[str]:
    if not math.isfinite(bar.value):
        return [_text(to_x(0) + 4, y + 12, "no value", kind="tick")]
    start, end = sorted((to_x(0), to_x(bar.value)))
    parts = [
        f'<rect x="{start:.1f}" y="{y + 2:.1f}" width="{end - start:.1f}" height="{_ROW - 5}" '
        f'fill="{_colour(colour)}" opacity="0.85"/>'
    ]
    right = end
    if bar.low is not None and bar.high is not None and math.isfinite(bar.high - bar.low):
        middle, right = y + _ROW / 2 - 0.5, max(end, to_x(bar.high))
        parts.append(_line(to_x(bar.low), middle, to_x(bar.high), middle, "error"))
        for x in (to_x(bar.low), to_x(bar.high)):
            parts.append(_line(x, middle - 3, x, middle + 3, "error"))
    parts.append(_text(right + 5, y + 13, format(bar.value, form), kind="tick"))
    return parts
