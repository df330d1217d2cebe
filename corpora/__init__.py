"""Text as samples: token files, the order of samples, blends.

    token_files   reads and writes the .bin/.idx pair of Megatron-LM
    sample_order  which tokens of a corpus each sample holds, and the order of the samples
    streams       the samples of a run with phases: each corpus goes on where it was
    phase_table   which epochs of each corpus the phases of a run read
    blends        samples of several corpora, mixed by weight
    usage         counts the tokens that a run has read from each corpus
    mapped_files  the cache of orders: one process of a node builds it, all processes map it
    objectives    which tokens a token sees and which labels count: masks, prefixes, fill-in
    corpus_splits  the splits of --data and the sets of --eval-data
    tasks         the multiple-choice tasks of --eval-tasks: rows, tokens, results
    text_sources  the texts of files of many formats; the reader of JSON lines
    text          prompts as token ids, and ids as text
    encoder       how documents, prompts and conversations become token ids
    special_tokens  which names in a text become tokens, and how many texts have them
    tokenizer_files  tokenizer.json, and the settings and chat templates beside it
    hdf5_files    HDF5 files from elsewhere: what is looked at before HDF5 follows it
    chat_templates  where tokenizers have chat templates, and rendering them with limits
    chat_environment  renders them as transformers does; runs in a process of its own
    conversation  a talk with a model: its messages, and the lines that a user types
    prefetch      micro-batches that threads read before they are asked for

data.py makes the samples of a run from these modules; scripts/prepare_data.py writes token files.
"""
