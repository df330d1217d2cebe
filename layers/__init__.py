"""The parts of a transformer block, split over the mesh.

attention         multi-head attention with KV heads; its parameters and kernels
attention_masks   which keys a query sees: causal, documents, windows, prefixes
local_attention   windows, softcaps and sinks of single blocks
repeated_heads    KV heads, or key heads of a mixer, that several tensor ranks hold
latent_attention  multi-head latent attention (MLA)
rotary            RoPE; rotary_scaling: linear, Llama 3, YaRN, LongRoPE
mixers            what may be in the place of attention, and what it needs of a micro-batch
recurrent_mixer   what mixers with a state have in common: ranks, documents, decoding
linear_recurrence states over the tokens, by products over chunks of them
causal_conv       the convolution before it; mixer_parameters: its taps, and decays
delta_mixer       what gated_delta_net and kimi_delta_attention (KDA) share; mamba2, short_conv
experts           MoE layers: router, dispatch, expert MLPs
loss              the cross entropy of vocabulary-parallel logits, and scores of tokens
"""
