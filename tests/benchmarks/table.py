"""A row of the table, as text and as JSON (docs/benchmarks.json, from which the site's page is made)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.benchmarks.timing import Spread


@dataclass(frozen=True)
class Row:
    """One setting and all who ran it.

    Attributes:
        section: key of the benchmark, e.g. "sleeping".
        values: by contender, "ours" among them; in ``unit``.
        ratios: by name, e.g. "ours / torch", formed within each round.
        equal: what was compared in the same run and found equal. A row is only made where it was.
        reach: the bound that was set, in words; ``met``: whether it was reached, None where there is no bound.
        notes: what a reader should know, e.g. a contender that is not installed.
    """

    section: str
    setting: str
    unit: str
    values: dict[str, Spread]
    ratios: dict[str, Spread] = field(default_factory=dict)
    equal: str = ""
    reach: str = ""
    met: bool | None = None
    notes: str = ""


def lines(row: Row) -> Iterator[str]:
    """The row as it is printed: the setting, then one line a contender, one a ratio, and the verdict."""
    yield row.setting
    for name, value in row.values.items():
        least = "" if row.unit == "excess" else f"   least {value.minimum:.4f}"
        yield f"    {name:<38} {value.median:8.4f} {row.unit:<6} [{value.low:.4f} .. {value.high:.4f}]{least}"
    for name, value in row.ratios.items():
        yield f"    {name:<38} {value.median:8.3f} x      [{value.low:.3f} .. {value.high:.3f}]"
    if row.reach:
        yield f"    reach: {row.reach}: {verdict(row)}"
    yield from (f"    {text}" for text in (f"equal: {row.equal}" if row.equal else "", row.notes) if text)


def verdict(row: Row) -> str:
    return "-" if row.met is None else "yes" if row.met else "NO"


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """One line a row: setting, our value, the ratios, whether the bound was reached."""
    width = max((len(row.setting) for row in rows), default=0)
    for row in rows:
        first = next(iter(row.values.values()))
        ratios = "  ".join(f"{name} {value.median:.3f}" for name, value in row.ratios.items())
        yield f"{row.setting:<{width}}  {first.median:8.4f} {row.unit:<6}  {verdict(row):<3}  {ratios}"


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row)
