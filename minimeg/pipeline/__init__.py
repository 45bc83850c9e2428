"""Executes a schedule: one executor for every one of them."""

from minimeg.pipeline.executor import run
from minimeg.pipeline.interface import Result, Stage
from minimeg.pipeline.recorder import Recorder

__all__ = ["Recorder", "Result", "Stage", "run"]
