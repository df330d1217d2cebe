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
experts           MoE layers: router, dispatch, expert MLPs
loss              the cross entropy of vocabulary-parallel logits, and scores of tokens
"""
