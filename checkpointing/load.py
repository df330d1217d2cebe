"""Loads a checkpoint into a run under any layout: chooses a checkpoint, checks it, reads tensors.

Every rank calls `Loader.resume`. Files are checked before any tensor is read, each file by one
rank. Then each rank reads from every tensor the elements whose master weights and optimizer state
it holds under this run's layout. Tensor and pipeline parallelism, replicas, ZeRO stage and
precision of the run that saved make no difference. The other weights that a rank needs come from
its replicas afterwards. Read index.py and state.py first.

A kind of state is "weights" or the name of an optimizer state, such as "exp_avg". A shard is a flat
range of the elements of a parameter on this rank. "Theirs" and "there" are about the checkpoint,
"ours" and "here" about this run.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from architecture.shape import ROTARY_OPTIONS
from base.errors import CheckpointError
from checkpointing import model_record
from checkpointing.folders import Chosen
from checkpointing.index import Index
from checkpointing.model_record import ModelRecord
from checkpointing.resumed import choose, configuration
from checkpointing.state import (
    Progress,
    checkpoints_folder,
    fingerprint,
    global_tensors,
    unpadded_shards,
)
from checkpointing.writer import global_boxes
from config.command_line import make_model
from config.inherited import run_option_names
from config.phases import changes, from_saved
from config.schema import EMA, Config
from config.timeline import Timeline
from corpora.usage import Usage
from data import Samples
from distributed.mesh import Mesh
from distributed.store import StoreExchange
from zero import Optimizer

# Options of a model that do not change any tensor if positions are not learned.
LENGTHS = ("seq_length", "max_positions")
WIDEST = torch.float64.itemsize  # the most bytes that an element of a saved tensor takes


def repeatability(device: str, deterministic: bool) -> str:
    """Return a note for the log if resuming a run changes its results by rounding; otherwise "".

    The results change on a GPU without --deterministic: the backward passes of flash attention and
    of cuDNN add to a gradient by atomic operations, in another order in each run. On a CPU a
    resumed run has the same bits as an uninterrupted run.
    """
    if device != "cuda" or deterministic:
        return ""
    return (
        "the next steps agree with those of an uninterrupted run to rounding: on GPUs the same "
        "bits need --deterministic"
    )


@dataclass
class Loader:
    """Loads the state of one run; `save.Checkpointer` explains the fields."""

    config: Config
    mesh: Mesh
    optimizer: Optimizer
    exchange: StoreExchange
    samples: Samples | None
    print_line: Callable[[str], None]
    chosen: Chosen | None = None  # the checkpoint to load; None: `resume` chooses it

    def __post_init__(self) -> None:
        """Set the fields that do not come from the caller; `resume` fills in the last one."""
        self.run = self.config.run
        self.parent = checkpoints_folder(self.config)
        self.record: ModelRecord | None = None  # config.json's fields, tokenizer

    def resume(self) -> Progress:
        """Load the checkpoint that --resume asks for, and return its progress.

        Return the progress of a new run if only weights are loaded, or if --resume auto finds no
        checkpoint. Collective over the world. Raise UserError on every rank if the checkpoint
        cannot be loaded.
        """
        if self.chosen is None:
            self.chosen = choose(self.run, self.exchange, self.print_line)
        folder = self.chosen.folder
        if folder is None:
            self.print_line(f"no checkpoint in {self.parent} yet: training begins at step 0")
            return Progress()
        with Index(folder) as index:
            weights_only = self.run.load_weights_only
            self._check_model(index, folder)
            self.record = self._read_record(index, folder)
            self._check_tensors(index, folder)
            kinds = ("weights",) if weights_only else self._kinds_of(index, folder)
            if kinds != ("weights",):
                self._check_older_muon(index, folder)
            self._read(index, kinds)
            # `after_load` makes the weights in compute precision from the masters that were read.
            if weights_only:
                self.optimizer.after_load()
                self.print_line(f"weights taken from {folder}: training begins at step 0")
                return Progress()
            scalars = index.attributes("optimizer")
            scalars.pop("kind")  # the optimizer's name; the others are numbers, such as "step"
            self.optimizer.after_load(scalars, has_average=EMA in index.kinds)
            progress = self._read_progress(index)
            if self.mesh.rank == 0:
                self._print_resumed(index, folder, progress)
            return progress

    def _check_model(self, index: Index, folder: str) -> None:
        """Raise UserError if the checkpoint's model has another shape than this run's model.

        With --load-weights-only, print a line instead.
        """
        ours = dataclasses.asdict(self.config.model)
        theirs = dataclasses.asdict(make_model(index.attributes("model"), index.path))
        positions = self.config.model.positions
        # Fields of the shape without effect, which may differ: the options of rotary positions if
        # positions are learned, the lengths if they are rotary, both with alibi.
        # The rotary options of blocks with a window are derived from the others.
        rotary = (*ROTARY_OPTIONS, "window_rotary_base", "window_rotary_scaling")
        unused = {"learned": rotary, "rotary": LENGTHS}.get(positions, (*LENGTHS, *rotary))
        if self.config.plan:  # phases may have samples of other lengths than those before
            unused = (*unused, "seq_length")
        different = [name for name in ours if ours[name] != theirs[name] and name not in unused]
        if not different:
            return
        both = ", ".join(f"{name} {theirs[name]} against {ours[name]}" for name in different)
        sentence = f"{folder} is of another model than this run's: {both}"
        if not self.run.load_weights_only:
            raise CheckpointError(sentence)
        self.print_line(sentence)

    def _read_record(self, index: Index, folder: str) -> ModelRecord:
        """Return what the checkpoint's model is beyond its shape; only rank 0 reads its tokenizer.

        Raise UserError if this run's samples are longer than the model's sliding window. An old
        checkpoint has no record: then nothing is known but the length of its samples.
        """
        record = model_record.read(folder, with_files=self.mesh.rank == 0)
        if record is None:
            length = int(index.attributes("model")["seq_length"])
            return model_record.without_tokenizer(length)
        model = self.config.model
        length = model.seq_length
        record.check_length(model, length, f"{folder}: seq-length({length})")
        return record

    def _check_tensors(self, index: Index, folder: str) -> None:
        """Compare names and shapes of the checkpoint's tensors with those of this run's model.

        Raise UserError if a tensor has another shape in the checkpoint, or, unless only weights are
        loaded, if only one of the two has it: code that was changed since may have made it. With
        --load-weights-only print a line that lists such tensors. Collective.
        """
        found = global_tensors(self.optimizer.parameters, self.mesh, self.exchange)
        ours = {name: shape for name, (shape, _) in found.items()}
        theirs = index.shapes
        wrong = [
            f"{name} is {theirs[name]} there and {ours[name]} here"
            for name in ours.keys() & theirs.keys()
            if theirs[name] != ours[name]
        ]
        if wrong:
            raise CheckpointError(f"{folder}: {_list_some(sorted(wrong))}")
        missing = sorted(ours.keys() - theirs.keys())
        surplus = sorted(theirs.keys() - ours.keys())
        notes = []
        if missing:
            notes.append(f"missing there: {_list_some(missing)}")
        if surplus:
            notes.append(f"not in this model: {_list_some(surplus)}")
        if notes and not self.run.load_weights_only:
            raise CheckpointError(
                f"{folder} is of a model with other tensors than this run's: {'; '.join(notes)}; "
                "--load-weights-only begins with the weights that both have"
            )
        if notes:
            self.print_line(f"{folder}: {'; '.join(notes)}; these keep their values")

    def _kinds_of(self, index: Index, folder: str) -> tuple[str, ...]:
        """Return the kinds of state to load: "weights" and the kinds of this run's optimizer.

        Raise UserError if the checkpoint has the state of another optimizer, or none.
        """
        ours = ("weights", *self.optimizer.state_kinds)
        theirs = tuple(index.kinds)
        if set(theirs) <= {"weights", EMA}:
            raise CheckpointError(
                f"{folder} holds only weights: --load-weights-only begins with them"
            )
        if EMA in ours and EMA not in theirs:
            self.print_line(f"{folder} has no average of weights: --ema begins one here")
            ours = tuple(kind for kind in ours if kind != EMA)
        if EMA in theirs and EMA not in ours:
            self.print_line(f"{folder} has an average of weights, which is dropped: --ema 0")
            theirs = tuple(kind for kind in theirs if kind != EMA)
        here = self.optimizer.state_name
        there = index.attributes("optimizer")["kind"]
        if sorted(ours) != sorted(theirs) or here != there:
            raise CheckpointError(
                f"{folder} has the state of {there} ({', '.join(theirs[1:])}), this run's "
                f"optimizer is {here} ({', '.join(ours[1:])}); --load-weights-only loads only the "
                f"weights"
            )
        return ours

    def _check_older_muon(self, index: Index, folder: str) -> None:
        """Print a line if the checkpoint is of a run with torch.optim.Muon, before version 0.3.

        Raise UserError if the model has experts: that Muon updated routers too, so there is no
        second moment for the AdamW that updates them now.
        """
        if self.optimizer.state_name != "muon":
            return
        if "muon_qkv" in configuration(index).get("training", {}):
            return
        if self.config.model.experts > 1:
            raise CheckpointError(
                f"{folder} is of torch's Muon, which updated routers as matrices; AdamW updates "
                "them now, and its second moment is not there: --load-weights-only begins with the "
                "weights"
            )
        training = self.config.training
        self.print_line(
            f"{folder} is of torch's Muon, in bf16, with q, k and v, and gate and up, as one "
            f"matrix; its momentum goes on with muon_qkv {training.muon_qkv} and muon_dtype "
            f"{training.muon_dtype}, so updates are not those of before"
        )

    def _read(self, index: Index, kinds: tuple[str, ...]) -> None:
        """Fill this rank's state of the given kinds from the checkpoint, shard by shard.

        Shards of tensors that the checkpoint does not have are left as they are.
        """
        shards = [s for s in unpadded_shards(self.optimizer) if s.spec.name in index.shapes]
        longest = max((shard.stop - shard.start for shard in shards), default=0)
        buffer = _read_buffer(longest)
        for shard in shards:
            self.mesh.recorder.at("load")
            boxes = global_boxes(shard)
            for kind in kinds:
                # `current` gives the dtype and the device; its values are replaced.
                current = shard.read(kind, shard.start, shard.stop)
                loaded = buffer[: current.nbytes].view(current.dtype)
                index.read(kind, shard.spec.name, boxes, loaded.numpy())
                shard.write(kind, shard.start, loaded.to(current.device))

    def _read_progress(self, index: Index) -> Progress:
        """Return the progress that a checkpoint holds.

        Old checkpoints have no `usage` (the counts of tokens); then it is computed as if all
        consumed samples had been trained on.
        """
        progress = Progress(**index.attributes("progress"))
        data_attributes = index.attributes("data")
        if "usage" in data_attributes:
            return dataclasses.replace(progress, usage=Usage.from_text(data_attributes["usage"]))
        consumed = progress.consumed_samples
        counts = dict[str, int]()
        if self.samples is not None:
            counts = self.samples.count_by_corpus(0, min(consumed, len(self.samples)))
        length = self.config.model.seq_length
        return dataclasses.replace(progress, usage=Usage().after(counts, consumed, length, True))

    def _print_resumed(self, index: Index, folder: str, progress: Progress) -> None:
        """Print where the run continues, and which data and options have changed; on rank 0."""
        consumed = progress.consumed_samples
        self.print_line(
            f"resumed from {folder}: step {progress.iteration}, {consumed} samples consumed"
        )
        if note := repeatability(self.optimizer.device.type, self.run.deterministic):
            self.print_line(note)
        here = fingerprint(self.samples, consumed)
        there = index.attributes("data")["fingerprint"]
        if here != there:
            self.print_line(
                f"the samples before {consumed} are not those that the checkpoint was trained "
                f"on (fingerprint {there} there, {here} here); training continues with these"
            )
        saved = configuration(index)
        # JSON makes tuples into lists, as in the checkpoint: so equal options compare as equal.
        now = json.loads(json.dumps(self.config.as_dict()))
        changed = []
        names = {*run_option_names(), "seq_length"}  # other options of the model cannot change
        for group in ("model", "training", "data"):
            theirs = saved.get(group, {})
            for name in now[group].keys() & theirs.keys() & names:
                if now[group][name] != theirs[name]:
                    changed.append(f"{name} {theirs[name]} before, {now[group][name]} now")
        if changed:
            self.print_line(f"options that changed: {'; '.join(sorted(changed))}")
        before_plan = from_saved(saved.get("plan"), index.path)
        if plans := changes(before_plan, self.config.plan):
            self.print_line(f"phases that changed: {'; '.join(plans)}")
        before = index.attributes("data").get("total_samples")
        total = Timeline(self.config).total_samples
        if before is not None and before != total:
            self.print_line(
                f"the run now has {total} samples in all, {before} before: the learning rate goes "
                f"by the {max(0, total - consumed)} that are left"
            )


def load_weights(stages: nn.ModuleList, index: Index, kind: str = "weights") -> None:
    """Fill the parameters of stages from an open checkpoint; padding is not changed.

    kind: "weights", or "ema" for their average.

    Called by sample.py, whose stages have no optimizer. Raise UserError if the checkpoint lacks a
    parameter or has it in another shape.
    """
    parameters = list(stages.parameters())
    buffer = _read_buffer(max((p.numel() for p in parameters), default=0))
    for p in parameters:
        spec = p.spec
        weights = p.data
        if index.shapes.get(spec.name) != spec.shape:
            there = index.shapes.get(spec.name, "missing")
            raise CheckpointError(
                f"{index.folder}: {spec.name} is {there} there and {spec.shape} here"
            )
        box = [(0, size) for size in spec.shape]
        if spec.rows is not None:
            box = list(spec.rows.box(spec.shape, spec.start))
        elif spec.dim is not None:
            box[spec.dim] = (spec.start, spec.stop)
            # This rank's tensor may be padded at the end of dimension `dim`; checkpoints are not.
            weights = p.data.narrow(spec.dim, 0, spec.stop - spec.start)
        loaded = buffer[: weights.nbytes].view(p.dtype)
        index.read(kind, spec.name, [tuple(box)], loaded.numpy())
        weights.copy_(loaded.view(weights.shape))


def _read_buffer(longest: int) -> Tensor:
    """Return a buffer, uint8 (bytes,), into which tensors of up to `longest` elements are read.

    One buffer serves for all tensors, one after the other: a new buffer would take longer to map
    into memory than a tensor takes to read.
    """
    return torch.empty(longest * WIDEST, dtype=torch.uint8)


def _list_some(items: list[str], count: int = 10) -> str:
    """Return the first `count` items as text, and the number of the other items."""
    text = ", ".join(items[:count])
    others = len(items) - count
    if others > 0:
        text += f" and {others} more"
    return text
