"""Pipeline schedules as data: one object that is drawn, simulated, proven and executed. Pure Python, nothing imported.

>>> from minimeg.schedule import one_f_one_b, prove, simulate
>>> prove(one_f_one_b(4, 8)).peak_in_flight
(4, 3, 2, 1)
>>> simulate(one_f_one_b(4, 8)).bubble_of_ideal
0.375
"""

from minimeg.schedule.actions import Action, Schedule, ScheduleError
from minimeg.schedule.catalogue import NAMES, build
from minimeg.schedule.dualpipe import dualpipe_v
from minimeg.schedule.messages import Free, Recv, Run, Send, Step, Transfer, plan
from minimeg.schedule.orders import forward_only, gpipe, interleaved, one_f_one_b
from minimeg.schedule.pipedream import pipedream, pipedream_2bw
from minimeg.schedule.proof import Proof, prove
from minimeg.schedule.simulation import simulate
from minimeg.schedule.timeline import Span, Timeline
from minimeg.schedule.zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v

__all__ = [
    "NAMES",
    "Action",
    "Free",
    "Proof",
    "Recv",
    "Run",
    "Schedule",
    "ScheduleError",
    "Send",
    "Span",
    "Step",
    "Timeline",
    "Transfer",
    "build",
    "dualpipe_v",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "plan",
    "prove",
    "simulate",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
]
