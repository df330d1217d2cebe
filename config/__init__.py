"""What a run is: its options, how they are read, and which go together. No torch.

schema          the dataclasses of all options, and the axes of the mesh of ranks
command_line    flags and TOML to a `Config`, with what was given
validation      every check across options; both sides of a mistake with their numbers
presets         models by name
batch_schedule  samples per step, ramp-ups, samples that are passed over
model_stats     parameters and FLOPs of a model
messages        `UserError`, and how a mistake is told
"""
