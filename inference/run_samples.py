"""Continuations of texts in a run's log, so that a person sees what the model has learnt."""

from collections.abc import Callable, Collection

from config.schema import Config
from corpora.text import SAMPLE_TOKENS, prompts_of_run
from inference.decoding import Decoder, SamplingParams
from telemetry.observer import Observer, Step


class RunSamples(Observer):
    """Writes continuations of --sample-prompt to a run's log, after --sample-every steps.

    They are drawn at --sample-temperature with the run's seed: any layout draws the same tokens.
    """

    def __init__(
        self,
        config: Config,
        decoder: Decoder,
        prepare: Callable[[], None],
        note: Callable[[str], None],
        ends: Collection[int] = (),
    ):
        """Encode the prompts that the options give.

        prepare: makes the model ready: all weights gathered after an update, and its own length of
        samples. note: a function that writes a line to the log. ends: the ids that end a text of
        the model that the run continues; without any, the token that ends a document of the corpus
        does.
        """
        self.every = config.run.sample_every
        self.choice = SamplingParams(config.run.sample_temperature, seed=config.training.seed)
        self.length = config.model.seq_length
        self.text, self.prompts = prompts_of_run(config)
        self.decoder = decoder
        self.prepare = prepare
        self.note = note
        self.ends = ends or self.text.ends

    def between_steps(self, step: Step) -> None:
        """Write samples, if they are due after this step or it is the last; collective."""
        is_due = step.is_last or step.iteration % self.every == 0
        if step.stops or not is_due:
            return
        self.decoder.mesh.recorder.enter("sample")
        self.prepare()
        for prompt in self.prompts:
            count = min(SAMPLE_TOKENS, self.length - len(prompt))
            ids = self.decoder.generate(prompt, count, self.choice, self.ends)
            text = f"{self.text.decode(prompt)!r} -> {self.text.decode(ids)!r}"
            self.note(f" sample at step {step.iteration} | {text}")
