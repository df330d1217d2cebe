"""Jobs of a real Slurm: if this failed, a limit or a lost rank would cost steps or the job."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ranks import ROOT, Job, fork_ranks, none_left, srun_command, start
from supervised_runs import write_batch
from test_switches import check_stopped, run

from config import validation
from config.command_line import parse
from scripts import requeue
from tools.supervisor.decisions import Decision, Journal, SupervisorAction
from tools.supervisor.evidence import Evidence

SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 64 --global-batch-size 8"
WORDS = f"{SHAPE} --device cpu --pp 2 --lr-schedule constant --lr 1e-3".split()
# Slurm checks limits every 30 s: the signal comes between 29 and 59 s after the start. The run is
# longer; the limit's last second and KillWait are enough to save.
STEPS, PAUSE = 130, 0.45
SECONDS = 400  # until the job with a time limit has ended

OPTIONS = "--job-name=limit --nodes=2 --time={limit} --signal=B:USR1@1 --open-mode=append"


@pytest.fixture(scope="module")
def limited_job(slurm, tmp_path_factory) -> tuple[Path, str]:
    """A job that reaches its limit of a minute; the other tests of Slurm run meanwhile."""
    out = tmp_path_factory.mktemp("limited") / "job"
    job = submit(out, limit=1, later=0.0)
    began = time.monotonic()
    while not list(out.glob("metrics.jsonl*")):  # two starts at the same time would be slow
        assert time.monotonic() < began + SECONDS, output(out)
        time.sleep(0.2)
    return out, job


@pytest.mark.slow
def test_a_lost_rank_is_started_again_in_the_job_and_scancel_ends_it(tmp_path, limited_job):
    """Saved, not requeued, and no process of Slurm stays, which `sleep` in the batch file kept."""
    out = tmp_path / "job"
    job = submit(out, limit=30)
    wait_for(lambda: (out / "metrics.jsonl").exists() and read(out / "metrics.jsonl"), out)
    ranks_of(out)[-1].kill()
    wait_for(lambda: "restart: no node is spare for n" in output(out), out)
    wait_for(lambda: (out / "metrics.jsonl.1").exists() and read(out / "metrics.jsonl"), out)
    subprocess.run(["scancel", job], check=True)
    wait_for(lambda: not queue(job), out)  # without a requeue it is not in the queue any more
    assert "start 0: status 75" in output(out)
    assert "not requeued: the job was cancelled" in output(out)
    assert list(out.glob("checkpoints/step_*"))
    assert none_left(f"slurmstepd: [{job}.") == []
    assert ranks_of(out) == []


@pytest.mark.slow
def test_srun_forwards_usr1_and_scancel_is_sigterm(tmp_path, limited_job):
    """srun forwards SIGUSR1; scancel sends SIGTERM to the ranks, as the time limit does."""
    with run(srun_command(2), tmp_path / "usr1", "--tp", "2") as job:
        job.wait_for(lambda: len(job.rows) > 1)
        job.send(signal.SIGUSR1)
        assert job.status() == 75
        check_stopped(job, "SIGUSR1")
    name = "to-be-cancelled"
    with run(srun_command(2, f"--job-name={name}"), tmp_path / "term", "--pp", "2") as job:
        job.wait_for(lambda: len(job.rows) > 1)
        subprocess.run(["scancel", f"--name={name}"], check=True)
        assert job.status() == 75
        check_stopped(job, "SIGTERM")


@pytest.mark.slow
def test_a_time_limit_loses_nothing(tmp_path, limited_job):
    """On the signal the run saves and exits with 75; the job is requeued and resumes."""
    (out, job), straight = limited_job, tmp_path / "straight"
    words = [*WORDS, "--steps", str(STEPS), "--out", str(straight)]
    outcome = fork_ranks(2, "train.py", *words)
    assert outcome.status == 0, outcome.err
    wait_for(lambda: not queue(job), out, SECONDS)
    endings = [line for line in output(out).splitlines() if "status" in line and "start" in line]
    assert len(endings) > 1, output(out)
    for number, line in enumerate(endings):
        last = number == len(endings) - 1
        assert f"start {number}: status {0 if last else 75}" in line, output(out)
    earlier = sorted(out.glob("metrics.jsonl.*"))
    rows = [row for path in [*earlier, out / "metrics.jsonl"] for row in read(path)]
    assert [row["iteration"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == [
        row["loss"] for row in read(straight / "metrics.jsonl")
    ]
    logs = sorted(path.name.split(".")[1] for path in (out / "logs").iterdir())
    assert logs == ["0", "1"]  # by node number: both nodes have this host's name


@pytest.mark.slow
def test_srun_trains_over_two_nodes(tmp_path, slurm):
    """Pre-flight checks the nodes, and the table shows the ranks of each node.

    After the job with a limit: these ranks need all CPUs of two nodes.
    """
    # Named: n3 may be free while a job of another test still ends on one of the two.
    launcher = srun_command(4, "--ntasks-per-node=2", "--nodelist=n1,n2")
    command = [*launcher, sys.executable, "train.py", *WORDS, "--tp", "2", "--steps", "3"]
    with Job([*command, "--out", str(tmp_path)], tmp_path) as job:
        assert job.status() == 0, job.text
        assert "4 ranks by srun on n1, n2: tp 2 x pp 2 x dp 1" in job.text
        assert "preflight: 4 ranks on 2 nodes answer" in job.text
        lines = [line.split() for line in job.text.splitlines()]
        table = [row for row in lines if row[:1] in (["n1"], ["n2"])]
        found = [(node, devices, ranks) for node, devices, _, ranks in table]
        assert found == [("n1", "2", "0-1"), ("n2", "2", "2-3")]
    places = json.loads((tmp_path / "run.json").read_text())["cluster"]["places"]
    assert [place["node"] for place in places] == ["n1", "n1", "n2", "n2"]


def submit(out, limit: int, later: float = PAUSE) -> str:
    """Submit a job with that --time, and that pause after its first start; its number."""
    out.mkdir()
    batch = out / "batch.slurm"
    words = [*WORDS, "--steps", str(STEPS), "--out", str(out), "--resume", "auto"]
    lines = [
        f"pause={PAUSE}",
        f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || pause={later}',
        f"ranks tests/paced_worker.py $pause {shlex.join(words)}",
    ]
    write_batch(batch, f"{OPTIONS.format(limit=limit)} --output={out}/batch.txt", *lines)
    command = ["sbatch", "--parsable", str(batch)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def queue(job: str) -> str:
    """Slurm's line about a job; nothing when it has ended."""
    command = ["squeue", "--noheader", f"--jobs={job}"]
    return subprocess.run(command, capture_output=True, text=True).stdout


