"""Answers questions about runs from the files in their folders, without torch.

record   reads the folder of a run; options in which runs differ
table    all runs of a folder, one line each
page     one run on one screen
run_page what a person looks at in the morning: loss, tasks, speed, rate, corpora, on one page
chart    losses of several runs as a picture or as text
checks   types and sizes of values that a file says
traces   the files of --trace-numerics, and the differences of two files, tensor by tensor
places   which ranks compute a tensor of a trace, by which operations, and from which samples
diff     why two runs differ
layers   a picture of the differences by layer and step
spikes   the growth of gradients in a spike, against the step before
states   which tensors of two checkpoints differ

runs.py calls all of them.
"""
