"""A ramp-up in stages of nodes: if this failed, a chain of jobs would not be one loss curve."""

import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

import pytest
from ranks import ROOT, Outcome, fork_one, mpi_command, start
from supervised_runs import write_batch

import plan
from config import validation
from config.batch_schedule import Level
from config.command_line import parse
from config.errors import UserError
from config.schema import Layout
from planner import growth
from scripts import stages

# Sizes 2, 4 and 12: four steps of each.
RAMP = "--batch-schedule 0:2 256:4 768:12 --train-samples 72"
MODEL = "--layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 64 --precision fp64"
WORDS = f"{MODEL} {RAMP} --device cpu --eval-samples 12 --eval-every 2 --skip-samples 21:22"
STEPS = 12
SECONDS = 400  # until the last of three jobs has ended

# ---- The plan ------------------------------------------------------------------------------------


def made_table(seed: int) -> tuple[list[Level], list[growth.Choice]]:
    """Ten batch sizes on 1 to 8 nodes: a part of each step is the same on any number of nodes."""
    draw = random.Random(seed)
    fixed = draw.uniform(0.5, 3)
    levels = [Level(32 * i, 10 * i, 100 * i, draw.randint(20, 60)) for i in range(1, 11)]
    choices = []
    for nodes in (1, 2, 4, 8):
        seconds = [level.batch / nodes / 8 * draw.uniform(1, 1.03) + fixed for level in levels]
        choices.append(growth.Choice(nodes, 4 * nodes, Layout(dp=nodes), tuple(seconds)))
    return levels, choices


def totals(levels, choices, path, restart: float) -> tuple[float, float]:
    """Seconds and GPU-seconds of a plan: at each level the choice with that index."""
    seconds = gpu_seconds = 0.0
    for number, (level, place) in enumerate(zip(levels, path, strict=True)):
        spent = level.steps * choices[place].seconds[number]
        if number and path[number - 1] != place:
            spent += restart
        seconds += spent
        gpu_seconds += spent * choices[place].gpus
    return seconds, gpu_seconds


def test_no_plan_that_is_as_fast_costs_less():
    """Against every plan, for 20 tables and 5 deadlines each."""
    for seed in range(20):
        levels, choices = made_table(seed)
        restart = 5.0 * (seed % 3)
        paths = itertools.combinations_with_replacement(range(len(choices)), len(levels))
        every = [totals(levels, choices, path, restart) for path in paths]
        fastest, slowest = (pick(seconds for seconds, _ in every) for pick in (min, max))
        for share in (0.02, 0.1, 0.3, 0.6, 1.0):
            deadline = (fastest + share * (slowest - fastest)) * (1 + 1e-9)
            found = growth.cheapest(levels, choices, restart, deadline)
            path = [choices.index(choice) for choice in found.chosen]
            assert path == sorted(path)
            ours = totals(levels, choices, path, restart)
            assert (found.seconds, found.gpu_seconds) == pytest.approx(ours)
            assert found.seconds <= deadline
            as_fast = [cost for seconds, cost in every if seconds <= found.seconds * (1 + 1e-9)]
            assert found.gpu_seconds <= min(as_fast) * (1 + 1e-9)
        late = growth.cheapest(levels, choices, restart, 0.9 * fastest)
        assert late.seconds == pytest.approx(fastest)


BLOOM = (
    "rampup --model 176b --gpu a100-80 --nodes 48 --rampup-batch-size 192 16 9765625 "
    "--train-samples 220000000 --tp 4 --pp 12"
)


def ask(line: str):
    return plan.ask(line.split())