def wait_for(what, out, seconds: float = 200) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit, output(out)
        time.sleep(0.2)


def ranks_of(out) -> list[psutil.Process]:
    """The running ranks of the job with that --out."""
    found = [p for p in psutil.process_iter(["cmdline"]) if str(out) in (p.info["cmdline"] or [])]
    return [p for p in found if "tests/paced_worker.py" in p.info["cmdline"][:3]]


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def output(out) -> str:
    """The output of the batch file and of the ranks."""
    paths = [out / "batch.txt", *sorted((out / "logs").glob("*"))]
    return "\n".join(path.read_text()[-3000:] for path in paths if path.exists())


# ---- Without Slurm -------------------------------------------------------------------------------

JOB = "JobId=7 JobName=Reason=TimeLimit\n   JobState={} Reason={} Dependency=(null)\n"
JOB += "   Requeue=1 Restarts={} BatchFlag=1\n   PreemptEligibleTime=x PreemptTime={}\n"
RUNNING, CANCELLED = ("RUNNING", "None", 2, "None"), ("COMPLETING", "None", 2, "None")
LIMIT, PREEMPTED = ("COMPLETING", "TimeLimit", 2, "None"), ("COMPLETING", "None", 2, "2026-11-21")
BY_SLURM = ("COMPLETING", "None", 3, "None")


