"""Pages that are made, not written: the course from the notebooks, the reference from the package, the benchmarks from their JSON."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOK_LINK = re.compile(r"\[([^\]]+)\]\((\d\d_\w+\.ipynb)\)")
BADGES = re.compile(r"^\[!\[.*$", re.MULTILINE)


def write(source: Path) -> None:
    root = source.parent
    replace(source / "course", course(root / "notebooks"))
    replace(source / "api", dict(reference(root / "minimeg")))
    keep(source / "benchmarks.md", benchmarks(source / "benchmarks.json"))


def replace(folder: Path, files: dict[str, str]) -> None:
    """Make ``folder`` hold exactly these; what is equal already keeps its time, so that Sphinx does not read it again."""
    folder.mkdir(exist_ok=True)
    for stale in [path for path in folder.iterdir() if path.name not in files]:
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    for name, text in files.items():
        keep(folder / name, text)


def keep(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


# ---- the course ----------------------------------------------------------------------------------------------------------------


def course(notebooks: Path) -> dict[str, str]:
    """The notebooks that exist, fit for the site, and their index."""
    names = sorted(path.name for path in notebooks.glob("[0-9][0-9]_*.ipynb"))
    files, rows = {}, []
    for name in names:
        page = json.loads((notebooks / name).read_text(encoding="utf-8"))
        words = ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "markdown"]
        title, question = heading(words)
        rows.append(f"| [{title}]({name}) | {question} |")
        files[name] = json.dumps(for_the_site(page, name, names), indent=1, ensure_ascii=False) + "\n"
    index = Path(__file__).with_name("course.md").read_text(encoding="utf-8")
    listed = "\n".join(Path(name).stem for name in names)
    files["index.md"] = index.format(
        table="\n".join(["| notebook | its question |", "|---|---|", *rows]), listed=listed
    )
    return files


def heading(words: list[str]) -> tuple[str, str]:
    """A notebook's title and the question beneath it."""
    lines = [line for line in "\n".join(words).splitlines() if line.strip()]
    title = next(line.removeprefix("# ") for line in lines if line.startswith("# "))
    question = next((line.strip("* ") for line in lines if line.startswith("**") and line.rstrip().endswith("**")), "")
    return title, question


def for_the_site(page: dict[str, Any], name: str, names: list[str]) -> dict[str, Any]:
    """Without badges (each is a request to another host), with a link to the notebook itself, and no link to one not yet written."""
    for cell in page["cells"]:
        if cell["cell_type"] == "markdown":
            text = BADGES.sub(
                f"Take it along and run it: {{download}}`{name} <{name}>`, or `make lab`.", "".join(cell["source"])
            )
            cell["source"] = NOTEBOOK_LINK.sub(lambda link: link[0] if link[2] in names else link[1], text)
    return page


# ---- the reference -------------------------------------------------------------------------------------------------------------


def reference(package: Path) -> Iterator[tuple[str, str]]:
    """One page for each room: a file of the package, or a folder with all its files."""
    rooms = []
    for path in sorted(package.iterdir()):
        modules = modules_of(path, package.parent)
        if modules:
            rooms.append(path.stem)
            title = f"minimeg.{path.stem}"
            parts = [f"# {title}", *(f"```{{eval-rst}}\n.. automodule:: {module}\n```" for module in modules)]
            if len(modules) > 1:
                parts = [f"# {title}"]
                for module in modules:
                    parts += [f"## {module}", f"```{{eval-rst}}\n.. automodule:: {module}\n```"]
            yield f"{path.stem}.md", "\n\n".join(parts) + "\n"
    listed = "\n".join(rooms)
    about = "Every public name, from its docstring; *[source]* shows the code. Which name stands where Megatron-LM has which function:"
    yield (
        "index.md",
        f"# Reference\n\n{about} [the dictionary](../dictionary.md).\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n",
    )


def modules_of(path: Path, root: Path) -> list[str]:
    files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py")) if path.is_dir() else []
    found = []
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 2:
            parts = parts[:-1]
        if parts[-1] not in ("__init__", "__main__"):
            found.append(".".join(parts))
    return found


# ---- benchmarks ----------------------------------------------------------------------------------------------------------------


def benchmarks(data: Path) -> str:
    """docs/benchmarks.json as tables; where nobody has measured yet, the page says so."""
    start = (
        "# Benchmarks\n\nWritten by `make bench` (tests/benchmarks). "
        "Ratios are formed within each round; the range is that of the middle half."
    )
    if not data.exists():
        nobody = "Nobody has measured yet on this checkout: `make bench` writes `docs/benchmarks.json`, from which this page is made."
        return f"{start}\n\n{nobody}\n"
    report = json.loads(data.read_text(encoding="utf-8"))
    about = ", ".join(f"{name}: {value}" for name, value in report["machine"].items())
    parts = [start, f"Measured on: {about}."]
    for section, content in report["sections"].items():
        parts += [f"## {section}", f"Load average before it began: {content['load']}; it took {content['seconds']} s."]
        rows = ["| setting | measured | ratio | bound | reached | equal |", "|---|---|---|---|---|---|"]
        rows += [benchmark_row(row) for row in content["rows"]]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def benchmark_row(row: dict[str, Any]) -> str:
    values = "<br>".join(f"{name}: {value['median']:.4g} {row['unit']}" for name, value in row["values"].items())
    ratios = "<br>".join(
        f"{name}: {r['median']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for name, r in row["ratios"].items()
    )
    met = {None: "no bound", True: "yes", False: "**no**"}[row["met"]]
    cells = [row["setting"], values, ratios, row["reach"], met, row["equal"]]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
