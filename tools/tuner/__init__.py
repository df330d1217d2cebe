"""Measured search for the fastest layout: starts train.py as a process, a few steps at a time.

session        one use of the tuner: reads the command line, measures layouts, writes the report
search_space   the layouts that can run, as configurations of train.py
search         chooses the layout to measure next, and when to stop
trials         runs and stores a trial; estimates how much repeated trials vary
result_tables  table.md, results.csv and layouts.svg
report_page    report.html: predicted and measured, the table, where the search stopped and why

tune.py uses `session`; benchmarks replay measured rows with `search`.
"""
