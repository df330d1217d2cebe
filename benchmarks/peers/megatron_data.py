"""megatron-core's data sets, side by side with ours: for tests and benchmarks."""

import warnings
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np


class Megatron:
    """The parts of megatron-core that are needed. The import takes some seconds, so it is late."""

    def __init__(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine
            from megatron.core.datasets import (
                blended_megatron_dataset_builder,
                blended_megatron_dataset_config,
                gpt_dataset,
                helpers,
                indexed_dataset,
                utils,
            )
        self.builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
        self.GPTDataset, self.GPTDatasetConfig = (
            gpt_dataset.GPTDataset,
            gpt_dataset.GPTDatasetConfig,
        )
        self.IndexedDataset, self.Split = indexed_dataset.IndexedDataset, utils.Split
        self.build_blending_indices = helpers.build_blending_indices
        self.parse_split = blended_megatron_dataset_config.parse_and_normalize_split
        self.split_matrix = blended_megatron_dataset_config.convert_split_vector_to_split_matrix

    def config(self, prefixes, weights, split, seq_length, seed, folder, vocab, resets=False):
        """Its settings; folder: of its cache, None for none; resets: of all masks."""
        names = OrderedDict()
        tokenizer = SimpleNamespace(unique_identifiers=names, vocab_size=vocab, eod=0, pad=-1)
        return self.GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            blend=(prefixes, weights),
            split=split,
            path_to_cache=folder,
            tokenizer=tokenizer,
            reset_position_ids=resets,
            reset_attention_mask=resets,
            eod_mask_loss=resets,
            create_attention_mask=resets,
        )

    def samples(self, prefix, count, cache, resets=False, seq_length=2048, seed=1234, first=0):
        """Its GPTDataset of a corpus from sequence `first` on."""
        config = self.config([prefix], None, "1", seq_length, seed, cache, 8192, resets)
        dataset = self.IndexedDataset(prefix)
        documents = np.arange(first, len(dataset), dtype=np.int32)
        return self.GPTDataset(dataset, prefix, documents, count, self.Split.train, config)

    def build(self, sizes, config):
        """Train, validation and test of so many samples; None for an empty split."""
        return self.builder(self.GPTDataset, sizes, lambda: True, config).build()

    def blend(self, shares: list[float], size: int):
        """Its blending indices."""
        which, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
        self.build_blending_indices(which, number, shares, len(shares), size, False)
        return which, number
