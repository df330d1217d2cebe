"""Programs beside the engine: they import it, and no file of the engine imports one of them.

planner     answers questions about layouts, budgets and shapes, also for other programs
tuner       searches for the fastest layout by short runs
checker     is a change right in every layout?
emulator    any rank of any world without its cluster, on fake GPUs
numerics    which runs are there, and why do two of them differ?
supervisor  keeps a job going inside its allocation
report      tables, pictures and pages of all of them
"""
