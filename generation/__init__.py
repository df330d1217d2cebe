"""Text from a model under any layout, while it is trained or from a checkpoint.

text            text as token ids: the tokenizer of a corpus or a checkpoint (without torch)
decoding        continues ids token by token, with a cache of keys and values; --sample-every

pipeline.py passes the activations; the cache is attention.KeyValueCache.
"""
