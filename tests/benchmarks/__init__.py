"""Measured against what others built: ``python -m tests.benchmarks`` (``make bench``) prints one table and writes
docs/benchmarks.json.

How it is measured. Contenders run in one process group and take turns, round after round, in alternating order; what counts is
the median over the rounds and the ratio of two contenders *within* a round, with its quartiles. In the same run each contender's
results are compared: a quick wrong answer is no answer. Absolute times depend on the machine and on who else uses it (the load
average is printed).
"""
