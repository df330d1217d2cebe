"""supervisor/: if this failed, a run would be restarted for ever, or not where it should be."""

import json
import os
import random
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import start

from base.errors import UserError
from distributed.launch import SlurmJob
from tools.supervisor import command, evidence
from tools.supervisor.command import run_options
from tools.supervisor.decisions import (
    DAY,
    HOUR,
    SAME_STEP,
    Decision,
    Earlier,
    Journal,
    SupervisorAction,
    decide,
)
from tools.supervisor.evidence import (
    LEAST_ROOM,
    LOST,
    REFUSED,
    SPIKE,
    Evidence,
    Files,
    read_evidence,
)

ROOM = {"free": 10**9, "needed": LEAST_ROOM}
DEAD = Evidence(9, "dead", ("n1",), (0,), iteration=40, newest=30, **ROOM)
FAILED = Evidence(1, "failed", ("n1",), (3,), "ValueError: x", iteration=40, newest=30, **ROOM)
MISTAKE = Evidence(2, **ROOM)
PREFLIGHT = replace(MISTAKE, kind="preflight", nodes=("n1",), error="preflight: ...")
PASS, STOP, QUEUE, WAIT, RESTART, RETURN = SupervisorAction
FULL = {"free": 10, "needed": LEAST_ROOM}


def after(*found: Evidence, action: SupervisorAction = RESTART, ago: float = 60.0) -> list[Earlier]:
    """Earlier ends of the ranks, each with that decision."""
    return [Earlier(ago, one, Decision(action, "")) for one in found]


def decided(found: Evidence, earlier=(), spare: int | None = 1, limit: int = 6) -> Decision:
    return decide(found, earlier, spare, limit)


@pytest.mark.parametrize(
    ("found", "earlier", "spare", "action", "out", "reason"),
    [
        (Evidence(0), [], 0, PASS, (), "the run is finished"),
        (Evidence(75), [], 0, PASS, (), "stopped early"),
        (Evidence(75, back=("n2",)), [], 0, RETURN, (), "n2 can be used again"),
        (Evidence(75, back=("n2",), requested=True), [], 0, PASS, (), "stopped early"),
        (replace(DEAD, requested=True), [], 1, PASS, (), "a signal asked for the end"),
        (MISTAKE, [], 1, STOP, (), "a user's mistake"),
        (replace(MISTAKE, finite=False), [], 1, STOP, (), "training has diverged"),
        # status 2 of a launcher whose rank is dead is no mistake
        (replace(DEAD, status=2), [], 1, RESTART, ("n1",), "n1 left out"),
        (replace(MISTAKE, **FULL), [], 1, WAIT, (), "the disk is full"),
        (replace(FAILED, error="OSError: [Errno 28] " + os.strerror(28)), [], 1, WAIT, (), "full"),
        (DEAD, [], 1, RESTART, ("n1",), "n1 left out"),
        (DEAD, [], None, RESTART, (), "no node is known"),
        (DEAD, [], 0, RESTART, (), "no node is spare for n1"),
        # twice the same node, in another step
        (DEAD, after(replace(DEAD, iteration=33)), 0, QUEUE, ("n1",), "n1 cannot be used, and 0"),
        (DEAD, after(replace(DEAD, iteration=33)), None, RESTART, (), "no node is known"),
        (DEAD, after(replace(DEAD, iteration=33), ago=2 * DAY), 0, RESTART, (), "no node is spare"),
        # an exception: the node only when it fails again
        (FAILED, [], 1, RESTART, (), "no node is known"),
        (FAILED, after(FAILED), 1, RESTART, ("n1",), "n1 left out"),
        (FAILED, after(FAILED, FAILED), 1, STOP, (), "it failed 3 times in step 40"),
        (FAILED, after(replace(FAILED, nodes=("n2",))), 1, STOP, (), "not the hardware"),
        (DEAD, after(replace(DEAD, nodes=("n2",))), 1, STOP, (), "in step 40 on n2 and n1"),
        (PREFLIGHT, [], 1, RESTART, ("n1",), "n1 left out"),
        (replace(PREFLIGHT, kind="audit"), [], None, STOP, (), "n1 cannot be used, and this"),
        (replace(MISTAKE, kind="spike", finite=False), [], 0, RESTART, (), "are skipped"),
        (replace(MISTAKE, kind="spike", **FULL), [], 0, WAIT, (), "the disk is full"),
        (PREFLIGHT, [], 0, QUEUE, ("n1",), "n1 cannot be used"),
        (replace(DEAD, kind="", nodes=(), silent=("n2", "n3")), [], 1, QUEUE, ("n2", "n3"), ""),
        (replace(DEAD, silent=("n2",)), [], 1, RESTART, ("n2",), "n2 left out"),
        (PREFLIGHT, after(*3 * [PREFLIGHT], action=QUEUE), 0, STOP, (), "queued 3 times without"),
        (PREFLIGHT, after(*3 * [DEAD], action=QUEUE), 0, QUEUE, ("n1",), ""),
    ],
)  # fmt: skip
def test_the_evidence_decides(found, earlier, spare, action, out, reason):
    decision = decided(found, earlier, spare)
    assert (decision.action, decision.out) == (action, out), decision.reason
    assert reason in decision.reason


