"""Plans with experts and cp: if this failed, they would be of another model."""

import json
from dataclasses import replace

import pytest

import plan
from architecture import block_kinds, model_stats
from architecture.shape import ModelShape
from base.errors import UserError
from config.schema import Layout, Training
from config.spelling import preset
from costs import hardware, memory, op_costs, step_time, time_terms
from costs.job import Job
from tools.planner import layouts, questions
from tools.planner.enumeration import Asked

H100, A100 = hardware.load("h100"), hardware.load("a100-80")
# Mixtral 8x7B, as its config.json has it.
MIXTRAL = (
    "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn-hidden 14336 --vocab-size 32000 "
    "--seq-length 4096 --positions rotary --norm rmsnorm --activation swiglu --no-bias --no-tied "
    "--experts 8 --experts-per-token 2"
)


def ask(line: str) -> questions.Answer:
    return plan.ask(line.split())


def job(model: ModelShape, layout: Layout, machine=H100, batch: int = 64) -> Job:
    return Job(model, layout, Training(global_batch_size=batch, precision="bf16"), machine)


def with_experts(model: ModelShape, experts: int, active: int = 2) -> ModelShape:
    return replace(model, experts=experts, experts_per_token=active)


# ------------------------------------------------------------------------------------------------
# Experts
# ------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_active_experts():
    dense = preset("gpt2-1.5b")
    router = 2.0 * dense.hidden * 8
    mlp = 2.0 * dense.hidden * (dense.up_width + dense.ffn_hidden)
    for active in (1, 2, 4):
        model = with_experts(dense, 8, active)
        more = model_stats.block_flops(model) - model_stats.block_flops(dense)
        assert more == pytest.approx((active - 1) * mlp + router)


def test_blocks_of_two_kinds_are_counted_each_and_planned_as_their_mean():
    model = with_experts(preset("gpt2-1.5b"), 8)
    model = replace(model, first_dense_layers=16, ffn_hidden=6400, expert_ffn_hidden=1600)
    (sparse_blocks, sparse), (dense_blocks, dense) = block_kinds.kinds(model)
    assert (sparse_blocks, dense_blocks) == (32, 16)
    difference = model_stats.block_parameters(sparse) - model_stats.block_parameters(dense)
    assert difference == 1600 * 8 + 8 * (2 * 1600 * 1600 + 3200) - (2 * 1600 * 6400 + 8000)
    assert model_stats.parameters_of_blocks(model, 15, 18) == (
        3 * model_stats.block_parameters(dense) + 2 * difference
    )
    passes = [step_time.block_pass(job(each, Layout(dp=8))) for each in (sparse, dense, model)]
    assert passes[2].forward == pytest.approx((2 * passes[0].forward + passes[1].forward) / 3)
    held = [memory.stages(job(each, Layout(dp=8)))[0] for each in (sparse, dense, model)]
    assert held[2].parameters < model_stats.parameters(model)
    assert held[0].activations + held[1].activations == pytest.approx(held[2].activations, rel=0.01)


def test_experts_are_spread_over_ep_and_their_state_over_all_replicas():
    model = with_experts(preset("gpt2-1.5b"), 8)
    experts = model.layers * 8 * model_stats.mlp_parameters(model)
    held, optimizer = {}, {}
    for ep in (1, 2, 8):
        stage = memory.stages(job(model, Layout(dp=16, zero=1, ep=ep)))[0]
        held[ep], optimizer[ep] = stage.parameters, stage.optimizer
    assert held[1] - held[2] == pytest.approx(experts / 2)
    assert held[1] - held[8] == pytest.approx(experts * 7 / 8)
    assert optimizer[1] == pytest.approx(optimizer[2]) == pytest.approx(optimizer[8])
    assert optimizer[1] == pytest.approx(12 * held[1] / 16)


def test_the_table_has_a_column_of_ep_for_experts_alone():
    line = "layouts --gpu h100 --nodes 2 --global-batch-size 64 --tp 2 --pp 2 --cp 1 --model "
    head, first = ask(line + "mixtral-8x7b").text.splitlines()[1:3]
    assert dict(zip(head.split(), first.split(), strict=False))["ep"] == "8"
    assert "ep" not in ask(line + "gpt2-1.5b").text.splitlines()[1].split()


def test_stages_tells_which_loads_of_experts_fit():
    question = "stages --model olmoe-1b-7b --gpu h100 --dp 8 --ep 8 --global-batch-size 64"
    answer = ask(question)
    loads = answer.data["expert_loads"]
    equal = answer.data["memory"][answer.data["fullest_rank"]]["total_bytes"]
    assert loads["rows_over_mean_factor"] == 8
    assert loads["total_bytes"] > equal
    assert f"the fullest GPU needs {loads['total_bytes'] / 1e9:.1f} GB" in answer.text
    assert ask(question.replace("--ep 8", "--ep 1")).data["expert_loads"] is None
    # With a larger accepted risk, a larger load is safe.
    riskier = ask(f"{question} --risk 0.5").data["expert_loads"]
    assert riskier["safe_rows_over_mean_factor"] > loads["safe_rows_over_mean_factor"] > 1


