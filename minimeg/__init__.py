"""minimeg: Megatron-LM's parallelism, small enough to hold in the head.

Importing the package imports nothing else: the pure rooms (``minimeg.grid``, ``minimeg.schedule``, ``minimeg.cost``) run
without torch, also in a browser. Read them in the order of docs/; every file opens with what it teaches.
"""

__version__ = "0.1.0"
