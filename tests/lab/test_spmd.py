"""``%%spmd`` in a real Jupyter kernel: what a reader of the notebooks does, and what may go wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from jupyter_client import BlockingKernelClient, KernelManager

ROOT = Path(__file__).parent.parent.parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@dataclass
class Outcome:
    """What one cell put on the page."""

    text: str = ""
    errors: str = ""  # the stream
    rich: list[dict[str, str]] = field(default_factory=list)
    exception: str = ""  # its name
    traceback: str = ""
    seconds: float = 0.0

    @property
    def value(self) -> str:
        return self.rich[-1]["text/plain"]


class Notebook:
    """A kernel, with the extension loaded."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "IPYTHONDIR": str(folder),
            "JUPYTER_RUNTIME_DIR": str(folder),
        }
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(ROOT), env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.run("%load_ext minimeg.lab\nfrom minimeg.lab import bet, broken, check, pool, table_of_checks")

    def start(self, source: str) -> str:
        return self.client.execute(source)

    def run(self, source: str, timeout: float = 60) -> Outcome:
        return self.finish(self.start(source), timeout)

    def finish(self, message: str, timeout: float = 60) -> Outcome:
        outcome, started = Outcome(), time.monotonic()
        while True:
            told = self.client.get_iopub_msg(timeout=timeout)
            if told["parent_header"].get("msg_id") != message:
                continue
            kind, content = told["msg_type"], told["content"]
            if kind == "stream" and content["name"] == "stdout":
                outcome.text += content["text"]
            elif kind == "stream":
                outcome.errors += content["text"]
            elif kind in ("display_data", "execute_result"):
                outcome.rich.append(content["data"])
            elif kind == "error":
                outcome.exception, outcome.traceback = content["ename"], "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                outcome.seconds = time.monotonic() - started
                return outcome

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("jupyter"))
    yield notebook
    notebook.close()


def fails_at(outcome: Outcome, text: str) -> None:
    """The report has no numbers but those of lines, so that a stored notebook stays right when cells are added to it."""
    assert outcome.exception == "RankError"
    assert outcome.traceback == text.strip("\n")
    assert outcome.errors == ""  # no noise from the connections that were shut


# ---- cells that work ---------------------------------------------------------------------------------------------------------


def test_a_cell_runs_on_every_rank_and_state_stays(notebook):
    assert notebook.run("%%spmd\nx = torch.tensor([rank + 1.0])\ndist.all_reduce(x)\nint(x)").text == "[ranks 0-3] 10\n"
    assert notebook.run("%%spmd\nx").text == "[ranks 0-3] tensor([10.])\n"
    for _ in range(2):  # a second run of any cell works
        assert notebook.run("%%spmd\nprint('rank', rank)\nx;").text == "".join(
            f"[rank {r}] rank {r}\n" for r in range(4)
        )


def test_a_cell_on_some_ranks(notebook):
    assert notebook.run("%%spmd --ranks 0,3\ny = rank\ny").text == "[rank 0] 0\n[rank 3] 3\n"
    assert notebook.run("%%spmd --ranks 1-2\nworld_size").text == "[ranks 1-2] 4\n"
    missing = notebook.run("%%spmd\ny")
    assert "NameError: name 'y' is not defined" in missing.traceback
    assert missing.traceback.startswith("ranks 1-2: ")


def test_pull_and_push(notebook):
    notebook.run("%%spmd\nw = torch.nn.Parameter(torch.ones(2)); (w * (rank + 1)).sum().backward()")
    assert notebook.run("pull('rank * 2')").value == "{0: 0, 1: 2, 2: 4, 3: 6}"
    assert notebook.run("pull('w.grad', ranks=[3, 1])").value == "{1: tensor([2., 2.]), 3: tensor([4., 4.])}"
    assert notebook.run("push(color='green', size=3)\npull('color * size')[2]").value == "'greengreengreen'"
    notebook.run("push([0], color='red')")
    assert notebook.run("pull('color')").value == "{0: 'red', 1: 'green', 2: 'green', 3: 'green'}"
    refused = notebook.run("pull('nothing')")
    assert refused.traceback.startswith("ranks 0-3: NameError: name 'nothing' is not defined")


def test_functions_and_classes_of_a_cell(notebook):
    source = "%%spmd\nimport inspect, pickle\nclass Point:\n    x = 1\ndef f():\n    return 7\n"
    assert (
        notebook.run(source + "print(inspect.getsource(f), end='')").text
        == "[ranks 0-3] def f():\n                return 7\n"
    )
    assert notebook.run("%%spmd\ntype(pickle.loads(pickle.dumps(Point()))) is Point").text == "[ranks 0-3] True\n"
    assert notebook.run("%%spmd\n__name__").text == "[ranks 0-3] '__main__'\n"


