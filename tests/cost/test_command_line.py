"""``python -m minimeg.cost``: what it prints is what the functions say; faults exit with 2 and a sentence."""

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import pytest

from minimeg.cost import GPUS, MODELS, GPTShape, Job, Layout, estimate, gpu, model, parameters, plan
from minimeg.cost.__main__ import main

GPT3 = ["--model", "gpt3-175b", "--gpus", "1024", "--gpu", "a100-80g"]
JOB = Job(model("gpt3-175b").shape, 1024, gpu("a100-80g"), 1536)


def lines_of(capsys, *arguments, status=0):
    assert main(arguments) == status
    return capsys.readouterr().out.splitlines()


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_formulas(capsys):
    words = "\n".join(lines_of(capsys, "--model", "22b"))
    assert f"{parameters(model('22b').shape):,}" in words
    assert re.search(r"none +0\.001144 +1,770\.0 +221\.2", words)
    assert re.search(r"full +\S+ +25\.2 +3\.1", words)


def test_the_list_of_layouts(capsys):
    lines = lines_of(capsys, *GPT3, "--top", "4")
    found = plan(JOB, 4)
    rows = [line for line in lines if re.match(r"t\d+ p\d+ d\d+", line)]
    assert len(rows) == 4
    for row, one in zip(rows, found.best, strict=True):
        assert row.split()[:6] == str(one.layout).split()
        m, memory, bubble, tp, pp, dp, step, mfu, days = row.split()[6:]
        assert (m, memory, bubble) == (
            str(1536 // (one.layout.data * one.layout.microbatch)),
            f"{one.memory_bytes / 1e9:.1f}",
            f"{one.bubble:.1%}",
        )
        assert (tp, pp, dp) == tuple(f"{x:.2f}" for x in (one.tensor_seconds, one.pipeline_seconds, one.data_seconds))
        assert (step, mfu, days) == (f"{one.seconds:.2f}", f"{one.mfu:.1%}", f"{one.days:.1f}")
    assert f"Why {found.best[0].layout}: the best with one other choice" in lines


LAYOUT = "t8 p8 d16 n3 b1 selective"


def test_an_explanation_is_a_sum(capsys):
    lines = lines_of(capsys, *GPT3, "--explain", LAYOUT)
    one = estimate(JOB, Layout.parse(LAYOUT))
    blocks = "\n".join(lines).split("\n\n")
    for block, expected, digits in ((blocks[1], one.memory_bytes / 1e9, 3), (blocks[2], one.seconds, 3)):
        numbers = [float(re.match(r"  .*?  +([\d.]+)  ", line)[1]) for line in block.splitlines()[1:]]
        assert numbers[-1] == round(expected, digits)
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.005)
        assert len(numbers) >= 6
    assert f"MFU   {one.mfu:.2%}" in "\n".join(lines)
    assert "31 in flight x 4 layers x 106,954,752 bytes" in "\n".join(lines)


def test_a_layout_that_does_not_fit_exits_with_1(capsys):
    lines = lines_of(capsys, *GPT3, "--explain", "t1 p8 d128 n1 b1 none", status=1)
    assert any("DOES NOT FIT 80" in line for line in lines)
    lines = lines_of(capsys, "--model", "1t", "--gpus", "8", "--global-batch-size", "8", status=1)
    assert any(line.startswith("No layout fits: the smallest needs") for line in lines)
    lines = lines_of(capsys, "--model", "1t", "--gpus", "7", "--global-batch-size", "8", status=1)
    assert any(line.startswith("No layout is legal.") for line in lines)


def test_every_default_can_be_replaced(capsys):
    shape = [
        "--num-layers",
        "8",
        "--hidden-size",
        "512",
        "--num-attention-heads",
        "8",
        "--seq-length",
        "256",
        "--vocab-size",
        "999",
    ]
    machine = {
        "--peak-tflops": 100,
        "--matmul-tflops": 80,
        "--memory-gb": 16,
        "--memory-bandwidth-gbs": 500,
        "--nvlink-gbs": 50,
        "--adapter-gbs": 5,
        "--matmul-efficiency": 0.5,
        "--memory-efficiency": 0.6,
        "--link-efficiency": 0.7,
        "--adapters-per-ring": 1,
        "--gpus-per-node": 4,
    }
    flags = [str(word) for pair in machine.items() for word in pair]
    rest = ["--gpus", "16", "--global-batch-size", "32", "--tokens", "1e9", "--reserve-gb", "1"]
    off = ["--no-sequence-parallel", "--no-distributed-optimizer", "--explain", "t2 p2 d4 n2 b2 full"]
    lines = lines_of(capsys, *shape, *flags, *rest, *off)
    one = estimate(
        Job(
            GPTShape(8, 512, 8, 256, 999),
            16,
            type(gpu("a100-80g"))("a100-80g", 100e12, 80e12, 16e9, 500e9, 50e9, 5e9, 0.5, 0.6, 0.7, 1, 4),
            32,
            1e9,
            False,
            False,
            1e9,
        ),
        Layout(2, 2, 4, 2, 2, "full"),
    )
    words = "\n".join(lines)
    assert f"MFU   {one.mfu:.2%}" in words
    assert f"{one.seconds:9.3f}  s" in words
    assert f"{one.memory_bytes / 1e9:9.3f}  GB" in words


def test_pictures(capsys, tmp_path):
    small = ["--model", "22b", "--gpus", "8", "--svg", str(tmp_path / "a.svg")]
    lines_of(capsys, *small)
    assert "Layouts of 8 x a100-80g" in ET.parse(tmp_path / "a.svg").getroot()[0].text
    lines_of(capsys, *small, "--explain", "t2 p4 d1 n1 b1 full")
    assert "1f1b" in ET.parse(tmp_path / "a.svg").getroot()[0].text.lower()


def test_the_list_of_names(capsys):
    words = "\n".join(lines_of(capsys, "--list"))
    assert all(re.search(rf"^{re.escape(name)} ", words, re.MULTILINE) for name in (*MODELS, *GPUS))


def test_faults(capsys, tmp_path):
    assert "'gpt5' is unknown" in refused(capsys, "--model", "gpt5")
    assert "'tpu' is unknown" in refused(capsys, "--gpus", "8", "--gpu", "tpu")
    assert "need --gpus" in refused(capsys, "--explain", LAYOUT)
    assert "is not gpus=1024; use data=16" in refused(capsys, *GPT3, "--explain", "t8 p8")
    assert "'q8' is not of the form" in refused(capsys, *GPT3, "--explain", "q8")
    assert "at least 1" in refused(capsys, *GPT3, "--top", "0")
    assert "nowhere" in refused(capsys, "--model", "22b", "--gpus", "8", "--svg", str(tmp_path / "nowhere" / "a.svg"))
    assert "no layout is legal" in refused(capsys, "--model", "1t", "--gpus", "7", "--svg", str(tmp_path / "a.svg"))


def test_formulas_answer_at_once_and_import_neither_torch_nor_numpy():
    code = (
        "import sys, minimeg.cost.__main__ as m; m.main(['--model', '1t']);"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    took = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.5  # the limit; about 0.1 s on an idle core
