"""Seconds and bytes of a layout on a machine: arithmetic, no torch, no GPU.

hardware        machines: rates, links, coefficients, from hardware/*.toml
job             the argument of every formula: model, layout, training options and machine
op_costs        seconds of GEMMs, attention, memory traffic, collectives
time_terms      every term of a step's seconds; step_time adds them, with the simulated schedule
memory_terms    every term of a GPU's bytes; memory adds them for each pipeline rank
mixer_terms     seconds and bytes of the mixers in the place of attention
muon_terms      seconds and bytes of Muon's iteration and of its exchange of matrices
partition_costs the stages of a layout, by the seconds of embedding, block and head
auto_schedule   what --schedule auto chooses
run_size        how much a run holds on one rank, estimated
distances       how far a layout is from measured runs, which widens its interval
networks        networks between nodes by name, and what rings reach on them
risk            intervals, quantiles, and the probability that a layout does not fit
"""