def test_the_ramp_up_of_bloom_costs_less_on_nodes_that_grow():
    """Every stage is one that train.py would start, and the run ends in time."""
    line = f"{BLOOM} --deadline 110"
    data, model = ask(line).data, "--model 176b --global-batch-size 2048 --train-samples 220000000"
    nodes = [stage["nodes"] for stage in data["stages"]]
    assert nodes == sorted(nodes)
    assert nodes[0] < nodes[-1] <= 48
    assert data["days"] <= 110
    assert data["gpu_hours"] < data["constant"]["gpu_hours"]
    for before, after in itertools.pairwise(data["stages"]):
        assert before["stop_at_samples"] == after["begin_at_samples"] > 0
    reached = []
    for stage in data["stages"]:
        words = f"{model} --rampup-batch-size 192 16 9765625 --precision bf16 --resume auto"
        checked = validation.check(parse(words.split() + stage["words"]), stage["gpus"])
        assert checked.layout.dp == stage["layout"]["dp"]
        sizes = [level.batch for level in checked.levels]
        assert [sizes[0], sizes[-1]] == stage["batches"]
        reached += sizes
    assert reached == list(range(192, 2049, 16))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--deadline 5", "--deadline 5 days cannot be kept: the fastest plan takes "),
        ("--stages x.json", "--stages and --restart need --deadline DAYS"),
        ("--deadline 95 --submit x.slurm", "--submit needs --stages FILE"),
        ("--deadline 95 --restart -1", "--restart must be at least 0, not -1"),
        ("--deadline -1", "--deadline must be above 0, not -1"),
        ("--deadline 95 --dp 7", "no plan runs every batch size"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence):
    with pytest.raises(UserError) as caught:
        ask(f"{BLOOM} {words}")
    assert sentence in str(caught.value)


def test_the_length_of_the_run_is_needed():
    with pytest.raises(UserError, match="how long is the run"):
        ask("rampup --model 176b --rampup-batch-size 192 16 9765625 --deadline 95")


# ---- The options of a start ----------------------------------------------------------------------


def test_only_the_batches_of_the_start_must_divide():
    words = f"{WORDS} --resume auto"
    for more, sizes in (
        ("--stop-at-samples 8", [2]),
        ("--begin-at-samples 8 --stop-at-samples 24", [4]),
        ("--begin-at-samples 9 --stop-at-samples 25", [4, 12]),
        ("--begin-at-samples 24", [12]),
        ("", [2, 4, 12]),
    ):
        config = parse(f"{words} {more}".split())
        assert [level.batch for level in config.levels] == sizes
        good = max(dp for dp in (2, 4, 12) if all(size % dp == 0 for size in sizes))
        assert validation.check(config, good).layout.dp == good
        with pytest.raises(UserError, match=r"does not divide (batch|global-batch-size)\("):
            validation.check(config, 8)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--begin-at-samples 8", "--begin-at-samples 8 needs --resume: a new run begins with 0"),
        (
            "--begin-at-samples 8 --stop-at-samples 8 --resume auto",
            "stop-at-samples(8) is not above begin-at-samples(8)",
        ),
    ],
)
def test_stages_that_cannot_be(words, sentence):
    with pytest.raises(UserError) as caught:
        validation.check(parse(f"{WORDS} {words}".split()), 1)
    assert str(caught.value) == sentence


# ---- The chain of jobs ---------------------------------------------------------------------------


def staged(folder: Path, **environment: str) -> list[int]:
    """Plan the run over 1, 2 and 3 nodes and submit its first stage; the stages' nodes.

    On a machine whose computation is slow beside its network the deadline decides alone.
    """
    folder.mkdir(exist_ok=True)
    start_of_all = f"ranks train.py {WORDS} --tp 1 --pp 1 --out {folder}/run --resume auto"
    write_batch(folder / "batch.slurm", f"--time=10 --output={folder}/job-%j.txt", start_of_all)
    (folder / "slow.toml").write_text('device = "CPU"\nnode = 1\ngemm_fraction = 1e-5\n')
    line = f"rampup --gpu cpu --calibration {folder}/slow.toml --nodes 3 --restart 0 --zero 1 "
    line += f"--recompute none {WORDS} --tp 1 --pp 1 --stages {folder}/stages.json"
    days = 1000.0
    while True:
        data = ask(f"{line} --deadline {days}").data
        nodes = [stage["nodes"] for stage in data["stages"]]
        if nodes == [1, 2, 3]:
            break
        days = 0.97 * data["days"]  # UserError at the end, if there is none
    submit = ["--submit", str(folder / "batch.slurm")]
    words = [*line.split(), "--deadline", str(days), *submit]
    outcome = start([sys.executable, "plan.py", *words], **environment)
    assert outcome.status == 0, outcome.err
    assert outcome.out.splitlines()[-1].endswith(": 1 nodes, after 0 samples")
    return nodes


