"""A chart of points, whiskers and lines as SVG: two axes, linear, logarithmic or of names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#0b62a4", "#d1495b", "#2e7d32", "#e08a00", "#6a4c93", "#5f6b73", "#00838f")
INK, GRID = "#222222", "#dddddd"
FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its label with the unit, and its ends. A logarithmic axis shows what is less than ``low`` at that end.

    ``names`` stand for the numbers 0, 1, ...; ``percent`` shows fractions as percent.
    """

    label: str
    low: float
    high: float
    log: bool = False
    names: tuple[str, ...] = ()
    percent: bool = False

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        if self.log:
            value, low, high = (math.log10(max(one, self.low)) for one in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Values with what is written at them."""
        if self.names:
            return [(float(place), name) for place, name in enumerate(self.names)]
        if self.log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [(10.0**power, f"{10.0**power:,.10g}") for power in powers]
        values = [self.low + (self.high - self.low) * part / 5 for part in range(6)]
        return [(value, f"{value:.0%}" if self.percent else f"{value:g}") for value in values]


@dataclass(frozen=True, slots=True)
class Point:
    """A point, its whiskers along one axis, and what is written beside it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour, in a line if they are joined."""

    name: str
    points: Sequence[Point]
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. ``whiskers`` says along which axis points have theirs; ``marks`` are lines across, with a word each."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    whiskers: str = "y"
    marks: Sequence[tuple[str, float, str]] = field(default_factory=tuple)
    width: int = 760
    height: int = 420
    left: int = 90

    def svg(self) -> str:
        """The picture."""
        lines = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' {FONT} font-size='13'>",
            f"<rect width='{self.width}' height='{self.height}' fill='#ffffff'/>",
            _text(self.left, 24, self.title, size=15, weight="bold"),
            *self._axes(),
        ]
        for name, value, words in self.marks:
            lines += self._mark(name, value, words)
        for series, colour in zip(self.series, COLOURS * 2, strict=False):
            lines += self._drawn(series, colour)
        lines += self._legend()
        return "\n".join([*lines, "</svg>"]) + "\n"

    @property
    def _right(self) -> int:
        return self.width - 190

    @property
    def _bottom(self) -> int:
        return self.height - 62

    def _px(self, value: float) -> float:
        return round(self.left + self.x.at(value) * (self._right - self.left), 1)

    def _py(self, value: float) -> float:
        return round(self._bottom - self.y.at(value) * (self._bottom - 44), 1)

    def _axes(self) -> list[str]:
        lines = []
        for value, words in self.x.ticks:
            lines.append(_line(self._px(value), 44, self._px(value), self._bottom, GRID))
            lines.append(_text(self._px(value), self._bottom + 18, words, anchor="middle"))
        for value, words in self.y.ticks:
            lines.append(_line(self.left, self._py(value), self._right, self._py(value), GRID))
            lines.append(_text(self.left - 8, self._py(value) + 4, words, anchor="end"))
        lines.append(_line(self.left, self._bottom, self._right, self._bottom, INK))
        lines.append(_line(self.left, 44, self.left, self._bottom, INK))
        lines.append(_text((self.left + self._right) / 2, self.height - 14, self.x.label, anchor="middle"))
        middle = (44 + self._bottom) / 2
        turned = f"transform='rotate(-90 18 {middle})'"
        lines.append(_text(18, middle, self.y.label, anchor="middle", more=turned))
        return lines

    def _mark(self, axis: str, value: float, words: str) -> list[str]:
        if axis == "x":
            px = self._px(value)
            return [_line(px, 44, px, self._bottom, INK, dash=True), _text(px + 4, 56, words, size=11)]
        py = self._py(value)
        return [
            _line(self.left, py, self._right, py, INK, dash=True),
            _text(self._right - 4, py - 5, words, size=11, anchor="end"),
        ]

    def _drawn(self, series: Series, colour: str) -> list[str]:
        lines = []
        if series.joined and len(series.points) > 1:
            path = " ".join(f"{self._px(point.x)},{self._py(point.y)}" for point in series.points)
            lines.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        for point in series.points:
            px, py = self._px(point.x), self._py(point.y)
            if point.low is not None and point.high is not None:
                ends = (
                    (px, self._py(point.low), px, self._py(point.high))
                    if self.whiskers == "y"
                    else (self._px(point.low), py, self._px(point.high), py)
                )
                lines.append(_line(*ends, colour, wide=2))
            lines.append(f"<circle cx='{px}' cy='{py}' r='4.5' fill='{colour}'/>")
            if point.note:
                lines.append(_text(px + 8, py - 7, point.note, size=12))
        return lines

    def _legend(self) -> list[str]:
        lines = []
        for at, (series, colour) in enumerate(zip(self.series, COLOURS * 2, strict=False)):
            y = 60 + 22 * at
            lines.append(f"<circle cx='{self._right + 20}' cy='{y - 4}' r='4.5' fill='{colour}'/>")
            lines.append(_text(self._right + 32, y, series.name))
        return lines


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "normal", more: str = ""
) -> str:
    style = f"text-anchor='{anchor}' font-size='{size}' font-weight='{weight}' fill='{INK}' {more}"
    return f"<text x='{x}' y='{y}' {style}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, wide: int = 1, dash: bool = False) -> str:
    dashes = " stroke-dasharray='5 4'" if dash else ""
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{colour}' stroke-width='{wide}'{dashes}/>"
