"""Text as samples: token files, the order of samples, blends.

    token_files   the .bin/.idx pair of Megatron-LM, read and written
    checksums     of a pair's files and their blocks
    sample_order  which tokens each sample of a corpus is cut from
    blends        samples of several corpora, mixed by weight
    usage         tokens that were read, by corpus
    compiled      loops of both that numba compiles where it is installed
    mapped_files  the cache of orders, built by one process of a node and mapped by all
    objectives    what is learned from a sample: masks, prefixes, reordered documents
    attention_masks  which tokens each token sees, as torch's attention takes it
    corpus_splits  the splits of --data and the sets of --eval-data
    text          tokenizers: texts as token ids, and back
    prefetch      micro-batches that threads read before they are asked for

data.py makes the samples of a run of them; scripts/prepare_data.py writes token files.
"""