def test_rich_results_are_shown(notebook):
    outcome = notebook.run(
        "%%spmd\nfrom IPython.display import HTML, SVG, display\nprint('first')\ndisplay(HTML(f'<b>{rank // 2}</b>'))\n"
        "SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"><title>t</title></svg>')"
    )
    assert [shown.get("text/html", "svg") for shown in outcome.rich] == ["<b>0</b>", "svg", "<b>1</b>", "svg"]
    assert all("<title>t</title>" in shown["image/svg+xml"] for shown in outcome.rich[1::2])
    assert outcome.text.startswith("[ranks 0-1] first\n")
    assert "[ranks 2-3]\n" in outcome.text


def test_magics_and_shell_commands_in_a_cell(notebook):
    assert notebook.run("%%spmd\n%env RANK").text == "".join(f"[rank {r}] '{r}'\n" for r in range(4))
    assert notebook.run("%%spmd\n!echo hello").text == "[ranks 0-3] hello\n"
    timed = notebook.run("%%spmd --ranks 0\n%time z = 1 + rank\nz")
    assert "Wall time" in timed.text
    assert timed.text.rstrip().endswith("1")


def test_warnings_go_to_the_error_stream(notebook):
    outcome = notebook.run("%%spmd\nimport warnings\nwarnings.warn('careful')")
    assert outcome.text == ""
    assert outcome.errors.startswith("[ranks 0-3] <spmd ")
    assert "careful" in outcome.errors


def test_checks_on_ranks_are_one_line_and_in_the_table(notebook):
    cell = "%%spmd\nfrom minimeg.lab import check\ncheck('sum on the ranks', x, 10)\ncheck('own number', rank, rank)"
    notebook.run("%%spmd\nx = torch.tensor([rank + 1.0])\ndist.all_reduce(x)")
    assert notebook.run(cell).text.splitlines() == [
        "check  sum on the ranks        got 10      want 10    diff 0                ok",
        "check  own number              got 0 1 2 3  want 0 1 2 3  diff 0            ok",
    ]
    failed = notebook.run("%%spmd\ncheck('only rank 0', rank, 0)")
    assert failed.text.endswith("FAILED on 1-3\n")
    assert failed.traceback.startswith("ranks 1-3: CheckFailed: only rank 0: largest difference 1\n")
    notebook.run("bet('in the notebook', 4)")
    assert notebook.run("check('in the notebook', pull('int(x)'), 10)").text.splitlines()[-1].endswith("lost")
    assert "3 of 4 as claimed" in notebook.run("table_of_checks()").value


# ---- cells that fail ---------------------------------------------------------------------------------------------------------


def test_an_error_is_shown_once_at_its_own_line_and_the_rest_goes_on(notebook):
    notebook.run("%%spmd\nx = torch.tensor([rank + 1.0])")
    outcome = notebook.run(
        "%%spmd\nprint('before', rank // 2)\nif rank == 2:\n    raise ValueError('boom')\ndist.all_reduce(x)"
    )
    assert outcome.text == "[ranks 0-1] before 0\n[ranks 2-3] before 1\n"
    fails_at(
        outcome,
        """
rank 2: ValueError: boom
  line 4: raise ValueError('boom')
Where the other ranks were:
  ranks 0-1,3  waiting at line 5: dist.all_reduce(x)
""",
    )
    assert outcome.seconds < 15
    assert notebook.run("%%spmd\ny = torch.ones(1)\ndist.all_reduce(y)\nx + y").text.startswith("[rank 0] tensor([5.])")


def test_an_error_in_a_function_of_another_cell(notebook):
    notebook.run("%%spmd\ndef inverse(x):\n    return 1 / x")
    fails_at(
        notebook.run("%%spmd\ninverse(0)"),
        """
ranks 0-3: ZeroDivisionError: division by zero
  line 2: inverse(0)
  line 3 of an earlier cell, in inverse: return 1 / x
""",
    )


def test_a_deadlock_is_cut_and_explained(notebook):
    notebook.run("%%spmd\nx = torch.ones(1)")
    for line in ("%%spmd --timeout 1", "%%spmd --timeout 1 --expect-error"):
        outcome = notebook.run(f"{line}\nif rank != 2:\n    dist.all_reduce(x)")
        report = outcome.traceback or outcome.text.rstrip()
        assert report == (
            "no end after 1 s: the call was cut\n"
            "Where the ranks were:\n"
            "  ranks 0-1,3  waiting at line 3: dist.all_reduce(x)\n"
            "  rank 2       finished"
        )
        assert bool(outcome.exception) != ("--expect-error" in line)
        assert notebook.run("%%spmd\ndist.all_reduce(x); int(x)").exception == ""


def test_a_slow_rank_is_named_and_the_second_run_works(notebook):
    source = (
        "%%spmd --timeout 1\nimport time\ndef load_checkpoint():\n    if rank == 3 and slow:\n        time.sleep(100)\n"
        "    dist.barrier()\n    return 'loaded'\nload_checkpoint()"
    )
    notebook.run("push(slow=True)")
    fails_at(
        notebook.run(source),
        """
no end after 1 s: the call was cut
Where the ranks were:
  ranks 0-2  waiting at line 6, in load_checkpoint: dist.barrier()
  rank 3     waiting at line 5, in load_checkpoint: time.sleep(100)
""",
    )
    notebook.run("push(slow=False)")
    for _ in range(2):
        assert notebook.run(source).text == "[ranks 0-3] 'loaded'\n"


