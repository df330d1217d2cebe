"""Names that users write: numbers and kinds of GPUs, models of a hub, batches in tokens."""

import pytest

import plan
import rehearse
import tune
from config.command_line import parse_request
from config.messages import UserError
from planner import hardware
from tuner.session import Session

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


@pytest.mark.parametrize(
    ("name", "taken", "note"),
    [
        ("a100", "a100-80", "a100: taken as a100-80; others: a100-40, a100-fms"),
        ("V100", "v100-32", "V100: taken as v100-32; others: v100-16"),
        ("a100-40gb", "a100-40", "a100-40gb: taken as a100-40"),
        ("NVIDIA-A100-SXM4-80GB", "a100-80", "NVIDIA-A100-SXM4-80GB: taken as a100-80"),
        ("H100-80GB", "h100", "H100-80GB: taken as h100"),
        ("mi300", "mi300x", "mi300: taken as mi300x"),
        ("h100", "h100", ""),
    ],
)
def test_a_family_of_gpus_is_taken_as_one_member_with_a_note(name, taken, note):
    machine = hardware.load(name)
    assert (machine.name, machine.note) == (taken, note)
    assert machine == hardware.load(taken)


def test_another_card_of_the_same_gpu_is_not_taken_for_it():
    for name in ("a100-pcie", "h100-nvl", "h100-pcie", "b100", "a10g"):
        with pytest.raises(UserError, match="no machine is called"):
            hardware.load(name)


def test_a_machine_with_the_facts_of_another_program_names_the_one_to_take():
    for name in hardware.names():
        machine = hardware.load(name)
        other = machine.software != hardware.Software() and machine.device != "CPU"
        assert other == bool(machine.note), name
    assert "train.py is planned with h100" in hardware.load("h100-megatron").note


def test_every_program_prints_what_a_family_was_taken_as(tmp_path, capsys, monkeypatch):
    note = "note: v100: taken as v100-32; others: v100-16"
    plan.ask(["layouts", *GPT, "--gpu", "v100", "--gpus", "1", "--global-batch-size", "8"])
    assert note in capsys.readouterr().err
    with pytest.raises(UserError, match="nowhere"):
        plan.ask(["calibrate", "nowhere", "--gpu", "v100"])
    assert note in capsys.readouterr().err
    with pytest.raises(UserError, match="nowhere"):
        plan.ask(["gap", "nowhere", "--gpu", "v100"])
    assert note in capsys.readouterr().err
    words = [
        *GPT,
        "--gpu",
        "v100",
        "--gpus",
        "1",
        "--out",
        str(tmp_path),
        "--launch",
        "env {ranks}",
    ]
    Session(*tune.parser().parse_known_args(words))
    assert note in capsys.readouterr().err
    monkeypatch.setattr(rehearse, "_emulate", lambda *_: 0)
    words = [*GPT, "--gpu", "v100", "--on", "cpu"]
    assert rehearse.main(words) == 0
    assert note in capsys.readouterr().err


SHORT = [*GPT, "--seq-length", "8192"]


@pytest.mark.parametrize(
    ("written", "samples"), [("4Mi", 512), ("4194304", 512), ("8192", 1), ("512Ki", 64)]
)
def test_a_batch_in_tokens_is_a_number_of_samples(written, samples):
    request = parse_request([*SHORT, "--batch-tokens", written])
    assert request.config.training.global_batch_size == samples
    assert request.config.training.batch_tokens is None
    assert "global_batch_size" in request.given


def test_a_unit_of_ten_is_taken_as_written_where_it_divides():
    request = parse_request([*GPT, "--seq-length", "4000", "--batch-tokens", "4M"])
    assert request.config.training.global_batch_size == 1000


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("4M", "488 x 8192 = 3997696 and 489 x 8192 = 4005888; or 4Mi = 512 x 8192"),
        ("0.5M", "61 x 8192 = 499712 and 62 x 8192 = 507904; or 0.5Mi = 64 x 8192"),
        ("512K", "62 x 8192 = 507904 and 63 x 8192 = 516096; or 512Ki = 64 x 8192"),
        ("3", "the nearest: 1 x 8192 = 8192"),
        ("0", "--batch-tokens must be at least 1, not 0"),
        ("-8192", "--batch-tokens must be at least 1, not -8192"),
        ("64T", "--global-batch-size must be at most 1048576, not 7812500000"),
        ("8192 --global-batch-size 1", "--global-batch-size and --batch-tokens; both were given"),
    ],
)
def test_a_batch_of_tokens_that_is_no_whole_samples_is_refused(written, sentence):
    with pytest.raises(UserError) as error:
        parse_request([*SHORT, "--batch-tokens", *written.split()])
    assert str(error.value).endswith(sentence)


def test_a_batch_in_tokens_of_a_file_and_of_a_flag(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nbatch_tokens = 16384\n")
    words = [*SHORT, "--config", str(file)]
    size = lambda *more: parse_request([*words, *more]).config.training.global_batch_size  # noqa: E731
    assert size() == 2
    assert size("--global-batch-size", "7") == 7
    file.write_text("[training]\nglobal_batch_size = 9\n")
    assert size("--batch-tokens", "32768") == 4
    file.write_text("[training]\nglobal_batch_size = 9\nbatch_tokens = 16384\n")
    with pytest.raises(UserError, match="both were given"):
        size()


def test_megatrons_iterations_count_the_samples_of_a_batch_in_tokens():
    words = [*SHORT, "--batch-tokens", "16384", "--lr-warmup-iters", "10", "--steps", "100"]
    assert parse_request(words).config.training.lr_warmup_samples == 20


def test_every_program_takes_a_batch_in_tokens(tmp_path, monkeypatch):
    batch = [*SHORT, "--batch-tokens", "65536", "--gpu", "cpu"]
    assert plan.ask(["layouts", *batch, "--gpus", "2"]).data["global_batch_size"] == 8
    words = [*batch, "--gpus", "2", "--out", str(tmp_path), "--launch", "env {ranks}"]
    session = Session(*tune.parser().parse_known_args(words))
    assert session.config.training.global_batch_size == 8
    seen = []
    monkeypatch.setattr(rehearse, "_emulate", lambda _, config, *__: seen.append(config) or 0)
    assert rehearse.main([*batch, "--on", "cpu"]) == 0
    assert seen[0].training.global_batch_size == 8
