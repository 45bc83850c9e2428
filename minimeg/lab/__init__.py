"""The laboratory: a pool of ranks, the ``%%spmd`` cell magic, checks that print, pictures and widgets.

``%load_ext minimeg.lab`` in a notebook defines the magic ``%%spmd`` and the functions ``pull`` and ``push``; see
``notebooks/00_start_here.ipynb``.
"""

from __future__ import annotations

from typing import Any

# Name -> module. Imported when used: tests want the pool without IPython, and a plain import should cost nothing.
_WHERE = {
    "RankError": "minimeg.lab.report",
    "Ranks": "minimeg.lab.ranks",
    "bet": "minimeg.lab.checks",
    "broken": "minimeg.lab.checks",
    "check": "minimeg.lab.checks",
    "exercise": "minimeg.lab.exercises",
    "memory_calculator": "minimeg.lab.widgets",
    "memory_page": "minimeg.lab.pages",
    "pool": "minimeg.lab.spmd",
    "pull": "minimeg.lab.spmd",
    "push": "minimeg.lab.spmd",
    "rank_explorer": "minimeg.lab.widgets",
    "rank_page": "minimeg.lab.pages",
    "schedule_explorer": "minimeg.lab.widgets",
    "schedule_page": "minimeg.lab.pages",
    "sharding_page": "minimeg.lab.pages",
    "sharding_stepper": "minimeg.lab.widgets",
    "show_picture": "minimeg.lab.showing",
    "show_source": "minimeg.lab.showing",
    "table_of_checks": "minimeg.lab.checks",
}
__all__ = sorted([*_WHERE, "load_ipython_extension"])


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext minimeg.lab``."""
    from minimeg.lab.spmd import load

    load(shell)
