"""check.py --widths and --depths: if this failed, a wrong scale would pass for a right one.

Scales are planted into the engine one at a time; each must be named with its tensor and its class,
and nothing else. Right models must not be accused.
"""

import re

import pytest

import check
from architecture import mup
from base.errors import UserError
from config import command_line
from parallel import ParamFactory
from tools.checker import scaling, transfer
from tools.checker.coordinates import Fitted, compare, slope
from tools.checker.sizes import Ladder

GPT = "--layers 2 --hidden 64 --heads 4"
LLAMA = f"{GPT} --positions rotary --norm rmsnorm --activation swiglu --no-bias --kv-heads 2"
MOE = f"{LLAMA} --experts 8 --set shared_ffn_hidden=64 --set shared_gate=true"
WIDTHS, DEPTHS = (32, 64, 128), (2, 4, 8)


def rows_of(words: str, by_depth: bool = False, sizes=None) -> list[Fitted]:
    config = command_line.parse([*words.split(), "--steps", "1"])
    sizes = sizes or (DEPTHS if by_depth else WIDTHS)
    ladder = Ladder(config, 64 if by_depth else sizes[0], sizes[0] if by_depth else 2)
    return compare(ladder, sizes, by_depth, seeds=1, updates=3, rate=4e-3)


def wrong(rows: list[Fitted]) -> list[str]:
    """The tensors that are accused, with their classes."""
    return sorted({f"{row.kind}: {row.name}" for row in rows if row.verdict and row.kind})


def with_role(monkeypatch, pattern: str, role: str) -> None:
    """Have the engine take parameters whose names fit for another role."""
    real = ParamFactory.parameter

    def parameter(self, name, shape, **options):
        if re.search(pattern, name):
            options["role"] = role
        return real(self, name, shape, **options)

    monkeypatch.setattr(ParamFactory, "parameter", parameter)


# The options of the run, the parameters with a wrong role and that role, and who is accused.
ROLES = {
    "embedding": (
        f"{LLAMA} --no-tied",
        r"embedding\.tokens",
        "hidden",
        "input-like: embedding.tokens.weight",
    ),
    "positions": (GPT, r"embedding\.positions", "hidden", "input-like: embedding.positions.weight"),
    "head": (f"{LLAMA} --no-tied", r"^head\.weight", "hidden", "output-like: head.weight"),
    "q, k and v": (
        LLAMA,
        r"attention\.qkv\.weight",
        "input",
        "hidden: blocks.*.attention.qkv.weight: k, hidden: blocks.*.attention.qkv.weight: q, "
        "hidden: blocks.*.attention.qkv.weight: v",
    ),
    "attention's output": (
        LLAMA,
        r"attention\.out\.weight",
        "input",
        "hidden: blocks.*.attention.out.weight",
    ),
    "MLP": (LLAMA, r"mlp\.down\.weight", "readout", "hidden: blocks.*.mlp.down.weight"),
    "router": (MOE, r"mlp\.router\.weight", "input", "output-like: blocks.*.mlp.router.weight"),
    "shared gate": (
        MOE,
        r"shared_gate",
        "input",
        "output-like: blocks.*.mlp.shared_gate.weight",
    ),
    "experts": (MOE, r"experts\.up\.weight", "input", "hidden: blocks.*.mlp.experts.up.weight"),
    "norm": (LLAMA, r"mlp_norm\.weight", "hidden", "vector: blocks.*.mlp_norm.weight"),
    "bias": (GPT, r"mlp\.up\.bias", "hidden", "vector: blocks.*.mlp.up.bias"),
    "latent": (
        "--layers 2 --hidden 64 --heads 4 --positions rotary --set kv_lora_rank=32 "
        "qk_nope_head_dim=8 qk_rope_head_dim=8 v_head_dim=16",
        r"kv_a\.weight",
        "input",
        "hidden: blocks.*.attention.kv_a.weight: latent, "
        "output-like: blocks.*.attention.kv_a.weight: key",
    ),
}


@pytest.mark.parametrize("plant", ROLES)
def test_a_wrong_role_is_named_with_its_tensor_and_its_class(plant, monkeypatch):
    words, pattern, role, accused = ROLES[plant]
    with_role(monkeypatch, pattern, role)
    assert ", ".join(wrong(rows_of(f"{words} --mup 64"))) == accused


