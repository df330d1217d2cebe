"""Text as samples: token files, the order of samples, blends.

    token_files   the .bin/.idx pair of Megatron-LM, read and written

Only data.py and scripts/prepare_data.py use it.
"""
