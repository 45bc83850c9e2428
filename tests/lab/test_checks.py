"""check, broken and bet: what passes, what fails, and every character of the lines they print."""

from __future__ import annotations

import math

import pytest
import torch

from minimeg.lab import checks
from minimeg.lab.checks import WIDTH, CheckFailed, Entry, bet, broken, check, show, table_of_checks


@pytest.fixture(autouse=True)
def _empty_table(monkeypatch):
    monkeypatch.setattr(checks, "TABLE", checks.Table())


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_lines_have_fixed_columns_and_at_most_78_characters(capsys):
    check("x.grad, every rank", {0: 10.0, 1: 10.0}, 10)
    check("loss, target 3", 0.9162907318741, math.log(10 / 4), tol=1e-10)
    check("loss, 4 ranks against one process", 4.1621, 4.1619, tol=1e-3)
    check("a claim whose name is far too long for the column it has", 1.0, 1, tol=1e-15)
    check("per rank", {0: 1, 1: 2, 2: 3, 3: 4}, [1, 2, 3, 4])
    broken("g backward all-reduces", torch.tensor([40.0, 40.0]), 10, 4)
    broken("ranks that share the index", {0: 4, 1: 6, 2: 4, 3: 6}, [3, 3, 7, 7], wrong=[4, 6, 4, 6])
    bet("x.grad on rank 3", None, among=[10, 4, 40, 2.5])
    printed = lines(capsys)
    assert printed == [
        "check  x.grad, every rank      got 10      want 10    diff 0                ok",
        "check  loss, target 3          got 0.916291  want 0.916291  diff <= 1e-10   ok",
        "check  loss, 4 ranks against one process                      diff <= 0.001 ok",
        "check  a claim whose name is far too long for the column it has",
        "       got 1  want 1  diff <= 1e-15                                         ok",
        "check  per rank                got 1 2 3 4  want 1 2 3 4  diff 0            ok",
        "broken g backward all-reduces  got 40 40   right 10   = 4 x right as predicted",
        "broken ranks that share the index      got 4 6 4 6  right 3 3 7 7 as predicted",
        "bet    x.grad on rank 3        10, 4, 40 or 2.5?                        no bet",
    ]
    assert all(len(line) <= WIDTH and line.isascii() for line in printed)


@pytest.mark.parametrize(
    ("got", "want", "tol"),
    [
        (10, 10.0, 0),
        (torch.tensor([1.0, 2.0]), [1, 2], 0),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]], 0),
        (torch.full((2, 3), 7.0), 7, 0),  # one number stands for every element
        ({0: torch.tensor([1.0, 1.0]), 1: torch.tensor([1.0, 1.0])}, 1, 0),
        ({0: 1, 1: 2}, {0: 1, 1: 2}, 0),
        ({0: [1, 2], 1: [1, 2]}, [1, 2], 0),  # lists on ranks: the wanted list is every rank's
        (1 + 1e-12, 1.0, 1e-10),
        (math.inf, math.inf, 0),
        (math.nan, math.nan, 0),
        ("2x2", "2x2", 0),
        (True, True, 0),
        (torch.Size([2, 3]), (2, 3), 0),
        (torch.tensor(1.0, dtype=torch.bfloat16), 1, 0),
    ],
)
def test_what_is_equal(got, want, tol, capsys):
    check("equal", got, want, tol)
    assert lines(capsys)[0].endswith("ok")


