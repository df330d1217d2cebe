"""Keeps a run going inside its allocation: starts its ranks again when a fault has ended them.

command       the command that starts the ranks, the run's --out, and the nodes of the Slurm job
evidence      the reason why the ranks ended, read from the files of the run
decisions     the next action, by pure functions of the evidence and of earlier decisions
fewer         a layout for fewer nodes, found by plan.py and rehearse.py
session       starts the ranks, waits, decides, and starts them again

Read `evidence` and `decisions` first; `session` calls both.
"""
