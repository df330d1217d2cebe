"""Reading ahead: if this failed, samples would be read twice, late, or never without a word."""

import gc
import os
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from test_data import VOCAB, config_of, write_corpus

import trainer
from architecture.shape import ModelShape
from base.errors import UserError
from config.schema import Config, Layout, Training
from config.timeline import Timeline
from config.validation import check
from corpora import prefetch
from corpora.prefetch import AHEAD, READERS, Prefetcher
from corpora.sample_order import GPTSamples
from data import Batch, BatchReader, Synthetic, micro_batch

CPU = torch.device("cpu")


class Watched(Synthetic):
    """Notes which samples are read; those from `blocked` on wait for `go_on`."""

    def __init__(self, count: int = 10**6, blocked: int = 10**9, bad: int = -1):
        super().__init__(VOCAB, 8, seed=3)
        self.count, self.blocked, self.bad = count, blocked, bad
        self.seen, self.arrived = [], threading.Condition()
        self.go_on, self.waiting = threading.Event(), threading.Event()

    def __len__(self):
        return self.count

    def file_of(self, k):
        return f"part{k // 100}.bin"

    def sample(self, k):
        with self.arrived:
            self.seen.append(k)
            self.arrived.notify_all()
        if k >= self.blocked:
            self.waiting.set()
            assert self.go_on.wait(60)
        if k == self.bad:
            raise UserError(f"sample {k} is bad")
        return super().sample(k)

    def wait_for(self, samples):
        """Until exactly these have been read or are being read."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: set(self.seen) >= set(samples), 60)
        assert sorted(self.seen) == sorted(samples), "each once, and no other"


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reader"]


def check_that_all_ended() -> None:
    if readers():  # a collection takes a second in a process that has run other files' tests
        gc.collect()
    for thread in readers():
        thread.join(60)
    assert readers() == []


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Nor is one there before: other files' tests in this process may have left theirs to gc."""
    check_that_all_ended()
    yield
    check_that_all_ended()


def reader_of(dp=1, rank=0, device=CPU, **options) -> tuple[BatchReader, object]:
    config = check(config_of(["synthetic"], **{"steps": 100, "global_batch_size": 8} | options), dp)
    return BatchReader(config, rank, device), config


def equal(batch: Batch, expected: tuple) -> bool:
    """Whether a batch has these tokens and labels, all of which count, and nothing else."""
    plain = Batch(*expected, expected[1].numel())
    same = all(map(torch.equal, (batch.tokens, batch.labels), expected))
    return same and replace(batch, tokens=plain.tokens, labels=plain.labels) == plain


def test_what_comes_next_is_read_before_it_is_asked_for():
    """Beyond the step's end too, each sample once; a rank that asks for nothing reads nothing."""
    reader, config = reader_of(dp=2, rank=1, micro_batch_size=2)
    samples = Watched()
    take = reader.batches(samples, 0, Timeline(config))
    assert readers() == []
    assert samples.seen == []
    own = [k for first in range(2, 1000, 4) for k in (first, first + 1)]  # this replica's
    for step in range(3):
        take = reader.batches(samples, 8 * step, Timeline(config))
        for index in range(2):
            expected = micro_batch(Watched(), 8 * step, index, config.layout, 1)
            assert equal(take(index), expected)
            samples.wait_for(own[: 2 * (2 * step + index + 1 + AHEAD)])
    assert len(readers()) == READERS
    reader.close()


def test_skipped_batches_growing_batches_and_the_end_are_followed():
    reader, config = reader_of(skip_samples="12:13", micro_batch_size=4)
    samples = Watched(count=27)
    reader.batches(samples, 0, Timeline(config))(0)
    samples.wait_for([*range(8), *range(16, 24)])  # 24 to 27 would be past the end
    reader.close()


