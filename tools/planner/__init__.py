"""Answers questions about layouts, budgets and shapes by the formulas of costs/. No torch, no GPU.

enumeration     every layout that train.py takes, as a table of columns
closed_form     seconds and bytes of every row, without its schedule
layouts         the fastest rows, each simulated; all others rejected with a reason
engines         what other training programs do otherwise than Trine: facts in engines.toml, and
                terms in place of Trine's; expert_engines: those of models with experts
program         another training program: facts, options, command; programs (--for) has those of
                megatron_words, torchtitan_words and bridge_words, releases each release's options
scaling_laws    tokens and loss of a model by Chinchilla's law and a newer one; batch and rate
recipe          the run file of a budget with muP, and the small runs before it; ladder: their fit
model_sizes     the largest model, and the fewest nodes
growth          a ramp-up of the batch in stages of nodes: the fastest layout of each
gap             where a run's time went, which flags win it back
flags           the planner's own flags: meaning and limits; plan.py says which question reads them
questions       what a question and an answer are
found_layouts   the layouts of a question, ranked, as data; layout_table renders them, and
                layout_commands writes their commands
duration_questions, layout_questions, model_questions, compare, budget, shapes
                the other questions; cost: money
batch_file      a Slurm batch file for a layout
run_files       reads measured runs; calibration refits a machine's constants to them, and measured
                corrects predictions by them, against what is known of the constants before
"""
