"""Fetch the Python that runs in a browser, once: ``python docs/builder/pyodide.py``, called by ``make docs``.

The package is pinned by version and digest, so the site is the same wherever it is built. Without npm, or without a network, the site
is built all the same: its schedule explorer then shows prepared pictures only.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "314.0.8"
SHA512 = (
    "ef85aad645ce0be08213301fc6e4403bbd359c070230b8dff0daf0bd6a6ef12e"
    "35755317c1798b434e5d601f85e1ee3a01d9c6a34a2aed81d2554a47b286ab2d"
)
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json", "README.md")
CACHE = Path(__file__).resolve().parent.parent / "_build" / f"pyodide-{VERSION}"


def fetch() -> str:
    """-> why there is no Python for the browser, or "" if there is."""
    if CACHE.is_dir():
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", f"pyodide@{VERSION}", "--silent", "--pack-destination", scratch]
        try:
            subprocess.run(command, check=True, timeout=300, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"npm could not fetch it ({type(error).__name__})"
        (archive,) = Path(scratch).glob("*.tgz")
        digest = hashlib.sha512(archive.read_bytes()).hexdigest()
        if digest != SHA512:
            return f"its digest is {digest}, not the pinned one; it is not used"
        unpack(archive, CACHE)
    return ""


def unpack(archive: Path, target: Path) -> None:
    """All or nothing: a folder that is there is complete."""
    partial = target.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:
        for name in FILES:
            content = packed.extractfile(f"package/{name}")
            assert content is not None, name
            (partial / name).write_bytes(content.read())
    partial.rename(target)


if __name__ == "__main__":
    reason = fetch()
    if reason:
        print(f"*** the explorer will not run Python in the browser: {reason} ***", file=sys.stderr)
