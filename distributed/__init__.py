"""Ranks: how they are started, meet, are placed, form groups, and end.

launch           which launcher started this process, as which rank
rendezvous       how ranks meet; context: this process among all, and how a job ends
placement        node, cores and GPU of each rank
mesh             the axes pp, dp, cp, tp and this rank's groups on them
collectives      what a group does together
store            small values between ranks without a collective
preflight        fast checks of every node before the first step
stop_conditions  signals, files and limits that end or save a run early
"""
