"""Predicts what fits and how fast, for any layout on any machine: arithmetic, no torch, no GPU.

hardware        machines: rates, links, coefficients, from hardware/*.toml
job             the argument of every formula: model, layout, training options and machine
op_costs        seconds of GEMMs, attention, memory traffic, collectives
time_terms      every term of a step's seconds; step_time adds them, with the simulated schedule
memory_terms    every term of a GPU's bytes; memory adds them for each pipeline rank
partition_costs the stages of a layout, by the seconds of embedding, block and head
muon_terms      seconds and bytes of Muon's iteration and of its exchange of matrices
auto_schedule   what --schedule auto chooses
risk            intervals, and the probability that a layout does not fit
enumeration     every layout that train.py takes, as a table of columns
closed_form     seconds and bytes of every row, without its schedule
layouts         the fastest rows, each simulated; all others rejected with a reason
engines         what other training programs do otherwise than Trine: facts in engines.toml, and
                terms in place of Trine's; expert_engines: those of models with experts
program         another training program: facts, options, command; programs (--for) has those of
                megatron_words and torchtitan_words
scaling_laws    tokens and loss of a model by Chinchilla's law and a newer one
model_sizes     the largest model, and the fewest nodes
growth          a ramp-up of the batch in stages of nodes: the fastest layout of each
gap             where a run's time went, which flags win it back
flags           the planner's own flags: meaning and limits; plan.py says which question reads them
questions       what a question and an answer are; the questions are in layout_table (picture draws
                it), duration_questions, layout_questions, model_questions, compare, budget and
                shapes; cost: money
batch_file      a Slurm batch file for a layout
web_page        an HTML page of one file with tables and pictures, everything in it escaped
run_files       reads measured runs; calibration refits a machine's constants to them
"""
