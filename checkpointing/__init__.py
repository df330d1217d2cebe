"""HDF5 checkpoints that do not depend on the layout, and weights in other formats.

file_format   the HDF5 files: shards, index, reading any part of a tensor
folders       the folder of a checkpoint: manifest, names, publishing, retention
writer        writes one save, mostly in the background
save          `Checkpointer`: saves and loads a run while training continues
load          reads a checkpoint under any layout; `Progress` of a run
hf_export     Hugging Face weights, out and in
hf_mappings   tensor names and shapes of the Hugging Face families

A run uses `Checkpointer` and `Progress`; checkpoint.py uses file_format, folders and hf_export.
"""
