"""Names that users write: if this failed, a GPU or a model would be taken for another one."""

import pytest

import plan
import rehearse
import tune
from architecture import model_stats
from base.errors import UserError
from config import spelling, validation
from config.command_line import parse_request
from config.spelling import PRESETS, means_preset, preset
from costs import hardware
from tools.tuner.session import Session

GPT = ["--layers", "4", "--hidden", "64", "--heads", "4"]


@pytest.mark.parametrize("flag", ["--gpus", "--ranks", "--world"])
def test_the_number_of_gpus_has_one_name_and_two_accepted_spellings(flag, capsys):
    for parser in (tune.parser(), rehearse.option_parser()):
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


@pytest.mark.parametrize(
    ("name", "taken", "note"),
    [
        ("a100", "a100-80", "a100: taken as a100-80; others: a100-40, a100-fms, a100-pcie"),
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
    for name in ("h100-nvl", "h100-pcie", "b100", "a10g"):
        with pytest.raises(UserError, match="no machine is called"):
            hardware.load(name)


def test_a_machine_with_the_rates_of_another_program_names_the_one_to_take():
    for name in hardware.names():
        machine = hardware.load(name)
        assert machine.software == hardware.Software() or machine.device == "CPU"
        other = name.startswith(("jean-zay", "selene", "b200", "b300", "gb200", "gb300", "h100-"))
        other |= name == "h200-megatron"
        assert other == bool(machine.note), name
    assert "train.py is planned with h100" in hardware.load("h100-megatron").note


def test_every_program_prints_what_a_family_was_taken_as(tmp_path, capsys):
    note = "note: v100: taken as v100-32; others: v100-16"
    plan.ask(["layouts", *GPT, "--gpu", "v100", "--gpus", "1", "--global-batch-size", "8"])
    assert note in capsys.readouterr().err
    with pytest.raises(UserError, match="nowhere"):
        plan.ask(["calibrate", "nowhere", "--gpu", "v100"])
    assert note in capsys.readouterr().err
    with pytest.raises(UserError, match="nowhere"):
        plan.ask(["gap", "nowhere", "--gpu", "v100"])
    assert note in capsys.readouterr().err
    words = ["--gpu", "v100", "--gpus", "1", "--out", str(tmp_path), "--launch", "env {ranks}"]
    Session(*tune.parser().parse_known_args([*GPT, *words]))
    assert note in capsys.readouterr().err
    with pytest.raises(SystemExit):  # which no rehearsal takes
        rehearse.main([*GPT, "--gpu", "v100", "--optimizer", "adamw8bit"])
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


def test_the_length_of_a_run_on_the_command_line_overrides_that_of_the_file(tmp_path):
    """Steps for samples and the other way round; two flags, or two keys, are a mistake."""
    file = tmp_path / "run.toml"
    file.write_text("[training]\ntrain_samples = 96\n")

    def length(*words: str) -> tuple[int | None, int | None]:
        training = parse_request([*SHORT, "--config", str(file), *words]).config.training
        return training.steps, training.train_samples

    assert length() == (None, 96)
    assert length("--steps", "5") == (5, None)
    assert length("--train-iters", "5") == (5, None)
    file.write_text("[training]\nsteps = 7\n")
    assert length("--train-samples", "40") == (None, 40)
    with pytest.raises(UserError, match="give one of --steps and --train-samples"):
        validation.check(parse_request([*SHORT, "--steps", "5", "--train-samples", "8"]).config, 1)


def test_megatrons_iterations_count_the_samples_of_a_batch_in_tokens():
    words = [*SHORT, "--batch-tokens", "16384", "--lr-warmup-iters", "10", "--steps", "100"]
    assert parse_request(words).config.training.lr_warmup_samples == 20


@pytest.mark.parametrize(
    ("words", "group", "expected"),
    [
        (
            "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 5",
            "training",
            {"lr_wsd_decay_style": "1-sqrt", "lr_wsd_decay_samples": 40, "lr_schedule": "wsd"},
        ),
        (
            "--lr-schedule wsd --lr-wsd-decay-style=minus_sqrt",
            "training",
            {"lr_wsd_decay_style": "1-sqrt"},
        ),
        (
            "--lr-schedule wsd --lr_wsd_decay_style linear --num-query-groups 2",
            "training",
            {"lr_wsd_decay_style": "linear"},
        ),
    ],
    ids=["wsd", "value alone", "same value"],
)
def test_values_that_megatron_calls_otherwise(words, group, expected):
    """The flag has the same name in both, so only its value is translated; a note says so."""
    request = parse_request([*SHORT, "--steps", "100", *words.split()])
    values = vars(getattr(request.config, group))
    assert {name: values[name] for name in expected} == expected
    named = any("--lr-wsd-decay-style 1-sqrt" in note for note in request.notes)
    assert named == ("minus_sqrt" in words)


@pytest.mark.parametrize("style", ["exponential", "cosine", "minus-sqrt"])
def test_a_decay_that_is_not_here_is_refused_with_those_that_are(style):
    words = ["--steps", "9", "--lr-decay-style", "WSD", "--lr-wsd-decay-style", style]
    with pytest.raises(
        UserError, match=f"lr-wsd-decay-style is one of linear, 1-sqrt, not '{style}'"
    ):
        parse_request([*SHORT, *words])


def test_every_program_takes_a_batch_in_tokens(tmp_path, monkeypatch):
    batch = [*SHORT, "--batch-tokens", "65536", "--gpu", "cpu"]
    assert plan.ask(["layouts", *batch, "--gpus", "2"]).data["global_batch_size"] == 8
    words = [*batch, "--gpus", "2", "--out", str(tmp_path), "--launch", "env {ranks}"]
    session = Session(*tune.parser().parse_known_args(words))
    assert session.config.training.global_batch_size == 8
    seen = []
    checked = rehearse.check_any_length
    monkeypatch.setattr(
        rehearse, "check_any_length", lambda config, *_: seen.append(config) or checked(config, 1)
    )
    with pytest.raises(SystemExit):  # which no rehearsal takes
        rehearse.main([*batch, "--optimizer", "adamw8bit"])
    assert seen[0].training.global_batch_size == 8


# ---- Models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("EleutherAI/pythia-1.4b", "pythia-1.4b"),
        ("EleutherAI/pythia-1.4b-deduped", "pythia-1.4b"),
        ("EleutherAI/gpt-neox-20b", "gpt-neox-20b"),
        ("openai-community/gpt2-xl", "gpt2-1.5b"),
        ("facebook/opt-13b", "opt-13b"),
        ("bigscience/bloom", "bloom-176b"),
        ("allenai/OLMo-2-1124-7B", "olmo2-7b"),
    ],
)
def test_names_of_repositories_find_their_preset(name, expected):
    request = parse_request(["--model", name])
    assert request.config.model == PRESETS[expected]
    assert f"--model {name} is the preset {expected}" in request.notes


