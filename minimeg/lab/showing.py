"""What a notebook shows besides numbers: pictures, and the package's own source.

A notebook never holds a copy of code that it explains: :func:`show_source` prints what will run. A picture is SVG text, with one
sentence beneath it that says what to see; the sentence is the picture's own ``<desc>``, which a screen reader reads out.

See it run: every notebook.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minimeg.lab.pages import Page


def show_source(*objects: Any) -> None:
    """Show the source of functions, classes or modules of the package, each under the name of its file."""
    from IPython import display

    page: Any = display
    parts = []
    for thing in objects:
        file = Path(inspect.getsourcefile(thing) or "")
        parts.append(
            f"`{_name_in_package(file)}`\n```python\n{textwrap.dedent(inspect.getsource(thing)).rstrip()}\n```"
        )
    page.display(page.Markdown("\n\n".join(parts)))


def show_picture(picture: str | Page, caption: str | None = None) -> None:
    """Show SVG text and its description (or ``caption`` instead; "" for none) beneath it; of a page, the lines beneath it."""
    from IPython import display

    page: Any = display
    svg, lines = (picture, ()) if isinstance(picture, str) else (picture.svg, picture.lines)
    page.display(page.SVG(svg))
    if caption is None and not lines:
        found = re.search(r"<desc>(.*?)</desc>", svg, re.DOTALL)
        caption = unescape(found[1]) if found else ""
    if caption:
        page.display(page.Markdown(f"*{caption}*"))
    if lines:
        print("\n".join(lines))


def _name_in_package(file: Path) -> str:
    package = Path(__file__).resolve().parent.parent
    return file.resolve().relative_to(package.parent).as_posix()
