"""Finds the rank that hangs or died, and ends the whole job with a report.

flight_recorder  what each rank does and did last; written by the groups of `distributed`
handshake        how the monitor recognises the ranks, and what other connections may cost
heartbeat        each rank's connection to the monitor; started by distributed.context
monitor          the process that watches all ranks; started by heartbeat
hang_report      the report as text and as files (python -m watchdog.hang_report OUT)

From outside: FlightRecorder, GroupLog, Watchdog, start_monitor.
"""
