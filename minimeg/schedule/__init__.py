"""Pipeline schedules as data: one object that is drawn, simulated, proven and executed. Pure Python, nothing imported."""

from minimeg.schedule.actions import Action, Schedule, ScheduleError
from minimeg.schedule.timeline import Span, Timeline

__all__ = ["Action", "Schedule", "ScheduleError", "Span", "Timeline"]
