"""What four ranks printed, as one output."""

from __future__ import annotations

from minimeg.lab.checks import Entry
from minimeg.lab.output import Shown, collapse


def text_of(pieces_of) -> str:
    return "".join(shown.content for shown in collapse(pieces_of) if shown.kind == "stdout")


def said(*texts):
    return [("stdout", text) for text in texts]


def test_equal_output_appears_once_and_ranks_in_order():
    assert text_of({rank: said("10\n") for rank in range(4)}) == "[ranks 0-3] 10\n"
    assert text_of({0: said("a\n"), 1: said("b\n"), 2: said("a\n"), 3: said("b\n")}) == "[ranks 0,2] a\n[ranks 1,3] b\n"
    assert text_of({3: said("d\n"), 0: said("a\n")}) == "[rank 0] a\n[rank 3] d\n"


def test_lines_stay_aligned():
    assert text_of({0: said("a\n", "bb\n"), 1: said("c\n"), 2: said("c\n")}) == (
        "[rank 0]    a\n"  #
        "            bb\n"
        "[ranks 1-2] c\n"
    )
    assert text_of({0: said("a\n\nb\n")}) == "[rank 0] a\n\n         b\n"


def test_pieces_of_one_text_count_as_that_text():
    assert text_of({0: said("a\n", "b\n"), 1: said("a\nb\n")}) == "[ranks 0-1] a\n            b\n"
    assert text_of({0: said("no newline")}) == "[rank 0] no newline\n"
    assert text_of({0: [("display", {"text/plain": "7"})], 1: said("7\n")}) == "[ranks 0-1] 7\n"


def test_a_progress_bar_leaves_its_last_state():
    assert text_of({0: said("\r 0%\r 50%\r100%\n", "done\r\n")}) == "[rank 0] 100%\n         done\n"


def test_ranks_that_show_nothing_are_left_out():
    assert text_of({0: [], 1: said("only me\n"), 2: []}) == "[rank 1] only me\n"
    assert text_of({0: [], 1: []}) == ""


def test_streams_and_pictures_keep_their_order():
    picture = {"text/plain": "<SVG>", "image/svg+xml": "<svg/>"}
    pieces = [("stdout", "before\n"), ("stderr", "warning\n"), ("display", picture), ("stdout", "after\n")]
    assert list(collapse({0: pieces, 1: pieces})) == [
        Shown("stdout", "[ranks 0-1] before\n"),
        Shown("stderr", "[ranks 0-1] warning\n"),
        Shown("stdout", "[ranks 0-1]\n"),
        Shown("display", picture),
        Shown("stdout", "[ranks 0-1] after\n"),
    ]


def entry(value, want="0", mark="ok", name="x"):
    return ("check", Entry("check", name, value, want, "diff 0", mark))


def test_a_check_made_on_all_ranks_is_one_line():
    def checks(pieces_of):
        return [str(shown.content) for shown in collapse(pieces_of) if shown.kind == "check"]

    assert checks({0: [entry("0")], 1: [entry("0")]}) == [
        "check  x                       got 0       want 0     diff 0                ok"
    ]
    assert checks({0: [entry("0", "0")], 1: [entry("1", "1")]}) == [
        "check  x                       got 0 1     want 0 1   diff 0                ok"
    ]
    assert checks({0: [entry("0")], 1: [entry("1", mark="FAILED")], 2: [entry("2", mark="FAILED")]}) == [
        "check  x                       got 0 1 2   want 0     diff 0     FAILED on 1-2"
    ]
    assert checks({0: [entry("0", name="a"), entry("0", name="b")], 1: [entry("0", name="b")]}) == [
        "check  a [r0]                  got 0       want 0     diff 0                ok",
        "check  b                       got 0       want 0     diff 0                ok",
    ]