def test_the_warm_up_of_compile_and_its_step_read_a_sample_once():
    """An evaluation of the same samples comes between; gradients show that nothing else is lost."""
    words = {"hidden": 16, "heads": 2, "layers": 1, "seq_length": 8, "vocab_size": VOCAB}
    shape, training = ModelShape(**words), Training(global_batch_size=8, steps=9)
    config = check(Config(shape, Layout(micro_batch_size=2), training), 1)
    losses = []
    for warm in (False, True):
        samples, state = Watched(), trainer.build(config)
        if warm:
            trainer.warm_up(state, samples, 0)
            trainer.evaluate(state, Watched(), 8)
        losses.append([trainer.step(state, samples, 8 * i, 1e-3).loss for i in range(3)])
        state.reader.close()
        assert sorted(samples.seen) == list(range(len(samples.seen)))
        assert len(samples.seen) >= 24
    assert losses[0] == losses[1]


def test_an_error_is_raised_where_its_sample_is_asked_for():
    reader, config = reader_of()
    samples = Watched(bad=2)
    take = reader.batches(samples, 0, Timeline(config))
    take(0)
    take(1)
    with pytest.raises(UserError, match="sample 2 is bad"):
        take(2)
    take(3)
    reader.close()
    few = Watched(count=3)
    reader, config = reader_of()
    take = reader.batches(few, 0, Timeline(config))
    [take(i) for i in range(3)]
    with pytest.raises(UserError, match="samples 3 to 4 are needed, but there are only 3"):
        take(3)
    reader.close()


def test_a_read_that_does_not_end_names_its_file():
    samples = Watched(blocked=205)
    slow = Prefetcher((4, 8), seconds=0.05)
    with pytest.raises(
        UserError, match=r"tokens of sample 205 .* within 0.05 s from part2.bin: does its file"
    ):
        slow.take(samples, 204)
    samples.go_on.set()
    slow.close()


def test_threads_end_with_the_run_also_if_nobody_ends_them(monkeypatch):
    """After `close`, after an exception, and while a read hangs."""
    monkeypatch.setattr(prefetch, "SECONDS_TO_END", 0.01)
    samples = Watched(blocked=5)
    reader, config = reader_of()
    reader.batches(samples, 0, Timeline(config))(0)
    assert samples.waiting.wait(60)
    reader.close()
    assert all(thread.daemon for thread in readers())
    samples.go_on.set()
    for thread in readers():
        thread.join(60)
    assert max(samples.seen) < AHEAD + 1
    reader, config = reader_of()
    reader.batches(Watched(), 0, Timeline(config))(0)
    gone = weakref.ref(reader.prefetcher)
    del reader
    gc.collect()
    assert gone() is None


def test_micro_batches_for_a_gpu_are_pinned_and_copied_without_waiting(monkeypatch):
    made, moved = [], []
    empty = torch.empty

    def pinned(*shape, pin_memory=False, **options):
        tensor = empty(*shape, **options)
        made.extend([tensor.data_ptr()] if pin_memory else [])
        return tensor

    def to(self, device, non_blocking):
        moved.append((self.data_ptr() in made, device.type, non_blocking))
        return self

    monkeypatch.setattr(torch, "empty", pinned)
    reader, config = reader_of(dp=2, rank=1, device=torch.device("cuda"), micro_batch_size=2)
    samples = Synthetic(VOCAB, 8, 3)
    take = reader.batches(samples, 8, Timeline(config))
    monkeypatch.setattr(torch.Tensor, "to", to)
    got = [take(index) for index in range(2)]
    for index, batch in enumerate(got):
        expected = micro_batch(samples, 8, index, config.layout, 1)
        assert equal(batch, expected)
    assert moved == 4 * [(True, "cuda", True)]
    reader.close()


# ------------------------------------------------------------------------------------------------
# Files that change under a run
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_cut_short_is_named(tmp_path, suffix):
    """In a process of its own: an access beyond the end of a mapping would end it."""
    dataset = write_corpus(f"{tmp_path}/c", [9] * 5000)
    samples = GPTSamples(dataset, range(5000), None, 8, 1, VOCAB)
    expected = samples.sample(0).tolist()
    os.truncate(f"{tmp_path}/c{suffix}", 100)
    reader, config = reader_of()
    take = reader.batches(samples, 0, Timeline(config))
    with pytest.raises(UserError, match=rf"c\{suffix} was cut short .*: it has 100 bytes and had"):
        [take(index) for index in range(8)]
    reader.close()
    assert len(expected) == 9
