"""A chart of points, whiskers and lines as SVG: two axes, linear, logarithmic or of names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0b62a4", "#d1495b", "#2e7d32", "#e08a00", "#6a4c93", "#5f6b73", "#00838f")
INK, GRID = "#222222", "#dddddd"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 110, 570, 44, 358
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
    """A point, and the ends of its whiskers."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour, in a line if they are joined."""

    name: str
    points: Sequence[Point]
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. ``whiskers`` is the axis along which points have theirs; ``mark`` a value of it to draw a line at."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    whiskers: str = "y"
    mark: float | None = None

    def svg(self) -> str:
        """The picture."""
        parts = [_text(LEFT, 24, self.title, size=15), *self._axes()]
        if self.mark is not None and self.whiskers == "x":
            parts.append(_line(self._px(self.mark), TOP, self._px(self.mark), BOTTOM, INK, dash=True))
        elif self.mark is not None:
            parts.append(_line(LEFT, self._py(self.mark), RIGHT, self._py(self.mark), INK, dash=True))
        for number, (series, colour) in enumerate(zip(self.series, COLOURS * 2, strict=False)):
            parts += self._drawn(series, colour)
            parts += [_dot(RIGHT + 20, 56 + 22 * number, colour), _text(RIGHT + 32, 60 + 22 * number, series.name)]
        head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' {FONT} font-size='13'>"
        return "\n".join([head, f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#ffffff'/>", *parts, "</svg>"]) + "\n"

    def _px(self, value: float) -> float:
        return round(LEFT + self.x.at(value) * (RIGHT - LEFT), 1)

    def _py(self, value: float) -> float:
        return round(BOTTOM - self.y.at(value) * (BOTTOM - TOP), 1)

    def _axes(self) -> Iterator[str]:
        for value, words in self.x.ticks:
            yield _line(self._px(value), TOP, self._px(value), BOTTOM, GRID)
            yield _text(self._px(value), BOTTOM + 18, words, anchor="middle")
        for value, words in self.y.ticks:
            yield _line(LEFT, self._py(value), RIGHT, self._py(value), GRID)
            yield _text(LEFT - 8, self._py(value) + 4, words, anchor="end")
        yield _line(LEFT, BOTTOM, RIGHT, BOTTOM, INK)
        yield _line(LEFT, TOP, LEFT, BOTTOM, INK)
        yield _text((LEFT + RIGHT) / 2, HEIGHT - 14, self.x.label, anchor="middle")
        middle = (TOP + BOTTOM) / 2
        yield _text(18, middle, self.y.label, anchor="middle", more=f"transform='rotate(-90 18 {middle})'")

    def _drawn(self, series: Series, colour: str) -> Iterator[str]:
        if series.joined and len(series.points) > 1:
            path = " ".join(f"{self._px(point.x)},{self._py(point.y)}" for point in series.points)
            yield f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>"
        for point in series.points:
            px, py = self._px(point.x), self._py(point.y)
            if point.low is not None and point.high is not None:
                if self.whiskers == "y":
                    yield _line(px, self._py(point.low), px, self._py(point.high), colour, wide=2)
                else:
                    yield _line(self._px(point.low), py, self._px(point.high), py, colour, wide=2)
            yield _dot(px, py, colour)


def _dot(x: float, y: float, colour: str) -> str:
    return f"<circle cx='{x}' cy='{y}' r='4.5' fill='{colour}'/>"


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, more: str = "") -> str:
    return f"<text x='{x}' y='{y}' text-anchor='{anchor}' font-size='{size}' fill='{INK}' {more}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, wide: int = 1, dash: bool = False) -> str:
    dashes = " stroke-dasharray='5 4'" if dash else ""
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{colour}' stroke-width='{wide}'{dashes}/>"
