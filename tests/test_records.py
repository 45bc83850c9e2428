"""Metrics on disk, and the page that is drawn from them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minimeg.records import METRICS, TIMELINE, Records, read_metrics
from minimeg.report import main


def written(folder: Path, steps: range, base: float = 5.0) -> None:
    with Records(folder, {"lr": 0.1, "data_path": Path("x<y")}) as records:
        for step in steps:
            validation = {"validation_loss": base - step / 20} if step % 5 == 0 else {}
            records.write(
                step, {"loss": base - step / 10, "norm": 1.0, "bubble": None, "tokens_per_second": 100.0, **validation}
            )


def test_a_line_a_step_and_nothing_lost_when_the_run_is_killed(tmp_path: Path) -> None:
    records = Records(tmp_path / "a" / "run", {})
    records.write(1, {"loss": 2.0, "norm": float("nan")})
    lines = (tmp_path / "a" / "run" / METRICS).read_text().splitlines()  # before close: a kill comes without notice
    assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 2.0, "norm": None}]
    records.__exit__(None, None, None)


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    written(tmp_path, range(1, 8))
    written(tmp_path, range(6, 11), base=4.0)  # steps 6 and 7 again, after a checkpoint of step 5
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 11, "lo')  # killed in the middle of a line
    metrics = read_metrics(tmp_path)
    assert [line["step"] for line in metrics] == list(range(1, 11))
    assert [line["loss"] for line in metrics] == [4.9, 4.8, 4.7, 4.6, 4.5, 3.4, 3.3, 3.2, 3.1, 3.0]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Records(None, {"a": 1}) as records:
        records.write(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written(tmp_path, range(1, 8))
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, round(e.value, 5)) for e in events.Scalars("loss")] == [
        (s, round(5 - s / 10, 5)) for s in range(1, 8)
    ]
    assert "bubble" not in events.Tags()["scalars"]


def test_the_page_draws_what_was_recorded_and_asks_no_other_host(tmp_path: Path) -> None:
    run = tmp_path / "run & more"
    written(run, range(1, 21))
    (run / TIMELINE).write_text("<svg><title>a timeline</title></svg>")
    assert main([str(run)]) == 0
    html = (run / "report.html").read_text()
    for words in (
        "<title>run &amp; more</title>",
        "20 steps; at the end a loss of 3",
        "Throughput",
        "validation",
        "a timeline",
    ):
        assert words in html, words
    assert "x&lt;y" in html
    assert "Bubble" not in html, "no bubble was measured, so none is drawn"
    assert html.count("<svg") == 4  # loss, norm, throughput, timeline
    # A namespace is a name, not an address that is asked.
    assert set(re.findall(r'(?:src|href)="(?!#)[^"]*"', html)) == set()
    first = html
    main([str(run)])
    assert (run / "report.html").read_text() == first, "the same records give the same page"


@pytest.mark.parametrize(
    ("text", "words"), [(None, f"holds no {METRICS}"), ("", "no finished step"), ("no\n{}\n", "line 1")]
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / METRICS).write_text(text)
    assert main([str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