def test_a_preset_by_its_own_name_has_no_note():
    for name in ("llama-3-8b", "Llama-3-8B", "176b"):
        assert not any("is the preset" in note for note in parse_request(["--model", name]).notes)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "meta-llama/Llama-9-8B",
            "no preset is called 'meta-llama/Llama-9-8B', and there is no such file; did you mean "
            "'llama-3-8b' or 'llama-3.1-8b' or 'llama-2-7b'?",
        ),
        # Longer rotary waves than those of the preset.
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "did you mean 'qwen3-30b-a3b'"),
        ("mixtral-8x7", "did you mean 'mixtral-8x7b' or"),
    ],
)
def test_an_unknown_model_names_the_nearest(name, sentence):
    with pytest.raises(UserError) as error:
        parse_request(["--model", name])
    assert sentence in str(error.value)


def test_a_folder_is_not_taken_for_a_repository(tmp_path, monkeypatch):
    """Nor is a path that is written wrong, in a folder that exists."""
    monkeypatch.chdir(tmp_path)
    assert means_preset("runs/llama-3-8b")
    (tmp_path / "runs").mkdir()
    assert not means_preset("runs/llama-3-8b")
    assert not means_preset("a/b/llama-3-8b")
    assert not means_preset("meta-llama/Llama-3.1-8B/config.json")
    with pytest.raises(UserError, match="there is no such file, and no preset of that name"):
        parse_request(["--model", "runs/llama-3-8b"])
    (tmp_path / "Llama-2-7b-hf").mkdir()
    assert not means_preset("Llama-2-7b-hf")
    (tmp_path / "llama-2-7b").mkdir()
    assert means_preset("llama-2-7b")


# Published figures: the parameters in the files, and about how many of them a token uses.
MIXTURES_PUBLISHED = {
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, 12.9e9),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, 3.3e9),
    "Qwen/Qwen3-235B-A22B": (235_093_634_560, 22.2e9),
    "allenai/OLMoE-1B-7B-0924": (6_919_161_856, 1.3e9),
    "openai/gpt-oss-20b": (20_914_757_184, 4.2e9),  # 3.6 without the embedding
}


