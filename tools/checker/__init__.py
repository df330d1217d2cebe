"""Is a change right in every layout? Runs of small models, compared with one rank in fp64.

shrink    the user's run at sizes that take the same paths through the code
thresholds  sizes from which the code takes another path, small too
corpora   small corpora of random documents, in the place of the user's
layouts   layouts that cover every pair of axes and options
variants  the runs of a check: the small run, and in some layouts other types or sizes
inference texts that are decoded and scored, compared with one rank's and with each other
ranks     worlds of ranks, forked from this process, that do one run after another
runs      one run on one rank: its losses, its tensors, and what the recorder has seen
recorder  every tensor of a step: inputs, outputs and gradients of modules, weights, state
alone     what one rank can check by itself: what tokens see, gradients against losses
rounding  how far rounding alone moves each tensor, and the updates that it decides
compare   the first tensor of a run that is not one rank's
causes    what such a difference usually is, and the operations before a tensor
drawn     runs drawn at random, for --random
programs  another program's file, its layouts and its mistakes
cuts      how another program cuts its tensors, read from them
program_recorder, program_runs, program_engine   what recorder, runs and engine are for Trine's own
modules   a module of a user's file as such a program
program_check  the check of such a program, on ranks of its own or on those of a launcher
launched  ranks that mpirun, srun or torchrun has started, in the place of forks
session   what a check prints while it runs, and its verdict as lines or JSON
engine    runs layouts in worlds of ranks, and compares each with one rank
report    the lines that check.py prints

The scales of a model, check.py --widths and --depths:

sizes        the user's model at several widths and depths
coordinates  the size of each tensor, activation and update, and how it grows with the model
transfer     the best learning rate at each size
scaling      options, tables, pictures and verdicts of the two

A cluster's first day, check.py --cluster:

cluster           agents on every rank of a launch, which run one part after the other
cluster_worker    the ranks of a part: measure the network, or do what engine does, in their world
card              what came of the parts, and the page of it
bandwidth         bandwidths, alpha and beta of timed collectives, and the line rate
timed_collectives times collectives of the groups of a layout, and pairs of nodes

check.py reads the command line and calls engine and report.
"""