@pytest.mark.parametrize(
    ("got", "want", "tol", "why"),
    [
        (10, 11, 0, "largest difference 1"),
        (1 + 1e-9, 1.0, 1e-10, "largest difference 1e-09"),
        (torch.tensor([1.0, 2.0]), [1, 2, 3], 0, "2 values against 3"),
        (torch.tensor([[1.0, 2.0]]), [1, 2], 10, "1 values against 2"),
        ([[1, 2], [3, 4]], [1, [3, 4]], 0, "largest difference 1"),
        (1, [1, 1], 0, "one value against several"),
        ({0: 1, 1: 2}, 1, 0, "largest difference 1"),
        ({0: 1, 1: 2}, {0: 1}, 0, "different keys"),
        ({0: [1, 2], 1: [1, 3]}, [1, 2], 0, "largest difference 1"),
        (math.nan, 1.0, 1e9, "largest difference inf"),
        (1.0, math.nan, 1e9, "largest difference inf"),
        (math.inf, 1.0, 1e9, "largest difference inf"),
        (None, 1, 0, "not equal"),
        ("a", "b", 0, "not equal"),
        (False, True, 0, "largest difference 1"),
    ],
)
def test_what_is_not_equal(got, want, tol, why, capsys):
    with pytest.raises(CheckFailed, match=why) as caught:
        check("unequal", got, want, tol)
    assert "yours" in str(caught.value)
    assert "right" in str(caught.value)
    (line,) = lines(capsys)
    assert line.endswith("FAILED")
    assert "1 checks and 0 predicted mistakes, 0 of 1 as claimed" in repr(table_of_checks())


def test_broken_fails_when_nothing_is_broken_or_something_else_is(capsys):
    broken("four times", {0: 40, 1: 40}, 10, 4)
    with pytest.raises(CheckFailed, match="nothing is broken"):
        broken("repaired", 10, 10, 4)
    with pytest.raises(CheckFailed, match="off by 10"):
        broken("otherwise wrong", 30, 10, 4)
    with pytest.raises(CheckFailed, match="nothing is broken"):
        broken("zero", 0, 0, 4)
    with pytest.raises(CheckFailed, match="nothing is broken"):
        broken("factor one", 10, 10, 1)
    with pytest.raises(ValueError, match="either factor or wrong"):
        broken("unsaid", 40, 10)
    with pytest.raises(ValueError, match="tol must be >= 0"):
        check("negative", 1, 1, -1)
    assert [line.rsplit("  ", 1)[-1].strip() for line in lines(capsys)][1:] == ["FAILED"] * 4


def test_a_bet_is_settled_by_the_check_of_its_name(capsys):
    bet("first", 4, among=[10, 4])
    bet("second", 10.0)
    bet("third", None)
    bet("fourth", 1)
    bet("fourth", None)  # the reader takes the bet back
    check("first", {0: 10, 1: 10}, 10)
    broken("second", 40, 10, 4)
    check("third", 1, 1)
    check("fourth", 1, 1)
    assert [line for line in lines(capsys) if line.startswith("bet")] == [
        "bet    first                   you say 4              10 or 4?          placed",
        "bet    second                  you say 10                               placed",
        "bet    third                                                            no bet",
        "bet    fourth                  you say 1                                placed",
        "bet    fourth                                                           no bet",
        "bet    first                   you said 4  it is 10                       lost",
        "bet    second                  you said 10 it is 10                        won",
    ]


def test_the_table_shows_each_check_once(capsys):
    check("one", 1, 1)
    check("two", 2, 2)
    check("one", 1, 1)  # the cell was run again
    broken("three", 40, 10, 4)
    capsys.readouterr()
    assert repr(table_of_checks()).splitlines() == [
        "check  one    got 1   want 1    diff 0       ok",
        "check  two    got 2   want 2    diff 0       ok",
        "broken three  got 40  right 10  = 4 x right  as predicted",
        "-" * WIDTH,
        "2 checks and 1 predicted mistakes, 3 of 3 as claimed",
    ]


def test_values_in_few_characters():
    assert show(torch.tensor([1.0, 2.5])) == "1 2.5"
    assert show([[1, 2], [3, 4]]) == "[1 2, 3 4]"
    assert show({0: 3, 1: 3}) == "3"
    assert show({0: 3, 1: 4}) == "3 4"
    assert show("x" * 20, 10) == "xxxxxxx..."


def test_every_line_fits_whatever_its_parts():
    for name in (1, 23, 24, 40, 60, 71):
        for value in ("1", "1234567", "12345678", "1234567890123456"):
            for mark in ("ok", "as predicted", "FAILED on 1-3"):
                text = str(Entry("check", "n" * name, value, value, "diff <= 1e-10", mark))
                assert all(len(line) <= WIDTH for line in text.split("\n")), text
                assert text.endswith(mark)
