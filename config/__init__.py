"""The description of a run: its options, how they are read, and which go together. No torch.

schema          the options of model and layout, `Config` with all options, the axes of the mesh
run_options     the options of training, data and run
examples        values of an option that its declaration allows, for tests and random runs
command_line    flags and TOML to a `Config`, with what was given
regular_files   opens a file that may be a stranger's: regular files only, of limited size
families        config.json of transformers in and out (families.toml), shapes of runs
past            what a resumed run has done before: total samples and steps
stages          the stages of a run, and where each begins
learning_rate   the rate of every step
branches        a branch of a stable run in which the rate falls
inherited       the options that a resumed run takes from its checkpoint
spelling        models by name (presets.toml), names of Megatron-LM's options (other_names.toml)
validation      every check across options; an error shows both sides with their numbers
batch_schedule  samples per step, ramp-ups, samples that are skipped
model_stats     parameters and FLOPs of a model
dispatch        how often a token is sent to the nodes of its experts
tensors         names and shapes of the tensors of a model; how a changed model differs
block_kinds     these numbers for models whose blocks differ, in experts or in windows
block_attention what attention does in a block; the patterns that say which blocks have what
child_environment  the environment of a command that a run starts for its user
console         the commands of an installed Trine
errors          `UserError`, and how a program ends with one
cli             the parser and the version of every program, numbers with units
paths           files and folders that a program writes, checked before its work
"""
