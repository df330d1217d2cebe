"""The planner's search: if this failed, its command would not start, or a fast layout be missed."""

import random
import shlex
from dataclasses import asdict, replace

import pytest
import ranks
from hypothesis import given
from hypothesis import strategies as st

import plan
from architecture.shape import ModelShape
from base.errors import UserError
from benchmarks.planner.plan_cases import least_of
from config import command_line, validation
from config.schema import Layout, Training
from config.validation import check_any_length
from costs import hardware, memory, memory_terms, risk, step_time
from costs.job import Job
from costs.step_time import predict
from schedules import orders
from tools.planner import layouts
from tools.planner.enumeration import SCHEDULES, Asked

MODEL = ModelShape(layers=12, hidden=4096, heads=32, seq_length=2048, vocab_size=250_000)
SHAPE = "--layers 12 --hidden 4096 --heads 32 --seq-length 2048 --vocab-size 250000"
TRAINING = Training(global_batch_size=64, precision="bf16")
A100 = hardware.load("a100-80")
SMALL = replace(A100, memory=26e9)  # so that what is fastest may not fit
GPUS = 16


def drawn(chance: random.Random) -> Layout:
    """Any options; most are refused."""
    name = chance.choice(SCHEDULES)
    recompute = chance.choice(["none", "selective", "full"])
    pp = chance.choice([1, 2, 4, 8])
    return Layout(
        tp=chance.choice([1, 2, 4, 8]),
        pp=pp,
        sequence_parallel=chance.choice([False, True]),
        schedule=name if pp > 1 else "1f1b",
        virtual_stages=chance.choice([None, 2, 3, 4]) if name == "interleaved" else None,
        micro_batch_size=chance.choice([1, 2, 4, 8, 16, 32]),
        recompute=recompute,
        recompute_layers=chance.choice([None, 1, 2]) if recompute != "none" else None,
        zero=chance.choice([0, 1, 2, 3]),
    )


def accepted(layout: Layout) -> Layout | None:
    """With dp, if train.py takes it."""
    words = [*SHAPE.split(), *command_line.to_words(layout), "--precision", "bf16"]
    run = command_line.parse([*words, "--global-batch-size", "64"])
    try:
        return check_any_length(run, GPUS).layout
    except UserError:
        return None


def test_all_kinds_of_schedules_are_found_where_they_are_fastest():
    """Few micro-batches and many stages: a plain schedule waits too long to be the first."""
    model = replace(MODEL, vocab_size=32000, layers=30)
    few = replace(TRAINING, global_batch_size=16)
    found, *_ = layouts.rank(
        Asked(model, few, A100, GPUS, {"pp": 8, "tp": 1, "micro_batch_size": 1})
    )
    assert found[0].layout.schedule in ("interleaved", "zb-h1", "zb-v")
    plain, *_ = layouts.rank(
        Asked(model, few, A100, GPUS, {"pp": 8, "tp": 1, "micro_batch_size": 1, "schedule": "1f1b"})
    )
    assert found[0].prediction.seconds < plain[0].prediction.seconds


def test_a_given_ep_is_known_while_layouts_are_ordered():
    """They were ordered by the ep that a plan takes by itself: the fastest was not tried."""
    line = "layouts --model qwen3-30b-a3b --gpu h100 --nodes 8 --global-batch-size 512 --ep 32"
    found = plan.ask(line.split()).data["ranked"]
    one = "--tp 1 --pp 1 --cp 1 --micro-batch-size 1 --zero 1 --recompute none"
    narrow = plan.ask([*line.split(), *one.split()]).data["ranked"]
    assert {one["ep"] for one in found} == {32}
    assert len(narrow) == 1
    assert found[0]["step_seconds"] <= narrow[0]["step_seconds"]


