"""If this failed, plan.py would miss the fastest of all layouts that train.py takes."""

import random

import pytest

from benchmarks.planner import plan_cases

SEED, CASES = 7, 4  # benchmarks/planner/plan_cases.py asks a thousand
# Questions whose fastest layout was once not found, or was found and not the first.
ONCE_WRONG = {
    "logits of one micro-batch": (
        "--layers 7 --hidden 32 --heads 1 --vocab-size 50257 --seq-length 8192 --gpu cpu --gpus 2 "
        "--global-batch-size 12 --no-tied --no-bias"
    ),
    "cp with a spread vocabulary": (
        "--layers 2 --hidden 1024 --heads 4 --vocab-size 250001 --seq-length 4096 --kv-heads 1 "
        "--gpu a100-80 --gpus 8 --global-batch-size 8"
    ),
    "no tied matrix to exchange": (
        "--layers 12 --hidden 1024 --heads 16 --vocab-size 50257 --seq-length 128 --gpu v100-16 "
        "--gpus 8 --global-batch-size 7 --activation swiglu --no-bias"
    ),
    "cp with one block recomputed": (
        "--layers 3 --hidden 800 --heads 25 --vocab-size 100 --seq-length 8192 --positions alibi "
        "--gpu b200 --gpus 4 --global-batch-size 32 --recompute full"
    ),
    "one copy of a tied matrix": (
        "--layers 12 --hidden 8192 --heads 32 --vocab-size 50257 --seq-length 1024 --kv-heads 4 "
        "--ffn-hidden 8192 --gpu v100-16 --gpus 8 --global-batch-size 1 --zero 2"
    ),
    "ranks that share cores do not wait": (
        "--layers 12 --hidden 1536 --heads 6 --vocab-size 257 --seq-length 128 --positions alibi "
        "--gpu cpu --gpus 3 --global-batch-size 12 --micro-batch-size 1 --set pad_vocab_multiple=64"
    ),
    "a sharding over one rank": (
        "--layers 3 --hidden 512 --heads 16 --vocab-size 50257 --seq-length 32768 --positions "
        "rotary --no-bias --gpu v100-16 --gpus 1 --global-batch-size 32"
    ),
}


def test_a_given_schedule_that_holds_less_with_more_virtual_stages():
    line = "--layers 62 --hidden 3072 --heads 12 --vocab-size 32000 --seq-length 2048 --gpus 6 "
    line += "--gpu h100-megatron --global-batch-size 500 --positions rotary"
    held = " --schedule interleaved --micro-batch-size 2 --zero 1"
    found = [plan_cases.question_of((line + more).split()).rank().ranked[0] for more in ("", held)]
    assert found[0].layout == found[1].layout


@pytest.mark.slow
@pytest.mark.parametrize("line", ONCE_WRONG.values(), ids=ONCE_WRONG)
def test_nothing_that_train_py_takes_is_faster(line):
    assert plan_cases.failures(line.split(), small=True, chance=random.Random(0)) == []


@pytest.mark.slow
def test_drawn_questions_have_answers_or_a_sentence():
    chance, answered = random.Random(SEED), 0
    for _ in range(CASES):
        words = plan_cases.drawn(chance, small=True)
        found, has_answer = plan_cases.checked(words, True, random.Random(SEED))
        assert found == [], " ".join(words)
        answered += has_answer
    assert answered > CASES // 2
