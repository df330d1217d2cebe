"""Options that cannot be or do not go together: unchecked, a run would begin and fail late,
or do something else than was asked. Each is one sentence with both sides and their numbers.
"""

import pytest

from config import validation
from config.command_line import parse
from config.messages import UserError

SHAPE = "--layers 4 --hidden 64 --heads 4 --seq-length 100 "
RUN = "--layers 4 --hidden 64 --heads 4 --global-batch-size 8 --steps 3 "
TINY = "--layers 1 --hidden 16 --heads 4 --seq-length 16 --vocab-size 61 --steps 3 "
GOLDEN = (
    "--layers 2 --hidden 32 --heads 8 --seq-length 16 --vocab-size 61 --precision fp32 --steps 9 "
)

# Cases of tables: the words given, the number of ranks, and a part of the error's sentence.
OF_LAYOUTS = [
    ("--tp 8 --pp 6", 100, "tp(8) * pp(6) * dp(?) does not divide 100 ranks"),
    ("--tp 2 --dp 2", 8, "tp(2) * pp(1) * dp(2) = 4 is not 8 ranks"),
    ("--tp 3", 3, "tp(3) does not divide heads(4)"),
    ("--heads 8 --hidden 72 --tp 16", 16, "tp(16) does not divide heads(8)"),
    ("--heads 8 --kv-heads 2 --tp 4", 4, "tp(4) does not divide kv-heads(2)"),
    ("--ffn-hidden 130 --tp 4", 4, "tp(4) does not divide ffn-hidden(130)"),
    ("--hidden 66", 1, "heads(4) does not divide hidden(66)"),
    ("--kv-heads 3", 1, "kv-heads(3) does not divide heads(4)"),
    ("--hidden 12 --positions rotary", 1, "head-size(3) * rotary-fraction(1) is 3"),
    (
        "--micro-batch-size 3",
        1,
        "micro-batch-size(3) * dp(1) = 3 does not divide global-batch-size(8)",
    ),
    (
        "--micro-batch-size 2",
        8,
        "micro-batch-size(2) * dp(8) = 16 does not divide global-batch-size(8)",
    ),
    (
        "--model gpt2-124m --seq-length 2048",
        1,
        "seq-length(2048) is longer than the learned positions: max-positions(1024)",
    ),
    ("--pp 7", 7, "pp(7) is more stages than there are parts to place: 4 blocks"),
    ("--pp 2 --partition 1,2", 2, "--partition 1,2 places 3 blocks, but layers is 4"),
    ("--pp 2 --partition 1,2,1", 2, "has 3 stages, but pp is 2"),
    ("--pp 2 --schedule zb-v --partition 1,3", 2, "but pp is 2, each with 2 stages"),
    ("--pp 2 --schedule interleaved --virtual-stages 9", 2, "pp(2) * 9 is more stages than"),
    (
        "--pp 2 --partition 1,3 --recompute full --recompute-blocks 2,2",
        2,
        "recomputes 2 of stage 0, but --partition 1,3 places 1 there",
    ),
    ("--partition evenly", 1, "or a list like 3,4,4,3, not 'evenly'"),
    ("--seq-length 30 --tp 4 --sequence-parallel", 4, "tp(4) does not divide seq-length(30)"),
    ("--train-samples 9", 1, "give one of --steps and --train-samples; both were given"),
    ("--min-lr 1.0", 1, "min-lr(1.0) is above lr(0.0003)"),
    ("--modle x", 1, "unknown argument '--modle'; did you mean '--model'?"),
    ("--model gpt2-123m", 1, "no preset is called 'gpt2-123m'; did you mean 'gpt2-124m' or"),
    ("--model 13b", 1, "did you mean 'opt-13b' or 'olmo2-13b' or 'llama-2-13b'?"),
    ("--model x", 1, "no preset is called 'x'; train.py --help model lists them"),
    ("--sample 4", 1, "did you mean '--sample-every' or '--sample-prompt'?"),
    ("--zero 9", 1, "--zero is one of"),
    ("--layers 0", 1, "--layers must be at least 1, not 0"),
    ("--layers four", 1, "argument --layers: invalid int value: 'four'"),
    ("--config nowhere.toml", 1, "cannot read --config nowhere.toml: No such file"),
]
OF_BATCHES = [
    (
        "--rampup-batch-size 192 16 9765625 --global-batch-size 2048 --micro-batch-size 4"
        " --steps 5",
        8,
        "micro-batch-size(4) * dp(8) = 32 does not divide batch(208), which begins after 439",
    ),
    (
        "--batch-schedule 0:4 1K:6 --steps 5",
        4,
        "= 4 does not divide batch(6), which begins after 3 steps",
    ),
    (
        "--batch-schedule 0:4 1K:16 --decrease-batch-size-if-needed --steps 5",
        8,
        "dp(8) = 8 is more than batch(4), which begins after 0 steps (0 samples): rounded down",
    ),
    (
        "--rampup-batch-size 8 5 100 --steps 5",
        1,
        "8 by 5 over 100 samples does not reach global-batch-",
    ),
    (
        "--rampup-batch-size 8 8 100 --batch-schedule 0:4 --steps 5",
        1,
        "one of --rampup-batch-size and",
    ),
    ("--rampup-batch-size 8 8 --steps 5", 1, "--rampup-batch-size: expected 3 arguments"),
    ("--rampup-batch-size 8 8 1.5 --steps 5", 1, "--rampup-batch-size: invalid int value: '1.5'"),
    ("--batch-schedule 0:4 5x:8 --steps 5", 1, "takes TOKENS:SIZE such as 5B:1024, not '5x:8'"),
    ("--batch-schedule 0:4 5B --steps 5", 1, "takes TOKENS:SIZE such as 5B:1024, not '5B'"),
    ("--batch-schedule 1K:4 --steps 5", 1, "1K:4: the first size is for 0 tokens, as in 0:192"),
    ("--batch-schedule 0:4 2K:8 1K:16 --steps 5", 1, "1000 tokens do not come after 2000"),
    (
        "--batch-schedule 0:4 1K:8 --global-batch-size 16 --steps 5",
        1,
        "global-batch-size(16) is not the last of --batch-schedule 0:4 1K:8: leave it out",
    ),
    (
        "--rampup-batch-size 8 8 64 --global-batch-size 24 --train-samples 7",
        1,
        "train-samples(7) is less than one first batch(8)",
    ),
]
OF_CONTEXT_PARALLELISM = [
    ("--cp 2", 3, "tp(1) * pp(1) * cp(2) * dp(?) does not divide 3 ranks"),
    ("--cp 2 --dp 2", 8, "tp(1) * pp(1) * cp(2) * dp(2) = 4 is not 8 ranks"),
    ("--cp 4 --seq-length 20", 4, "2 * cp(4) does not divide seq-length(20)"),
    (
        "--cp 2 --tp 4 --sequence-parallel --seq-length 20 --heads 4",
        8,
        "--sequence-parallel: cp(2) * tp(4) does not divide seq-length(20)",
    ),
    ("--cp 0", 1, "--cp must be at least 1, not 0"),
]
OF_MASKS = [
    ("--reset-attention", 1, "--reset-attention needs --eod-token"),
    ("--mask-eod-loss", 1, "--mask-eod-loss needs --eod-token"),
    ("--eod-token 61", 1, "eod-token: 61 is not below vocab-size(61)"),
    ("--reset-positions --eod-token 1 --positions alibi", 1, "alibi knows distances"),
    ("--answers-only --objective prefix", 1, "--answers-only needs --objective causal"),
    ("--answers-only", 1, "--answers-only needs the files of --data"),
]
OF_OPTIMIZERS = [
    ("--zero 3 --pp 2", 2, " needs pp(1), not pp(2)"),
    ("--optimizer muon --tp 2", 2, "muon needs whole matrices, but tp(2) cuts them"),
    ("--optimizer adafactor --zero 2", 1, "use --zero 0 or 1, not 2"),
    ("--grad-dtype bf16", 1, "--grad-dtype bf16 needs --precision bf16, not fp32"),
    ("--recompute-layers 2", 1, "--recompute-layers 2 needs --recompute"),
    ("--overlap-param-gather --zero 0", 1, "needs --zero 1 or 2, not 0"),
    ("--optimizer adamw8bit --precision fp64", 1, "cannot train in fp64"),
]
OF_SCHEDULES = [
    (
        "--pp 2 --layers 4 --schedule-costs measured",
        4,
        "--schedule-costs measured needs --schedule auto",
    ),
    (
        "--pp 2 --layers 4 --schedule-costs 1,2,3,4,5,6 --schedule zb-h1",
        4,
        "--schedule auto, not zb-h1",
    ),
    ("--pp 2 --layers 4 --vocab-pp --schedule auto", 4, "takes --schedule 1f1b or gpipe, not auto"),
    (
        "--pp 4 --layers 4 --recompute-blocks 1,1,1,1 --schedule auto --recompute full",
        4,
        "auto chooses them: give",
    ),
    (
        "--pp 2 --layers 4 --recompute-blocks 1,1",
        4,
        "--recompute-blocks 1,1 needs --recompute selective or full",
    ),
    (
        "--pp 4 --layers 4 --recompute-blocks 1,1 --recompute full",
        4,
        "1,1 has 2 stages, but the layout has 4",
    ),
    (
        "--pp 4 --layers 4 --recompute-blocks 1,x --recompute full",
        4,
        "a list like 3,2,1,0, not '1,x'",
    ),
    (
        "--pp 4 --layers 4 --recompute-blocks 1 --recompute full --recompute-layers 2",
        4,
        "give --recompute-layers(2) or",
    ),
]
OF_VOCABULARIES = [
    ("--vocab-pp --pp 1", 4, "--vocab-pp spreads the vocabulary over pipeline ranks: pp is 1"),
    ("--vocab-pp --pp 2 --schedule zb-h1", 4, "takes --schedule 1f1b or gpipe, not zb-h1"),
    ("--vocab-pp --pp 2 --objective prefix", 4, "neither masks of attention nor reset positions"),
    ("--vocab-pp --pp 2 --optimizer adafactor", 4, "whole matrices, but --vocab-pp cuts"),
]
OF_DATA = [
    ("--eval-data x", 1, "NAME=PREFIX or NAME=PREFIX:SAMPLES such as "),
    ("--eval-data =x", 1, "not '=x'"),
    ("--eval-data a=", 1, "not 'a='"),
    ("--eval-data a=x:0", 1, "not 'a=x:0'"),
    ("--eval-data a/b=x", 1, "not 'a/b=x'"),
    ("--eval-data a=x a=y", 1, "--eval-data a=y: another set is called a"),
    ("--eval-data test=x", 1, "a split of --data is called test"),
]
OF_SKIPPED_SAMPLES = [
    ("--skip-samples 7:7", 1, "takes A:B, from sample A up to but not including B, not '7:7'"),
    ("--skip-samples 9:7", 1, "not '9:7'"),
    ("--skip-samples 7:-3", 1, "not '7:-3'"),
    ("--skip-samples 7", 1, "not '7'"),
    ("--skip-samples 1K:2K", 1, "not '1K:2K'"),
    ("--skip-samples 10:20 0:5 19:30", 1, "--skip-samples: 10:20 and 19:30 overlap"),
]
TABLES = [
    (RUN, OF_LAYOUTS),
    (SHAPE, OF_BATCHES),
    (TINY, OF_CONTEXT_PARALLELISM),
    (GOLDEN, OF_MASKS),
    (GOLDEN, OF_OPTIMIZERS),
    (GOLDEN, OF_SCHEDULES),
    (GOLDEN, OF_VOCABULARIES),
    (TINY, OF_DATA),
    (TINY, OF_SKIPPED_SAMPLES),
]


@pytest.mark.parametrize(
    ("words", "ranks", "sentence"),
    [(base + words, ranks, sentence) for base, rows in TABLES for words, ranks, sentence in rows],
)
def test_options_that_cannot_be_are_one_sentence(words, ranks, sentence):
    with pytest.raises(UserError) as caught:
        validation.check(parse(words.split()), ranks)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
