"""Checkpoints that know no layout, and weights in other formats.

file_format   files of a checkpoint, written and read
save          saves a run while training goes on
load          reads a checkpoint under any layout
hf_export     Hugging Face weights, in and out
hf_mappings   tensor names and shapes of the families there
"""
