"""Fewer key/value heads, or key heads of a mixer, than tensor ranks: several ranks hold the same.

If these failed, a model with few key/value heads would be another one at a larger --tp.
"""

import golden_worker
import pytest
import sample_worker
from ranks import results_of
from test_checkpoint import check_chain
from test_golden import check_lines

from base.errors import UserError
from config import validation

MODEL = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
MODEL |= {"kv_heads": 2, "precision": "fp64", "qkv_bias": True}
MIXER = {"mixer": "gated_delta_net", "mixer_blocks": "1:1", "mixer_key_heads": 2}
MIXER |= {"mixer_value_heads": 4, "mixer_key_size": 6, "mixer_value_size": 4}


@pytest.mark.slow
def test_layouts_equal_the_single_rank_run(tmp_path):
    check_lines("repeated_heads", tmp_path)


@pytest.mark.parametrize(
    "more", [{"qk_norm": "full", "attention_gate": True}, MIXER | {"optimizer": "muon", "ema": 0.9}]
)
def test_a_checkpoint_is_resumed_with_and_without_repeated_heads(tmp_path, more):
    """What four ranks have of two heads is saved once, and is all of it."""
    layouts = [{"tp": 2, "zero": 1}, {"tp": 4, "sequence_parallel": True}, {"pp": 2, "zero": 2}]
    layouts += [{"tp": 4}, {"tp": 2, "pp": 2}]
    check_chain(4, MODEL | more, layouts, tmp_path)


def test_decoding_is_that_of_one_rank(tmp_path):
    layouts = [{"tp": 4, **MIXER}, {"tp": 4, "sequence_parallel": True, "attention_gate": True}]
    layouts += [{"tp": 2, "pp": 2, "kv_heads": 1}, {"tp": 4, "window": 5, "window_blocks": "1:1"}]
    cases = [MODEL | layout for layout in layouts]
    results = results_of("tests/sample_worker.py", 4, [{"run": case} for case in cases], tmp_path)
    for case, result in zip(cases, results, strict=True):
        alone = {n: v for n, v in case.items() if n not in ("tp", "pp", "sequence_parallel")}
        config = validation.check(golden_worker.options(alone), 1)
        expected = sample_worker.sampled_steps(config)
        assert [row["sample"] for row in result] == [row["sample"] for row in expected], case


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tp": 4, "heads": 24, "hidden": 48, "kv_heads": 6},
            r"tp\(4\) does not divide kv-heads\(6\), nor the other way round",
        ),
        (
            {"tp": 8, "kv_heads": 2, "heads": 12, "hidden": 48},
            r"tp\(8\) does not divide heads\(12\)",
        ),
        (
            {"tp": 4, "optimizer": "muon", "muon_qkv": "joint"},
            r"muon_qkv joint updates .* kv-heads\(2\) and tp\(4\)",
        ),
        (
            MIXER | {"tp": 4, "kv_heads": 4, "optimizer": "muon", "muon_qkv": "joint"},
            r"muon_qkv joint updates .* mixer_key_heads\(2\) and tp\(4\)",
        ),
    ],
)
def test_a_layout_that_no_rank_can_hold_is_a_sentence(options, message):
    with pytest.raises(UserError, match=message):
        validation.check(golden_worker.options(MODEL | options), 8)
