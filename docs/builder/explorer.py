"""The schedule explorer: pictures for its first sliders, and the package itself for the Python that a click starts."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

from builder.pyodide import CACHE
from minimeg.lab.pages import schedule_page

NAMES = ("1f1b", "gpipe", "interleaved", "zb-h1")
STAGES, MICROBATCHES = range(1, 7), range(1, 13)
# The pure rooms, and of the laboratory what draws.
PACKED = (
    "__init__.py",
    "grid.py",
    "grid_drawing.py",
    "svg.py",
    "schedule",
    "cost",
    "lab/__init__.py",
    "lab/pages.py",
    "lab/drawings",
)
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # equal sources, equal archive


def write(folder: Path, source: Path) -> None:
    """Fill ``folder``: pictures, what is said beneath them (data.js), and where it was fetched, Python."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    said = {}
    for name in NAMES:
        for p in STAGES:
            for m in MICROBATCHES:
                key = f"{name}-{p}-{m}"
                try:
                    page = schedule_page(name, p, m, 2 if name == "interleaved" else 1)
                except ValueError as error:
                    said[key] = {"error": str(error)}
                    continue
                said[key] = {"lines": page.lines}
                (folder / f"{key}.svg").write_text(page.svg, encoding="utf-8")
    python = CACHE.is_dir()
    if python:
        shutil.copytree(CACHE, folder / "pyodide")
        pack(source.parent / "minimeg", folder / "minimeg.zip")
    data = {"names": NAMES, "stages": max(STAGES), "microbatches": max(MICROBATCHES), "python": python, "said": said}
    # A script, not JSON: a page that was opened as a file may load scripts and pictures, and nothing else.
    (folder / "data.js").write_text(f"window.minimegExplorer = {json.dumps(data)};\n", encoding="utf-8")


def pack(package: Path, target: Path) -> None:
    files = sorted(
        path
        for name in PACKED
        for path in ([package / name] if (package / name).is_file() else (package / name).rglob("*.py"))
    )
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(package.parent).as_posix(), LONG_AGO)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