@pytest.mark.parametrize(
    ("status", "job", "requeued", "reason"),
    [
        (0, RUNNING, False, "the run is finished"),
        (75, RUNNING, True, "stopped early, everything is saved"),
        (75, LIMIT, True, "stopped early"),
        (75, PREEMPTED, True, "stopped early"),
        (75, CANCELLED, False, "the job was cancelled (state COMPLETING, reason None)"),
        (75, BY_SLURM, False, "Slurm requeues the job itself"),
        (0, BY_SLURM, False, "Slurm requeues the job itself"),
        (137, BY_SLURM, False, "Slurm requeues the job itself"),
        (137, CANCELLED, False, "the job was cancelled"),
        (2, RUNNING, False, "status 2, and no rank was lost"),
        (137, RUNNING, False, "status 137, and no rank was lost"),
    ],
)
def test_the_state_of_the_job_decides(status, job, requeued, reason, tmp_path):
    decided = requeue.decide(status, tmp_path, JOB.format(*job), "7", 2)
    assert decided[0] == requeued
    assert reason in decided[1]


def test_a_lost_rank_is_requeued_three_times_without_a_new_checkpoint(tmp_path):
    """By the number of the start: an earlier start's loss, or an exception, is none. Nor is a case
    in OUT/hang, the time of which is that of a file server.
    """
    job, kinds = JOB.format(*RUNNING), ["dead", "hang", "missing", "dead"]

    def lose(start: str, kind: str, newest: int | None = None) -> tuple[bool, str]:
        journal = Journal(str(tmp_path), start)
        journal.add(Evidence(137, kind, newest=newest), Decision(SupervisorAction.PASS, "a signal"))
        return requeue.decide(137, tmp_path, job, "7", 2)

    assert not lose("7.1", "dead", 4)[0]  # the start before this one
    (tmp_path / "hang").mkdir()
    (tmp_path / "hang" / "case.json").write_text('{"kind": "dead"}')
    assert not requeue.decide(137, tmp_path, job, "7", 2)[0]
    decided = [lose("7.2", kind) for kind in kinds]
    assert [requeued for requeued, _ in decided] == [True, True, True, False]
    assert "(dead), 4 times since the newest checkpoint" in decided[-1][1]
    assert lose("7.2", "dead", 8)[0]
    assert not lose("7.2", "failed", 8)[0]


def requeued(tmp_path, status: int, *words: str, fails: int = 0, **environment: str):
    """scripts/requeue.py beside a scontrol that fails so often before it answers; its calls."""
    scontrol, log = tmp_path / "scontrol", tmp_path / "calls"
    scontrol.write_text(f"""#!/bin/sh
echo $@ >>{log}
[ $(wc -l <{log}) -gt {fails} ] || {{ echo unable to contact slurm controller >&2; exit 1; }}
cat <<'E'
{JOB.format("RUNNING", "None", 0, "None")}E
""")
    scontrol.chmod(0o755)
    command = [sys.executable, "scripts/requeue.py", str(status), "train.py", "--tp", "2", *words]
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return start(command, **environment), log.read_text().splitlines()


@pytest.mark.parametrize(("array", "calls"), [({}, 2), ({"SLURM_ARRAY_JOB_ID": "7"}, 1)])
def test_an_element_of_an_array_is_not_requeued(array, calls, tmp_path):
    outcome, called = requeued(tmp_path, 75, "--out", str(tmp_path), **array)
    assert outcome.status == 0, outcome.err
    expected = "not requeued: " if array else "requeued: "
    assert outcome.out.startswith(f"job 7: {expected}stopped early, everything is saved")
    assert called == ["show job 7", "requeue 7"][:calls]


