"""Continues token ids with a model under any layout: every rank calls, every rank gets the same.

    decoder = Decoder(pipeline, factory, model)
    ids = decoder.generate(prompt, 50, Choice(temperature=0.8, top_p=0.95))

The prompt is one pass through the stages, and every new token is one, with the keys and values of
those before it in a cache (attention.KeyValueCache). The last stage's logits are gathered over
tensor ranks, one rank of the world chooses, and its choice is broadcast. Replicas repeat the work.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attention import KeyValueCache, local_slopes
from config.schema import Config, ModelShape, rows_along
from corpora.text import SAMPLE_TOKENS, prompts_of_run
from model import Embedding
from parallel import ParamFactory
from pipeline import Pipeline


@dataclass(frozen=True)
class Choice:
    """How a token is chosen: at temperature 0 the most likely one; else drawn, of the most likely
    ones that have `top_p` of the probability together.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1234


def choose(logits: Tensor, how: Choice, random: torch.Generator) -> int:
    """A token by its logits, (V,), on the CPU."""
    if how.temperature == 0:
        return int(logits.argmax())
    likely, tokens = (logits.double() / how.temperature).softmax(-1).sort(descending=True)
    before = likely.cumsum(-1) - likely  # of those that are more likely
    likely = likely.masked_fill(before >= how.top_p, 0.0)
    return int(tokens[torch.multinomial(likely, 1, generator=random)])


class Decoder:
    """Continues ids with the stages of a pipeline; its methods are collective over the world."""

    def __init__(self, pipeline: Pipeline, factory: ParamFactory, model: ModelShape):
        self.pipeline = pipeline
        self.factory = factory
        self.mesh = factory.mesh
        self.model = model
        self.slopes = local_slopes(model, factory) if model.positions == "alibi" else None

    @torch.no_grad()
    def generate(
        self, prompt: list[int], count: int, how: Choice, end: int | None = None
    ) -> list[int]:
        """Up to so many ids that follow those of the prompt; none from `end` on."""
        device = self.factory.device
        cache = KeyValueCache(len(prompt) + count, self.slopes, device)
        random = torch.Generator().manual_seed(how.seed)
        tokens = torch.tensor([prompt], device=device)
        found = list[int]()
        with _whole_sequences(self.pipeline.stages.values()):
            while len(found) < count:
                chosen = self._next(tokens, cache, how, random)
                if chosen == end:
                    break
                found.append(chosen)
                tokens = torch.tensor([[chosen]], device=device)
        return found

    def _next(
        self, tokens: Tensor, cache: KeyValueCache, how: Choice, random: torch.Generator
    ) -> int:
        """The token that follows; the choice of the last stage's first rank."""
        local = self.pipeline.decode(tokens, cache)
        chosen = torch.zeros(1, dtype=torch.int64)
        if local is not None:
            tp, columns = self.mesh.tp, local.t().contiguous()  # (V/tp, 1)
            whole = columns.new_empty(len(columns) * tp.size, 1)
            tp.at_once.all_gather(whole, columns).wait()
            chosen[0] = choose(whole[: self.model.vocab_size, 0].cpu(), how, random)
        chosen = chosen.to(self.factory.device)
        first = rows_along(self.mesh.axes, ("pp",))[0]
        self.mesh.world.at_once.broadcast(chosen, first[self.pipeline.last_rank]).wait()
        return int(self.mesh.world.values(chosen)[0])


@contextlib.contextmanager
def _whole_sequences(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Without sequence parallelism: one token cannot be cut."""
    changed: list[tuple[nn.Module, str, object]] = []
    for module in (module for stage in stages for module in stage.modules()):
        factory = getattr(module, "factory", None)
        if isinstance(factory, ParamFactory) and factory.sequence_parallel:
            changed.append((module, "factory", factory))
            setattr(module, "factory", replace(factory, sequence_parallel=False))  # noqa: B010
        if isinstance(module, Embedding) and module.part is not None:
            changed.append((module, "part", module.part))
            module.part = None
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


class RunSamples:
    """What --sample-every writes to a run's log: greedy continuations of --sample-prompt."""

    def __init__(
        self,
        config: Config,
        decoder: Decoder,
        gather_weights: Callable[[], None],
        note: Callable[[str], None],
    ):
        """gather_weights: is called first, so that all weights are there; note: writes a line."""
        self.every = config.run.sample_every
        self.length = config.model.seq_length
        self.text, self.prompts = prompts_of_run(config)
        self.decoder = decoder
        self.gather_weights = gather_weights
        self.note = note

    def after_step(self, iteration: int, last: bool) -> None:
        """Write the samples that are due after this step; collective over the world."""
        if not self.every or (iteration % self.every and not last):
            return
        self.decoder.mesh.recorder.enter("sample")
        self.gather_weights()
        for prompt in self.prompts:
            count = min(SAMPLE_TOKENS, self.length - len(prompt))
            ids = self.decoder.generate(prompt, count, Choice(), self.text.end)
            both = f"{self.text.decode(prompt)!r} -> {self.text.decode(ids)!r}"
            self.note(f" sample at iteration {iteration} | {both}")
