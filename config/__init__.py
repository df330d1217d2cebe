"""The description of a run: its options, how they are read, and which go together. No torch.

schema          the options of the layout, `Config` with all options
mesh_axes       the axes of the mesh, and the position of a rank on them
buffer_sizes    sizes of gradient buckets, and of the logits of a loss
run_options     the options of training, data and run
optimizers      the traits of each optimizer
examples        values of an option that its declaration allows, for tests and random runs
command_line    flags and TOML to a `Config`, with what was given
timeline        when a run does what: batch, length and phase of a sample, its steps, its end
past            what a resumed run has done before: total samples and steps
phases          the phases of a run, and where each begins
run_lengths     lengths that options give, compared with what the run consumes
learning_rate   the rate of every step
branches        a branch of a stable run in which the rate falls
corpus_record   what a corpus says of its tokens: its end, its largest id, special tokens
inherited       the options that a resumed run takes from its checkpoint
spelling        models by name (presets.toml), names of Megatron-LM's options (other_names.toml)
validation      every check across options; an error shows both sides with their numbers
run_paths       checks of the paths that a run reads and writes
batch_schedule  samples per step, ramp-ups, samples that are skipped
"""
