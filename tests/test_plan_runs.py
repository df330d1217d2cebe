"""Plans of runs: if this failed, constants refitted from a run would predict worse than before."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import ROOT

import plan
from base.errors import UserError
from config.command_line import parse
from config.validation import check_any_length
from costs import hardware
from costs.auto_schedule import decide
from costs.job import Job
from costs.step_time import predict
from tools.planner import calibration, compare, questions, run_files

OLD = ROOT / "tests" / "data" / "run_189cc1d"
H100, A100 = hardware.load("h100"), hardware.load("a100-80")


def ask(line: str) -> questions.Answer:
    return plan.ask(line.split())


def write_run(folder: Path, words: str, gpus: int, device: str, seconds: list[float]) -> str:
    """A run's folder as train.py leaves it, with steps that took these seconds."""
    config = check_any_length(parse(words.split()), gpus)
    folder.mkdir(parents=True)
    facts = {"config": config.as_dict(), "cluster": {"device": device, "ranks": gpus}}
    (folder / "run.json").write_text(json.dumps(facts))
    batch = config.training.global_batch_size
    rows = [{"iteration": 0, "validation_loss": 9.0, "consumed_samples": 0}]
    rows += [
        {"iteration": i + 1, "seconds": one, "global_batch_size": batch}
        for i, one in enumerate(seconds)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def a_run(tmp_path) -> str:
    words = "--model 1b3 --tp 2 --pp 2 --recompute full --global-batch-size 96"
    words += " --precision fp16 --optimizer sgd"
    return write_run(tmp_path / "a", words, 8, "NVIDIA A100-SXM4-80GB", [9.0, 9.0, 1.0, 1.1, 0.9])


# ------------------------------------------------------------------------------------------------
# A run as the source of options
# ------------------------------------------------------------------------------------------------


def test_a_run_gives_model_training_and_where_one_layout_is_asked_for_its_layout(a_run, capsys):
    for path in (a_run, f"{a_run}/run.json"):
        stages = ask(f"stages --config {path}").data
        assert [row["first"] for row in stages["stages"]] == [0, 13]
    same = "--model 1b3 --tp 2 --pp 2 --dp 2 --recompute full --global-batch-size 96"
    same = ask(f"stages {same} --precision fp16 --optimizer sgd --gpus 8").data
    assert stages["memory"] == same["memory"]
    capsys.readouterr()
    found = ask(f"layouts --config {a_run} --gpus 8")
    assert found.text.splitlines()[0].endswith("global batch 96, fp16")
    assert len({(row["tp"], row["pp"]) for row in found.data["ranked"]}) > 3
    assert "its layout is not held" in capsys.readouterr().err


def test_a_checkpoint_and_an_old_run_are_sources():
    checkpoint = next((OLD / "checkpoints").glob("step_*"))
    run, saved = (ask(f"stages --config {path}").data for path in (OLD, checkpoint))
    assert run == saved
    assert len(run["stages"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no run's folder and no checkpoint of one"),
        ("{", "run.json is not JSON"),
        pytest.param('{"config":' + 100_000 * "[", "run.json is not JSON", id="nested"),
        ('{"config": {}}', "is no run.json: it has no configuration"),
        ('{"config": {"model": {"layers": 1, "depth": 2}}}', "model options unknown here: depth"),
    ],
)
def test_what_is_no_run_is_one_sentence(tmp_path, text, message):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=message):
        ask(f"model --config {tmp_path}")


# ------------------------------------------------------------------------------------------------
# Two layouts
# ------------------------------------------------------------------------------------------------

SHARED = ["--model", "176b", "--gpu", "a100-80", "--nodes", "48"]


def test_the_causes_are_all_of_the_step():
    waits = replace(A100.software, host_per_block=2e-3)
    machines = [A100, H100, replace(A100, software=waits)]
    machines.append(replace(A100, slowdown=1.3))
    layouts = [
        "--tp 4 --pp 12",
        "--tp 8 --pp 3 --recompute full",
        "--tp 8 --pp 48 --schedule zb-h1",
    ]
    for machine in machines:
        for words in layouts:
            line = f"--model 176b --global-batch-size 2048 --precision bf16 {words}"
            run = check_any_length(parse(line.split()), 384)
            job = Job(run.model, run.layout, run.training, machine)
            causes = compare.by_cause(job)
            assert sum(causes.values()) == pytest.approx(predict(job).seconds)
            assert all(seconds >= 0 for seconds in causes.values())
            assert causes["tp"] > 0
            assert (causes["host"] > 0) == (machine.software.host_per_block > 0)
            assert (causes["recompute"] > 0) == (run.layout.recompute == "full")


