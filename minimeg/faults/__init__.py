"""A rank that fails: every process ends within seconds, and one summary says who failed first, where and when.

    with watch(state) as box:                  each rank watches the others of its host
        for step in range(steps):
            box.enter("data", step)            what it is busy with, for the summary
            ...

    blackbox.py      what a rank leaves behind: a mapped file, and a lock that death lets go of
    watcher.py       the thread that looks at the others' boxes, and ends the process
    postmortem.py    who failed first, and how to tell it
    injection.py     MINIMEG_FAULT=rank:step:phase:kind, a failure on purpose

What goes wrong without it (pytorch issues 76287, 113546): survivors wait for half an hour, and the rank that is blamed is often a
neighbour, whose "connection closed by peer" is only a consequence. Ranks on other hosts are not seen.

See it run: ``MINIMEG_FAULT=2:3:forward:kill python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2``.
"""

from minimeg.faults.blackbox import BOX, PHASES
from minimeg.faults.injection import Fault, InjectedFault
from minimeg.faults.watcher import watch

__all__ = ["BOX", "PHASES", "Fault", "InjectedFault", "watch"]