def test_restarts_in_an_hour_have_a_limit():
    seconds = {HOUR - 1: (STOP, "6 restarts in an hour, at most 6"), HOUR + 1: (RESTART, "n1 left")}
    for ago, (action, reason) in seconds.items():
        earlier = after(*(replace(DEAD, iteration=i) for i in range(6)), ago=ago)
        decision = decided(DEAD, earlier)
        assert decision.action == action
        assert decision.reason.startswith(reason)


NODES = st.lists(st.sampled_from(["n1", "n2", "n3", "n4"]), unique=True, max_size=2).map(tuple)
ENDS = st.builds(
    Evidence,
    st.sampled_from([1, 2, 9, 137]),
    kind=st.sampled_from(["", "failed", SPIKE, *REFUSED, *LOST]),
    nodes=NODES,
    silent=st.one_of(st.just(()), NODES),
    iteration=st.integers(1, 4),
    newest=st.sampled_from([None, 1, 2]),
    finite=st.booleans(),
    free=st.sampled_from([0, 10**9]),
    needed=st.just(LEAST_ROOM),
)


@given(st.lists(st.tuples(ENDS, st.integers(1, 2000)), max_size=40), st.integers(0, 3))
def test_no_sequence_of_ends_makes_a_loop(ends, spare):
    """Few restarts an hour, few in one step, never more nodes out than are spare."""
    earlier, clock, started, left = [], 0, [], spare
    for found, seconds in ends:
        clock += seconds
        ago = [replace(row, ago=clock - at) for at, row in earlier]
        decision = decided(found, ago, left, limit=4)
        assert set(decision.out) <= {*found.nodes, *found.silent}
        earlier.append((clock, Earlier(0.0, found, decision)))
        if decision.action not in (RESTART, WAIT):
            assert decision.reason
            break
        left -= len(decision.out)
        assert left >= 0
        started.append(clock)
        assert sum(clock - at < HOUR for at in started) <= 4
    ended = [row.evidence for _, row in earlier if row.decision.action == RESTART]
    # The run itself counts its returns after spikes, up to spike_limit.
    plain = [e for e in ended if not e.silent and e.kind not in (*REFUSED, SPIKE)]
    assert all(plain.count(e) < SAME_STEP for e in plain)


# ---- Evidence ------------------------------------------------------------------------------------


def write_case(out, case: dict, ranks: dict[int, dict]) -> None:
    (out / "hang").mkdir()
    (out / "hang" / "case.json").write_text(json.dumps(case))
    for number, rank in ranks.items():
        (out / "hang" / f"rank_{number:05d}.json").write_text(json.dumps(rank))


NOTHING = Files(b"", 0, b"")  # no case and no row before the start


