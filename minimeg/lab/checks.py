"""``check``, ``broken``, ``bet``: claims as numbers, each on one line of 78 columns, with a table of them at the end.

    check  x.grad, every rank      got 10      want 10    diff 0                ok
    check  loss, 4 ranks against 1                        diff <= 1e-10         ok
    broken g backward all-reduces  got 40      right 10   = 4 x right as predicted
    bet    x.grad on rank 3        10, 4, 40 or 2.5?                        no bet

A check that fails raises, and shows yours beside the right one. ``broken`` asserts a *wrong* number, one that was predicted: it
fails, too, when the mistake has other consequences than claimed. Bounds are printed rather than last digits, which differ between
machines. Values may be numbers, tensors, lists, or ``{rank: value}`` as ``pull`` returns it.

See it run: every notebook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 78
NAME, GOT, WANT, DIFF = 7, 31, 43, 54  # columns at which the fields begin; the mark ends at WIDTH
SHORT = 16  # characters of a value that is printed in the line itself


class CheckFailed(AssertionError):
    """A check did not hold. The message shows yours beside the right one."""

    def _render_traceback_(self) -> list[str]:
        return [f"CheckFailed: {self}"]


@dataclass(frozen=True)
class Entry:
    """One line: what was claimed, and how it went."""

    kind: str  # "check", "broken", "bet" or "task"
    name: str
    got: str  # values as text; "" where they are too long to print, or not worth it
    want: str
    relation: str  # "diff <= 1e-10", "= 4 x right"
    mark: str
    right: str = ""  # what a bet on this name is compared with
    details: tuple[str, ...] = ()  # lines beneath

    def __str__(self) -> str:
        return "\n".join([self._line(), *(f"{'':<{NAME}}{line}" for line in self.details)])

    def _line(self) -> str:
        got, want = self.got, self.want
        if self.kind != "bet":
            got, want = got and f"got {got}", want and f"{'want' if self.kind == 'check' else 'right'} {want}"
        room = WIDTH - len(self.mark)
        line = f"{self.kind:<{NAME}}{self.name:<{GOT - NAME}}{got:<{WANT - GOT}}{want:<{DIFF - WANT}}{self.relation}"
        if len(self.name) < GOT - NAME and len(got) < WANT - GOT and len(want) < DIFF - WANT and len(line) < room:
            return f"{line:<{room}}{self.mark}"
        # Too wide for the columns: close up, at the left if the name leaves room; or take a second line.
        told = "  ".join(part for part in (got, want, self.relation) if part)
        if len(self.name) < GOT - NAME and GOT + len(told) < room:
            return f"{self.kind:<{NAME}}{self.name:<{GOT - NAME}}{told:<{room - GOT}}{self.mark}"
        if NAME + len(told) >= room:
            told = self.relation
        head = f"{self.kind:<{NAME}}{self.name}"
        gap = room - len(head) - len(told) - 1
        if gap > 0:
            return f"{head}{'':<{gap}}{told} {self.mark}"
        return f"{head}\n{'':<{NAME}}{told:<{max(0, room - NAME - 1)}} {self.mark}"


@dataclass
class Table:
    """All checks so far, in order; running a cell again replaces its lines."""

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    bets: dict[str, Any] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self.entries[entry.kind, entry.name] = entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        count = {kind: sum(entry.kind == kind for entry in self) for kind in ("check", "broken")}
        claims = [entry for entry in self if entry.kind != "task"]
        tasks = [entry for entry in self if entry.kind == "task"]
        good = sum(entry.mark in ("ok", "as predicted") for entry in claims)
        words = [
            f"{count['check']} checks and {count['broken']} predicted mistakes, {good} of {len(claims)} as claimed"
        ]
        if tasks:
            words.append(f"exercises: {', '.join(f'{task.name.split()[0]} {task.mark}' for task in tasks)}")
        lines = _aligned(claims)
        return "\n".join([*lines, "-" * max([WIDTH, *map(len, lines)]), *words])


def _aligned(claims: list[Entry]) -> list[str]:
    """The entries as a table whose columns are as wide as they must be."""
    rows = [
        (
            f"{claim.kind:<{NAME}}{claim.name}",
            claim.got and f"got {claim.got}",
            claim.want and f"{'want' if claim.kind == 'check' else 'right'} {claim.want}",
            claim.relation,
            claim.mark,
        )
        for claim in claims
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)] if rows else []
    return ["  ".join(f"{part:<{width}}" for part, width in zip(row, widths, strict=True)).rstrip() for row in rows]


TABLE = Table()
SINK: Callable[[Entry], None] | None = None  # on a rank: sends the entry to the notebook, which prints it


def check(name: str, got: Any, want: Any = True, tol: float = 0.0) -> None:
    """Assert that ``got`` equals ``want`` within ``tol`` (largest absolute difference), and say so on one line.

    A single number as ``want`` is meant for every element and every rank.

    Raises:
        CheckFailed: it does not hold; the message shows both.
    """
    if not tol >= 0:
        raise ValueError(f"tol must be >= 0, got {tol}")
    difference, reason = compare(got, want)
    ok = difference <= tol
    # A loose bound, or digits that differ, mean that digits vary from machine to machine: they are not printed.
    stable = tol == 0 or (tol <= 1e-7 and show(got) == show(want))
    values = (show(got), show(want)) if stable and _is_short(got, want) else ("", "")
    relation = "diff 0" if tol == 0 else f"diff <= {tol:g}"
    record(Entry("check", name, *values, relation, "ok" if ok else "FAILED", show(want)))
    if not ok:
        why = reason or f"largest difference {difference:.3g}"
        raise CheckFailed(f"{name}: {why}\n  yours {show(got, 66)}\n  right {show(want, 66)}")


def broken(
    name: str, got: Any, right: Any, factor: float | None = None, *, wrong: Any = None, tol: float = 1e-10
) -> None:
    """Assert that a deliberate mistake gives the predicted wrong number: ``factor`` times ``right``, or ``wrong``.

    Raises:
        CheckFailed: ``got`` is another number; or it is right, so that nothing is broken.
    """
    if (factor is None) == (wrong is None):
        raise ValueError("broken() needs either factor or wrong")
    predicted = _scale(_plain(right), factor) if factor is not None else wrong
    difference, reason = compare(got, predicted)
    error, _ = compare(got, right)
    ok = difference <= tol < error
    values = (show(got), show(right)) if _is_short(got, right) else ("", "")
    relation = f"= {factor:g} x right" if factor is not None else "" if values[0] else "not right"
    record(Entry("broken", name, *values, relation, "as predicted" if ok else "FAILED", show(right)))
    if not ok:
        why = "the number is right: nothing is broken" if error <= tol else reason or f"off by {difference:.3g}"
        told = (("yours    ", got), ("predicted", predicted), ("right    ", right))
        raise CheckFailed("\n".join([f"{name}: {why}", *(f"  {label} {show(value, 62)}" for label, value in told)]))


def bet(name: str, guess: Any = None, among: Sequence[Any] = ()) -> None:
    """Write your guess in place of None before you run the next cell; the check of the same name then tells who was right."""
    TABLE.bets.pop(name, None)
    *others, last = [show(value) for value in among] or [""]
    choice = f"{', '.join(others)} or {last}?" if others else ""
    if guess is None:
        print(Entry("bet", name, choice, "", "", "no bet"))
        return
    TABLE.bets[name] = guess
    print(Entry("bet", name, f"you say {show(guess)}", "", choice, "placed"))


def table_of_checks() -> Table:
    """The table of all checks of this notebook so far; show it in the last cell."""
    return TABLE


def record(entry: Entry) -> None:
    """Print the line and put it in the table; on a rank, leave both to the notebook."""
    if SINK is not None:
        SINK(entry)
        return
    TABLE.add(entry)
    print(entry)
    if entry.name in TABLE.bets:
        guess = show(TABLE.bets.pop(entry.name))
        mark = "won" if guess == entry.right else "lost"
        print(Entry("bet", entry.name, f"you said {guess}", f"it is {entry.right}", "", mark))


# ---- values ------------------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Tensors and arrays as nested lists, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def compare(got: Any, want: Any) -> tuple[float, str]:
    """-> (largest absolute difference, or infinity; why the two cannot be compared)."""
    got, want = _plain(got), _plain(want)
    if isinstance(got, dict) and not isinstance(
        want, dict
    ):  # {rank: value} against one value for all, or a list by rank
        by_rank = (
            isinstance(want, list) and len(want) == len(got) and not any(isinstance(v, list) for v in got.values())
        )
        want = dict(zip(got, want, strict=True)) if by_rank else dict.fromkeys(got, want)
    return _difference(got, want)


def _difference(got: Any, want: Any) -> tuple[float, str]:
    if isinstance(got, dict):
        if not isinstance(want, dict) or set(got) != set(want):
            return math.inf, "different keys"
        parts = [_difference(got[key], want[key]) for key in got]
    elif isinstance(got, list):
        if isinstance(want, list) and len(got) != len(want):
            return math.inf, f"{len(got)} values against {len(want)}"
        wants = want if isinstance(want, list) else [want] * len(got)
        parts = [_difference(one, other) for one, other in zip(got, wants, strict=True)]
    elif isinstance(want, (list, dict)):
        return math.inf, "one value against several"
    elif isinstance(got, (int, float, complex)) and isinstance(want, (int, float, complex)):
        if got == want or (got != got and want != want):
            return 0.0, ""
        distance = abs(got - want)
        return (math.inf if distance != distance else distance), ""
    else:
        return (0.0, "") if got == want else (math.inf, "not equal")
    return max((part[0] for part in parts), default=0.0), next((part[1] for part in parts if part[1]), "")


def _scale(value: Any, factor: float) -> Any:
    if isinstance(value, dict):
        return {key: _scale(part, factor) for key, part in value.items()}
    return [_scale(part, factor) for part in value] if isinstance(value, list) else value * factor


def _is_short(*values: Any) -> bool:
    return all(len(show(value)) <= SHORT for value in values)


def show(value: Any, width: int = 1000) -> str:
    """A value in few characters: ``10``, ``0.916291``, ``1 2 3 4``; one value only where all ranks hold the same."""
    value = _plain(value)
    if isinstance(value, dict):
        parts = [show(part) for part in value.values()]
        text = parts[0] if len(set(parts)) == 1 else " ".join(parts)
    elif isinstance(value, list):
        nested = any(isinstance(part, list) for part in value)
        text = f"[{', '.join(map(show, value))}]" if nested else " ".join(map(show, value))
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = str(value)
    return text if len(text) <= width else text[: width - 3] + "..."
