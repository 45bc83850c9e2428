"""Every blank is open, every solution passes, and a solution with a mistake in it does not: on real ranks, in a real kernel."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.test_spmd import Notebook
from tests.notebooks.pages import NOTEBOOKS, Cell, Exercise, code, exercises, read

MUTANTS = 12  # at most, of one solution; the first that is found out is enough


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def at_exercises(request, tmp_path_factory) -> Iterator[tuple[Path, Notebook]]:
    """A kernel in which the cells of a notebook have run that its exercises need."""
    path = request.param
    notebook = Notebook(tmp_path_factory.mktemp("jupyter"))
    for cell in code(path):
        if "setup" in cell.tags:
            assert notebook.run(cell.source).exception == "", cell.source
    yield path, notebook
    notebook.close()


def judged(notebook: Notebook, source: str) -> str:
    """open, ok, WRONG, or the name of what was raised."""
    outcome = notebook.run(re.sub(r"^(%%spmd.*)--timeout \d+", r"\1--timeout 5", source), timeout=90)
    found = re.findall(r"^task .*?(open|ok|WRONG(?: on [\d,-]+)?)$", outcome.text, re.MULTILINE)
    return outcome.exception or " ".join(found) or f"silent: {outcome.text}"


def test_blanks_are_open_solutions_pass_mistakes_do_not(at_exercises: tuple[Path, Notebook]) -> None:
    path, notebook = at_exercises
    for exercise in exercises(path):
        assert judged(notebook, exercise.cell.source) == "open", exercise.name
        assert judged(notebook, exercise.filled()) == "ok", exercise.name
        mutants = itertools.islice(exercise.mutants(), MUTANTS)
        assert any(judged(notebook, mutant) not in ("ok", "open") for mutant in mutants), (
            f"{path.name}: {exercise.name} passes with every mistake tried"
        )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_at_least_two_exercises_with_hint_and_folded_solution(path: Path) -> None:
    found = exercises(path)
    assert len(found) >= 2
    assert all(re.search(r"^task .* open$", exercise.cell.printed, re.MULTILINE) for exercise in found)
    assert len({exercise.name for exercise in found}) == len(found)
    cells = read(path)
    for exercise in found:
        beneath = cells[cells.index(exercise.cell) + 1].source
        assert "<summary>Hint</summary>\n\n" in beneath, exercise.name


def test_filling_in_replaces_only_the_blank() -> None:
    cell = Cell("code", "%%spmd\nk = 3\n\n\ndef f(x):\n    return ...\n\n\nexercise('A  sum', f, [(1, 4)])")
    exercise = Exercise(cell, "def f(x):\n    return x + k")
    assert exercise.name == "A  sum"
    assert exercise.filled() == "%%spmd\nk = 3\n\n\ndef f(x):\n    return x + k\n\n\nexercise('A  sum', f, [(1, 4)])"
    assert sum("x - k" in mutant for mutant in exercise.mutants()) == 1
    with pytest.raises(KeyError):
        Exercise(cell, "def g(x):\n    return 1").filled()
    with pytest.raises(ValueError, match="have no blank"):
        Exercise(cell, "def f(x):\n    return 1\nk = 4").filled()