@pytest.mark.parametrize("clock", [-60.0, 0.0, 60.0])
def test_the_evidence_is_of_this_start(tmp_path, monkeypatch, clock):
    """Only the checkpoints of an earlier start count, whatever a file server's clock is."""
    out = str(tmp_path)
    ranks = {3: {"node": "n2", "error": "Traceback\n  x\nValueError: y\n"}}
    write_case(tmp_path, {"kind": "failed", "culprits": [3]}, ranks)
    rows = [{"iteration": 7, "loss": 1.5}, {"iteration": 8, "loss": float("nan")}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, complete in ((2, True), (4, True), (6, False)):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "rank_00000.h5").write_bytes(bytes(2 << 20))
        if complete:
            (folder / "manifest.json").write_text("{}")
    for file in ("hang/case.json", "hang/rank_00003.json", "metrics.jsonl"):
        os.utime(tmp_path / file, (time.time() + clock, time.time() + clock))
    found = read_evidence(out, 1, NOTHING)
    expected = Evidence(1, "failed", ("n2",), (3,), "ValueError: y", iteration=9, newest=4)
    expected = replace(expected, finite=False, free=found.free, needed=(2 << 20) + 2)
    assert found == expected
    text = "status 1; failed rank 3 on n2; ValueError: y; after step 8, whose loss is not finite"
    assert found.describe() == f"{text}; newest checkpoint 4"
    assert evidence.case_is_written(out, NOTHING)
    assert evidence.has_trained(out, NOTHING)
    before = evidence.files_before(out)
    later = read_evidence(out, 1, before)
    assert later == Evidence(1, iteration=5, newest=4, free=later.free, needed=found.needed)
    assert not evidence.case_is_written(out, before)
    assert not evidence.has_trained(out, before)
    monkeypatch.setattr(evidence, "free_bytes", lambda out: 10)
    full = read_evidence(out, 1, NOTHING)
    assert full.disk_is_full
    assert full.describe().endswith("; 0.0 MB free of 2.1 needed")


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ('{"status": 2, "error": "tp(3) does not divide 2 ranks"}', 2, "tp(3) does not divide"),
        ('{"status": 75, "error": ""}', 75, ""),
        ('{"status": "2"}', 143, ""),
        ('{"status": 2', 143, ""),
        ("[2]", 143, ""),
    ],
)
def test_the_status_of_a_rank_counts_more_than_that_of_the_launcher(tmp_path, text, status, error):
    (tmp_path / "end.json").write_text(text)
    found = read_evidence(str(tmp_path), 143, NOTHING)
    assert (found.status, found.error[: len(error)]) == (status, error)
    assert found.is_mistake == (status == 2)
    assert read_evidence(str(tmp_path), 0, NOTHING).status == 0, "the launcher knows of no failure"


def test_a_resumed_run_that_does_no_step_has_no_last_row(tmp_path):
    """It begins metrics.jsonl anew; a step that is done again makes another row."""
    file, out = tmp_path / "metrics.jsonl", str(tmp_path)
    assert evidence.files_before(out) == NOTHING
    file.write_text('{"iteration": 8, "loss": 1.5, "elapsed": 3.25}\n')
    before = evidence.files_before(out)
    file.rename(tmp_path / "metrics.jsonl.1")
    assert not evidence.has_trained(out, before)
    file.write_text("")
    assert not evidence.has_trained(out, before)
    file.write_text('{"iteration": 8, "loss": 1.5, "elapsed": 4.25}\n')
    assert evidence.has_trained(out, before)
    assert read_evidence(out, 1, before).iteration == 9


def test_a_checkpoint_that_vanishes_does_not_end_the_supervisor(tmp_path):
    """Ranks of other nodes may still delete surplus ones when the launcher has ended."""
    assert evidence.newest_checkpoint(str(tmp_path)) == (None, LEAST_ROOM)
    for step in (4, 8):
        folder = tmp_path / f"checkpoints/step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(bytes(LEAST_ROOM + step))
    assert evidence.newest_checkpoint(str(tmp_path)) == (8, LEAST_ROOM + 8)
    (tmp_path / "checkpoints/step_00000008/rank_00000.h5").symlink_to("gone")  # listed, not there
    assert evidence.newest_checkpoint(str(tmp_path)) == (4, LEAST_ROOM + 4)


