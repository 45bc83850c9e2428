"""python -m minimeg.schedule"""

import subprocess
import sys
import time

import pytest

from minimeg.schedule import Schedule, interleaved, one_f_one_b, zero_bubble_h1
from minimeg.schedule.__main__ import main


def run(capsys, *words):
    status = main(words)
    return status, *capsys.readouterr()


def test_one_schedule(capsys):
    status, out, err = run(capsys, "1f1b", "--pp", "4", "--microbatches", "8")
    assert (status, err) == (0, "")
    assert out.startswith(str(one_f_one_b(4, 8)) + "\n")
    assert out.splitlines()[5:] == [
        "# makespan  33",
        "# bubble    37.50% of ideal time, 27.27% of total time",
        "# spans     33 30 27 24  (each rank from its first start to its last end)",
        "# in flight 4 3 2 1  (chunk activations held at the peak, proven)",
        "# memory    4 3 2 1  (activations of a whole stage at the peak)",
        "# messages  48, in one global order: no deadlock",
    ]
    assert Schedule.parse(out) == one_f_one_b(4, 8)  # the output is a table again


def test_times_and_memory_are_options(capsys):
    words = [
        "zb-h1",
        "--pp",
        "4",
        "--microbatches",
        "8",
        "--forward",
        "2",
        "--backward",
        "2",
        "--weight",
        "1",
        "--weight-part",
        "0.6",
    ]
    _, out, _ = run(capsys, *words)
    assert "# makespan  49\n" in out
    assert "# memory    4 3.6 3.2 2.8  (" in out
    _, out, _ = run(capsys, *["interleaved", "--pp", "4", "--microbatches", "9", "--chunks", "3", "--group-size", "5"])
    assert out.startswith(str(interleaved(4, 9, 3, 5)))
    assert "chunks=2" in run(capsys, *["interleaved", "--pp", "4", "--microbatches", "8"])[1]


def test_compare(capsys):
    names = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"]
    _, out, _ = run(capsys, *names, *["--compare", "--pp", "4", "--microbatches", "8", "--chunks", "4"])
    head, *rows = [line.split() for line in out.splitlines()]
    assert head == [
        "schedule",
        "makespan",
        "span",
        "bubble/ideal",
        "bubble/total",
        "in",
        "flight",
        "memory",
        "messages",
    ]
    assert rows == [
        ["gpipe", "33", "33", "37.50%", "27.27%", "8", "8", "48"],
        ["1f1b", "33", "33", "37.50%", "27.27%", "4", "4", "48"],
        ["interleaved", "26.25", "26.25", "9.38%", "8.57%", "19", "4.75", "240"],
        ["zb-h1", "27", "27", "12.50%", "11.11%", "4", "4", "48"],
        ["zb-h2", "27", "24", "0.00%", "0.00%", "7", "7", "48"],
        ["zb-v", "25.5", "24", "0.00%", "0.00%", "8", "4", "96"],
    ]
    _, out, _ = run(capsys, "--compare", "--pp", "2", "--microbatches", "4")
    assert len(out.splitlines()) == 10  # without names: every schedule for training


def test_a_table_of_ones_own(capsys, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("# name=mine\nF0 F1 B0 B1\nF0 B0 F1 B1\n")
    status, out, _ = run(capsys, "--file", str(file))
    assert status == 0
    assert out.startswith("# name=mine stages=2 microbatches=2 ")
    _, out, _ = run(capsys, "zb-h1", "--file", str(file), "--compare", "--pp", "2", "--microbatches", "2")
    assert [line.split()[0] for line in out.splitlines()] == ["schedule", "mine", "zb-h1"]


def test_a_table_that_cannot_run(capsys, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("F0 B0 F1 B1\nF0 F1 B0 B1\n")
    status, out, err = run(capsys, "--file", str(file))
    assert (status, out) == (1, "")
    assert "ranks wait for each other in a circle" in err
    assert "It runs with B0.0 put before F0.1 on rank 1." in err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("", "name a schedule"),
        ("1f1b", "give --pp and --microbatches"),
        ("1f1b --pp 0 --microbatches 0", "stages=0"),
        ("1f1d --pp 4 --microbatches 8", "'1f1d' is unknown"),
        ("1f1b --pp 4 --microbatches 8 --chunks 2", "chunks=2"),
        ("1f1b --pp 4 --microbatches 8 --forward -1", "forward=-1"),
        ("--file does-not-exist.txt", "does-not-exist.txt"),
        ("1f1b --pp four --microbatches 8", "invalid int value"),
    ],
)
def test_wrong_arguments_are_named(capsys, words, fault):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    assert fault in capsys.readouterr().err


def test_pictures(capsys, tmp_path):
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    run(capsys, *f"zb-h1 --pp 4 --microbatches 8 --svg {one}".split())
    run(capsys, *f"1f1b zb-h1 --compare --pp 4 --microbatches 8 --svg {two}".split())
    for file, names in ((one, ["zb-h1"]), (two, ["1f1b", "zb-h1"])):
        svg = file.read_text(encoding="utf-8")
        assert svg.startswith("<svg")
        assert all(name in svg for name in names)
    assert len(two.read_text()) > len(one.read_text())


def test_it_answers_at_once():
    words = [sys.executable, "-m", "minimeg.schedule", "zb-v", "--pp", "4", "--microbatches", "8"]
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        subprocess.run(words, check=True, capture_output=True, timeout=30)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.5


def test_the_import_is_pure_and_quick():
    code = (
        "import sys, time; begin = time.perf_counter(); import minimeg.schedule; "
        "seconds = time.perf_counter() - begin; import minimeg.schedule.__main__; "
        "print(seconds, [m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
        ).stdout.split(" ", 1)
        for _ in range(3)
    ]
    assert {found.strip() for _, found in runs} == {"[]"}
    assert min(float(seconds) for seconds, _ in runs) < 0.1


def test_help_names_every_schedule(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert zero_bubble_h1(1, 1).name in capsys.readouterr().out