def test_the_difference_is_in_its_cause():
    answer = plan.ask(["compare", "--tp 4 --pp 12", "--tp 4 --pp 12 --recompute full", *SHARED])
    moved = {cause for cause, much in answer.data["difference_seconds"].items() if abs(much) > 1e-9}
    # Collectives are repeated too, and more of a reduction hides behind longer passes.
    assert {"recompute"} <= moved <= {"recompute", "bubble", "tp", "dp"}
    assert answer.data["a"]["memory_bytes"]["total"] > answer.data["b"]["memory_bytes"]["total"]
    assert "most of the difference: recompute" in answer.text
    none = plan.ask(["compare", "--tp 4 --pp 12", "--pp 12 --tp 4", *SHARED]).data
    assert set(none["difference_seconds"].values()) == {0.0}
    machines = plan.ask(["compare", "--tp 4", "--tp 4 --gpu h100", *SHARED, "--pp", "12"])
    assert machines.data["difference_seconds"]["compute"] < 0


def test_a_run_is_a_side(a_run):
    shared = ["--gpu", "a100-80", "--model", "gpt2-1.5b", "--global-batch-size", "64", "--tp", "1"]
    answer = plan.ask(["compare", a_run, "--pp 1 --gpus 8", *shared])
    assert answer.data["a"]["global_batch_size"] == 64
    assert answer.data["a"]["flags"][:2] == ["--pp", "2"]
    assert answer.data["a"]["gpus"] == 4, "tp 1 for 2 and the run's dp of 2"
    with pytest.raises(UserError, match="give --gpu NAME"):
        plan.ask(["compare", a_run, a_run])
    with pytest.raises(UserError, match="'nowhere' is neither flags nor a run's folder"):
        plan.ask(["compare", "nowhere", "--tp 1 --pp 1", *SHARED])
    with pytest.raises(UserError, match='compare: "--tp \'4": No closing quotation'):
        plan.ask(["compare", "--tp '4", "--tp 1 --pp 1", *SHARED])
    with pytest.raises(UserError, match="compare takes two layouts"):
        plan.ask(["compare", "--tp 1"])


# ------------------------------------------------------------------------------------------------
# What it costs
# ------------------------------------------------------------------------------------------------


def test_cost_and_energy_are_gpus_times_hours():
    line = "days --model gpt2-1.5b --gpu h100 --nodes 2 --global-batch-size 256 --tokens 1e12"
    found = ask(f"{line} --price-per-gpu-hour 2.5")
    hours = found.data["days"] * 24 * 16
    assert found.data["gpu_hours"] == pytest.approx(hours)
    assert found.data["cost"] == pytest.approx(2.5 * hours)
    assert found.data["kwh"] == pytest.approx(0.7 * hours)
    assert "700 W a GPU (the limit in h100's datasheet), GPUs alone" in found.text
    assert ask(line).data["cost"] is None
    assert "at 650 W a GPU (--watts-per-gpu)" in ask(f"{line} --watts-per-gpu 650").text


def test_the_table_has_the_columns_that_are_asked_for():
    line = "layouts --model gpt2-1.5b --gpu a100-80 --nodes 2 --global-batch-size 256"
    plain, priced = ask(line), ask(f"{line} --price-per-gpu-hour 2")
    assert "cost/Gtok" not in plain.text
    assert "kWh/Gtok cost/Gtok" in " ".join(priced.text.split())
    row = priced.data["ranked"][0]
    hours = 16 * 1e9 / row["tokens_per_second"] / 3600
    assert row["cost_per_billion_tokens"] == pytest.approx(2 * hours)
    assert row["kwh_per_billion_tokens"] == pytest.approx(0.4 * hours)
    assert f"{0.4 * hours:,.1f}" in priced.text
    with pytest.raises(UserError, match="--price-per-gpu-hour goes with layouts, days and budget"):
        ask("model --model 1b3 --price-per-gpu-hour 2")


# ------------------------------------------------------------------------------------------------
# Calibration
# ------------------------------------------------------------------------------------------------