def test_the_room_is_that_of_run_json_else_of_the_newest_checkpoint(tmp_path, monkeypatch):
    out, stated = tmp_path / "run", 5 * LEAST_ROOM
    folder = out / "checkpoints/step_00000004"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(bytes(2 * LEAST_ROOM))
    for text, needed in (
        ("{}", 2 * LEAST_ROOM),
        ('{"checkpoint_bytes": null}', 2 * LEAST_ROOM),
        (json.dumps({"checkpoint_bytes": stated}), stated),
        ("[" * 100_000, 2 * LEAST_ROOM),
    ):
        (out / "run.json").write_text(text)
        assert evidence.bytes_needed(str(out)) == needed
    (out / "run.json").write_text(json.dumps({"checkpoint_bytes": stated}))
    monkeypatch.setattr(evidence, "free_bytes", lambda out: stated - 1)
    assert decided(read_evidence(str(out), 1, NOTHING)).action == WAIT


def test_what_is_damaged_is_no_evidence(tmp_path):
    """Cut short, of other types: never an exception."""
    chance = random.Random(1)
    whole = json.dumps({"kind": "dead", "culprits": [0], "nodes": ["n1"], "error": "x"}).encode()
    (tmp_path / "hang").mkdir()
    for file in ("hang/case.json", "hang/rank_00000.json", "metrics.jsonl", "supervisor.jsonl"):
        for _ in range(40):
            text = bytearray(whole)
            text[chance.randrange(len(text))] = chance.randrange(256)
            (tmp_path / file).write_bytes(text[: chance.randrange(len(text) + 1)])
            read_evidence(str(tmp_path), 1, NOTHING)
            Journal(str(tmp_path), "").earlier()
    for value in ({"culprits": 3, "nodes": "n1"}, {"culprits": ["x", None]}, [], "x", None):
        (tmp_path / "hang" / "case.json").write_text(json.dumps(value))
        assert read_evidence(str(tmp_path), 1, NOTHING).ranks == ()
    (tmp_path / "hang" / "case.json").write_text(json.dumps({"kind": "dead", "culprits": [0]}))
    (tmp_path / "hang" / "rank_00000.json").write_text(json.dumps({"error": " \n"}))
    assert read_evidence(str(tmp_path), 1, NOTHING).error == "", "an error without words"


def test_a_number_of_nodes_that_is_no_number_is_no_decision(tmp_path):
    """JSON has Infinity for Python, which is no whole number."""
    journal = Journal(str(tmp_path), "")
    journal.add(DEAD, Decision(RESTART, "n1 left out", ("n1",)))
    file = tmp_path / "supervisor.jsonl"
    file.write_text(file.read_text().replace('"used": 0', '"used": Infinity'))
    assert Journal(str(tmp_path), "").earlier() == []


DEEP = {"array": "[" * 100_000, "object": '{"evidence":' * 100_000, "number": "1" + "0" * 5000}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_json_is_no_evidence(tmp_path, kind):
    """In any file that the supervisor reads; the rows beside it count."""
    out = tmp_path / "run"
    Journal(str(out), "").add(DEAD, Decision(RESTART, "n1 left out", ("n1",)))
    for file in ("supervisor.jsonl", "metrics.jsonl", "hang/case.json", "hang/rank_00000.json"):
        (out / file).parent.mkdir(exist_ok=True)
        with open(out / file, "a") as written:
            written.write(DEEP[kind] + "\n")
    assert [row.evidence for row in Journal(str(out), "").earlier()] == [DEAD]
    assert read_evidence(str(out), 1, NOTHING).kind == ""
    (out / "hang/case.json").write_text('{"kind": "dead", "culprits": [0]}')
    assert read_evidence(str(out), 1, NOTHING).ranks == (0,)


@pytest.mark.parametrize(
    "values",
    [{"nodes": [["n1"]]}, {"nodes": 5}, {"silent": [{}]}, {"error": None}, {"newest": "x"}],
)
def test_a_decision_of_other_types_does_not_count(tmp_path, values):
    journal = Journal(str(tmp_path), "")
    journal.add(DEAD, Decision(RESTART, "n1 left out", ("n1",)))
    file = tmp_path / "supervisor.jsonl"
    row = json.loads(file.read_text())
    assert len(Journal(str(tmp_path), "").earlier()) == 1
    file.write_text(json.dumps(row | {"evidence": row["evidence"] | values}))
    assert Journal(str(tmp_path), "").earlier() == []


