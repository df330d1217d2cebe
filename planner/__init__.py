"""Predicts what fits and how fast, for any layout on any machine: arithmetic, no torch, no GPU.

hardware        machines: rates, links, coefficients, from hardware/*.toml
job             what every formula takes
op_costs        seconds of GEMMs, attention, memory traffic, collectives
time_terms      every term of a step's seconds; step_time: with the simulated schedule, a step's
memory_terms    every term of a GPU's bytes; memory: of each stage
risk            intervals, and the probability that a layout does not fit
enumeration     every layout that train.py takes, as a table of columns
closed_form     seconds and bytes of every row, without its schedule
layouts         the fastest rows, each simulated; all others rejected with a reason
model_sizes     the largest model, the fewest nodes, and shapes that suit the hardware
growth          a ramp-up of the batch in stages of nodes, fewest GPU-hours by a deadline
gap             where a run's time went, which flags win it back; measured_steps simulates it
flags           the planner's own flags: what each means, its limits; plan.py says who reads it
questions       what a question and an answer are; layout_table: all layouts, picture draws them;
                duration_questions; of one layout: layout_questions; of models: model_questions;
                cost, compare
run_files       runs that were measured; calibration refits a machine's constants from them
"""
