"""Schedules as text and as objects."""

import doctest
import pickle

import pytest

import minimeg.schedule
from minimeg.schedule import NAMES, Action, Schedule, ScheduleError, build, interleaved, one_f_one_b, zero_bubble_v


def test_an_action_is_its_text():
    assert str(Action("F", 3, 0)) == "F0.3"
    assert f"{Action('W', 12, 7)}" == "W7.12"
    assert Action.parse("B1.20") == Action("B", 20, 1)
    assert Action.parse("F3") == Action("F", 3, 0)
    for wrong in ("", "F", "X0.1", "F0.1.2", "f0.1", "F-1", "F0.", "F٣", " F3"):
        with pytest.raises(ValueError, match="is not an action"):
            Action.parse(wrong)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 8)])
def test_every_schedule_is_read_back_from_its_text(name, p, m):
    if name == "pipedream-2bw" and m < p:
        pytest.skip("2BW needs m >= p")
    schedule = build(name, p, m)
    assert Schedule.parse(str(schedule)) == schedule
    assert hash(Schedule.parse(str(schedule))) == hash(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert len(str(schedule).splitlines()) == 1 + p


def test_the_header_names_every_field():
    first, *rows = str(zero_bubble_v(4, 8)).splitlines()
    assert first == "# name=zb-v stages=4 microbatches=8 chunks=2 placement=v updates=flush"
    assert [len(row.split()) for row in rows] == [48] * 4
    assert rows[3].startswith("F0.0 F1.0 F0.1 F1.1")


def test_without_a_header_the_sizes_are_inferred():
    table = "\n  F0 F1 B0 B1   # the first rank\n\nF0\tB0 F1 B1\n"
    assert Schedule.parse(table) == Schedule("custom", 2, 2, 1, one_f_one_b(2, 2).ranks)
    ours = interleaved(2, 4, 2)
    assert Schedule.parse("\n".join(str(ours).splitlines()[1:])).ranks == ours.ranks


def test_part_of_a_header_is_enough():
    rows = "\n".join(str(zero_bubble_v(2, 4)).splitlines()[1:])
    mine = Schedule.parse(f"# name=my own v placement=v\n{rows}")
    assert (mine.name, mine.placement, mine.chunks, mine.microbatches) == ("my own v", "v", 2, 4)
    assert Schedule.parse("# just a comment\nF0 B0").stages == 1


def test_an_idle_rank_is_a_dash():
    schedule = Schedule("half", 2, 1, 1, ((Action("F", 0), Action("B", 0)), ()))
    assert str(schedule).splitlines()[2] == "-"
    assert Schedule.parse(str(schedule)) == schedule
    nothing = Schedule("nothing", 1, 1, 1, ((),))
    assert Schedule.parse(str(nothing)) == nothing


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["no action"]),
        ("F0 X1\nB0 Q", ["rank 0: 'X1'", "rank 1: 'Q'"]),
        ("F0 B0\nF1.0 B1.0", ["rank 0: F0 does not name its chunk", "rank 0: B0 does not name its chunk"]),
        ("# name=a stages=3 foo=1 chunks=x stages=4\nF0", ["unknown field 'foo'", "chunks='x'", "gives stages twice"]),
        ("# name=a stages=3\nF0 B0", ["stages=3 wants 3 lists"]),
        ("# name=a placement=w updates=never\nF0 B0", ["placement='w'", "updates='never'"]),
        ("# name=a placement=v\nF0 B0", ["two chunks"]),
    ],
)
def test_a_table_that_cannot_be_read_names_all_its_faults(text, faults):
    with pytest.raises(ValueError) as error:
        Schedule.parse(text)
    for fault in faults:
        assert fault in str(error.value)


def test_sizes_that_do_not_fit_are_named_at_once():
    with pytest.raises(ValueError) as error:
        Schedule("a=b", 0, True, 3, (), "v", "sometimes")
    for fault in ("stages=0", "microbatches=True", "name='a=b'", "chunks=3", "updates='sometimes'"):
        assert fault in str(error.value)


def test_a_schedule_cannot_be_changed():
    schedule = Schedule("mine", 1, 1, 1, [[Action("F", 0), Action("B", 0)]])  # lists become tuples
    assert schedule.ranks == ((Action("F", 0), Action("B", 0)),)
    with pytest.raises(AttributeError):
        schedule.name = "yours"
    assert issubclass(ScheduleError, ValueError)


def test_placements():
    loop = interleaved(4, 8, 3)
    assert [[loop.virtual_stage(r, c) for c in range(3)] for r in range(4)] == [
        [0, 4, 8],
        [1, 5, 9],
        [2, 6, 10],
        [3, 7, 11],
    ]
    v = zero_bubble_v(4, 8)
    assert [[v.virtual_stage(r, c) for c in range(2)] for r in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    for schedule in (loop, v, one_f_one_b(3, 3)):
        for stage in range(schedule.stages * schedule.chunks):
            assert schedule.virtual_stage(schedule.rank_of(stage), schedule.chunk_of(stage)) == stage
    for wrong in (lambda: loop.virtual_stage(4, 0), lambda: loop.virtual_stage(0, 3), lambda: loop.rank_of(12)):
        with pytest.raises(ValueError, match="is not in 'interleaved'"):
            wrong()


def test_split_and_forward_only():
    assert {name for name in NAMES if build(name, 4, 8).split} == {"zb-h1", "zb-h2", "zb-v", "dualpipe-v"}
    assert {name for name in NAMES if build(name, 4, 8).forward_only} == {"forward-only"}
    assert {name: build(name, 4, 8).updates for name in NAMES if build(name, 4, 8).updates != "flush"} == {
        "pipedream": "each",
        "pipedream-2bw": "2bw",
    }


def test_who_sends_what_an_action_needs():
    v = zero_bubble_v(4, 8)
    assert v.sender(3, Action("F", 5, 1)) == (3, Action("F", 5, 0))  # the turn of the v
    assert v.sender(0, Action("B", 5, 0)) == (1, Action("B", 5, 0))
    assert v.sender(0, Action("F", 5, 0)) is None
    assert v.sender(0, Action("B", 5, 1)) is None
    assert v.sender(2, Action("W", 5, 0)) is None
    assert interleaved(4, 8, 2).sender(0, Action("F", 5, 1)) == (3, Action("F", 5, 0))


def test_the_example_in_the_docstring():
    result = doctest.testmod(minimeg.schedule)
    assert (result.attempted, result.failed) == (3, 0)
