"""What lies in the notebooks: run from top to bottom, outputs stored, nothing in them that differs from machine to machine.

nbval passes a notebook whose outputs were stripped, so that what it compares is looked after here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebooks import pages
from tests.notebooks.pages import NOTEBOOKS, Cell, code, read

NOTEBOOK = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

SPEAKING = ("check", "broken", "bet", "exercise", "print", "show_picture", "show_source", "table_of_checks", "display")
CUT = re.compile(r"no end after \d+ s: the call was cut")  # the one place where a number of seconds is a constant
VOLATILE = {
    "an absolute path": re.compile(r"(?<![\w.:/<])/(?:home|root|tmp|usr|work|opt|var|Users|mnt|proc)/|[A-Z]:\\"),
    "an address in memory": re.compile(r"0x[0-9a-fA-F]{5,}"),
    "an address of a machine": re.compile(r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b|localhost"),
    "a time": re.compile(r"\b\d+(\.\d+)? ?(s|ms|µs|us|ns|seconds?|minutes?|it/s)\b(?!\[)|\b\d\d:\d\d:\d\d\b"),
    "a process id": re.compile(r"\bpid\b", re.IGNORECASE),
    "a warning": re.compile(r"\w+Warning\b"),
    "the last digits of a float": re.compile(r"(?<!\d)\d\.\d{8,}|\d\.\d{3,}e-\d+"),
}


def volatile(text: str) -> list[str]:
    """What in an output would change on another machine or another day."""
    text = CUT.sub("", re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))
    return [f"{what}: {match[0]!r}" for what, pattern in VOLATILE.items() if (match := pattern.search(text))]


def speaks(cell: Cell) -> bool:
    """Whether the cell must have an output when it has run."""
    return cell.calls(*SPEAKING) and not re.search(r"^\s+(print|check)\(", cell.source, re.MULTILINE)


def faults(cells: list[Cell]) -> list[str]:
    found = []
    counts = [cell.count for cell in cells if cell.kind == "code"]
    if counts != [*range(1, len(counts) + 1)]:
        found.append(f"not run from top to bottom: {counts}")
    for cell in cells:
        if cell.kind != "code":
            continue
        where = f"In [{cell.count}]"
        if any(output["output_type"] == "error" for output in cell.outputs):
            found.append(f"{where}: an error is stored")
        if any(output.get("name") == "stderr" for output in cell.outputs):
            found.append(f"{where}: something is stored that went to the error stream")
        if speaks(cell) and not cell.outputs:
            found.append(f"{where}: no output is stored")
        if (
            "nbval-ignore-output" not in cell.tags
        ):  # a measured timeline, under which everybody's machine will have its own times
            found += [f"{where}: {fault}" for fault in volatile(cell.printed)]
    return found


@NOTEBOOK
def test_outputs_are_stored_and_the_same_everywhere(path: Path) -> None:
    assert faults(read(path)) == []


@NOTEBOOK
def test_shape_of_a_notebook(path: Path) -> None:
    cells = read(path)
    assert cells[0].kind == "markdown"
    assert cells[0].source.startswith(f"# {path.stem[:2]} · ")
    assert "nbval-skip" in cells[1].tags, "the first cell of code installs minimeg where it is missing"
    assert not cells[1].outputs
    assert sum("nbval-skip" in cell.tags for cell in cells) == 1
    last = code(path)[-1]
    assert last.calls("table_of_checks")
    assert re.search(r"\d+ checks and \d+ predicted mistakes, (\d+) of \1 as claimed\nexercises: ", last.printed)


def claims(path: Path) -> int:
    """Checks and predicted mistakes that the last cell counts."""
    (found,) = re.findall(r"^(\d+) checks and (\d+) predicted mistakes", code(path)[-1].printed, re.MULTILINE)
    return sum(map(int, found))


@NOTEBOOK
def test_every_notebook_checks_what_it_says(path: Path) -> None:
    assert claims(path) >= 8


def test_the_course_has_150_checks() -> None:
    total = sum(map(claims, NOTEBOOKS))
    assert total >= 150 * len(NOTEBOOKS) / 14, total


@NOTEBOOK
def test_links_between_notebooks_lead_somewhere(path: Path) -> None:
    for cell in read(path):
        if cell.kind == "markdown":
            for target in re.findall(r"\]\(([^)#:]+)\.ipynb", cell.source):
                assert target in pages.COURSE


def test_the_notebooks_are_those_of_the_course() -> None:
    assert [path.stem for path in NOTEBOOKS if path.stem not in pages.COURSE] == []


@NOTEBOOK
def test_every_picture_says_in_words_what_there_is_to_see(path: Path) -> None:
    for cell in code(path):
        for svg in re.findall(r"<svg.*?</svg>", cell.printed, re.DOTALL):
            assert re.search(r"<title>.+</title>", svg)
            assert re.search(r"<desc>.{20,}</desc>", svg)


# ---- and the guards themselves -------------------------------------------------------------------------------------------------


def stream(text: str, name: str = "stdout") -> dict[str, object]:
    return {"output_type": "stream", "name": name, "text": text}


def test_the_guard_finds_each_fault() -> None:
    good = [Cell("code", "print(1)", [], 1, [stream("1\n")]), Cell("markdown", "text"), Cell("code", "x = 1", [], 2)]
    assert faults(good) == []
    bad = {
        "not run": [Cell("code", "x", [], 2)],
        "not run from top": [Cell("code", "x", [], None)],
        "no output": [Cell("code", "check('a', 1, 1)", [], 1)],
        "no output is": [Cell("code", "%%spmd\nprint(rank)", [], 1)],
        "an error": [Cell("code", "x", [], 1, [{"output_type": "error", "traceback": ["ValueError"]}])],
        "error stream": [Cell("code", "x", [], 1, [stream("careful", "stderr")])],
    }
    for words, cells in bad.items():
        (fault,) = faults(cells)
        assert words in fault


@pytest.mark.parametrize(
    "text",
    [
        'File "/' + 'home/me/x.py"',
        "/" + "work/main/minimeg",
        "<object at 0x7f12ab34cd>",
        "listening on 127.0.0.1",
        "took 3.2 s",
        "12 ms",
        "3 seconds",
        "at 12:30:01",
        "UserWarning: careful",
        "0.91629073187",
        "got 2.88658e-15",
        "worker pid 17",
    ],
)
def test_the_search_for_what_varies_finds_it(text: str) -> None:
    assert volatile(text) != []


def test_the_search_for_what_varies_leaves_numbers_alone() -> None:
    for text in (
        "no end after 2 s: the call was cut",
        "4 seqs",
        "[s, b, h/t]",
        "0.916291",
        "8 B",
        "minimeg/mappings.py",
        "16 : 1",
    ):
        assert volatile(text) == []


def test_badges_and_the_install_cell_take_the_address_from_one_place() -> None:
    class Page:
        cells = [  # noqa: RUF012
            Cell("markdown", f"# title\n\n{pages.badges('OLD/old', 'x.ipynb')}"),
            Cell("code", pages.INSTALL.format(repository="OLD/old")),
            Cell("code", "x = 1"),
        ]

    pages.readdress(Page, "me/mine", "00.ipynb")
    text = "\n".join(cell.source for cell in Page.cells)
    assert "old" not in text.lower().replace("hold", "")
    assert text.count("me/mine") == 4
    assert "git+https://github.com/me/mine" in text
