"""A ramp-up in segments of nodes: if this failed, a chain of jobs would not be one loss curve."""

import itertools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import ROOT, Outcome, fork_one, mpi_command, start
from supervised_runs import write_batch

import plan
from base.errors import UserError
from config import validation
from config.command_line import parse
from config.timeline import Timeline
from costs.job import Job
from costs.step_time import predict
from scripts import growing_jobs
from tools.planner import growth

# Sizes 2, 4 and 12: four steps of each.
RAMP = "--batch-schedule 0:2 256:4 768:12 --train-samples 72"
MODEL = "--layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 64 --precision fp64"
WORDS = f"{MODEL} {RAMP} --device cpu --eval-samples 12 --eval-every 2 --skip-samples 21:22"
STEPS = 12
SECONDS = 400  # until the last of three jobs has ended

# ---- The plan ------------------------------------------------------------------------------------


BLOOM = (
    "rampup --model 176b --gpu a100-80 --rampup-batch-size 192 16 9765625 "
    "--train-samples 220000000 --tp 4"
)


def ask(line: str):
    return plan.ask(line.split())


def question_of(line: str):
    return plan.question_of(*plan.parser().parse_known_args(line.split()))


def test_every_segment_of_blooms_ramp_up_is_one_that_train_py_starts():
    """On the nodes that the user named, each with the fastest layout for its batch sizes."""
    data = ask(f"{BLOOM} --nodes-by-batch 192:18 400:32 2048:48").data
    model = "--model 176b --global-batch-size 2048 --train-samples 220000000"
    assert [segment["nodes"] for segment in data["segments"]] == [18, 32, 48]
    for before, after in itertools.pairwise(data["segments"]):
        assert before["stop_at_samples"] == after["begin_at_samples"] > 0
    reached = []
    for segment in data["segments"]:
        words = f"{model} --rampup-batch-size 192 16 9765625 --precision bf16 --resume auto"
        checked = validation.check(parse(words.split() + segment["words"]), segment["gpus"])
        assert checked.layout.dp == segment["layout"]["dp"]
        sizes = [level.batch for level in Timeline(checked).levels]
        assert [sizes[0], sizes[-1]] == segment["batches"]
        reached += sizes
    assert reached == list(range(192, 2049, 16))
    assert data["gpu_hours"] == pytest.approx(
        sum(24 * segment["days"] * segment["gpus"] for segment in data["segments"])
    )


@pytest.mark.slow
def test_a_segment_has_the_fastest_of_the_layouts_that_run_all_its_sizes():
    """Without the smaller sizes of the segment, a faster layout may come first."""
    question = question_of(BLOOM)
    levels = growth.levels_of_run(question.config)
    (segment,) = growth.segments_of(levels, [(192, 36)])
    layout, seconds = growth.fastest(question, segment)
    assert all(level.batch % (layout.micro_batch_size * layout.dp) == 0 for level in levels)
    tried = 0
    for pp in (1, 2, 4, 6, 9, 12, 18, 24, 36):
        for size in (1, 2, 4, 8):
            for recompute in ("none", "full"):
                other = replace(layout, pp=pp, micro_batch_size=size, recompute=recompute)
                other = replace(other, dp=36 * 8 // (4 * pp))
                if any(level.batch % (size * other.dp) for level in levels):
                    continue
                job = Job(question.config.model, other, question.config.training, question.machine)
                prediction = predict(job)
                if not prediction.fits or prediction.risk > question.options.risk:
                    continue
                tried += 1
                assert growth.seconds_of(question, other, segment) >= seconds * (1 - 1e-9)
    assert tried > 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "192:18 200:32",
            "--nodes-by-batch 200:32: the ramp-up has no batch 200 there; it goes on",
        ),
        ("192:18 400:32 304:48", "the ramp-up has no batch 304 there"),
        ("208:18", "--nodes-by-batch begins with 208, but the ramp-up with 192"),
        ("192", "--nodes-by-batch takes BATCH:NODES, such as 192:18, not '192'"),
        ("192:0", "--nodes-by-batch takes BATCH:NODES, such as 192:18, not '192:0'"),
        (
            "192:7",
            "no layout on 7 nodes (56 GPUs of a100-80) fits and runs the batches 192 to 2048",
        ),
        (
            "192:18 --nodes 48",
            "--nodes-by-batch names the nodes of each segment: leave out --nodes",
        ),
        ("192:18 --submit x.slurm", "--submit needs --jobs FILE"),
        ("192:18 --deadline 95", "--deadline is gone: name the segments yourself"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence):
    with pytest.raises(UserError) as caught:
        ask(f"{BLOOM} --nodes-by-batch {words}")
    assert sentence in str(caught.value)


def test_the_length_of_the_run_is_needed():
    with pytest.raises(UserError, match="how long is the run"):
        ask("rampup --model 176b --rampup-batch-size 192 16 9765625 --nodes-by-batch 192:48")


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
        assert [level.batch for level in Timeline(config).levels] == sizes
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
def test_segments_that_cannot_be(words, sentence):
    with pytest.raises(UserError) as caught:
        validation.check(parse(f"{WORDS} {words}".split()), 1)
    assert str(caught.value) == sentence


# ---- The chain of jobs ---------------------------------------------------------------------------


