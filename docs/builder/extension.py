"""Our part of Sphinx: generated sources before it reads, docstrings as it reads, alternative texts and MathML as it writes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes

from builder import explorer, pages, pictures

SECTION = re.compile(r"^\s*(Args|Arguments|Attributes|Raises|Returns|Yields|Example|Examples|Note)\s*:\s*$")
LITERAL = re.compile(r"``.+?``|:\w+:`[^`]+`")


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(block_math, None))
    app.add_role("notebook", notebook)
    app.connect("builder-inited", generate)
    app.connect("autodoc-process-docstring", plain_to_rst, priority=400)  # before napoleon's 500
    app.connect("doctree-read", describe_pictures)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": False}


def notebook(name: str, rawtext: str, text: str, lineno: int, inliner: Any, *rest: Any) -> tuple[list[Any], list[Any]]:
    """``{notebook}`02` ``: a link to that notebook, or, while it is not written, its number."""
    env = inliner.document.settings.env
    found = sorted((Path(env.srcdir) / "course").glob(f"{text}_*.ipynb"))
    if not found:
        return [nodes.Text(f"notebook {text} (not written yet)")], []
    target = {"refdoc": env.docname, "refdomain": "std", "reftype": "doc", "reftarget": f"/course/{found[0].stem}"}
    link = addnodes.pending_xref(
        rawtext, nodes.inline("", f"notebook {text}"), refexplicit=True, refwarn=True, **target
    )
    return [link], []


def generate(app: Any) -> None:
    source = Path(app.srcdir)
    pictures.write(source / "pictures")
    pages.write(source)


def finish(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        explorer.write(Path(app.outdir) / "_static" / "explorer", Path(app.srcdir))


# ---- docstrings ----------------------------------------------------------------------------------------------------------------


def plain_to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are written to be read as they stand: a table or some code is simply indented. reST wants to be told."""
    lines[:] = literal_blocks(lines)


def literal_blocks(lines: list[str]) -> list[str]:
    """Mark what is indented after an empty line as literal; elsewhere put out of action what only looks like markup."""
    found: list[str] = []
    inside: int | None = None  # indentation of the literal block we are in
    section = False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        before = lines[number - 1] if number else ""
        if inside is not None and line.strip() and indent < inside:
            inside = None
            if found[-1].strip():
                found.append("")
        if SECTION.match(line):
            section = True
        elif section and line.strip() and indent == 0:
            section = False
        starts = inside is None and not section and line.strip() and indent > 0
        if starts and (not before.strip() or not found) and not line.lstrip().startswith(">>>"):
            inside = indent
            found += ["::", ""]
        found.append(line if inside is not None or line.lstrip().startswith(">>>") else escape(line))
    return found


def escape(line: str) -> str:
    """``a_`` is no link, ``|x|`` no substitution and ``*args`` no emphasis; what stands in ``literals`` stays."""
    parts, end = [], 0
    for literal in [*LITERAL.finditer(line), None]:
        words = line[end : literal.start() if literal else None]
        words = re.sub(r"(?<=\w)_(?!\w)", r"\\_", words)
        words = words.replace("|", r"\|")
        words = re.sub(r"(?<![\w*])\*(?=\w+\b(?![^*]*\*))", r"\\*", words)
        parts += [words, literal[0] if literal else ""]
        end = literal.end() if literal else end
    return "".join(parts)


# ---- pictures and formulas -----------------------------------------------------------------------------------------------------


def describe_pictures(app: Any, doctree: nodes.document) -> None:
    """Our pictures say what there is to see; that is their alternative text."""
    for image in doctree.findall(nodes.image):
        uri = image["uri"]
        if uri.endswith(".svg") and not image.get("alt"):
            places = [Path(app.srcdir) / uri.lstrip("/"), Path(uri), Path(app.outdir) / uri]
            path = next((place for place in places if place.is_file()), None)
            if path is not None:
                image["alt"] = pictures.description(path.read_text(encoding="utf-8"))


def inline_math(self: Any, node: Any) -> None:
    self.body.append(mathml(node.astext(), block=False))
    raise nodes.SkipNode


def block_math(self: Any, node: Any) -> None:
    self.body.append(f'<div class="math">{mathml(node.astext(), block=True)}</div>\n')
    raise nodes.SkipNode


def mathml(tex: str, block: bool) -> str:
    drawn = tex2mathml(
        re.sub(r"\\dots\b", r"\\ldots", tex), as_block=block
    )  # the one command of ours that docutils lacks
    drawn = re.sub(r"&(?!lt;|gt;|amp;|#)\w+;", lambda entity: unescape(entity[0]), drawn)
    ElementTree.fromstring(drawn)  # a formula that came out broken stops the build
    return str(drawn)
