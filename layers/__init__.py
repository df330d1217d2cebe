"""The parts of a transformer block, split over the mesh.

attention         multi-head attention with KV heads; its parameters and kernels
attention_masks   which keys a query sees: causal, documents, windows, prefixes
local_attention   windows, softcaps and sinks of single blocks
latent_attention  multi-head latent attention (MLA)
rotary            RoPE; rotary_scaling: linear, Llama 3, YaRN, LongRoPE
experts           MoE layers: router, dispatch, expert MLPs
loss              the cross entropy of vocabulary-parallel logits, and scores of tokens
"""