@pytest.mark.parametrize("fails", [1, 4])
def test_a_busy_controller_is_asked_again_and_the_folder_is_that_of_the_config(fails, tmp_path):
    (tmp_path / "run.toml").write_text(f'[run]\nout = "{tmp_path}"\n')
    Journal(str(tmp_path), "7.0").add(
        Evidence(137, "dead"), Decision(SupervisorAction.PASS, "a signal")
    )
    outcome, _ = requeued(tmp_path, 137, "--config", str(tmp_path / "run.toml"), fails=fails)
    if fails == 1:
        assert outcome.out.startswith("job 7: requeued: a rank was lost (dead), 1 times since")
        assert outcome.status == 0
        return
    unable = "error: not requeued: scontrol show job 7: unable to contact slurm controller\n"
    assert (outcome.status, outcome.out, outcome.err) == (1, "", unable)


def test_a_requeue_outside_of_a_job_is_one_sentence():
    for environment in ({"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "x"}):
        words = [sys.executable, "scripts/requeue.py", "75", "train.py"]
        outcome = start(words, **environment)
        assert (outcome.status, outcome.out, outcome.err.count("\n")) == (1, "", 1)
        assert outcome.err.startswith("error: SLURM_JOB_ID is ")


@pytest.mark.parametrize("name", ["train", "train_1b3", "train_104b", "train_176b"])
def test_a_batch_file_without_slurm_is_one_sentence(name):
    outcome = start(["env", "-u", "SLURM_JOB_ID", "bash", f"scripts/{name}.slurm"])
    sentence = f"error: not in a Slurm job: sbatch scripts/{name}.slurm\n"
    assert (outcome.status, outcome.out, outcome.err) == (2, "", sentence)


@pytest.mark.parametrize("name", ["train_1b3", "train_104b", "train_176b"])
def test_batch_files_request_what_their_run_needs(name):
    """bash parses them, and their command line fits the number of ranks that they request."""
    path = ROOT / "scripts" / f"{name}.slurm"
    assert start(["bash", "-n", str(path)]).status == 0
    text = path.read_text()
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH --")
    )
    ranks = int(asked["nodes"]) * int(asked["ntasks-per-node"])
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    assert asked["signal"].startswith("B:USR1@")
    assert "requeue" in asked or asked["array"].endswith("%1")
    assert not any(word in asked for word in ("account", "partition", "qos", "constraint"))
    line = text.partition("ranks train.py ")[2].replace("\\\n", " ")
    words = [word.replace("$OUT", "runs/x").replace("$DATA", "x") for word in shlex.split(line)]
    checked = validation.check(parse(words), ranks)
    assert checked.run.kill_switch == "runs/x/kill"
    assert checked.run.device == "cuda", "a node without a GPU is a mistake"
    layouts = {"train_1b3": (1, 1, 32), "train_104b": (4, 32, 1), "train_176b": (4, 12, 8)}
    layout = checked.layout
    assert (layout.tp, layout.pp, layout.dp) == layouts[name]


def test_what_the_supervisor_has_stopped_is_not_requeued(tmp_path):
    """Though a rank was lost; an earlier start's decision does not count."""
    journal = Journal(str(tmp_path), "7.2")
    journal.add(Evidence(137, "dead"), Decision(SupervisorAction.STOP, "6 restarts in an hour"))
    job = JOB.format(*RUNNING)
    assert requeue.decide(137, tmp_path, job, "7", 2) == (
        False,
        "the supervisor has stopped it: 6 restarts in an hour",
    )
    journal.add(
        Evidence(2, "preflight"), Decision(SupervisorAction.QUEUE, "n1 cannot be used", ("n1",))
    )
    assert requeue.decide(75, tmp_path, job, "7", 2) == (True, "n1 cannot be used")
    next_job = job.replace("=2 ", "=3 ")
    early = (True, "stopped early, everything is saved")
    assert requeue.decide(75, tmp_path, next_job, "7", 3) == early, "no decision of its own yet"
    later = Journal(str(tmp_path), "7.3")
    later.add(Evidence(137, "dead"), Decision(SupervisorAction.PASS, "a signal"))
    assert requeue.decide(137, tmp_path, next_job, "7", 3)[0]