def test_the_planned_ep_is_what_a_rehearsal_and_a_trial_run():
    """All take the flags of a line, or its layout; without ep the run would have ep 1."""
    line = "layouts --gpu h100 --nodes 2 --global-batch-size 64 --tp 2 --pp 2 --cp 1 --model "
    for row in ask(line + "mixtral-8x7b").data["ranked"]:
        assert "--ep 8" in " ".join(row["flags"])
    model = preset("mixtral-8x7b")
    training = Training(global_batch_size=64, precision="bf16")
    found = layouts.rank(Asked(model, training, H100, 16, {"tp": 2, "pp": 2}))
    assert {one.layout.ep for one in found.ranked} == {8}
    dense = layouts.rank(Asked(preset("gpt2-1.5b"), training, H100, 16, {"tp": 1, "pp": 2}))
    assert {one.layout.ep for one in dense.ranked} == {None}


def test_by_default_experts_stay_on_a_node():
    model = with_experts(preset("gpt2-1.5b"), 16)
    for tp, dp, ep in ((1, 16, 8), (2, 16, 8), (8, 8, 8), (1, 4, 4), (1, 6, 2)):
        assert job(model, Layout(tp=tp, dp=dp)).ep == ep
    assert job(model, Layout(dp=32, ep=16)).ep == 16


def test_all_to_all_sends_what_others_have_and_is_slower_between_nodes():
    assert op_costs.all_to_all(H100, 1, 1, 1e9) == 0
    inside = op_costs.all_to_all(H100, 8, 1, 8e9)
    assert inside == pytest.approx(7e9 / H100.nvlink.speed, rel=1e-3)
    across = op_costs.all_to_all(H100, 16, 1, 16e9)
    assert across == pytest.approx(8e9 * 8 / H100.network.speed, rel=1e-3)
    model = with_experts(preset("gpt2-1.5b"), 16)
    at = [Layout(dp=16, ep=ep, micro_batch_size=4) for ep in (8, 16)]
    seconds = [step_time.block_pass(job(model, each)).forward for each in at]
    assert seconds[1] > 1.2 * seconds[0]


def test_experts_that_only_one_replica_has_are_not_reduced():
    model = with_experts(preset("gpt2-1.5b"), 8)
    alone, shared = (
        step_time.step_parts(job(model, Layout(dp=8, ep=ep)))["reduce"] for ep in (8, 1)
    )
    assert 0 < alone < 0.4 * shared


# Facts of the published models; keys that no formula needs are left out.
MIXTRAL_FILE = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN_FILE = {name: value for name, value in MIXTRAL_FILE.items() if name != "num_local_experts"}
QWEN_FILE |= {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "attention_bias": False,
    "use_sliding_window": False,
}


def test_a_config_json_of_experts(tmp_path, capsys):
    for name, facts, total, active in (
        ("mixtral", MIXTRAL_FILE, 46_702_792_704, 12.9e9),
        ("qwen", QWEN_FILE, 30_532_122_624, 3.35e9),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(facts))
        for path in (folder, folder / "config.json"):
            found = ask(f"model --model {path}").data
            assert found["parameters"] == total
            assert found["active_parameters"] == pytest.approx(active, rel=0.02)
    line = f"layouts --model {tmp_path}/mixtral --seq-length 4096 --gpu h100 --nodes 8"
    given = MIXTRAL.replace("--experts", "--set rotary_base=1e6 --experts", 1)
    found, expected = ask(line).data, ask(f"layouts {given} --gpu h100 --nodes 8").data
    assert found["ranked"] == expected["ranked"]
    assert "train.py cannot" not in capsys.readouterr().err
    assert ask(f"model --model {tmp_path}/mixtral --experts 4").data["parameters"] < 25e9


# ------------------------------------------------------------------------------------------------
# Context parallelism
# ------------------------------------------------------------------------------------------------


def test_cp_shares_the_tokens_and_not_the_weights():
    model = replace(preset("1b3"), seq_length=32768, max_positions=32768)
    one = job(model, Layout(dp=8))
    four = job(model, Layout(cp=4, dp=2))
    assert four.gpus == one.gpus == 8
    assert four.tokens == one.tokens / 4
    before, after = memory.stages(one)[0], memory.stages(four)[0]
    assert after.activations == pytest.approx(before.activations / 4)
    assert after.optimizer == pytest.approx(before.optimizer)
    assert (after.weights, after.gradients) == (before.weights, before.gradients)
    # The same work of a step, but for keys and values that are passed on.
    passes = [step_time.block_pass(each).forward for each in (one, four)]
    assert passes[0] / 4 < passes[1] < passes[0] / 2


