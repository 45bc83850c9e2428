"""What N ranks printed, as one notebook output: in rank order, and what is equal only once.

    [ranks 0-1,3] loss 4.159
    [rank 2]      loss 4.162

Ranks count as equal when everything they showed in a cell is equal. See it run: ``notebooks/00_start_here.ipynb``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from minimeg.lab.checks import Entry
from minimeg.lab.report import spans

Piece = tuple[str, Any]  # ("stdout" | "stderr", text), ("display", MIME bundle) or ("check", Entry)


@dataclass(frozen=True)
class Shown:
    """What the notebook has to show next."""

    kind: str  # as in Piece
    content: Any  # labelled text; a MIME bundle; an Entry


def merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring text of one stream in one piece. A result that has no form but text is text."""
    result: list[Piece] = []
    for kind, content in pieces:
        if kind == "display" and set(content) <= {"text/plain"}:
            kind, content = "stdout", content.get("text/plain", "") + "\n"
        if result and result[-1][0] == kind and kind in ("stdout", "stderr"):
            result[-1] = (kind, result[-1][1] + content)
        else:
            result.append((kind, content))
    return result


def collapse(pieces_of: dict[int, list[Piece]]) -> Iterator[Shown]:
    """In the order of each set's lowest rank, what the sets of equal ranks showed; then their checks, each once.

    ``pieces_of``: one list for every rank that took part.
    """
    sets: list[tuple[list[int], list[Piece]]] = []
    for rank in sorted(pieces_of):
        pieces = merged([piece for piece in pieces_of[rank] if piece[0] != "check"])
        for ranks, known in sets:
            if known == pieces:
                ranks.append(rank)
                break
        else:
            sets.append(([rank], pieces))
    sets = [(ranks, pieces) for ranks, pieces in sets if pieces]
    labels = [f"[{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}]" for ranks, _ in sets]
    width = max(map(len, labels), default=0)
    for label, (_, pieces) in zip(labels, sets, strict=True):
        for kind, content in pieces:
            if kind == "display":
                yield Shown("stdout", f"{label}\n")
                yield Shown(kind, content)
            else:
                yield Shown(kind, labelled(content, label, width))
    for entry in joined({rank: [c for kind, c in pieces if kind == "check"] for rank, pieces in pieces_of.items()}):
        yield Shown("check", entry)


def labelled(text: str, label: str, width: int) -> str:
    """The label before the first line, the others below it, so that tables stay aligned."""
    lines = [
        line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")
    ]  # a bar's last state
    heads = [label, *[""] * (len(lines) - 1)]
    return "".join(f"{head:<{width}} {line}".rstrip() + "\n" for head, line in zip(heads, lines, strict=True))


def joined(entries_of: dict[int, list[Entry]]) -> list[Entry]:
    """The same check on several ranks as one line, with each rank's value where they differ."""
    by_name: dict[tuple[str, str], dict[int, Entry]] = {}
    for rank, entries in sorted(entries_of.items()):
        for entry in entries:
            by_name.setdefault((entry.kind, entry.name), {})[rank] = entry
    result = []
    for (kind, name), found in by_name.items():
        failed = [rank for rank, entry in found.items() if entry.mark in ("FAILED", "WRONG")]
        mark = found[failed[0]].mark if failed else next(iter(found.values())).mark
        if failed and len(failed) < len(found):
            mark += f" on {spans(failed)}"
        label = name if len(found) == len(entries_of) else f"{name} [r{spans([*found])}]"
        got, want, relation, right = (
            " ".join(dict.fromkeys(texts) if len({*texts}) == 1 else texts)
            for texts in zip(*((e.got, e.want, e.relation, e.right) for e in found.values()), strict=True)
        )
        details = _labelled_details({rank: entry.details for rank, entry in found.items() if entry.details})
        result.append(Entry(kind, label, got, want, relation, mark, right, details))
    return result


def _labelled_details(details_of: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    """Lines beneath an entry, equal ones once, each under the ranks that have them."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, details in details_of.items():
        ranks_of.setdefault(details, []).append(rank)
    names = {details: f"r{spans(ranks)}" for details, ranks in ranks_of.items()}
    width = max(map(len, names.values()), default=0)
    return tuple(
        f"{names[details] if i == 0 else '':<{width}}  {line}" for details in ranks_of for i, line in enumerate(details)
    )
