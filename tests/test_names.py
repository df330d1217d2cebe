"""Names that users write: numbers and kinds of GPUs, models of a hub, batches in tokens."""

import pytest

import plan
import rehearse
import tune
from config.messages import UserError

GPT = ["--layers", "4", "--hidden", "64", "--heads", "4"]


@pytest.mark.parametrize("flag", ["--gpus", "--ranks", "--world"])
def test_the_number_of_gpus_has_one_name_and_two_accepted_spellings(flag, capsys):
    for parser in (tune.parser(), rehearse._parser()):
        assert parser.parse_known_args([flag, "6"])[0].gpus == 6
    words = ["layouts", *GPT, "--gpu", "cpu", flag, "2", "--global-batch-size", "8"]
    assert plan.ask(words).data["gpus"] == 2
    with pytest.raises(UserError, match=r"give --nodes\(1\) or --gpus\(2\), not both"):
        plan.ask([*words, "--nodes", "1"])
    for program in (tune.parser(), plan.parser()):
        question = ["layouts"] * (program.prog == "plan.py")
        with pytest.raises(SystemExit):
            program.parse_args([*question, "--help"])
        help_text = capsys.readouterr().out
        assert "--gpus N" in help_text
        assert "--ranks" not in help_text
        assert "--world" not in help_text


@pytest.mark.parametrize("flag", ["--min-gpus", "--min-ranks"])
def test_the_fewest_gpus_are_found_by_either_name(flag):
    assert tune.parser().parse_known_args([flag])[0].min_gpus
