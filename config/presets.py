"""Models by name: sizes of GPT-2 and GPT-3, of BigScience's runs, of Megatron-LM's paper."""

from config.messages import UserError, nearest
from config.schema import ModelShape


def _gpt2(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(layers, hidden, heads, seq_length=1024, vocab_size=50257)


def _tr11(layers: int, hidden: int, heads: int) -> ModelShape:
    """Shapes tried for BLOOM: ALiBi, a normalised embedding, a vocabulary of 250,880."""
    return ModelShape(
        layers,
        hidden,
        heads,
        seq_length=2048,
        vocab_size=250880,
        positions="alibi",
        embedding_norm=True,
    )


def _megatron(layers: int, hidden: int, heads: int) -> ModelShape:
    """Table 1 of arXiv 2104.04473."""
    return ModelShape(layers, hidden, heads, seq_length=2048, vocab_size=51200)


PRESETS = {
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "gpt3-175b": ModelShape(96, 12288, 96, seq_length=2048, vocab_size=50257),
    "1b3": ModelShape(24, 2048, 16, seq_length=2048, vocab_size=50257, embedding_norm=True),
    "104b": ModelShape(64, 11600, 80, seq_length=2048, vocab_size=50257),
    "bloom-176b": _tr11(70, 14336, 112),
    "177b": _tr11(96, 12288, 64),
    "181b": _tr11(72, 14336, 64),
    "182b": _tr11(84, 13312, 64),
    "182b-wide": _tr11(78, 13824, 64),
    "183b": _tr11(72, 14400, 96),
    "187b": _tr11(80, 13824, 64),
    "194b": _tr11(78, 14400, 96),
    "195b": _tr11(77, 14400, 96),
    "196b": _tr11(84, 13824, 64),
    "200b": _tr11(80, 14400, 96),
    "205b": _tr11(81, 14400, 96),
    "206b": _tr11(96, 13312, 64),
    "megatron-1.7b": _megatron(24, 2304, 24),
    "megatron-3.6b": _megatron(30, 3072, 32),
    "megatron-7.5b": _megatron(36, 4096, 32),
    "megatron-18b": _megatron(40, 6144, 48),
    "megatron-39b": _megatron(48, 8192, 64),
    "megatron-76b": _megatron(60, 10240, 80),
    "megatron-145b": _megatron(80, 12288, 96),
    "megatron-310b": _megatron(96, 16384, 128),
    "megatron-530b": _megatron(105, 20480, 128),
    "megatron-1t": _megatron(128, 25600, 160),
}
ALIASES = {"176b": "bloom-176b", "bloom": "bloom-176b", "175b": "gpt3-175b", "1.3b": "1b3"}


def preset(name: str) -> ModelShape:
    """The shape of that name, upper or lower case; UserError names the nearest if there is none."""
    key = ALIASES.get(name.lower(), name.lower())
    if key not in PRESETS:
        known = list(PRESETS) + list(ALIASES)
        raise UserError(f"no preset is called {name!r}{nearest(key, known)}")
    return PRESETS[key]
