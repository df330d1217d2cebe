"""Keeps a run going inside its allocation: starts its ranks again when a fault has ended them.

command       what `supervise.py` is given: the launcher, the run's --out, its place in Slurm
evidence      why the ranks ended, from the files of the run
decisions     what to do about it: pure functions of the evidence and of earlier decisions
fewer         the layout for fewer nodes: asks plan.py and rehearse.py
session       start, wait, decide, start again
"""
