"""If this failed, a user would be told to train a shape that is slower than another of its size."""

import pytest

import plan
from architecture import model_stats
from architecture.shape import ModelShape
from base.errors import UserError
from benchmarks.planner import plan_accuracy, published_cases, published_rows, shape_order
from costs import hardware


def ask(words: str) -> plan.Answer:
    return plan.ask(words.split())


@pytest.fixture(scope="module")
def tables():
    rows = published_cases.cases(published_rows.read(str(plan_accuracy.DATA / "measured_rows.csv")))
    values = dict(hardware.fitted_values())
    return shape_order.timed(rows, plan_accuracy.held_out(rows, "seconds", values))


def test_the_shapes_of_the_notes_come_out_in_the_order_in_which_they_ran(tables):
    """Held out: each section with constants fitted without it."""
    found = {name: shape_order.pairs(shapes) for name, shapes in tables.items()}
    assert sum(count for count, _ in found.values()) == 25
    assert sum(len(wrong) for _, wrong in found.values()) <= 4
    in_order = [shape.name for shape in sorted(tables["shapes of 177 to 196 B"], key=predicted)]
    assert [name.split(",")[0] for name in in_order if "84 x 13824" not in name] == [
        *("78 x 13824", "72 x 14336", "84 x 13312", "96 x 12288"),
    ]
    assert found["hidden 14,400 and 13,824, 80 blocks"] == (1, [])
    heads = {shape.name.split(", ")[1]: shape for shape in tables["heads of 72 x 14,336"]}
    assert heads["64 heads"].predicted < heads["112 heads"].predicted


def predicted(shape: shape_order.Timed) -> float:
    return shape.predicted


def test_shapes_near_a_size_are_sorted_with_reasons():
    answer = ask("shapes --size 7B --gpu a100-80 --gpus 64 --json")
    shapes = answer.data["shapes"]
    assert len(shapes) > 5
    seconds = [shape["seconds_per_token_and_parameter"] for shape in shapes]
    assert seconds == sorted(seconds)
    for shape in shapes:
        model = shape["model"]
        assert shape["parameters"] == pytest.approx(7e9, rel=0.031)
        assert shape["layout"]["tp"] in shape["tp_that_divide"]
        assert shape["reasons"]
        assert model["hidden"] % model["heads"] == 0
        assert model["head_size"] % 8 == 0
    assert "measure them: python tune.py --try model=" in answer.text


def test_a_size_that_the_user_gives_is_held_and_a_bad_one_has_its_reason():
    common = "--model bloom-176b --size 183B --gpu a100-80 --nodes 48 --tp 8 --pp 12"
    held = ask(f"shapes {common} --hidden 14400 --layers 72").data["shapes"]
    assert {shape["model"]["hidden"] for shape in held} == {14400}
    assert {shape["model"]["layers"] for shape in held} == {72}
    text = ask(f"shapes {common} --hidden 14336 --heads 16").text
    assert "head size 896: no flash kernel above 256" in text


def test_shapes_of_latent_attention_have_a_kv_head_for_each_head():
    """Also where the model of the question has fewer, because the user names none."""
    latent = "kv_lora_rank=512 qk_nope_head_dim=64 qk_rope_head_dim=64 v_head_dim=64"
    common = "shapes --gpu h100 --size 200M --global-batch-size 8 --positions rotary"
    found = ask(f"{common} --set {latent}").data["shapes"]
    assert all(shape["model"]["kv_heads"] == shape["model"]["heads"] for shape in found)


def test_a_budget_gives_the_size():
    budget = ask("budget --gpu h100 --gpu-hours 2000 --gpus 16").data["found"]["the budget"]
    shapes = ask("shapes --gpu h100 --gpu-hours 2000 --gpus 16").data
    assert shapes["size_parameters"] == budget["parameters"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "of which size"),
        ("--size 7B --gpu-hours 5000", "not both"),
        ("--size 7B --model mixtral-8x7b", "a model with experts"),
        ("--model nemotron-h-8b", "hybrid_pattern lists each of 52 blocks, and this question"),
        ("--model lfm2-700m", "mixer_blocks lists each of 16 blocks.*: give it as N:M, or ask"),
        ("--size 900B --gpus 8", "no layout of 900.0 B parameters fits"),
    ],
)
def test_what_has_no_shape_is_a_sentence(words, sentence):
    with pytest.raises(UserError, match=sentence):
        ask(f"shapes --gpu h100 {words}")


def test_a_size_is_a_number_with_a_letter():
    text = ask("shapes --size 350M --gpu a100-80 --gpus 8 --vocab-size 50257").data["shapes"][0]
    assert model_stats.parameters(ModelShape(**text["model"])) == pytest.approx(350e6, rel=0.031)
    with pytest.raises(UserError, match="'many' is no number of parameters"):
        ask("shapes --size many --gpu a100-80")