def test_the_command_names_the_model_as_it_was_given():
    line = "layouts --model gpt2-124m --bias --seq-length 512 --gpus 4 --tp 2 --global-batch-size 8"
    data = plan.ask(line.split()).data
    words = data["command"]
    assert words[2:7] == ["--model", "gpt2-124m", "--seq-length", "512", "--bias"]
    assert "--hidden" not in words
    run = check_any_length(command_line.parse([*words[2:-1], "100"]), 4)
    asked = "--model gpt2-124m --bias --seq-length 512"
    assert asdict(run.model) == asdict(command_line.parse(asked.split()).model)


@pytest.mark.slow
def test_the_printed_command_starts_as_it_stands(tmp_path):
    """On two ranks of this machine, with its launcher, data and steps; it is not edited."""
    line = f"layouts {SHAPE} --gpu cpu --global-batch-size 4 --seq-length 32 --device cpu"
    line += f" --layers 2 --hidden 32 --heads 4 --vocab-size 64 --out {tmp_path / 'run'}"
    text = plan.ask([*line.split(), "--gpus", "2", "--steps", "2"]).text
    (printed,) = [each for each in text.splitlines() if each.startswith("the first: ")]
    launcher, n, count, python, *words = shlex.split(printed.removeprefix("the first: "))
    assert [launcher, n, count, python] == ["mpirun", "-n", "2", "python"]
    assert words[words.index("--data") + 1] == "synthetic"
    done = ranks.mpirun(2, *words)
    assert done.status == 0, done.err
    assert "2 ranks by mpirun" in done.out
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("gpus", "launcher"),
    [(1, []), (8, ["mpirun", "-n", "8"]), (16, ["srun", "--mpi=pmi2", "-n", "16"])],
)
def test_the_command_has_a_launcher_a_length_and_data_for_any_number_of_gpus(gpus, launcher):
    line = f"layouts {SHAPE} --gpus {gpus} --global-batch-size 64 --risk 0.1"
    data = plan.ask(line.split()).data
    assert data["launcher"] == launcher
    assert data["command"][-4:] == ["--data", "synthetic", "--steps", "1000"]
    validation.check(command_line.parse(data["command"][2:]), gpus)  # train.py's own check
    own = plan.ask(f"{line} --data synthetic --steps 7".split()).data["command"]
    assert own.count("--data") == own.count("synthetic") == 1
    data = plan.ask(f"{line} --data my/corpus --steps 7".split()).data
    assert data["command"].count("--data") == data["command"].count("--steps") == 1
    assert "my/corpus" in data["command"]


def test_what_the_command_has_by_default_is_said_below_it():
    """Else a run would train on random tokens, or with a batch that nobody has chosen."""
    line = "layouts --model gpt2-124m --gpus 8"
    below = plan.ask(line.split()).text.partition("\nthe first: ")[2].splitlines()[1]
    assert "random tokens: give the prefix of your corpus; --steps 1000 is an example" in below
    assert "the planner's default): give --global-batch-size or --batch-tokens" in below
    given = " --global-batch-size 512 --steps 9 --data my/corpus"
    said = plan.ask((line + given).split()).text.partition("\nthe first: ")[2]
    assert "give" not in said


# ------------------------------------------------------------------------------------------------
# Context parallelism
# ------------------------------------------------------------------------------------------------

LONG = replace(MODEL, seq_length=32768, max_positions=32768, vocab_size=32000, layers=8)


def test_cp_is_found_where_it_is_fastest_and_only_for_long_samples():
    few = replace(TRAINING, global_batch_size=16)
    ranked, *_ = layouts.rank(Asked(LONG, few, SMALL, GPUS))
    first = ranked[0]
    assert first.layout.cp > 1
    held, *_ = layouts.rank(Asked(LONG, few, SMALL, GPUS, {"cp": 1}))
    assert {one.layout.cp for one in held} == {1}
    assert held[0].prediction.seconds > first.prediction.seconds
    # With more room, what has cp is slower than what is found in its place without.
    roomy, *_ = layouts.rank(Asked(LONG, few, A100, GPUS, {"schedule": "1f1b", "pp": 4}))
    assert roomy
    short, *_ = layouts.rank(Asked(MODEL, TRAINING, A100, GPUS))
    assert {one.layout.cp for one in short} == {1}


