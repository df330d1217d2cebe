"""What a training step does not do: a text that is decoded, and texts that are scored.

record(state, recorder)                on every rank, after the steps; collective
for sentence in findings(state): ...   what is wrong on one rank
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import trainer
from corpora.tasks import ScoringRequest, TaskSet
from inference.decoding import Decoder, SamplingParams
from inference.scoring import Scorer
from layers.attention import KeyValueCache
from tools.checker.recorder import Recorder

CONTEXTS = (1, 1, 2, 4)  # tokens, after which each token of the vocabulary is scored
PROMPT, DECODED = 4, 5  # tokens: together more than the window of the small run
DRAWN = SamplingParams(temperature=1.0)  # so that tokens of every tensor rank are chosen
CLOSE = 1e-9  # of log-likelihoods, relative
LOGITS, SCORES, MISSES = (
    "logits of decoding",
    "scores of texts",
    "tokens that are not the likeliest",
)


@dataclass
class KeepsLogits:
    """A pipeline for a Decoder, of which the logits of every decoded token are kept."""

    pipeline: Any
    logits: list[Tensor | None] = field(default_factory=list)  # (V/tp,) or None, by token

    @property
    def stages(self) -> Any:
        """The stages of this rank."""
        return self.pipeline.stages

    @property
    def last_rank(self) -> int:
        """The pipeline rank that has the last stage."""
        return self.pipeline.last_rank

    def decode(self, tokens: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Return and keep the logits of the token after `tokens`."""
        logits = self.pipeline.decode(tokens, cache)
        self.logits.append(None if logits is None else logits[0].double())
        return logits


def _has_room(state: trainer.TrainState) -> bool:
    """Return whether a model is made for texts as long as the decoded one."""
    model = state.config.model
    return model.positions != "learned" or model.max_positions >= PROMPT + DECODED


def record(state: trainer.TrainState, recorder: Recorder) -> None:
    """Have the recorder keep the logits of a decoded text and the scores of others. Collective.

    Nothing is kept of a model whose learned positions are fewer than the text's tokens.
    """
    if not _has_room(state):
        return
    state.optimizer.finish_gathering()
    columns = state.config.model.vocab_size
    _, logits = _decoded(state)
    for number, of_token in enumerate(logits):
        if of_token is not None:
            here = np.arange(len(of_token)) + state.factory.mesh.tp.rank * len(of_token)
            kept = here < columns  # the others are padding
            values = of_token.cpu().numpy()[kept]
            recorder.values(LOGITS, number * columns + here[kept], values)
    requests = _requests(columns, state.config.training.seed)
    for name, values in zip((SCORES, MISSES), _scored(state, requests), strict=True):
        recorder.values(name, np.arange(len(values)), values)


def findings(state: trainer.TrainState) -> Iterator[str]:
    """Yield a sentence if a text's score is not the probability with which it was decoded.

    state: of one rank. Decoding keeps keys and values of earlier tokens, and scoring does not.
    """
    if not _has_room(state):
        return
    text, logits = _decoded(state)
    chances = [x.log_softmax(-1)[i] for x, i in zip(logits, text[PROMPT:]) if x is not None]
    decoded = float(torch.stack(chances).sum())
    (score,), _ = _scored(state, [ScoringRequest(text, PROMPT)])
    if not abs(score - decoded) <= CLOSE * abs(decoded):
        both = f"decoded with log-probability {decoded:.9g}, and scored as {score:.9g}"
        yield f"a text of {len(text)} tokens is {both}"


def _decoded(state: trainer.TrainState) -> tuple[list[int], list[Tensor | None]]:
    """Return a prompt with the tokens that follow it, and the logits of each of these."""
    chance = random.Random(state.config.training.seed)
    prompt = [chance.randrange(state.config.model.vocab_size) for _ in range(PROMPT)]
    pipeline: Any = KeepsLogits(state.pipeline)
    decoder = Decoder(pipeline, state.factory, state.config)
    return prompt + decoder.generate(prompt, DECODED, DRAWN), pipeline.logits


def _requests(vocabulary: int, seed: int) -> list[ScoringRequest]:
    """Return requests for every token of the vocabulary after random contexts.

    One of them is the likeliest, and others are the likeliest of a tensor rank.
    """
    chance = random.Random(seed)
    contexts = [[chance.randrange(vocabulary) for _ in range(length)] for length in CONTEXTS]
    return [ScoringRequest([*c, token], len(c)) for c in contexts for token in range(vocabulary)]


def _scored(
    state: trainer.TrainState, requests: list[ScoringRequest]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-likelihood of each request, and its tokens that are not the likeliest."""
    tasks = TaskSet(requests=requests)
    return Scorer(state.pipeline, state.factory, state.config, tasks).score()