def curve(run: Path) -> list[tuple]:
    """Every row of all starts, in order: its step and what was trained or evaluated."""
    earlier = sorted(run.glob("metrics.jsonl.*"), key=lambda path: int(path.suffix[1:]))
    rows = []
    for path in [*earlier, run / "metrics.jsonl"]:
        rows += [json.loads(line) for line in path.read_text().splitlines()]
    names = ("loss", "validation_loss", "grad_norm", "learning_rate", "skipped_samples")
    return [(row["iteration"], *(row.get(name, -1.0) for name in names)) for row in rows]


def check_one_curve(folder: Path) -> None:
    """Check that a run in stages has the loss curve of one rank without stages."""
    words = [*WORDS.split(), "--out", str(folder / "straight")]
    outcome = fork_one("train.py", *words)
    assert outcome.status == 0, outcome.err
    ours, straight = curve(folder / "run"), curve(folder / "straight")
    assert [row[0] for row in ours] == [row[0] for row in straight]
    assert straight[-1][0] == STEPS
    assert ours == [pytest.approx(row, rel=1e-6) for row in straight]
    worlds = [json.loads(path.read_text())["cluster"]["ranks"] for path in runs_of(folder / "run")]
    assert sorted(worlds) == [1, 2, 3]


def runs_of(run: Path) -> list[Path]:
    return list(run.glob("run.json*"))


SLURM = {
    "sbatch": 'echo "$@" >>{bin}/jobs; echo "STAGES $STAGES $SLURM_RESTART_COUNT" >>{bin}/jobs; '
    "echo 8",
    "scancel": 'echo "scancel $@" >>{bin}/jobs',
    "scontrol": """case $2 in
job) printf 'JobId=7\\n JobState=RUNNING Reason=None Restarts=0 PreemptTime=None\\n' ;;
*) for node in $(seq $SLURM_JOB_NUM_NODES); do echo n$node; done ;;
esac""",
    "srun": """while [ "$1" != env ]; do shift; done
exec {mpirun} $SLURM_JOB_NUM_NODES "$@\"""",
}


def commands_of_slurm(folder: Path) -> Path:
    """A folder with commands that note what they are given, and start ranks by mpirun."""
    folder.mkdir()
    mpirun = " ".join(mpi_command(0)[:-1])
    for name, body in SLURM.items():
        text = body.replace("{bin}", str(folder)).replace("{mpirun}", mpirun)
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.slow
def test_a_chain_of_jobs_over_three_numbers_of_nodes_is_one_curve(tmp_path):
    """The batch file with commands in place of Slurm's, as one job after the other."""
    own = commands_of_slurm(tmp_path / "bin")
    path, jobs = f"{own}:{os.environ['PATH']}", own / "jobs"
    staged(tmp_path, PATH=path)

    def job(nodes: int, **more: str) -> Outcome:
        facts = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "1", "SLURM_SUBMIT_DIR": str(ROOT)}
        facts |= {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "n", "PATH": path}
        facts |= {"STAGES": str(tmp_path / "stages.json")} | more
        return start(["bash", str(tmp_path / "batch.slurm")], **facts)

    for nodes in (1, 2, 3):
        (line, stages_line) = jobs.read_text().splitlines()[-2:]
        assert line == f"--parsable --export=ALL --nodes={nodes} {tmp_path / 'batch.slurm'}"
        assert stages_line == f"STAGES {tmp_path / 'stages.json'} "  # and no number of restarts
        if nodes == 2:  # a job of other nodes than its stage's
            assert "error: SPARE_NODES is 'x', not a whole number" in job(2, SPARE_NODES="x").err
            wrong = job(3)
            assert wrong.status == 2
            assert "error: after 8 samples the stage has 2 nodes and 2 ranks, but" in wrong.err
            check_starts_at_no_stage(tmp_path / "run", tmp_path / "other")
        array = {"SLURM_ARRAY_JOB_ID": "5"} if nodes == 2 else {}
        done = job(nodes, SLURM_RESTART_COUNT="0", **array)
        assert done.status == (0 if nodes == 3 else 75), done.out + done.err
        if nodes < 3:
            after = {1: 8, 2: 24}[nodes]
            assert f"job 7: submitted job 8: {nodes + 1} nodes, after {after} samples" in done.out
            assert f"stopped by --stop-at-samples {after} on rank 0" in done.out
        if array:
            assert jobs.read_text().splitlines()[-1] == "scancel --state=PENDING 5"
            with jobs.open("a") as file:  # the last two lines are a job's again
                file.write("\n".join(jobs.read_text().splitlines()[-3:-1]) + "\n")
    check_one_curve(tmp_path)


