"""Line charts as SVG: a grid of panels with one legend. The same numbers give the same file, byte for byte."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

PANEL_WIDTH, PANEL_HEIGHT = 220, 170
LEFT, TOP, RIGHT, BETWEEN, BELOW = 58, 34, 12, 26, 44
LEGEND_ROW, LEGEND_COLUMN = 20, 190
INK, GRID = "#333333", "#dddddd"


@dataclass(frozen=True)
class Line:
    """Points ``(x, y)`` of one name, drawn in a colour, wide or dashed."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.5
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """A range with marks. A logarithmic one has positive numbers alone."""

    label: str
    low: float
    high: float
    marks: tuple[float, ...]
    logarithmic: bool = True

    def part(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Panel:
    """One chart of a figure."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line] = field(default_factory=tuple)


def logarithmic(label: str, values: Iterable[float], marks: Sequence[float] = ()) -> Axis:
    """An axis around the values, with marks at 1, 2 and 5 times powers of ten unless there are others."""
    values = list(values)
    low, high = min(values) / 1.3, max(values) * 1.3
    if not marks:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        if high / low > 100:
            marks = [10.0**power for power in powers]
    return Axis(label, low, high, tuple(mark for mark in marks if low <= mark <= high))


def linear(label: str, values: Iterable[float], step: float) -> Axis:
    """An axis from 0 to the first mark above the values."""
    count = max(1, math.ceil(max(values) / step))
    return Axis(label, 0.0, count * step, tuple(step * i for i in range(count + 1)), logarithmic=False)


def figure(panels: Sequence[Panel], columns: int) -> str:
    """An SVG file: the panels row by row, and below them a legend of all lines."""
    rows = -(-len(panels) // columns)
    legend = list({line.name: line for panel in panels for line in panel.lines}.values())
    width = columns * (LEFT + PANEL_WIDTH + RIGHT)
    legend_columns = max(1, width // LEGEND_COLUMN)
    legend_top = rows * (TOP + PANEL_HEIGHT + BELOW)
    height = legend_top + LEGEND_ROW * -(-len(legend) // legend_columns) + BETWEEN
    size = f'width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="{INK}">',
        f'<rect {size} fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        left = column * (LEFT + PANEL_WIDTH + RIGHT) + LEFT
        parts += _panel(panel, left, row * (TOP + PANEL_HEIGHT + BELOW) + TOP)
    for number, line in enumerate(legend):
        row, column = divmod(number, legend_columns)
        left, middle = 16 + column * LEGEND_COLUMN, legend_top + row * LEGEND_ROW + 12
        parts.append(_path(line, [(left, middle), (left + 24, middle)]))
        parts.append(_text(left + 30, middle + 4, line.name))
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: float, top: float) -> Iterable[str]:
    right, bottom = left + PANEL_WIDTH, top + PANEL_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return left + panel.x.part(x) * PANEL_WIDTH, bottom - panel.y.part(y) * PANEL_HEIGHT

    yield _text(left, top - 12, panel.title, 'font-weight="bold"')
    for mark in panel.x.marks:
        across = left + panel.x.part(mark) * PANEL_WIDTH
        yield f'<path d="M{_n(across)} {top}V{bottom}" stroke="{GRID}"/>'
        yield _text(across, bottom + 14, f"{mark:g}", 'text-anchor="middle"')
    for mark in panel.y.marks:
        up = bottom - panel.y.part(mark) * PANEL_HEIGHT
        yield f'<path d="M{left} {_n(up)}H{right}" stroke="{GRID}"/>'
        yield _text(left - 5, up + 4, f"{mark:g}", 'text-anchor="end"')
    yield f'<rect x="{left}" y="{top}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="{INK}"/>'
    yield _text((left + right) / 2, bottom + 29, panel.x.label, 'text-anchor="middle"')
    middle = (top + bottom) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 {left - 40} {_n(middle)})"'
    yield _text(left - 40, middle, panel.y.label, turned)
    for line in panel.lines:
        places = [place(x, y) for x, y in line.points]
        yield _path(line, places)
        yield from (f'<circle cx="{_n(x)}" cy="{_n(y)}" r="2.2" fill="{line.colour}"/>' for x, y in places)


def _path(line: Line, places: Sequence[tuple[float, float]]) -> str:
    path = "L".join(f"{_n(x)} {_n(y)}" for x, y in places)
    dashes = ' stroke-dasharray="5 3"' if line.dashed else ""
    return f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="{line.width:g}"{dashes}/>'


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}"{" " if attributes else ""}{attributes}>{escape(text)}</text>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