TRUTH = {"gemm_fraction": 0.45, "nvlink.fraction": 0.35, "network.fraction": 0.5}
# Runs that tell them apart: computation alone, with tensor groups, with replicas on other nodes.
RUNS = [
    ("--model gpt2-1.5b --micro-batch-size 4 --global-batch-size 64 --recompute full", 1),
    ("--model gpt2-124m --micro-batch-size 1 --global-batch-size 1", 1),
    ("--model megatron-18b --tp 8 --micro-batch-size 8 --global-batch-size 256", 8),
    ("--model gpt2-355m --tp 8 --micro-batch-size 1 --global-batch-size 256", 8),
    ("--model megatron-18b --tp 8 --micro-batch-size 1 --global-batch-size 8", 64),
]


def simulated(tmp_path: Path, truth: hardware.Machine, noise: float = 0.0) -> list[str]:
    """Runs whose steps take what the planner predicts on the machine `truth`."""
    paths = []
    for number, (words, gpus) in enumerate(RUNS):
        line = f"{words} --precision bf16"
        run = check_any_length(parse(line.split()), gpus)
        seconds = predict(Job(run.model, run.layout, run.training, truth)).seconds
        steps = [seconds * (1 + noise * way) for way in (5, 3, -1, 1, 0, -1, 1)]
        paths.append(write_run(tmp_path / str(number), line, gpus, "NVIDIA H100 80GB", steps))
    return paths


def test_constants_that_the_runs_determine_are_found(tmp_path):
    truth = H100
    for name, value in TRUTH.items():
        truth = calibration.changed(truth, name, value)
    file = tmp_path / "mine.toml"
    paths = simulated(tmp_path, truth, noise=0.005)
    answer = plan.ask(["calibrate", *paths, "--gpu", "h100", "--write", str(file)])
    assert {"gemm_fraction", "nvlink.fraction", "network.fraction"} <= set(
        answer.data["determined"]
    )
    for name, value in TRUTH.items():
        assert answer.data["constants"][name]["value"] == pytest.approx(value, rel=0.02), name
    assert answer.data["after_fraction"] < 0.01 < answer.data["before_fraction"]
    left = set(calibration.CONSTANTS) - set(answer.data["determined"])
    assert {"p2p_fraction", "software.host_per_block"} <= left
    for name in left:
        assert answer.data["constants"][name]["value"] == calibration.value_of(H100, name)
        assert answer.data["constants"][name]["origin"].startswith("as in h100; not determined by")
    made = hardware.load(str(file))
    assert made.sources["gemm_fraction"].startswith(f"fitted on {paths[0]}")
    for name in calibration.CONSTANTS:
        known = answer.data["constants"][name]["value"]
        assert calibration.value_of(made, name) == pytest.approx(known, rel=1e-4)
    assert made.fitted_range["gpus"] == [1, 64]
    line = f"layouts --model gpt2-1.5b --nodes 2 --global-batch-size 256 --gpu {file}"
    assert ask(line).data["machine"] == str(file)


def test_one_run_determines_one_constant_and_says_so(tmp_path):
    slower = replace(H100, gemm_fraction=0.4)
    path = simulated(tmp_path, slower)[0]
    found = plan.ask(["calibrate", path, "--gpu", "h100"])
    assert found.data["determined"] == ["gemm_fraction"]
    assert found.data["constants"]["gemm_fraction"]["value"] == pytest.approx(0.4, rel=0.01)
    assert "nvlink.fraction = 0.7: as in h100; not determined by" in found.text


def test_a_run_with_schedule_auto_is_a_source_like_any_other(tmp_path):
    """run.json has the schedule that was chosen."""
    words = "--model gpt2-1.5b --pp 4 --schedule auto --steps 5 --global-batch-size 4"
    config, choice = decide(check_any_length(parse(words.split()), 4), "cuda")
    assert choice.name != "1f1b"
    path = write_run(tmp_path / "run", words, 4, "NVIDIA H100", [1.0, 1.01, 0.99, 1.0, 1.0])
    facts = json.loads((Path(path) / "run.json").read_text())
    facts["config"] = config.as_dict()
    (Path(path) / "run.json").write_text(json.dumps(facts))
    (run,) = [run_files.read(path, H100)]
    assert run.job.layout.schedule == choice.name
    assert run.job.layout.partition == ",".join(map(str, choice.blocks))
    assert plan.ask(["calibrate", path, "--gpu", "h100"]).data["determined"]
    given = words.replace("--steps 5", "--gpus 4 --gpu h100")
    again = ask(f"stages --config {path} --gpus 4 --gpu h100").data
    assert again == ask(f"stages {given} --precision fp32").data


