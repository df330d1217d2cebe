"""What fits and how fast, for any layout on any machine: arithmetic, no torch, no GPU.

hardware        machines: rates, links, software, from hardware/*.toml
job             a model, a layout, training and a machine: what every formula takes
op_costs        seconds of GEMMs, attention, memory traffic, collectives
step_time       seconds of a step, from the simulated schedule
memory          bytes of each stage's GPU
risk            intervals, and the probability of running out of memory
layouts         every layout, ranked or rejected with a reason
growth          a ramp-up of the batch in stages of nodes, fewest GPU-hours by a deadline
questions       what plan.py answers, as text and as data
"""