def test_a_model_that_fits_with_cp_alone():
    line = "layouts --model 1b3 --seq-length 524288 --positions rotary --gpu h100 --gpus 8 --tp 1"
    line += " --pp 1 --global-batch-size 1 --recompute full"
    assert not ask(f"{line} --cp 1").data["ranked"]
    assert ask(line).data["ranked"][0]["cp"] == 8
    found = ask(f"{line} --cp 8 --risk 1").data
    assert [(row["dp"], row["recompute"]) for row in found["ranked"]] == [(1, "full")]
    for words, reason in (
        ("--seq-length 524286 --cp 3", "tp(1) * pp(1) * cp(3) * dp(?) does not divide 8 GPUs"),
        ("--seq-length 1000 --cp 8", "2 * cp(8) does not divide seq-length(1000)"),
    ):
        found = ask(f"{line.replace('--seq-length 524288', '')} {words}").data
        assert not found["ranked"]
        assert [row["reason"] for row in found["rejected"]] == [reason]


def test_fp8_is_gone():
    with pytest.raises(UserError, match=r"--fp8 is gone: train\.py cannot train in fp8"):
        ask("layouts --model gpt3-175b --gpu h100 --nodes 16 --fp8")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "largest --gpu h100 --experts 8",
            "a model with experts goes with layouts, days and stages",
        ),
        ("stages --model 1b3 --ep 8 --gpus 8", "--ep needs --experts N"),
        (f"stages {MIXTRAL} --ep 3 --gpus 8", r"ep\(3\) does not divide experts\(8\)"),
        (
            "model --model 1b3 --experts 8 --experts-per-token 9",
            r"experts-per-token\(9\) is more than experts\(8\)",
        ),
        ("model --model 1b3 --experts 0", "--experts must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(line, message):
    with pytest.raises(UserError, match=message):
        ask(line)


# ------------------------------------------------------------------------------------------------
# Machines as users have them
# ------------------------------------------------------------------------------------------------


def test_a_v100_plans_with_fp16_and_says_so(capsys):
    line = "layouts --model gpt2-1.5b --gpu v100-32 --gpus 8 --global-batch-size 64"
    assert ask(line).text.splitlines()[0].endswith("fp16")
    heard = capsys.readouterr().err
    assert "V100 has neither bf16 nor flash attention: planned with fp16, efficient" in heard
    assert ask(f"{line} --precision fp32").text.splitlines()[0].endswith("fp32")
    with pytest.raises(UserError, match="--precision bf16: V100 has no bf16 arithmetic"):
        ask(f"{line} --precision bf16")
    assert ask(line.replace("v100-32", "a100-80")).text.splitlines()[0].endswith("bf16")
    assert "neither" not in capsys.readouterr().err.splitlines()[-1:]


def test_gpus_per_node_is_the_users(capsys):
    line = "layouts --model 1b3 --gpu v100-32 --nodes 2 --global-batch-size 64 --top 300"
    four, eight = ask(line).data, ask(f"{line} --gpus-per-node 8").data
    assert (four["gpus"], eight["gpus"]) == (8, 16)
    assert max(row["tp"] for row in four["ranked"]) == 4
    assert max(row["tp"] for row in eight["ranked"]) == 8
    assert "a node of 8 has the links that v100-32 states" in capsys.readouterr().err
    with pytest.raises(UserError, match="--gpus-per-node must be above 0, not -1"):
        ask(f"{line} --gpus-per-node -1")


def test_the_busiest_rank_of_many_experts_is_nearer_to_the_mean():
    """Eight ranks of 8 experts: 0.3 / sqrt(8) x 1.43 above the mean; of one expert 0.3 x 1.43."""
    training = Training(global_batch_size=64, precision="bf16")
    layout = Layout(dp=8, ep=8)
    machine = hardware.load("h100")

    def uneven(experts: int, ep: int) -> float:
        model = ModelShape(2, 64, 4, experts=experts, experts_per_token=2)
        return float(time_terms.uneven(Job(model, replace(layout, ep=ep), training, machine)))

    assert uneven(64, 8) == pytest.approx(1 + 0.3 * 1.434 / 8**0.5, rel=0.01)
    assert uneven(8, 8) == pytest.approx(1 + 0.3 * 1.434, rel=0.01)
    assert uneven(8, 1) == pytest.approx(1.0)
