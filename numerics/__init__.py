"""Questions about runs, answered from the files in their folders, without torch.

record   reads the folder of a run; options in which runs differ
table    all runs of a folder, one line each
page     one run on one screen
chart    losses of several runs as a picture or as text
traces   the files of --trace-numerics, and the difference of two of them row by row
places   which samples, micro-batches and ranks a row belongs to, and what is computed before it
diff     why two runs differ
spikes   a spike against the step before
states   which tensors of two checkpoints differ

runs.py calls all of them.
"""
