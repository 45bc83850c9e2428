"""What the pages say holds: names in the dictionary exist, links lead somewhere, examples run, figures are drawn and described."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import minimeg

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WRITTEN = sorted(path for path in DOCS.rglob("*.md") if not {"_build", "course", "api", "builder"} & set(path.parts))
PAGES = [path for path in WRITTEN if path != DOCS / "benchmarks.md"]
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
EXAMPLES = [path for path in [*READMES, *PAGES] if ">>>" in path.read_text(encoding="utf-8")]
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- the dictionary ------------------------------------------------------------------------------------------------------------


def dictionary_names(text: str) -> list[str]:
    """The name in the first column of each row."""
    return re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)


def find(name: str) -> object:
    """Import as much as is a module and take attributes from there on. ImportError or AttributeError: no such name."""
    parts = ["minimeg", *name.split(".")]
    found: object = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if isinstance(found, types.ModuleType) and not hasattr(found, part):
            found = importlib.import_module(".".join(parts[:index]))
        else:
            found = getattr(found, part)
    return found


NAMES = dictionary_names((DOCS / "dictionary.md").read_text(encoding="utf-8"))


def test_the_dictionary_is_read() -> None:
    rows = [
        line for line in (DOCS / "dictionary.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    assert len(NAMES) == len(rows) > 40
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_dictionary_exist(name: str) -> None:
    assert callable(find(name)) or isinstance(find(name), property)


@pytest.mark.parametrize("name", ["grid.Gird", "grid.Grid.group", "nothing.at_all"])
def test_a_name_that_is_not_there_is_noticed(name: str) -> None:
    with pytest.raises((ImportError, AttributeError)):
        find(name)


# ---- links ---------------------------------------------------------------------------------------------------------------------


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path, _, fragment = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        place = (page.parent / path).resolve() if path else page
        nowhere = fragment and place.suffix == ".md" and place.exists() and fragment not in anchors(place)
        if nowhere or not (place.exists() or generated(place)):
            yield target


def generated(place: Path) -> bool:
    """Whether building the site makes this file, from a notebook, a module or a drawing function."""
    if not place.is_relative_to(DOCS):
        return False
    folder, name = place.relative_to(DOCS).parent.as_posix(), place.name
    if folder == "course":
        return name == "index.md" or (ROOT / "notebooks" / name).is_file()
    if folder == "api":
        return name == "index.md" or any(
            (ROOT / "minimeg" / place.stem).with_suffix(end).exists() for end in ("", ".py")
        )
    if folder == "pictures":
        return f'"{place.stem}":' in (DOCS / "builder" / "pictures.py").read_text(encoding="utf-8")
    return name == "benchmarks.md" and folder == "."


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=label)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page, page.read_text(encoding="utf-8"))) == []


def test_a_broken_link_is_noticed() -> None:
    text = "[a](nowhere.md) [b](index.md#no-such) ![c](pictures/none.svg) [d](course/99_no.ipynb) [e](api/none.md) [f](index.md)"
    assert len(list(broken_links(DOCS / "index.md", text))) == 5


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = set(re.findall(r"^[\w/]+$", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE))
    rooms = set(re.findall(r"^[\w/]+$", (DOCS / "rooms" / "index.md").read_text(encoding="utf-8"), re.MULTILINE))
    there = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"}
    assert there <= listed | {f"rooms/{room}" for room in rooms}


# ---- examples ------------------------------------------------------------------------------------------------------------------


def run_examples(text: str, name: str) -> doctest.TestResults:
    """Every ``>>>`` of a text, in one name space."""
    text = re.sub(r"^```.*$", "", text, flags=re.MULTILINE)
    case = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, name, 0)
    said: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(case, out=said.append)
    assert results.failed == 0, "".join(said)
    return results


@pytest.mark.parametrize("page", EXAMPLES, ids=label)
def test_examples_of_the_pages(page: Path) -> None:
    assert run_examples(page.read_text(encoding="utf-8"), label(page)).attempted > 0


def test_most_questions_have_a_number_from_a_run() -> None:
    questions = re.split(r"^## ", (DOCS / "questions.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(questions) > 10
    assert sum(">>>" in question for question in questions) >= len(questions) - 2


def test_a_wrong_example_is_noticed() -> None:
    with pytest.raises(AssertionError, match="Expected"):
        run_examples(">>> 1 + 1\n3\n", "wrong")


def modules_with_examples() -> list[str]:
    found = []
    for module in pkgutil.walk_packages(minimeg.__path__, "minimeg."):
        path = ROOT.joinpath(*module.name.split("."))
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if ">>> " in source.read_text(encoding="utf-8"):
            found.append(module.name)
    return found


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_of_the_docstrings(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module))
    assert results.failed == 0
    assert results.attempted > 0


# ---- what the builder makes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """docs/ on the path, as when the site is built."""
    monkeypatch.syspath_prepend(str(DOCS))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "builder"]:
        del sys.modules[name]


@pytest.mark.usefixtures("builder")
def test_every_room_has_a_picture_that_says_what_there_is_to_see() -> None:
    from builder import pictures

    for page in sorted((DOCS / "rooms").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        names = re.findall(r"pictures/(\w+)\.svg", text)
        measured = re.findall(r"\.\./(images/\w+\.svg)", text)
        assert names or measured or page.name == "index.md", page.name
        for name in measured:
            assert "measured" in pictures.description((DOCS / name).read_text(encoding="utf-8")), (page.name, name)
        for name in names:
            words = (
                pictures.description(pictures.PICTURES[name]())
                if name != "cost"
                else "the planner takes seconds; its own test"
            )
            assert len(words.split()) > 5, (page.name, name)


@pytest.mark.usefixtures("builder")
def test_the_course_is_made_of_the_notebooks_that_exist(tmp_path: Path) -> None:
    from builder import pages

    page = {"cells": [{"cell_type": "markdown", "source": ["# 03 · T\n", "\n", "**Why?**\n", "[![a](http://x/y)](z)\n",
                                                         "[to 04](04_x.ipynb) [to 05](05_y.ipynb)"]}]}  # fmt: skip
    for name in ("03_t.ipynb", "05_y.ipynb"):
        (tmp_path / name).write_text(json.dumps(page), encoding="utf-8")
    files = pages.course(tmp_path)
    assert sorted(files) == ["03_t.ipynb", "05_y.ipynb", "index.md"]
    assert "| [03 · T](03_t.ipynb) | Why? |" in files["index.md"]
    (cell,) = json.loads(files["03_t.ipynb"])["cells"]
    assert "http" not in cell["source"]
    assert "to 04 [to 05](05_y.ipynb)" in cell["source"]


@pytest.mark.usefixtures("builder")
def test_benchmarks_become_tables(tmp_path: Path) -> None:
    from builder import pages

    data = tmp_path / "benchmarks.json"
    assert "Nobody has measured" in pages.benchmarks(data)
    value = {"median": 0.5, "low": 0.4, "high": 0.6}
    row = {"setting": "p=2 | m=4", "unit": "s", "values": {"ours": value}, "ratios": {"ours / torch": value},
           "reach": "<= 1", "met": False, "equal": "losses"}  # fmt: skip
    section = {"load": 0.1, "seconds": 3, "rows": [row]}
    data.write_text(json.dumps({"machine": {"cores": 2}, "sections": {"sleeping": section}}), encoding="utf-8")
    text = pages.benchmarks(data)
    assert "| p=2 \\| m=4 | ours: 0.5 s | ours / torch: 0.500 (0.400 to 0.600) | <= 1 | **no** | losses |" in text


@pytest.mark.parametrize(
    ("line", "escaped"),
    [
        ("scatter_to_ and ``kept_``", "scatter_to\\_ and ``kept_``"),
        ("|x| < 1", "\\|x\\| < 1"),
        ("takes *args", "takes \\*args"),
        ("an *important* word", "an *important* word"),
    ],
)
@pytest.mark.usefixtures("builder")
def test_docstrings_are_no_markup_by_accident(line: str, escaped: str) -> None:
    pytest.importorskip("sphinx", reason="the docs extra is not installed")
    from builder import extension

    assert extension.escape(line) == escaped


@pytest.mark.usefixtures("builder")
def test_indented_text_becomes_literal() -> None:
    pytest.importorskip("sphinx", reason="the docs extra is not installed")
    from builder import extension

    lines = ["Words:", "", "    a_   |b|", "    c", "", "More.", "", "Args:", "    x: a number."]
    found = extension.literal_blocks(lines)
    assert found == ["Words:", "", "::", "", "    a_   |b|", "    c", "", "More.", "", "Args:", "    x: a number."]
