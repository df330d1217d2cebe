"""Measured search for the fastest layout: starts train.py as a process, a few steps at a time.

session        one use of the tuner: what is asked, what is measured, the budget, the report
search_space   every layout that can run, as a command line of train.py
search         which layout to measure next, and when to stop
trials         rehearses and runs one trial, stores it, and how much trials vary
result_tables  table.md, results.csv and layouts.svg

tune.py uses `session`; benchmarks replay measured rows with `search`.
"""