@pytest.mark.parametrize("name", MIXTURES_PUBLISHED)
def test_mixtures_of_experts_have_names(name, capsys):
    found = plan.ask(["model", "--model", name]).data
    total, active = MIXTURES_PUBLISHED[name]
    assert found["parameters"] == total
    assert found["active_parameters"] == pytest.approx(active, rel=0.03)
    assert preset(name).experts > 1
    assert "planned, but not trained here" not in capsys.readouterr().err


def test_the_printed_command_of_a_plan_in_these_names_is_what_train_takes():
    """train.py's own check takes the command; tests/test_planner_search.py has the launchers."""
    line = "layouts --model meta-llama/Llama-3.2-1B --gpu a100 --world 8 --batch-tokens 1Mi"
    found = plan.ask([*line.split(), "--tp", "1", "--pp", "1"]).data
    config = validation.check(parse_request(found["command"][2:]).config, 8)
    assert found["launcher"] == ["mpirun", "-n", "8"]
    assert config.model == PRESETS["llama-3.2-1b"]
    assert config.training.global_batch_size == 128


@pytest.mark.parametrize(
    ("name", "preset_name", "parameters"),
    [
        ("HuggingFaceTB/SmolLM3-3B", "smollm3-3b", 3_075_098_624),
        ("allenai/Olmo-3-1025-7B", "olmo3-7b", 7_298_011_136),
        ("LiquidAI/LFM2-350M", "lfm2-350m", 354_483_968),
        ("LiquidAI/LFM2-1.2B", "lfm2-1.2b", 1_170_340_608),
        ("ibm-granite/granite-3.3-2b-instruct", "granite-3.3-2b", 2_533_539_840),
        ("ibm-granite/granite-4.0-h-tiny-base", "granite-4.0-h-tiny", 6_939_037_248),
        ("ibm-granite/granite-4.0-h-small", "granite-4.0-h-small", 32_207_337_984),
        ("ibm-granite/granite-4.0-h-micro", "granite-4.0-h-micro", 3_191_396_096),
        ("ibm-granite/granite-4.0-micro", "granite-4.0-micro", 3_402_836_480),
        ("tiiuae/Falcon-H1-0.5B-Instruct", "falcon-h1-0.5b", 521_411_104),
        ("nvidia/Nemotron-H-8B-Base-8K", "nemotron-h-8b", 8_100_852_736),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "nemotron-nano-9b-v2", 8_888_227_328),
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "nemotron-3-nano-30b-a3b",
            31_577_937_344,
        ),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi-linear-48b-a3b", 49_122_675_072),
        ("CohereLabs/c4ai-command-r7b-12-2024", "command-r7b", 8_028_033_024),
        ("CohereLabs/c4ai-command-a-03-2025", "command-a", 111_057_580_032),
        ("ibm-ai-platform/Bamba-9B-v2", "bamba-9b", 9_780_235_392),
        ("google/gemma-2-27b-it", "gemma-2-27b", 27_227_128_320),
        ("google/gemma-3-1b-pt", "gemma-3-1b", 999_885_952),
        ("microsoft/phi-4", "phi-4", 14_659_507_200),
        ("mistralai/Mistral-Small-24B-Base-2501", "mistral-small-24b-2501", 23_572_403_200),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b", 140_620_634_112),
        ("openai/gpt-oss-120b", "gpt-oss-120b", 116_829_156_672),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b-a35b", 480_154_875_392),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3", 671_026_404_352),
        ("deepseek-ai/DeepSeek-V2", "deepseek-v2", 235_741_434_880),
        ("moonshotai/Kimi-K2-Base", "kimi-k2", 1_026_408_209_408),
        ("zai-org/GLM-4.5-Air", "glm-4.5-air", 106_852_245_504),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama-4-scout-17b-16e", 107_769_861_120),
    ],
)
def test_a_model_of_the_hub_has_as_many_parameters_as_its_weights(name, preset_name, parameters):
    """Without the biases that a router is balanced with, and without parts that are not here."""
    assert spelling.preset_name(name) == preset_name
    assert model_stats.parameters(preset(name)) == parameters


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("ai21labs/Jamba-v0.1", "Mamba blocks"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "moe_latent_size"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "sparse attention"),
        ("google/gemma-3n-E4B", "per-layer embeddings"),
    ],
)
def test_a_model_that_cannot_be_expressed_says_what_is_missing(name, missing):
    """It was offered the nearest name before, which is another architecture."""
    with pytest.raises(UserError, match=f"cannot be expressed here: it has .*{missing}"):
        preset(name)


def test_a_model_that_is_planned_but_not_trained_says_what_it_lacks(capsys):
    name = "meta-llama/Llama-4-Scout-17B-16E"
    plan.main(["layouts", "--model", name, "--gpu", "h100", "--nodes", "16"])
    assert "chunks of 8192 tokens" in capsys.readouterr().err
