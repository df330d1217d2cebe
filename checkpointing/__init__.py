"""HDF5 checkpoints that do not depend on the layout, and weights in other formats.

file_format   the HDF5 files: shards and index, and writing them
index         reads index.h5, and any part of a tensor from the shards
folders       the folder of a checkpoint: manifest, names, publishing, retention
writer        writes one save, mostly in the background
save          `Checkpointer`: saves and loads a run while training continues
after_save    runs the command of --after-save for each complete checkpoint
resumed       the checkpoint that --resume means; options and past of its run
load          reads a checkpoint under any layout
state         what a rank saves of a run: `Progress`, the parts of tensors that it has, sizes
model_record  what a model is beyond its shape: special tokens, context, window, tokenizer
weights_only  checkpoints without optimizer state
merge         the weighted mean of checkpoints
hf_export     Hugging Face weights, out and in; rules that convert their tensors and ours
hf_mixers     the tensors of mixers there: in which order their rows are
hf_scales     scales of muP folded into weights, for families without fields for them
hf_buffers    tensors of such folders that become no parameter, each compared with what it should be

A run uses `Checkpointer` and `Progress`; checkpoint.py all but writer, save and load.
"""