def test_decisions_of_the_future_do_not_count_for_ever(tmp_path, monkeypatch):
    """A clock was a day ahead when they were made, and was set back: no restart is refused."""
    journal, now = Journal(str(tmp_path), ""), time.time()
    monkeypatch.setattr("tools.supervisor.decisions.time.time", lambda: now + DAY)
    for step in range(6):
        journal.add(replace(DEAD, iteration=step), Decision(RESTART, ""))
    monkeypatch.setattr("tools.supervisor.decisions.time.time", lambda: now + DAY - HOUR / 2)
    assert decided(DEAD, journal.earlier()).action == STOP  # a small step of the clock
    monkeypatch.setattr("tools.supervisor.decisions.time.time", lambda: now)
    assert decided(DEAD, journal.earlier()).action == RESTART


REFUSED = """
import sys
from base.errors import NodeError
from config.run_options import Run
from distributed.context import start
from distributed.launch import Launch
context = start(Launch("python"), Run(watchdog=False))
with context.failing_loudly():
    context.lock_folder(sys.argv[1])
    raise NodeError("preflight: the device of rank 3 (n2) failed: ECC", {"n2"})
"""


def test_the_preflight_leaves_the_nodes_that_it_names(tmp_path):
    outcome = start([sys.executable, "-c", REFUSED, str(tmp_path)])
    sentence = "preflight: the device of rank 3 (n2) failed: ECC"
    assert (outcome.status, outcome.err) == (2, f"error: {sentence}\n")
    assert sentence in (tmp_path / "hang/report.txt").read_text()
    found = read_evidence(str(tmp_path), 2, NOTHING)
    assert (found.kind, found.nodes, found.error) == ("preflight", ("n2",), sentence)
    assert decided(found).out == ("n2",)


def test_the_journal_is_read_again(tmp_path, capsys):
    """The decisions of a supervisor count for the next one; a torn line does not."""
    journal = Journal(str(tmp_path / "run"), "7.0")
    journal.add(DEAD, Decision(RESTART, "n1 left out", ("n1",)))
    assert "status 9; dead rank 0 on n1; after step 39; newest checkpoint 30: restart: n1 left" in (
        capsys.readouterr().out
    )
    with open(journal.file.path, "a") as file:
        file.write('{"time": "2026')
    again = Journal(str(tmp_path / "run"), "7.0")
    (row,) = again.earlier()
    assert (row.evidence, row.decision.action, row.decision.out) == (DEAD, RESTART, ("n1",))
    assert 0 <= row.ago < 60
    assert again.left_out() == {"n1"}
    assert Journal(str(tmp_path / "run"), "7.1").left_out() == set()  # another allocation


# ---- Commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "refused"),
    [("-N2", True), ("--nodes=2", True), ("-n", True), ("--mpi=pmi2", False), ("--exclude", True)],
)
def test_nodes_that_the_user_chose_stay_chosen(option, refused, monkeypatch):
    monkeypatch.setattr(command, "slurm_job", lambda: SlurmJob("7.0", ("n1", "n2"), 1))
    words = ["srun", option, "python", "train.py", "--resume", "auto"]
    if refused:
        with pytest.raises(UserError, match="leave out " + option):
            command.read_command(words, 1)
        assert command.read_command(words, 0).nodes == ()
    else:
        found = command.read_command(words, 1)
        assert (found.nodes, found.used) == (("n1", "n2"), 1)
        with pytest.raises(UserError, match=r"--spare-nodes\(2\) must be below the job's 2"):
            command.read_command(words, 2)


def test_out_and_resume_are_those_of_the_run(tmp_path):
    (tmp_path / "run.toml").write_text('[run]\nout = "a"\nresume = "auto"\n')
    words = ["--tp", "2", "--config", str(tmp_path / "run.toml")]
    assert run_options(words) == {"out": "a", "resume": "auto"}
    assert run_options([*words, "--out=b"]) == {"out": "b", "resume": "auto"}
    assert run_options(["--tp", "2"]) == {"out": "runs/latest", "resume": ""}