def test_keys_and_values_that_are_gathered_are_held():
    """Keys and values of all tokens of the gathering ranks count, unless recomputed."""
    training = Training(global_batch_size=8, precision="bf16")
    for kv_heads, others in ((1, 7), (2, 3), (8, 0)):
        model = replace(LONG, kv_heads=kv_heads)
        job = Job(model, Layout(cp=8, dp=1), training, A100)
        held = memory_terms.block_activations(job, True) - memory_terms.block_activations(
            job, False
        )
        keys = 2 * kv_heads * model.head_size * job.tokens
        assert held == 2 * keys * others


def test_no_more_blocks_are_recomputed_than_memory_asks():
    held = {"tp": 2, "pp": 2, "micro_batch_size": 4, "zero": 1, "recompute": "full"}
    held |= {"schedule": "1f1b", "sequence_parallel": True}
    numbers = set()
    for size in (18e9, 20e9, 22e9, 26e9):
        machine = replace(A100, memory=size)
        ranked, *_ = layouts.rank(Asked(MODEL, TRAINING, machine, GPUS, held))
        for one in ranked:
            room = size
            if one.prediction.risk <= risk.DEFAULT:
                room = risk.safe_bytes(machine, risk.DEFAULT)
            number = one.layout.recompute_layers or 7  # a stage has at most 7
            numbers.add(number)
            fewer = replace(one.layout, recompute_layers=number - 1)
            needed = memory.fullest(Job(MODEL, fewer, TRAINING, machine)).total
            assert needed > room or number == 1
    assert len(numbers) > 1


@given(st.integers(0, 10**6), st.integers(1, 3))
def test_no_schedule_is_much_faster_than_its_closed_form(seed, batches):
    chance = random.Random(seed)
    layout = None
    while layout is None:
        layout = accepted(drawn(chance))
    training = replace(TRAINING, global_batch_size=64 * batches)
    job = Job(MODEL, layout, training, A100)
    assert least_of(job) <= 1.02 * predict(job).seconds


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_bound_knows_that_micro_batches_go_round_a_slow_network(name):
    """Round trips of 16 ranks over a slow network, of which the passes alone know nothing."""
    slow = hardware.with_network(replace(A100, node=1), 1e9)
    layout = Layout(pp=16, dp=1, schedule=name)
    training = replace(TRAINING, global_batch_size=64)
    job = Job(replace(MODEL, layers=32), layout, training, slow)
    passes = 64 * max(map(sum, step_time.stage_passes(job)))
    assert passes < 0.7 * predict(job).seconds
    least = least_of(job) / predict(job).seconds
    assert 0.95 < least < 1 + 1e-9


@pytest.mark.parametrize("name", ["zb-v", "zb-h1"])
@pytest.mark.parametrize("ranks_", [2, 3, 5, 8])
def test_every_rank_of_a_split_backward_holds_what_the_bound_says(name, ranks_):
    for count in (1, ranks_ - 1, ranks_, 3 * ranks_ + 1):
        order = orders.build(name, ranks_, count)
        stages = order.stages // ranks_
        assert set(order.peak) == {stages * min(ranks_, count)}


def test_numbers_of_recomputed_blocks_that_are_given_are_kept():
    held = {"tp": 2, "pp": 4, "micro_batch_size": 4, "schedule": "1f1b", "recompute": "full"}
    held |= {"recompute_blocks": "3,2,1,0"}
    for machine in (A100, SMALL):
        for one in layouts.rank(Asked(MODEL, TRAINING, machine, GPUS, held)).ranked:
            assert (one.layout.recompute_blocks, one.layout.recompute_layers) == ("3,2,1,0", None)
            assert one.prediction == predict(Job(MODEL, one.layout, TRAINING, machine))
    assert layouts.rank(Asked(MODEL, TRAINING, A100, GPUS, held)).ranked