@pytest.mark.slow
def test_a_ramp_up_over_three_numbers_of_nodes_by_slurm_is_one_curve(slurm, tmp_path):
    """Each job submits the next one by sbatch, with other --nodes."""
    folder = tmp_path / "growing"
    staged(folder)

    def output() -> str:
        return "\n".join(path.read_text() for path in sorted(folder.glob("job-*.txt")))

    limit = time.monotonic() + SECONDS
    while ": status 0" not in output():
        assert time.monotonic() < limit, output()
        assert "\nerror: " not in output(), output()
        time.sleep(0.5)
    assert [output().count(f": {nodes} nodes, after") for nodes in (1, 2, 3)] == [0, 1, 1]
    check_one_curve(folder)


def check_starts_at_no_stage(run: Path, out: Path) -> None:
    """After 8 samples: one that begins later is a mistake, one that stops there ends at once."""
    words = ["train.py", *WORDS.split(), "--out", str(out), "--resume", str(run)]
    early = fork_one(*words, "--begin-at-samples", "24")
    assert early.status == 2
    sentence = f"--begin-at-samples 24, but --resume {run} continues after 8 samples"
    assert early.err.count(sentence) == 1
    late = fork_one(*words, "--stop-at-samples", "8")
    assert late.status == 75, late.err
    assert (out / "metrics.jsonl").read_text() == ""


def test_a_batch_file_of_other_options_is_refused(tmp_path):
    """The plan's words replace those of the layout; model, sizes and the rest must be the same."""
    own = commands_of_slurm(tmp_path / "bin")
    staged(tmp_path, PATH=f"{own}:{os.environ['PATH']}")
    tree = stages.read(str(tmp_path / "stages.json"))
    run = [*WORDS.split(), "--out", str(tmp_path / "run"), "--resume", "auto"]
    assert stages.words_of(tree, [*run, "--tp", "4"], 1, 1) == tree["stages"][0]["words"]
    for more, sentence in (
        ("--layers 4", "model differs"),
        ("--batch-schedule 0:2 256:4 800:12", "batches differs"),
        ("--schedule gpipe", "schedule differs: 1f1b of the plan and gpipe of the batch file"),
    ):
        with pytest.raises(UserError, match=sentence):
            stages.words_of(tree, [*run, *more.split()], 1, 1)
    with pytest.raises(UserError, match="the stage has 1 nodes and 1 ranks, but this job has 1"):
        stages.words_of(tree, run, 1, 4)
    with pytest.raises(UserError, match="leave out --nodes=2"):
        stages.submit("x", tree | {"sbatch": ["--nodes=2", "x.slurm"]}, 0)
    with pytest.raises(UserError, match="names no batch file"):
        stages.submit("x", tree | {"sbatch": []}, 0)
    with pytest.raises(UserError, match=r"STAGES .* is not what `plan.py rampup"):
        stages.read(str(tmp_path / "batch.slurm"))
