"""Do the benchmarks compare what they say, and would they notice a wrong answer? No time is asserted here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from minimeg.models.config import GPTConfig
from minimeg.schedule import build, simulate
from tests.benchmarks import (
    __main__,
    compute,
    data_parallel,
    prediction,
    rank_functions,
    recomputation,
    sleeping,
    tensor_parallel,
    whole_step,
)
from tests.benchmarks.critical_path import critical_path
from tests.benchmarks.table import Row, as_json, lines
from tests.benchmarks.timing import Spread, ratio, spread

SMALL = GPTConfig(4, 16, 2, 32, 8, tied=False)
BRIEF = sleeping.Setting(2, 3, 0.001, 0.002, kilobytes=4, jitter=0.5)


def check(rows: list[Row], names: set[str]) -> None:
    """Each row can be printed and stored, and holds these contenders."""
    assert rows
    for row in rows:
        assert set(row.values) == names
        assert row.setting in "\n".join(lines(row))
        assert json.loads(json.dumps(as_json(row)))["met"] == row.met
        assert row.equal


# ---- measuring ---------------------------------------------------------------------------------------------------------------


def test_spread_and_ratio() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0, 1.0, 5)
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0, 2.0, 1)
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == Spread(3.0, 2.5, 3.5, 2.0, 3)


def test_contenders_take_turns_in_alternating_order_and_the_first_round_does_not_count(ranks: Any) -> None:
    for seen, times in ranks.pool(2).call(rank_functions.turns, 2):
        assert [name for name in seen if len(name) == 1] == ["b", "a", "a", "b", "b", "a"]
        assert seen[::2] == [f"prepare {name}" for name in seen[1::2]]
        assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2}
        assert all(0 <= seconds < 10 for each in times.values() for seconds in each)


def test_a_step_ends_when_its_last_rank_does(ranks: Any) -> None:
    answers = ranks.pool(2).call(rank_functions.one_is_late)
    assert answers[0] == answers[1]
    assert answers[0]["late"][0] >= 0.05


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_critical_path_agrees_with_the_simulator(name: str) -> None:
    schedule = build(name, 4, 7)
    rows = [
        [(a.kind, a.microbatch, schedule.virtual_stage(rank, a.chunk)) for a in row]
        for rank, row in enumerate(schedule.ranks)
    ]
    took = {"F": 2.0, "B": 3.0, "W": 1.0}
    weight = took["W"] if schedule.split else 0.0
    expected = simulate(schedule, took["F"], took["B"], weight).makespan
    last = schedule.stages * schedule.chunks - 1
    assert critical_path(rows, last, lambda work: took[work[0]] / schedule.chunks) == expected
    rows[0].reverse()
    with pytest.raises(ValueError, match="circle"):
        critical_path(rows, last, lambda work: 1.0)


# ---- the rows ----------------------------------------------------------------------------------------------------------------


def test_sleeping_rows(ranks: Any) -> None:
    rows = list(sleeping.rows(1, ranks.pool, [BRIEF], BRIEF))
    check(rows[:2], {"ours", "hand loop", "torch"})
    assert [row.setting.split()[0] for row in rows] == ["1f1b", "interleaved", "zb-h1", "zb-v"]
    assert all(value.minimum > 1 for row in rows for value in row.values.values())  # nobody beats free messages


def test_a_wrong_gradient_is_seen(ranks: Any) -> None:
    assert ranks.pool(2).call(rank_functions.forgets_one, BRIEF) == [["1f1b wrong stage 0"], ["1f1b wrong stage 1"]]


def test_a_late_order_is_slept_by_everyone_alike() -> None:
    split, whole = BRIEF.duration(("B", 1, 0), 1, True), BRIEF.duration(("B", 1, 0), 1, False)
    assert whole == 2 * split
    assert 0.5 * BRIEF.backward <= whole <= 1.5 * BRIEF.backward
    assert BRIEF.duration(("B", 2, 0), 1, False) != whole  # jitter


def test_compute_rows(ranks: Any) -> None:
    rows = list(compute.rows(1, ranks.pool, config=SMALL, microbatches=3))
    check(rows[:3], {"ours", "hand loop", "torch"})
    check(rows[3:], {"ours", "torch"})


def test_tensor_parallel_rows(ranks: Any) -> None:
    (row,) = tensor_parallel.rows(1, ranks.pool, SMALL, 2)
    check([row], {"ours", "DTensor"})
    assert row.notes == "all-reduces a step: ours 32, DTensor 32"


def test_data_parallel_rows(ranks: Any) -> None:
    rows = list(data_parallel.rows(1, ranks.pool, SMALL, 2))
    check(rows[:2], {"ours", "DDP"})
    check(rows[2:3], {"ours", "DDP + AdamW"})
    check(rows[3:], {"ours", "DDP + ZeroRedundancyOptimizer"})


@pytest.mark.parametrize("layout", whole_step.LAYOUTS, ids=str)
def test_whole_step_rows(ranks: Any, layout: whole_step.Layout) -> None:
    (row,) = whole_step.rows(2, ranks.pool, SMALL, 2, (layout,))
    assert {"ours", "torch"} <= set(row.values)


def test_a_step_that_trains_otherwise_is_seen() -> None:
    whole_step.check_histories("pp2", "torch", [(5.0, 1.0), (4.0, 2.0)], [(5.0, 1.0), (4.00001, 2.0)])
    with pytest.raises(RuntimeError, match=r"pp2, step 1: loss 4\.0 of minimeg, 4\.1 of torch"):
        whole_step.check_histories("pp2", "torch", [(5.0, 1.0), (4.0, 2.0)], [(5.0, 1.0), (4.1, 2.0)])
    with pytest.raises(RuntimeError, match="gradient norm nan"):
        whole_step.check_histories("pp2", "torch", [(5.0, float("nan"))], [(5.0, 1.0)])


def test_prediction_rows(ranks: Any) -> None:
    rows = list(prediction.rows(1, ranks.pool, config=SMALL, microbatches=3))
    check(rows, {"measured", "simulated"})
    assert [row.setting.split()[0] for row in rows] == list(prediction.SCHEDULES)


def test_recomputation_rows(ranks: Any) -> None:
    rows = list(recomputation.rows(1, ranks.pool, [0.0]))
    assert {"ours", "none", "torch, non-reentrant"} <= set(rows[0].values)


# ---- the program -------------------------------------------------------------------------------------------------------------


def test_the_program_writes_what_it_measured_and_keeps_the_rest(monkeypatch: Any, tmp_path: Any, capsys: Any) -> None:
    def rows(rounds: int, pool: Any) -> Iterator[Row]:
        yield Row("made up", f"{rounds} rounds", "s", {"ours": spread([1.0, 2.0])}, reach="below 1", met=False)

    target = tmp_path / "benchmarks.json"
    target.write_text(json.dumps({"sections": {"other": {"rows": []}}}))
    monkeypatch.setattr(__main__, "SECTIONS", {"made-up": (rows, 1.5)})
    monkeypatch.setattr("sys.argv", ["benchmarks", "--rounds", "4", "--json", str(target)])
    assert __main__.main() == 0
    report = json.loads(target.read_text())
    assert set(report["sections"]) == {"other", "made-up"}
    (row,) = report["sections"]["made-up"]["rows"]
    assert row["setting"] == "6 rounds"
    assert row["values"]["ours"]["median"] == 1.5
    assert "reach: below 1: NO" in capsys.readouterr().out


def test_an_unknown_section_is_refused_by_name(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "sleping"])
    with pytest.raises(SystemExit):
        __main__.main()
    assert "sleping" in capsys.readouterr().err