def submit_first(folder: Path, **environment: str) -> None:
    """Plan the run over 1, 2 and 3 nodes and submit its first segment."""
    folder.mkdir(exist_ok=True)
    start_of_all = f"ranks train.py {WORDS} --tp 1 --pp 1 --out {folder}/run --resume auto"
    write_batch(folder / "batch.slurm", f"--time=10 --output={folder}/job-%j.txt", start_of_all)
    (folder / "one.toml").write_text('device = "CPU"\nnode = 1\n')
    line = (
        f"rampup --gpu cpu --calibration {folder}/one.toml --nodes-by-batch 2:1 4:2 12:3 --zero 1 "
    )
    line += f"--recompute none {WORDS} --tp 1 --pp 1 --jobs {folder}/segments.json"
    words = [*line.split(), "--submit", str(folder / "batch.slurm")]
    outcome = start([sys.executable, "plan.py", *words], **environment)
    assert outcome.status == 0, outcome.err
    assert outcome.out.splitlines()[-1].endswith(": 1 nodes, after 0 samples")


def curve(run: Path) -> list[tuple]:
    """Every row of all starts, in order: its step and what was trained or evaluated."""
    earlier = sorted(run.glob("metrics.jsonl.*"), key=lambda path: int(path.suffix[1:]))
    rows = []
    for path in [*earlier, run / "metrics.jsonl"]:
        rows += [json.loads(line) for line in path.read_text().splitlines()]
    names = ("loss", "validation_loss", "grad_norm", "learning_rate", "skipped_samples")
    return [(row["iteration"], *(row.get(name, -1.0) for name in names)) for row in rows]


def check_one_curve(folder: Path) -> None:
    """Check that a run in segments has the loss curve of one rank without segments."""
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
    "sbatch": 'echo "$@" >>{bin}/jobs; '
    'echo "SEGMENTS $SEGMENTS $SLURM_RESTART_COUNT" >>{bin}/jobs; echo 8',
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
    submit_first(tmp_path, PATH=path)

    def job(nodes: int, **more: str) -> Outcome:
        facts = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "1", "SLURM_SUBMIT_DIR": str(ROOT)}
        facts |= {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "n", "PATH": path}
        facts |= {"SEGMENTS": str(tmp_path / "segments.json")} | more
        return start(["bash", str(tmp_path / "batch.slurm")], **facts)

    for nodes in (1, 2, 3):
        (line, segments_line) = jobs.read_text().splitlines()[-2:]
        assert line == f"--parsable --export=ALL --nodes={nodes} {tmp_path / 'batch.slurm'}"
        # The environment has no number of restarts.
        assert segments_line == f"SEGMENTS {tmp_path / 'segments.json'} "
        if nodes == 2:  # a job of other nodes than its segment's
            assert "error: SPARE_NODES is 'x', not a whole number" in job(2, SPARE_NODES="x").err
            wrong = job(3)
            assert wrong.status == 2
            assert "error: after 8 samples the segment has 2 nodes and 2 ranks, but" in wrong.err
            check_starts_at_no_segment(tmp_path / "run", tmp_path / "other")
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
    submit_first(folder)

    def output() -> str:
        return "\n".join(path.read_text() for path in sorted(folder.glob("job-*.txt")))

    limit = time.monotonic() + SECONDS
    while ": status 0" not in output():
        assert time.monotonic() < limit, output()
        assert "\nerror: " not in output(), output()
        time.sleep(0.5)
    assert [output().count(f": {nodes} nodes, after") for nodes in (1, 2, 3)] == [0, 1, 1]
    check_one_curve(folder)


def check_starts_at_no_segment(run: Path, out: Path) -> None:
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
    submit_first(tmp_path, PATH=f"{own}:{os.environ['PATH']}")
    tree = growing_jobs.read(str(tmp_path / "segments.json"))
    run = [*WORDS.split(), "--out", str(tmp_path / "run"), "--resume", "auto"]
    assert growing_jobs.words_of(tree, [*run, "--tp", "4"], 1, 1) == tree["segments"][0]["words"]
    for more, sentence in (
        ("--layers 4", "model differs"),
        ("--batch-schedule 0:2 256:4 800:12", "batches differs"),
        ("--schedule gpipe", "schedule differs: 1f1b of the plan and gpipe of the batch file"),
    ):
        with pytest.raises(UserError, match=sentence):
            growing_jobs.words_of(tree, [*run, *more.split()], 1, 1)
    with pytest.raises(UserError, match="the segment has 1 nodes and 1 ranks, but this job has 1"):
        growing_jobs.words_of(tree, run, 1, 4)
    with pytest.raises(UserError, match="leave out --nodes=2"):
        growing_jobs.submit("x", tree | {"sbatch": ["--nodes=2", "x.slurm"]}, 0)
    with pytest.raises(UserError, match="names no batch file"):
        growing_jobs.submit("x", tree | {"sbatch": []}, 0)
    old = tmp_path / "stages.json"  # of version 0.3
    text = (tmp_path / "segments.json").read_text()
    old.write_text(text.replace('"segments"', '"stages"'))
    assert growing_jobs.read(str(old)) == tree
    with pytest.raises(UserError, match=r"SEGMENTS .* is not what `plan.py rampup"):
        growing_jobs.read(str(tmp_path / "batch.slurm"))
