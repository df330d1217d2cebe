"""Questions about runs that are over, answered from their files, without torch.

traces   the files of --trace-numerics, and the difference of two of them row by row
places   which samples, micro-batches and ranks a row belongs to, and what is computed before it
diff     why two runs differ

runs.py calls all of them.
"""
