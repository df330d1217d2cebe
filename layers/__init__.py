"""The parts of a transformer block, split over the mesh.

attention         multi-head attention with KV heads; its parameters and kernels
attention_masks   which keys a query sees: causal, documents, windows, prefixes
local_attention   windows, softcaps and sinks of single blocks
latent_attention  multi-head latent attention (MLA)
rotary            RoPE; rotary_scaling: linear, Llama 3, YaRN, LongRoPE
mixers            what a block may have in the place of attention: gated_delta_net,
                  kimi_delta_attention, mamba2, short_conv; recurrent_mixer is what these share,
                  mixer_parameters their weights and how tp cuts them
linear_recurrence a state over the tokens by products over chunks; causal_conv: a convolution
mixers            what may be in the place of attention, and what it needs of a micro-batch
recurrent_mixer   what mixers with a state have in common: ranks, documents, decoding
linear_recurrence states over the tokens, by products over chunks of them
causal_conv       the convolution before it; mixer_parameters: its taps, and decays
gated_delta_net   gated delta net; kimi_delta_attention: KDA; mamba2, short_conv
experts           MoE layers: router, dispatch, expert MLPs
loss              the cross entropy of vocabulary-parallel logits, and scores of tokens
"""
