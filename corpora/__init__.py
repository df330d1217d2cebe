"""Text as samples: token files, the order of samples, blends.

    token_files   the .bin/.idx pair of Megatron-LM, read and written
    sample_order  which tokens each sample of a corpus is cut from
    blends        samples of several corpora, mixed by weight

data.py makes the samples of a run of them; scripts/prepare_data.py writes token files.
"""
