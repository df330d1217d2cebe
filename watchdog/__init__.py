"""Who hangs or died, and why: every rank is watched, and the whole job ends with a report.

flight_recorder  what each rank does and did last; used by the groups of `distributed`
heartbeat        each rank's connection to the monitor; started by distributed.context
monitor          the process that watches all ranks (python -m watchdog.monitor)
wait_graph       who waits for whom, and where the waits end
hang_report      the report in words, and its files
"""
