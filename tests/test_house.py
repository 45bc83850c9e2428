"""The rules of the house, each checked: what may import what, who communicates, how long things may be, what lies where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minimeg"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PURE = ["minimeg", "minimeg.grid", "minimeg.schedule", "minimeg.cost", "minimeg.svg"]

TOP_LEVEL = [
    ".ci",
    ".github",
    ".gitignore",
    ".pre-commit-config.yaml",
    "LICENSE",
    "Makefile",
    "README.md",
    "README.zh.md",
    "constraints.txt",
    "docs",
    "minimeg",
    "notebooks",
    "pyproject.toml",
    "tests",
]

LONGEST_MODULE, LONGEST_FUNCTION, LONGEST_DEMO = 320, 60, 40

# What any file may take from torch.distributed: questions, types and errors. Nothing here sends a byte.
QUESTIONS = [
    "QueueEmptyError",
    "is_available",
    "is_initialized",
    "get_rank",
    "get_world_size",
    "get_backend",
    "get_process_group_ranks",
    "group",
    "ProcessGroup",
    "ReduceOp",
    "Store",
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "QueueEmptyError",
    "get_error_handler",
    "record",
    "TCPStore",
    "HashStore",
    "PrefixStore",
]
# Who makes and ends process groups, besides comm.py.
LIFETIME = [
    "init_process_group",
    "destroy_process_group",
    "new_group",
    "_abort_process_group",
    "_world",
    "_get_default_store",
    "rendezvous",
]
MAKERS = {"dry_run.py", "comm.py", "parallel_state.py", "train.py", "lab/groups.py"}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


# ---- what may import what ----------------------------------------------------------------------------------------------------


def imported_by(module: str, folder: Path = ROOT) -> set[str]:
    """The top-level names of all modules that a fresh Python has loaded after importing ``module``."""
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("module", PURE)
def test_pure_rooms_load_nothing_but_the_standard_library(module: str) -> None:
    foreign = imported_by(module) - imported_by("math") - set(sys.stdlib_module_names) - {"minimeg"}
    assert foreign == set()


def test_every_file_of_the_pure_rooms_is_pure() -> None:
    """Also those that the room's front door does not import, such as its command line."""
    files = [
        PACKAGE / "grid.py",
        PACKAGE / "grid_drawing.py",
        PACKAGE / "svg.py",
        *(PACKAGE / "schedule").rglob("*.py"),
        *(PACKAGE / "cost").rglob("*.py"),
    ]
    allowed = set(sys.stdlib_module_names) | {"minimeg"}
    faults = []
    for path in files:
        for module in imports_of(tree_of(path)):
            if module.split(".")[0] not in allowed:
                faults.append(f"{name_of(path)} imports {module}")
            elif module.startswith("minimeg.") and not module.startswith(tuple(PURE[1:])):
                faults.append(f"{name_of(path)} imports {module}, a room above it")
    assert faults == []


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield node.module or ""


# ---- who communicates --------------------------------------------------------------------------------------------------------


def taken_from_distributed(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of everything that a file uses of torch.distributed, under whichever name it imported it."""
    aliases = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if "distributed" in alias.name and alias.name.startswith("torch"):
                    aliases.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                if alias.name == "distributed" or (alias.name == "nn" and node.module == "torch.distributed"):
                    aliases.add(alias.asname or alias.name)
                elif "distributed" in (node.module or ""):
                    yield alias.name, node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases and node.attr != "distributed":
            yield node.attr, node.lineno
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops.") and "c10d" in node.attr:
            yield node.attr, node.lineno


def trespasses(path: str, tree: ast.AST) -> list[str]:
    allowed = {*QUESTIONS, *(LIFETIME if path in MAKERS else [])}
    return [f"{path}:{line} {name}" for name, line in taken_from_distributed(tree) if name not in allowed]


def test_only_comm_communicates() -> None:
    found = [
        fault for path in SOURCES if name_of(path) != "comm.py" for fault in trespasses(name_of(path), tree_of(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch.distributed\ntorch.distributed.broadcast(x, 0)",
        "import torch\ntorch.distributed.send(x, 0)",
        "from torch import distributed as d\nd.isend(x, 0)",
        "from torch.distributed import barrier",
        "from torch.distributed import *",
        "from torch.distributed.distributed_c10d import all_gather_object",
        "import torch.distributed._functional_collectives as funcol\nfuncol.all_reduce(x, 'sum', g)",
        "from torch.distributed import nn\nnn.all_reduce(x)",
        "import torch.distributed as dist\ndef late():\n    return dist.irecv",
        "import torch\ntorch.ops._c10d_functional.all_reduce(x, 'sum', 'g')",
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
    ],
)
def test_the_search_for_communication_finds_it(code: str) -> None:
    assert trespasses("layers.py", ast.parse(code)) != []


# ---- how long things may be --------------------------------------------------------------------------------------------------


def test_no_module_is_too_long() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE} == {}


def test_no_function_is_too_long() -> None:
    found = {}
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    found[f"{name_of(path)}:{node.name}"] = lines
    assert found == {}


def test_demos_fit_on_a_page() -> None:
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (PACKAGE / "demos").glob("*.py")
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_DEMO} == {}


def test_no_global_state() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_every_file_says_what_it_is() -> None:
    found = [name_of(path) for path in SOURCES if len((ast.get_docstring(tree_of(path)) or "").split()) < 5]
    assert found == []


# ---- what lies where ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files belong to the repository")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_the_top_level_is_tidy(tracked: list[str]) -> None:
    assert {name.split("/")[0] for name in tracked} - set(TOP_LEVEL) == set()


# Written in pieces, so that this file does not name what it forbids.
HOSTS = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("pytorch", "org/whl"), ("npmjs", "org"),
                                       ("npmjs", "com"), ("anaconda", "org"), ("deb.debian", "org"), ("ghcr", "io"))]  # fmt: skip
FOLDERS = ["/" + name for name in ("work/", "root/", "tmp/s/", "home/", "Users/", "opt/wheels")]
FORBIDDEN = re.compile("|".join([*(rf"(?<![\w.~-]){re.escape(name)}" for name in FOLDERS), *map(re.escape, HOSTS)]))


def test_no_file_names_this_machine_or_a_registry(tracked: list[str]) -> None:
    found = [
        f"{name}:{number} {match[0]}"
        for name in tracked
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8", errors="ignore").splitlines(), 1)
        for match in FORBIDDEN.finditer(line)
    ]
    assert found == []


def test_the_search_for_names_finds_them() -> None:
    for name in [*FOLDERS, *HOSTS]:
        assert FORBIDDEN.search(f'"{name}x"')
    assert not FORBIDDEN.search("docs/work/flow and network/ and a/home/page")
