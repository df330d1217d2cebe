"""Ranks: how they start, meet, are placed, form groups and communicate, and how a job ends.

launch           the launcher of this process, its rank and the number of ranks
other_launchers  what variables of launchers that are not known here say of this process
early_end        how a rank that fails, dies or is stopped before its first step ends the whole job
rendezvous       devices and cores, the store, process groups: how ranks meet
context          this process among all ranks; how a job ends
placement        node, cores and GPU of each rank
gpus             the GPU that a rank takes
network_variables  the network between nodes, and the variables that its libraries read
mesh             the axes pp, dp, cp, tp and this rank's groups on them
collectives      the operations of a group
context_parallel attention of ranks that share the tokens of a sample
token_exchange   tokens on their way to experts on other ranks
node_dispatch    the same with one copy of a token to each node
store            the job's key-value store: opened safely; small values without a collective
run_lock         one run at a time in an --out folder
preflight        what is said and checked before step 1: places, nodes, groups, room, compiler
heap             one heap of memory for all threads
garbage          Python's garbage collector, at the same steps on all ranks
parent_death     processes that end with their parent
local_ranks      ranks that a program forks from itself, on one machine
stop_conditions  signals, files and limits that end or save a run early
"""
