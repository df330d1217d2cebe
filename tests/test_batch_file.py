"""Batch files: if this failed, a first job would not start, or would lose its last steps."""

import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from ranks import ROOT, start

import plan
from base.errors import UserError
from config import validation
from config.command_line import parse
from costs import hardware, memory, risk
from costs.job import Job
from tools.planner.batch_file import TEMPLATE, outside_a_clone

MODEL = "--model gpt2-1.5b --global-batch-size 64"


def asked_of_slurm(text: str) -> dict[str, str]:
    """The options of sbatch that a batch file has, by name."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH --")]
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)


def words_of(text: str) -> list[str]:
    """The words of train.py in a batch file, as the shell would make them."""
    line = text.partition("ranks train.py ")[2].replace("\\\n", " ")
    shell = {"$DATA": "data/x", "$OUT": "runs/x", "${STEPS:-1000}": "1000"}
    return [shell.get(word, word) for word in shlex.split(line)]


def test_the_file_of_a_plan_asks_for_what_its_layout_needs(tmp_path):
    """bash parses it, and train.py takes its words on as many ranks as it asks for."""
    path = tmp_path / "mine.slurm"
    line = f"layouts {MODEL} --gpu a100-40 --nodes 4 --gpus-per-node 4 --sbatch {path}"
    found = plan.ask(line.split())
    assert found.text.splitlines()[-1].startswith(f"written: {path}, for --")
    assert start(["bash", "-n", str(path)]).status == 0
    text = path.read_text()
    asked = asked_of_slurm(text)
    wanted = {"nodes": "4", "ntasks-per-node": "4", "gpus-per-node": "4", "requeue": ""}
    wanted |= {"distribution": "block:block", "gpu-bind": "none", "job-name": "mine"}
    assert wanted.items() <= asked.items()
    assert int(asked["cpus-per-task"]) > 0
    assert int(asked["signal"].removeprefix("B:USR1@")) >= 600
    assert "MPI=${MPI:-pmi2}" in text
    words = words_of(text)
    for option in ("--data", "--out", "--resume", "--save-every", "--steps"):
        assert words.count(option) == 1
    checked = validation.check(parse(words), 16)
    chosen = found.data["ranked"][0]
    layout = checked.layout
    names = ("tp", "pp", "dp", "micro_batch_size", "zero", "recompute", "schedule")
    assert {name: getattr(layout, name) for name in names} == {name: chosen[name] for name in names}


def test_a_file_may_have_any_name_that_can_be_written_into_it(tmp_path):
    path = tmp_path / r"my \1 run.slurm"
    words = ["layouts", *MODEL.split(), "--gpu", "a100-40", "--nodes", "1", "--sbatch"]
    found = plan.ask([*words, str(path)])
    assert shlex.split(found.text.splitlines()[-1])[-1] == str(path)
    text = path.read_text()
    assert asked_of_slurm(text)["job-name"] == shlex.quote(path.stem)
    (line,) = re.findall("^.*OUT=.*OUT:-.*$", text, re.MULTILINE)
    shown = start(["bash", "-c", f'{line}\nprintf %s "$OUT"'])
    assert shown.out == f"runs/{path.stem}"
    with pytest.raises(UserError, match="--sbatch has bytes that are not utf-8"):
        plan.ask([*words, str(tmp_path / "\udce9.slurm")])
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_user_gave_stays_and_a_slow_step_is_told_earlier(tmp_path):
    path = tmp_path / "slow.slurm"
    line = f"layouts --model gpt3-175b --gpu a100-80 --nodes 8 --sbatch {path} --out runs/mine"
    plan.ask([*line.split(), "--data", "a/b c", "--steps", "7", "--save-every-minutes", "20"])
    text = path.read_text()
    words = words_of(text)
    assert words[words.index("--data") + 1] == "a/b c"
    assert words[words.index("--steps") + 1] == "7"
    assert "--save-every" not in words
    assert "OUT=${OUT:-runs/mine}" in text
    assert int(asked_of_slurm(text)["signal"].removeprefix("B:USR1@")) > 900


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model llama-2-70b --gpu a100-40 --gpus 8", "no layout fits at --risk"),
        (f"{MODEL} --gpu h100 --gpus 9 --global-batch-size 63", "do not divide equally among 2 nodes"),
    ],
)
def test_what_cannot_be_submitted_is_a_sentence(words, sentence, tmp_path):
    path = tmp_path / "x.slurm"
    with pytest.raises(UserError, match=sentence):
        plan.ask(f"layouts {words} --sbatch {path}".split())
    assert not path.exists() or not path.read_text()


@pytest.mark.parametrize("name", ["train", "train_1b3", "train_104b", "train_176b"])
def test_every_batch_file_binds_ranks_and_takes_another_mpi(name):
    text = (ROOT / "scripts" / f"{name}.slurm").read_text()
    assert start(["bash", "-n", f"scripts/{name}.slurm"]).status == 0
    asked = asked_of_slurm(text)
    assert (asked["distribution"], asked["gpu-bind"]) == ("block:block", "none")
    assert "\nMPI=${MPI:-pmi2} " in text
    ranks = int(asked["nodes"]) * int(asked["ntasks-per-node"])
    words = [word.replace("$OUT", "runs/x") for word in words_of(text)]
    assert validation.check(parse(words), ranks).run.resume == "auto"


@pytest.mark.parametrize("name", ["train_1b3", "train_104b", "train_176b"])
def test_no_batch_file_recomputes_a_block_that_fits(name):
    """Recomputing all blocks costs a third of the compute more."""
    text = (ROOT / "scripts" / f"{name}.slurm").read_text()
    asked = asked_of_slurm(text)
    words = [word.replace("$OUT", "runs/x") for word in words_of(text)]
    ranks = int(asked["nodes"]) * int(asked["ntasks-per-node"])
    run = validation.check(parse(words), ranks)
    machine = hardware.load(text.partition("GPU=${GPU:-")[2].partition("}")[0])
    layout = run.layout

    def fits(**fields) -> bool:
        job = Job(run.model, replace(layout, **fields), run.training, machine)
        return memory.fullest(job).total <= risk.safe_bytes(machine, risk.DEFAULT)

    assert fits()
    if layout.recompute == "none":
        return
    fewer = layout.recompute_layers - 1
    assert not fits(recompute_layers=fewer) if fewer else not fits(recompute="none")


@pytest.mark.slow
def test_the_launcher_of_a_batch_file_is_the_one_of_the_mpi(tmp_path):
    """srun gets --mpi, and binds neighbouring ranks to neighbouring cores: its words, not run."""
    script = 'env() { echo "$@" >$LOGS/words; }; LOGS=$1; source scripts/slurm_job.sh'
    script += "; ranks train.py --out $1/run"
    for mpi, wanted in (("", "--mpi=pmi2"), ("pmix", "--mpi=pmix")):
        start(["bash", "-c", script, "bash", str(tmp_path)], SLURM_JOB_ID="7", MPI=mpi)
        words = (tmp_path / "words").read_text().split()
        assert words[words.index("srun") + 1] == wanted
        assert {"--distribution=block:block", "--gpu-bind=none"} <= set(words)


def test_the_file_of_an_installed_plan_names_its_package(tmp_path):
    """It may be submitted in any folder, which has no scripts/ and no .venv."""
    head = TEMPLATE.read_text().partition("ranks train.py ")[0]
    text = outside_a_clone(head, str(ROOT), sys.executable)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert not re.search(r"(plan|prepare_data)\.py", text), comments
    script = 'env() { shift; echo "$@" >> words; }\n'
    text = text.replace('cd "$SLURM_SUBMIT_DIR"', f"cd {tmp_path}")
    done = start(
        ["bash", "-c", f"{script}{text}ranks train.py --out run"], SLURM_JOB_ID="7", GPU="none"
    )
    words = (tmp_path / "words").read_text().split()
    assert words[:2] == [sys.executable, f"{ROOT}/supervise.py"], done.err
    assert f"{ROOT}/train.py" in words


@pytest.mark.slow
def test_a_planned_batch_file_trains_in_slurm(slurm, tmp_path):
    """Two nodes of two ranks on CPUs, random tokens, from the plan to the last step."""
    path, out = tmp_path / "small.slurm", tmp_path / "run"
    line = "layouts --layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 64"
    line += f" --global-batch-size 8 --gpu cpu --gpus-per-node 2 --nodes 2 --sbatch {path}"
    plan.ask([*line.split(), "--data", "synthetic", "--steps", "3", "--out", str(out)])
    command = ["sbatch", "--parsable", f"--output={tmp_path}/job.txt", str(path)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    job = done.stdout.strip()
    until = time.monotonic() + 300
    queue = ["squeue", "--noheader", f"--jobs={job}"]
    while subprocess.run(queue, capture_output=True, text=True, check=False).stdout.strip():
        assert time.monotonic() < until, (tmp_path / "job.txt").read_text()
        time.sleep(0.5)
    text = (tmp_path / "job.txt").read_text()
    assert re.search(r"start 0: status 0", text), text
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
