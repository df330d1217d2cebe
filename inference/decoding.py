"""Continues token ids with a model, under any layout: all ranks call it and get the same ids.

    decoder = Decoder(pipeline, factory, config)
    ids = decoder.generate(prompt, 50, SamplingParams(temperature=0.8, top_p=0.95))

The prompt takes one forward pass through the stages, and so does every new token; the keys and
values of earlier tokens are in a cache (attention.KeyValueCache). The last stage's logits are
gathered over tensor ranks, one rank of the world chooses the token, and its choice is broadcast.
All replicas do the same work. sample.py calls this file, and so does training (--sample-every).
Ids are numbers of tokens in the vocabulary; V is the vocabulary's size.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from config.mesh_axes import rows_along
from config.schema import Config
from layers.attention import KeyValueCache, local_slopes
from layers.rotary import text_switch
from model import Embedding
from parallel import ParamFactory
from pipeline import Pipeline


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen: at temperature 0 the most likely token, otherwise a random draw.

    A token is drawn with the probabilities softmax(logits / temperature) from the smallest set of
    most likely tokens whose probability is at least `top_p`. seed: the seed of the random draws.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1234


def choose(logits: Tensor, how: SamplingParams, random: torch.Generator) -> int:
    """Return the id of the next token, chosen in the way `how`; logits: (V,), on the CPU.

    random: the generator of the draws, whose state each draw changes.
    """
    if how.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double() / how.temperature
    probabilities, tokens = scaled.softmax(-1).sort(descending=True)
    # For each token the probability of all tokens that are more likely. If it reaches top_p, these
    # suffice, and the token is not in the set.
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= how.top_p, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=random)])


class Decoder:
    """Continues ids with the stages of a pipeline; `generate` is collective over the world."""

    def __init__(self, pipeline: Pipeline, factory: ParamFactory, config: Config):
        """Make a decoder of the stages in `pipeline`; factory: the factory that made the stages.

        config: of the run. With --objective prefix a prompt is a prefix, whose tokens see all of
        it, as in training.
        """
        self.pipeline = pipeline
        self.factory = factory
        self.mesh = factory.mesh
        model = self.model = config.model
        self.has_prefix = config.data.objective == "prefix"
        self.slopes = local_slopes(model, factory) if model.positions == "alibi" else None
        # The tokens from which on a longer text has other rotary tables, and so other keys.
        self.switch = text_switch(model)

    @torch.no_grad()
    def generate(
        self,
        prompt: list[int],
        count: int,
        how: SamplingParams,
        ends: Collection[int] = (),
    ) -> list[int]:
        """Return the ids that follow the prompt, the same on every rank.

        They are `count` ids, or fewer if one of `ends` is chosen, which ends the text and is not
        returned.
        """
        device = self.factory.device
        prefix = len(prompt) if self.has_prefix else 0
        cache = KeyValueCache(len(prompt) + count, self.slopes, device, prefix)
        random = torch.Generator().manual_seed(how.seed)
        tokens = torch.tensor([prompt], device=device)
        ids: list[int] = []
        with _sequence_parallelism_off(self.pipeline.stages.values()):
            # First the whole prompt is run, then each time the token that was chosen last.
            while len(ids) < count:
                chosen = self._choose_next(tokens, cache, how, random)
                if chosen in ends:
                    break
                ids.append(chosen)
                tokens = torch.tensor([[chosen]], device=device)
                if cache.tokens == self.switch:  # the next token makes the text longer
                    cache = KeyValueCache(len(prompt) + count, self.slopes, device, prefix)
                    tokens = torch.tensor([prompt + ids], device=device)
        return ids

    def _choose_next(
        self,
        tokens: Tensor,
        cache: KeyValueCache,
        how: SamplingParams,
        random: torch.Generator,
    ) -> int:
        """Return the token after `tokens`, (1, s), which follow the cached tokens.

        One rank chooses the token and broadcasts it to all ranks of the world: in the first
        pipeline, the rank with the last stage.
        """
        logits_here = self.pipeline.decode(tokens, cache)  # (1, V/tp), None before the last stage
        chosen = torch.zeros(1, dtype=torch.int64)
        if logits_here is not None:
            tp = self.mesh.tp
            columns = logits_here.t().contiguous()  # (V/tp, 1)
            logits = columns.new_empty(len(columns) * tp.size, 1)
            tp.at_once.all_gather(logits, columns).wait()
            unpadded = logits[: self.model.vocab_size, 0]  # the last rows of V may be padding
            chosen[0] = choose(unpadded.cpu(), how, random)
        chosen = chosen.to(self.factory.device)
        first_pipeline = rows_along(self.mesh.axes, ("pp",))[0]  # world ranks, by pp rank
        chooser = first_pipeline[self.pipeline.last_rank]
        self.mesh.world.at_once.broadcast(chosen, chooser).wait()
        return int(self.mesh.world.values(chosen)[0])


@contextlib.contextmanager
def _sequence_parallelism_off(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Turn off sequence parallelism in the stages during the `with` block; then restore it.

    Decoding runs one token at a time, which cannot be split over tp. Each layer has the setting in
    its attribute `factory`, the embedding also in `sequence_group`.
    """
    changed: list[tuple[nn.Module, str, object]] = []  # module, attribute and its previous value
    modules = [module for stage in stages for module in stage.modules()]
    for module in modules:
        factory = getattr(module, "factory", None)
        if isinstance(factory, ParamFactory) and factory.sequence_parallel:
            changed.append((module, "factory", factory))
            setattr(module, "factory", replace(factory, sequence_parallel=False))  # noqa: B010
        if isinstance(module, Embedding) and module.sequence_group is not None:
            changed.append((module, "sequence_group", module.sequence_group))
            module.sequence_group = None
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
