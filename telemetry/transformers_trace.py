"""Sketches of the forward pass of a model of transformers, for `runs.py diff`.

The model reads the samples of a step that a run has traced. Its outputs are sketched like those of
telemetry/numerics_trace.py, so that they can be compared layer by layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import data
from base.errors import ModelError, installed
from config.schema import Config, Layout
from distributed.collectives import Group
from telemetry.sketches import Sketches, activation_sketch

# transformers' model computes in fp64 if the run does, and otherwise in fp32.
DTYPES = {"fp64": torch.float64}


@torch.no_grad()
def activations(folder: str, config: Config, about: dict[str, Any]) -> np.ndarray:
    """Return sketches of the activations that transformers' model has, (activations x bins, 12).

    folder: a folder of transformers, with config.json and weights. config: the configuration of the
    run. about: the facts of the run's trace, which give names, bins and samples. Sketches of
    activations that are not computed here, such as gradients, are 0. Raise UserError if
    transformers is not installed, or cannot read the folder.
    """
    with installed("a comparison needs transformers, `pip install transformers`"):
        import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES.get(about["precision"], torch.float32),
            attn_implementation="eager",
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"transformers cannot read {folder}: {error}") from None
    model.eval()
    samples = data.build(config).train
    names = about["activations"]
    bins = about["bins"]
    table = Sketches(len(names) * bins, torch.device("cpu"))
    positions = torch.arange(config.model.seq_length)
    one_sample = Layout(dp=1, micro_batch_size=1)  # so micro-batch n of the step is its sample n

    def add(number: int, name: str, x: Tensor) -> None:
        """Add an activation of sample `number` of the step to the table: (1, s, h), or (1, s)."""
        with_channels = x.reshape(1, len(positions), -1).transpose(0, 1)  # (s, 1, h) or (s, 1, 1)
        # The rows of an activation are its bins, each of which adds up a range of samples.
        row = names.index(name) * bins + number * bins // about["samples"]
        sketch = activation_sketch(with_channels, positions, torch.tensor([number]))
        table.add(torch.tensor([row]), *sketch)

    for number in range(about["samples"]):
        first = about["first_sample"]
        tokens, labels = data.micro_batch(samples, first, number, one_sample, dp_rank=0)
        with _observed(model, config.model.layers, partial(add, number)):
            logits = model(tokens).logits
        losses = nn.functional.cross_entropy(logits[0], labels[0], reduction="none")
        add(number, "tokens", tokens)
        add(number, "labels", labels)
        add(number, "loss", losses)
    return table.total(Group())


@contextmanager
def _observed(model: nn.Module, layers: int, add: Any) -> Iterator[None]:
    """Inside this context, call add(name, x) with the outputs of a pass through the model.

    The names are as in a run's trace. The outputs of the embedding and of the final norm are read
    as the inputs of the first layer and of the head. Raise UserError if the model has not exactly
    one list of `layers` layers of which some have attention: in a hybrid model the others do not.
    """
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    of_layers = [part for part in lists if len(part) == layers and any(map(_attention, part))]
    if len(of_layers) != 1:
        have = f"the model of transformers has {len(of_layers)} lists of {layers} layers"
        raise ModelError(f"{have} of which some have attention; one is needed")

    def before(name: str, module: nn.Module, inputs: tuple) -> None:
        add(name, inputs[0])

    def after(name: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        add(name, output[0] if isinstance(output, tuple) else output)

    (blocks,) = of_layers
    handles = [blocks[0].register_forward_pre_hook(partial(before, "embedding"))]
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_hook(partial(after, f"blocks.{number}")))
        attention = _attention(block)
        # BLOOM's attention, which has `hidden_dropout`, adds the block's input to its output, so it
        # cannot be compared.
        if attention is not None and not hasattr(attention, "hidden_dropout"):
            after_attention = partial(after, f"blocks.{number}.attention")
            handles.append(attention.register_forward_hook(after_attention))
    get_head: Any = model.get_output_embeddings
    head = get_head()  # the output matrix
    handles.append(head.register_forward_pre_hook(partial(before, "head.norm")))
    yield
    for handle in handles:
        handle.remove()


def _attention(block: nn.Module) -> Any:
    """Return the attention of a layer of transformers, or None."""
    for part in block.children():
        if type(part).__name__.endswith("Attention"):
            return part
    return None
