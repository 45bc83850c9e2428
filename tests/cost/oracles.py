"""The published values that the formulas are held against: a copied extract, see ``_schema`` and ``source`` in the file."""

import json
from pathlib import Path

PAPERS = json.loads((Path(__file__).parents[1] / "data" / "papers.json").read_text(encoding="utf-8"))


def cases(name):
    """The tests of one entry."""
    return PAPERS[name]["tests"]


def rows(name):
    """The rows of its table."""
    return PAPERS[name]["data"]["rows"]


def inputs(test):
    """A short name for pytest."""
    return str(test["inputs"])
