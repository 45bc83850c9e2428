"""``exercise``: open, ok and WRONG, on one process; and how the words of several ranks become one line."""

from __future__ import annotations

import linecache
import textwrap

import pytest
import torch

from minimeg.lab import checks
from minimeg.lab.checks import WIDTH, Entry, table_of_checks
from minimeg.lab.exercises import exercise
from minimeg.lab.output import joined


@pytest.fixture(autouse=True)
def _empty_table(monkeypatch):
    monkeypatch.setattr(checks, "TABLE", checks.Table())


def run_cell(source: str, name: str = "<cell 1>") -> None:
    source = textwrap.dedent(source)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), {"exercise": exercise, "torch": torch})


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "blank",
    [
        "def f(x):\n    return ...",
        "def f(x):\n    ...",
        "def f(x):\n    y = ...\n    return y.sum()",
        "f = ...",
        "class F:\n    def forward(x):\n        return ...\nf = F.forward",
    ],
)
def test_a_cell_with_a_blank_is_open_and_nothing_is_called(blank, capsys):
    run_cell(f"{blank}\nexercise('A  double', f, [(2, 4)])")
    assert lines(capsys) == ["task   A  double" + " " * (WIDTH - 20) + "open"]


@pytest.mark.parametrize(
    ("filled", "told"),
    [
        ("def f(x):\n    return 2 * x", []),
        ("f = lambda x: x + x", []),
        ("def f(x):\n    return 3 * x", ["of 2   yours 6   right 4", "of 3   yours 9   right 6"]),
        ("def f(x):\n    return x * x", ["of 3   yours 9   right 6"]),
        ("def f(x):\n    return None", ["of 2   yours None   right 4", "of 3   yours None   right 6"]),
        ("f = 4", ["yours 4   right [[2, 4], [3, 6]]"]),
    ],
)
def test_ok_or_yours_beside_the_right_one(filled, told, capsys):
    run_cell(f"{filled}\nexercise('A  double', f, [(2, 4), (3, 6)])")
    first, *rest = lines(capsys)
    assert first.endswith("WRONG" if told else "ok")
    assert len(first) == WIDTH
    if "f = 4" not in filled:
        assert [line.strip() for line in rest] == told


def test_an_index_with_an_ellipsis_is_no_blank(capsys):
    run_cell("def f(x):\n    return x[..., 0]\nexercise('A  first', f, [(torch.tensor([[1, 2], [3, 4]]), [1, 3])])")
    assert lines(capsys)[0].endswith("ok")


def test_several_arguments_a_tolerance_and_values(capsys):
    run_cell("exercise('A  sum', lambda a, b: a + b + 1e-12, [((1.0, 2.0), 3.0)], tol=1e-10)", "<cell 2>")
    run_cell("exercise('B  set', {'a', 'b'}, {'b', 'a'})", "<cell 3>")
    run_cell("exercise('C  list', [1, 2, 4], [1, 2, 3])", "<cell 4>")
    marks = [line.split()[-1] for line in lines(capsys)]
    assert marks == ["ok", "ok", "WRONG", "3"]


def test_what_is_raised_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run_cell("exercise('A  x', lambda x: x / 0, [(1, 1)])")


def test_called_inside_a_function_only_that_function_counts(capsys):
    source = "def other():\n    return ...\ndef mine():\n    exercise('A  x', 3, 3)\nmine()"
    run_cell(source)
    assert lines(capsys)[0].endswith("ok")


def test_long_values_stand_below_each_other(capsys):
    run_cell("exercise('A  long', list(range(30)), list(range(1, 31)))")
    printed = lines(capsys)
    assert [line.split()[0] for line in printed[1:]] == ["yours", "right"]
    assert all(len(line) <= WIDTH for line in printed)


def test_the_table_counts_exercises_apart(capsys):
    checks.check("one", 1, 1)
    run_cell("f = ...\nexercise('A  x', f, 1)")
    run_cell("exercise('B  x', 1, 1)", "<cell 5>")
    run_cell("exercise('C  x', 2, 1)", "<cell 6>")
    assert repr(table_of_checks()).splitlines()[-2:] == [
        "1 checks and 0 predicted mistakes, 1 of 1 as claimed",
        "exercises: A open, B ok, C WRONG",
    ]


def entry(mark: str, *details: str) -> Entry:
    return Entry("task", "A  x", "", "", "", mark, details=details)


def test_several_ranks_become_one_line():
    (all_ok,) = joined({rank: [entry("ok")] for rank in range(4)})
    assert str(all_ok).endswith(" ok")
    (all_wrong,) = joined({rank: [entry("WRONG", f"yours {rank // 2}")] for rank in range(4)})
    assert str(all_wrong).splitlines() == [
        f"{'task   A  x':<73}WRONG",
        "       r0-1  yours 0",
        "       r2-3  yours 1",
    ]
    (some,) = joined({rank: [entry("WRONG", "yours 9", "right 1") if rank == 2 else entry("ok")] for rank in range(3)})
    assert str(some).splitlines() == [f"{'task   A  x':<68}WRONG on 2", "       r2  yours 9", "           right 1"]
