"""What a model is: its shape, tensors, parameters and FLOPs, and the families of transformers.

shape            the options that say what model it is, `ModelShape`
block_attention  what attention does in a block; the patterns that say which blocks have what
block_kinds      numbers of models whose blocks differ, in experts, mixers or windows
multipliers      factors of a block's results and projections
mixer_stats      tensors, parameters and FLOPs of mixers in the place of attention
mup              muP: deviations and learning rates by the role of a parameter, width and depth
rotary_scaling   the forms of RoPE scaling and their numbers
model_stats      parameters and FLOPs of a model
tensors          names and shapes of the tensors of a model; how a changed model differs
dispatch         how often a token is sent to the nodes of its experts
odd_families     what some families have that no plain field of families.toml says
hybrid_families  the same of families with mixers
families         config.json of transformers in and out (families.toml), shapes of runs
"""