def test_a_run_of_an_earlier_version_with_a_searched_schedule_is_read(tmp_path):
    """Its options are those of --schedule auto; only its passes cannot be priced."""
    words = "--model gpt2-1.5b --pp 4 --schedule 1f1b --steps 5 --global-batch-size 64"
    path = write_run(tmp_path / "run", words, 8, "NVIDIA H100", [1.0, 1.01, 0.99, 1.0, 1.0])
    facts = json.loads((Path(path) / "run.json").read_text())
    costs = "10.7,12.5,6.6,0.1,0.1,0.1"
    old = {"schedule": "searched-v", "partition": "7,6,6,6,6,6,6,5", "schedule_costs": costs}
    facts["config"]["layout"] |= old
    (Path(path) / "run.json").write_text(json.dumps(facts))
    given = words.replace("1f1b --steps 5", "auto --gpus 8 --gpu h100")
    again = ask(f"stages --config {path} --gpus 8 --gpu h100").data
    assert again == ask(f"stages {given} --precision fp32").data
    for question in (["calibrate", path, "--gpu", "h100"], ["gap", path]):
        with pytest.raises(UserError, match="the schedule 'searched-v', which an earlier version"):
            plan.ask(question)


def test_runs_that_no_machine_explains_are_said_and_no_rate_exceeds_its_peak(tmp_path):
    machine = hardware.load("h100-torch")
    factors = {"faster": [0.1] * 5, "contradict": [0.3, 3.0, 0.3, 3.0, 0.3]}
    for name, each in factors.items():
        paths = simulated(tmp_path / name, machine)
        for path, factor in zip(paths, each, strict=True):
            file = Path(path) / "metrics.jsonl"
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            rows = [r | {"seconds": r["seconds"] * factor} for r in rows if "seconds" in r]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        answer = plan.ask(["calibrate", *paths, "--gpu", "h100-torch"])
        assert answer.data["after_fraction"] <= answer.data["before_fraction"]
        assert answer.text.endswith("no constants explain these runs together")
        values = {name: each["value"] for name, each in answer.data["constants"].items()}
        assert all(values[n] <= 1 for n in values if n.endswith("fraction"))
        if name == "faster":
            assert values["gemm_fraction"] == 1.0
            assert (
                "fitted on these runs: its limit"
                in answer.data["constants"]["gemm_fraction"]["origin"]
            )


def test_runs_of_the_same_machine_change_nothing(tmp_path):
    paths = simulated(tmp_path, H100, noise=0.0)
    exact = calibration.fit([run_files.read(path, H100) for path in paths], H100)
    assert exact.after <= exact.before < 1e-6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "calibrate needs --gpu"),
        (["RUN", "--gpu", "a100-80"], "ran on 'NVIDIA H100 80GB', but a100-80 has 'A100'"),
        (["nowhere.json", "--gpu", "h100"], "cannot read nowhere.json"),
        (["RUN", "--gpu", "h100", "--write", "x.txt"], r"a machine's file ends in \.toml"),
        (["RUN", "--gpu", "h100", "--model", "1b3"], "unknown argument '--model'"),
    ],
)
def test_mistakes_of_calibrate(tmp_path, words, message):
    path = simulated(tmp_path, H100)[0]
    with pytest.raises(UserError, match=message):
        plan.ask(["calibrate", *[path if word == "RUN" else word for word in words]])


def test_a_run_of_few_steps_is_refused(tmp_path):
    words = "--model gpt2-1.5b --global-batch-size 8 --precision bf16"
    path = write_run(tmp_path / "short", words, 1, "NVIDIA H100", [1.0] * 4)
    with pytest.raises(UserError, match="needs 3 steps or more, it has 2 after the first 2"):
        plan.ask(["calibrate", path, "--gpu", "h100"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peak = 1.0", "needs like = NAME"),
        ('like = "h100"\npeek = 1.0', "has peek = 1.0, which no machine has"),
        ('like = "h100"\npeak = "fast"', "has peak = 'fast'"),
        ('like = "h100"\n[nvlink]\nwidth = 2', r"has in \[nvlink\] width = 2"),
        ('like = "h100"\nnode = 0', "has node = 0, which no machine has"),
        ('like = "h1000"', "no machine is called 'h1000'"),
        ('like = "h100"\nkernel = "flash9"', "has kernel = 'flash9'; known are flash, flash1"),
        ('like = "h100"\nkernel = "math"', "has kernel = 'math'; known are"),
        (
            'like = "h100"\n[software]\nattention = "flash2"',
            r"has in \[software\] attention = 'flash2', which no machine has",
        ),
    ],
)
def test_a_machines_file_with_a_mistake_is_one_sentence(tmp_path, text, message):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        hardware.load(str(tmp_path / "mine.toml"))
