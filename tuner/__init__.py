"""Measured search for the fastest layout: starts train.py as a process, a few steps at a time.

search_space   every layout worth a trial, as a command line
search         which trial next, and when to stop
trials         runs one, keeps its figures
sweeps         one axis with all its values, bounds by bisection
result_tables  table.md and results.csv; html_report: report.html
progress       what a person sees meanwhile
"""
