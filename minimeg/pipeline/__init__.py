"""Executes a schedule: one executor for every one of them."""

from minimeg.pipeline.executor import Result, Stage, run
from minimeg.pipeline.recorder import Recorder

__all__ = ["Recorder", "Result", "Stage", "run"]