def test_a_wrong_rate_of_muons_matrices_is_named(monkeypatch):
    wrong_rate = mup.EXPONENTS["hidden"]._replace(match_rms_adamw=0.0)
    monkeypatch.setitem(mup.EXPONENTS, "hidden", wrong_rate)
    accused = wrong(rows_of(f"{LLAMA} --mup 64 --optimizer muon"))
    matrices = {"attention.qkv.weight: q", "attention.out.weight", "mlp.up.weight"}
    assert {f"hidden: blocks.*.{name}" for name in matrices} <= {*accused}
    assert {one.partition(":")[0] for one in accused} == {"hidden"}


def test_a_wrong_divisor_of_the_logits_is_named():
    accused = wrong(rows_of(f"{LLAMA} --no-tied --mup 64 --set logit_divisor=3"))
    assert accused == ["output-like: head.weight"]


def test_a_wrong_scale_of_the_scores_is_named():
    """Heads that grow, with scores divided by a number that stays."""
    growing = f"{LLAMA} --mup 64 --set mup_base_head_size=16"
    assert wrong(rows_of(growing)) == []
    accused = wrong(rows_of(f"{growing} --set query_scalar=15"))
    assert accused == ["attention scale: attention scores"]


def test_a_wrong_scale_of_the_residual_stream_is_named():
    accused = wrong(rows_of(f"{LLAMA} --mup-base-layers 2 --set residual_multiplier=0.9", True))
    names = {"attention.out.weight", "mlp.down.weight"}
    assert {*accused} == {f"residual: blocks.*.{name}" for name in names}


def test_without_mup_each_class_that_does_not_scale_is_named():
    accused = wrong(rows_of(f"{MOE} --no-tied"))
    assert {one.partition(":")[0] for one in accused} == {"hidden", "output-like"}
    assert "output-like: head.weight" in accused
    assert "output-like: blocks.*.mlp.router.weight" in accused
    assert not [one for one in accused if "norm" in one or "embedding" in one]
    deep = wrong(rows_of(GPT, True))
    assert {one.partition(":")[0] for one in deep} == {"residual"}


# ---- Right models --------------------------------------------------------------------------------

LATENT = "--set kv_lora_rank=32 qk_nope_head_dim=8 qk_rope_head_dim=8 v_head_dim=16"
PARTS = "--set mixer=mamba2"
RIGHT = [
    GPT,
    LLAMA,
    MOE,
    f"{LLAMA} --no-tied",
    f"{GPT} --positions alibi --activation relu",
    f"{LLAMA} --block parallel",
    f"{LLAMA} --set qk_norm=head",
    f"{LLAMA} --block sandwich --set norm_plus_one=true --activation geglu",
    f"{LLAMA} --block post-norm --set qk_norm=full",
    f"{GPT} --positions rotary --no-bias --norm rmsnorm {LATENT}",
    f"{GPT} --positions rotary --no-tied --norm rmsnorm {LATENT} q_lora_rank=32 --experts 8",
    f"{LLAMA} --set mixer=gated_delta_net mixer_blocks=1:1",
    f"{LLAMA} --set mixer=kda mixer_blocks=1:1",
    f"{LLAMA} --set mixer=mamba2 mixer_blocks=1:1",
    f"{LLAMA} --set mixer=short_conv mixer_blocks=1:1",
    f"{LLAMA} --set window=8 sinks=true",
    f"{LLAMA} --set attention_softcap=20 logit_softcap=20",
    f"{MOE} --router sigmoid --balance bias --no-tied",
    f"{LLAMA} --set mup_base_head_size=16",
    f"{LLAMA} --set attention_gate=true",
]
FAST = {LLAMA, MOE}
MODELS = [
    pytest.param(
        f"{words} --optimizer {optimizer}", marks=[] if words in FAST else pytest.mark.slow
    )
    for words in RIGHT
    for optimizer in ("adamw", "muon")
]