def test_an_expected_error_must_come(notebook):
    outcome = notebook.run("%%spmd --expect-error\nrank")
    assert outcome.exception == "CellError"
    assert "ran to its end" in outcome.traceback


def test_groups_of_a_parallel_state_work_after_an_error(notebook):
    pytest.importorskip("minimeg.grid")
    notebook.run(
        "%%spmd\nfrom minimeg.parallel_state import initialize_model_parallel\n"
        "state = initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)"
    )
    cell = "%%spmd\nint(state.tp.all_reduce(torch.tensor(rank + 1))), int(state.pp.all_reduce(torch.tensor(rank + 1)))"
    right = "[rank 0] (3, 4)\n[rank 1] (3, 6)\n[rank 2] (7, 4)\n[rank 3] (7, 6)\n"
    assert notebook.run(cell).text == right
    notebook.run("%%spmd --timeout 1\nif rank < 2:\n    state.pp.all_reduce(torch.tensor(1))")
    assert notebook.run(cell).text == right


def test_mistakes_in_the_cell_itself_do_not_reach_the_ranks(notebook):
    misspelt = notebook.run("%%spmd\nx = 1\n1 +")
    assert misspelt.exception == "CellError"
    assert re.search(r"this cell, line 3\n    1 \+\n +\^\nSyntaxError: invalid syntax", misspelt.traceback)
    for options, words in (
        ("-n x", "invalid int value"),
        ("-n 0", "at least 1"),
        ("--ranks 0-9", r"must lie in 0\.\.3"),
        ("--ranks a", "must look like"),
        ("--timeout 0", "must be positive"),
        ("--what", "unrecognized arguments"),
    ):
        assert re.search(words, notebook.run(f"%%spmd {options}\nrank").errors), options


def test_the_interrupt_button(notebook):
    notebook.run("%%spmd\nkept = rank")
    message = notebook.start("%%spmd\nprint('working')\nif rank != 1:\n    dist.barrier()")
    time.sleep(1.5)
    notebook.manager.interrupt_kernel()
    outcome = notebook.finish(message, timeout=30)
    assert outcome.text == "[ranks 0-3] working\n"
    assert outcome.exception == "Interrupted"
    assert "ranks 0,2-3  waiting at line 4" in outcome.traceback
    assert "rank 1       finished" in outcome.traceback
    message = notebook.start("%%spmd\nwhile True:\n    pass")
    time.sleep(1.5)
    notebook.manager.interrupt_kernel()
    assert "line 2: while True:" in notebook.finish(message, timeout=30).traceback
    assert notebook.run("%%spmd\ndist.barrier(); kept").text == "".join(f"[rank {r}] {r}\n" for r in range(4))


def test_a_killed_rank_and_another_number_of_ranks(notebook):
    killed = notebook.run(
        "%%spmd\nimport os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    )
    fails_at(
        killed,
        """
rank 1 died: killed by SIGKILL
Where the other ranks were:
  ranks 0,2-3  waiting at line 5: dist.barrier()
The ranks were started again: their variables are gone.
""",
    )
    assert notebook.run("%%spmd\nrank, world_size").text.endswith("[rank 3] (3, 4)\n")
    assert notebook.run("%%spmd -n 2\nrank, world_size").text == "[rank 0] (0, 2)\n[rank 1] (1, 2)\n"
    assert notebook.run("%%spmd\nworld_size").text == "[ranks 0-1] 2\n"
    assert notebook.run("pool().restart()\npool().call(divmod, 7, 2)").value == "[(3, 1), (3, 1)]"
    assert notebook.run("%%spmd -n 4\nworld_size").text == "[ranks 0-3] 4\n"


# ---- the end of the kernel ---------------------------------------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize("state", ["idle", "collective", "receive"])
def test_a_killed_kernel_leaves_no_process(tmp_path, state):
    notebook = Notebook(tmp_path)
    try:
        assert notebook.run("%%spmd\nx = torch.zeros(1)\nrank").exception == ""
        pids = eval(notebook.run("pool().pids").value)
        everybody = family(notebook.pid)
        assert set(pids) < everybody
        assert len(everybody) >= 6  # the server and its tracker, four ranks
        if state == "collective":
            notebook.start("%%spmd\nif rank != 1:\n    dist.all_reduce(x)")
        elif state == "receive":
            notebook.start("%%spmd\nif rank == 1:\n    dist.recv(x, 0)")
        time.sleep(1)
        os.kill(notebook.pid, signal.SIGKILL)
        notebook.manager.provisioner.process.wait(30)
        deadline = time.monotonic() + 20
        while (left := {process for process in everybody if alive(process)}) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == set()
    finally:
        notebook.close()


def family(ancestor: int) -> set[int]:
    """All processes that descend from ``ancestor``."""
    found: set[int] = set()
    for child in Path(f"/proc/{ancestor}/task/{ancestor}/children").read_text().split():
        found |= {int(child)} | family(int(child))
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
