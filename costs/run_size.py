"""An estimate of how much a run holds on one rank, by which train.py knows a small run."""

from architecture.model_stats import parameters
from config.schema import Config
from config.timeline import Timeline


def elements_of_run(config: Config) -> int:
    """Return an estimate of the numbers that a run on one rank holds at once.

    They are the weights, the inputs of the blocks and the logits of a micro-batch, and the order of
    the samples. The vocabulary's matrix is counted once more, with its padding. train.py compares
    the estimate with a limit: only a run that is not small is checked against the node's memory
    before it starts.
    """
    model = config.model
    vocabulary = max(model.vocab_size, config.layout.pad_vocab_multiple)
    tokens = config.layout.micro_batch_size * model.seq_length
    activations = tokens * (vocabulary + model.hidden * model.layers)
    timeline = Timeline(config)
    samples = max([*timeline.ordered, timeline.total_samples]) + config.data.eval_samples
    return parameters(model) + vocabulary * model.hidden + activations + samples
