"""The published values that schedules are held against; copied extracts, see ``_schema`` and ``source`` in the files."""

import json
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data"

MEGATRON = json.loads((_DATA / "schedules.json").read_text(encoding="utf-8"))
PAPERS = json.loads((_DATA / "papers_schedules.json").read_text(encoding="utf-8"))