@pytest.mark.parametrize("words", MODELS)
def test_no_tensor_of_a_right_model_is_accused(words):
    """From 4 heads on: of two a tensor of a number for each head moves by chance."""
    rows = rows_of(f"{words} --mup 64", sizes=(64, 128, 256))
    assert len(rows) > 20
    assert [row for row in rows if row.verdict] == []


# With post-norm the first blocks read a stream that is small, the more so the deeper the model is.
DEEP = [GPT, LLAMA, MOE, f"{LLAMA} --block sandwich", f"{LLAMA} --block parallel"]


@pytest.mark.slow
@pytest.mark.parametrize("words", DEEP)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_no_tensor_of_a_right_model_is_accused_by_depth(words, optimizer):
    rows = rows_of(f"{words} --mup-base-layers 2 --optimizer {optimizer}", True)
    assert [row for row in rows if row.verdict] == []


# ---- The command ---------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_a_verdict_and_draws(capsys, tmp_path):
    table, picture = tmp_path / "t.txt", tmp_path / "p.png"
    words = f"{LLAMA} --widths 32,128 --updates 2 --seeds 1 --table {table} --picture {picture}"
    assert check.main(words.split()) == 1
    printed = capsys.readouterr().out
    assert (
        "hidden: the update size of blocks.*.mlp.up.weight grows, as width to the power" in printed
    )
    assert table.read_text() == printed
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert check.main(f"{words} --mup 32".split()) == 0
    assert "\nright: " in capsys.readouterr().out


def test_the_transfer_check_prints_the_best_rates(capsys):
    words = f"{GPT} --widths 32,64 --mup 32 --rates 4e-3:6.4e-2 --factor 4 --runs-of 12 --seeds 1"
    assert check.main(words.split()) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[3:5]] == [["width", "32"], ["width", "64"]]
    assert lines[3].count("*") == lines[4].count("*") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--widths 64", "--widths takes two sizes or more"),
        ("--widths 64,100", "--widths are multiples of 32, two heads of 16: not 100"),
        ("--widths 128,64", "goes from the smallest to the largest"),
        ("--widths 64,x", "--widths takes whole numbers such as 64,128,256, with commas"),
        ("--widths 64,128 --depths 2,4", "give several --widths or several --depths"),
        ("--widths 64,128 --updates 11", "--updates is from 1 to 10, not 11"),
        ("--widths 64,128 --rates 1e-3", "--rates takes A:B such as"),
        ("--widths 64,128 --rates 1e-3:2e-3", "is 2 rates by a factor 2: give 3 or more"),
        ("--widths 64,128 --mup 64 --optimizer sgd", "--mup 64 has rates for"),
        (
            f"--widths 32,64 --layers 4 {PARTS} hybrid_pattern=M-*-",
            "hybrid_pattern has 3 kinds of blocks (M-*), which a model of 2 blocks cannot have: "
            "give --depths of 3 or more",
        ),
    ],
)
def test_a_mistake_is_one_sentence(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check.main([*GPT.split(), *words.split()])


def test_blocks_of_one_part_take_turns_at_every_depth():
    """Each kind is in the smallest model, and a list of one number of blocks fits every other."""
    words = f"{GPT} --layers 4 {PARTS} hybrid_pattern=MM-*"
    config = command_line.parse(words.split())
    ladder = Ladder(config, 32, 3)
    patterns = [ladder.at(32, layers, 1).model.hybrid_pattern for layers in (3, 6, 8)]
    assert patterns == ["M-*", "M-*M-*", "M-*M-*M-"]


def test_an_exponent_is_the_slope_of_logarithms():
    assert slope([64, 128, 512], [3 * size**-0.5 for size in (64, 128, 512)]) == pytest.approx(-0.5)


def test_rates_are_a_grid_from_the_first_to_the_last():
    assert scaling.rates_of("1e-3:8e-3", 2.0) == pytest.approx((1e-3, 2e-3, 4e-3, 8e-3))


def test_the_best_rate_and_how_far_it_moves():
    flat, steep = [3.0, 2.51, 2.5, 2.52, 9.0], [2.0, 2.5, 3.0, float("inf"), float("inf")]
    assert transfer.best(flat) == transfer.Best(2, 1, 3)
    assert transfer.drift([flat, steep]) == -2
    assert transfer.at_edge([flat, steep])
    assert not transfer.at_edge([flat])
