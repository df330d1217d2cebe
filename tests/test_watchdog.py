"""Who is named when ranks hang, die or fail: from records made by hand, and from real faults."""

import faulthandler
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fault_worker
import pytest
from ranks import mpirun, none_left, start

from config import schema as configuration
from config import validation
from config.messages import UserError
from config.schema import Layout
from distributed import context
from telemetry.step_stats import StepStats, StragglerCheck
from watchdog import hang_report, heartbeat
from watchdog.flight_recorder import FlightRecorder, Operation
from watchdog.wait_graph import Waits, culprits

WORKER = "tests/fault_worker.py"

# ------------------------------------------------------------------------------------------------
# Records
# ------------------------------------------------------------------------------------------------


class Work:
    def __init__(self, seconds=0.0):
        self.seconds, self.waits = seconds, 0

    def wait(self):
        time.sleep(self.seconds)
        self.waits += 1


def test_operations_are_numbered_per_group_and_per_peer():
    recorder = FlightRecorder()
    tp, forward = recorder.group_log("tp", (0, 1)), recorder.group_log("forward", (0, 2, 4))
    assert recorder.group_log("tp", (0, 1)) is tp
    numbers = [tp.enter("all_reduce", 8).number, forward.enter_send(8, 1).number]
    numbers += [forward.enter_receive(8, 1).number, forward.enter_send(8, 1).number]
    numbers += [forward.enter_send(8, 2).number, tp.enter("all_gather", 8).number]
    assert numbers == [1, 1, 1, 2, 1, 2]
    assert recorder.snapshot(9)["counts"] == [(2, {}, {}), (0, {1: 2, 2: 1}, {1: 1})]


def test_a_wait_is_on_record_while_it_lasts_and_its_time_is_kept():
    recorder = FlightRecorder()
    recorder.begin_step(7)
    recorder.at("F", 3)
    work = Work(0.05)
    operation = recorder.group_log("tp", (4, 5)).enter("all_reduce", 64).under_way(work)
    assert recorder.snapshot(1)["wait"] is None
    recorder.waiting = operation
    wait = recorder.snapshot(1)["wait"]
    assert (wait["role"], wait["ranks"], wait["number"]) == ("tp", (4, 5), 1)
    assert wait["place"] == ("train", 7, "F", 3)
    operation.wait()
    operation.wait()
    assert work.waits == 1
    assert 0.05 <= recorder.take_waited() < 0.2
    assert recorder.take_waited() == 0.0
    assert recorder.snapshot(1)["wait"] is None
    last = recorder.snapshot(1)["last"][0]
    assert last["ended"] is not None


def test_the_ring_keeps_the_newest_records():
    recorder = FlightRecorder()
    group_log = recorder.group_log("dp", (0, 1))
    for _ in range(1000):
        group_log.enter("all_reduce", 4)
    last = recorder.snapshot(10_000)["last"]
    assert [r["number"] for r in last] == list(range(1001 - len(last), 1001))
    assert len(last) == 256


class Event:
    """A CUDA event of a device that has got to `Event.passed`."""

    passed, clock = 0, 0

    def record(self):
        Event.clock += 1
        self.at = Event.clock

    def query(self):
        return self.at <= Event.passed

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_waits_of_a_stream_are_seen_by_events():
    """On nccl the host goes on: what the device has not passed is what it waits for."""
    recorder = FlightRecorder(Event)
    group_log = recorder.group_log("tp", (0, 1))
    operations = [group_log.enter("all_reduce", 4) for _ in range(3)]
    for operation in operations:
        operation.under_way(Work()).wait()
    Event.passed = 2
    assert recorder.device_waits_for() is operations[1]
    with recorder.waiting_for("device"):
        assert recorder.snapshot(0)["wait"]["number"] == 2
    assert recorder.snapshot(0)["wait"]["number"] == 2  # wherever the host is
    with recorder.waiting_for("writer"):
        assert recorder.snapshot(0)["wait"]["kind"] == "writer"
    assert recorder.take_waited() == 1.0  # of three, one has passed
    Event.passed = 6
    assert recorder.take_waited() == 2.0
    assert recorder.device_waits_for() is recorder.snapshot(0)["wait"] is None


# ------------------------------------------------------------------------------------------------
# Waits followed to their end
# ------------------------------------------------------------------------------------------------


class Place:
    """Ranks of a tp 2 x pp 2 x dp 2 mesh whose records are written by hand."""

    def __init__(self, size=8):
        self.recorders = [FlightRecorder() for _ in range(size)]
        self.states = dict.fromkeys(range(size), "answered")
        self.still = dict.fromkeys(range(size), 100.0)

    def wait(self, rank: int, operation: Operation) -> None:
        self.recorders[rank].waiting = operation

    def collective(self, role, ranks, waiting, kind="all_reduce"):
        """All of `ranks` have done one; `waiting` of them wait in the second."""
        for rank in ranks:
            self.recorders[rank].group_log(role, ranks).enter(kind, 4)
        for rank in waiting:
            self.wait(rank, self.recorders[rank].group_log(role, ranks).enter(kind, 4))

    def told(self) -> hang_report.Ranks:
        ranks = {}
        for number, recorder in enumerate(self.recorders):
            ranks[number] = {
                "rank": number,
                "node": "n1",
                "pid": 1,
                "coordinates": {},
                "state": self.states[number],
                "process": None,
                "error": None,
                "heard": 1.0,
                "still": self.still[number],
                "memory": None,
                "groups": recorder.groups(),
                "snapshot": recorder.snapshot(9),
                "stacks": {},
                "raw": "",
            }
        return json.loads(json.dumps(ranks), object_hook=numbered)

    def culprits(self, **case) -> list[int]:
        case = {"kind": "hang", "limit": 60.0, "still": 0, **case}
        return culprits(case, Waits(self.told()))


def numbered(values: dict) -> dict:
    """Ranks' numbers, which JSON has as text; those inside a rank stay text, as in the files."""
    return {int(k): v for k, v in values.items()} if "0" in values and "7" in values else values


def test_who_never_entered_is_named():
    place = Place()
    place.collective("world", tuple(range(8)), [0, 1, 2, 3, 4, 6, 7])
    assert place.culprits() == [5]


def test_waits_are_followed_over_axes():
    """0 waits in tp for 1, 1 in the pipeline for 5, 5 in dp for 7, which waits for nobody."""
    place = Place()
    place.collective("tp", (0, 1), [0])
    group_log = place.recorders[1].group_log("forward", (1, 5))
    place.wait(1, group_log.enter_receive(4, 1))
    place.recorders[5].group_log("forward", (1, 5))
    place.collective("dp", (5, 7), [5])
    for others in (2, 3, 4, 6):
        place.wait(
            others, place.recorders[others].group_log("world", tuple(range(8))).enter("x", 4)
        )
    assert place.culprits() == [7]
    told = place.told()
    assert Waits(told).blockers(0) == [1]
    assert Waits(told).blockers(1) == [5]
    report = hang_report.tell(
        {"kind": "hang", "limit": 60.0, "still": 0, "time": "now"} | {"culprits": [7]}, told, "out"
    )
    assert "never entered all_reduce 2 of dp (ranks 5, 7), 4 bytes, in which rank 5 waits" in report
    assert "  0 in all_reduce 2 of tp (ranks 0-1), 4 bytes: for 1" in report


@pytest.mark.parametrize("kind", ["send", "receive"])
def test_messages_count_by_pair(kind):
    """A neighbour that has done the other half of it is not the one that is missed."""
    place = Place(8)
    ours, theirs = (r.group_log("forward", (0, 1)) for r in place.recorders[:2])
    for _ in range(3):
        ours.enter_send(4, 1)
        theirs.enter_receive(4, 0)
        ours.enter_receive(4, 1)
        theirs.enter_send(4, 0)
    place.wait(0, ours.enter_send(4, 1) if kind == "send" else ours.enter_receive(4, 1))
    assert Waits(place.told()).blockers(0) == [1]
    theirs.enter_receive(4, 0) if kind == "send" else theirs.enter_send(4, 0)
    assert Waits(place.told()).blockers(0) == []


def test_a_silent_rank_is_the_end_of_waits_even_if_it_had_entered():
    place = Place()
    place.collective("world", tuple(range(8)), range(8))
    assert place.culprits() == []
    assert "NO CULPRIT AMONG THE RANKS" in hang_report.tell(
        {"kind": "hang", "limit": 60.0, "still": 0, "time": "now", "culprits": []},
        place.told(),
        "out",
    )
    place.states[3] = "silent"
    assert place.culprits() == [3]


def test_who_still_moves_is_no_culprit():
    place = Place()
    place.collective("world", tuple(range(8)), [0, 1, 2, 3, 4])
    place.still |= {5: 1.0, 6: 90.0, 7: 99.0}
    assert place.culprits() == [7, 6]


def test_a_wait_for_the_own_writer_leads_to_whom_that_waits_for():
    place = Place()
    for rank, recorder in enumerate(place.recorders):
        recorder.joined = {"kind": "writer", "ranks": [], "began": time.monotonic()}
        recorder.aside_at("store", (6,)) if rank == 0 else recorder.aside_at("writes its shard")
    for rank in (1, 2, 3, 4, 5, 7):
        place.recorders[rank].joined = None
        place.wait(rank, place.recorders[rank].group_log("world", tuple(range(8))).enter("x", 4))
    assert place.culprits() == [6]


def test_a_circle_and_different_operations_are_said():
    place = Place()
    place.collective("tp", (0, 1), [0])
    place.collective("dp", (0, 1), [1])
    for rank in range(2, 8):
        place.states[rank] = "left"
        place.still[rank] = 0.0
    assert place.culprits() == []
    case = {"kind": "hang", "limit": 60.0, "still": 0, "time": "now", "culprits": []}
    assert "wait for one another in a circle" in hang_report.tell(case, place.told(), "out")
    place = Place()
    place.collective("tp", (0, 1), [0])
    place.collective("tp", (0, 1), [1], kind="all_gather")
    place.recorders[0].group_log("tp", (0, 1)).entered = 3
    place.recorders[0].waiting.number = 3
    place.recorders[1].waiting.number = 3
    line = hang_report.mismatches(Waits(place.told()))[0]
    assert line.startswith("ranks 0 and 1 entered different operations as 3 of tp")


# ------------------------------------------------------------------------------------------------
# Slow ranks, options
# ------------------------------------------------------------------------------------------------


def speed_check(layout: Layout, nodes: list[str], every: int) -> StragglerCheck:
    model = configuration.ModelShape(layers=1, hidden=8, heads=1)
    run = configuration.Run(check_speed_every=every, slow_rank_percent=20.0)
    return StragglerCheck(configuration.Config(model, layout, run=run), nodes)


def test_a_rank_slower_than_its_peers_is_named_with_its_node():
    layout, nodes = Layout(tp=2, pp=2, dp=2), [f"n{rank // 4}" for rank in range(8)]
    check = speed_check(layout, nodes, 4)
    lines = []
    for _ in range(4):
        assert lines == []
        everyone = [StepStats(0, 0, 1.0, 0.5 if rank < 4 else 0.2, 0) for rank in range(8)]
        everyone[6] = StepStats(0, 0, 1.0, 0.0, 0)  # 1.0 s where its stage takes 0.8 s
        everyone[1] = StepStats(0, 0, 1.0, 0.45, 0)  # 10 % longer than the first stage's 0.5 s
        lines = check.add(everyone)
    assert len(lines) == 1
    assert "rank 6 (tp 0, pp 1, dp 1) on n1 computed 1.0000 s a step over the last 4" in lines[0]
    assert "25% longer than the median of the 3 others of its stage, 0.8000 s" in lines[0]
    assert check.add(everyone) == []
    alone = speed_check(Layout(pp=2, dp=1), ["a", "b"], 1)
    assert alone.add([StepStats(0, 0, 1.0, 0.0, 0), StepStats(0, 0, 9.0, 0.0, 0)]) == []


def test_what_cannot_be_watched_or_drawn_is_refused():
    from config.command_line import parse

    words = ["--layers=1", "--hidden=8", "--heads=1", "--steps=4", "--profile-step=5"]
    with pytest.raises(UserError, match="--profile-step 5 is never reached: the run has 4 steps"):
        validation.check(parse(words), 1)
    words = [*words[:-1], "--no-watchdog", "--hang-timeout=9"]
    with pytest.raises(UserError, match="--hang-timeout 9 needs the watchdog; now it is off"):
        validation.check(parse(words), 1)


def test_debugging_flags_set_what_torch_reads_when_it_is_loaded():
    code = (
        "import os, sys; from cluster import prepare; from config import Run; "
        "prepare(Run(blocking=True, deterministic=True)); assert 'torch' not in sys.modules; "
        "print(*(os.environ[k] for k in ('CUDA_LAUNCH_BLOCKING', 'TORCH_NCCL_BLOCKING_WAIT', "
        "'CUBLAS_WORKSPACE_CONFIG')))"
    )
    assert start([sys.executable, "-c", code]).out == "1 1 :4096:8\n"


# ------------------------------------------------------------------------------------------------
# The monitor
# ------------------------------------------------------------------------------------------------


def wait_until(condition, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_strangers_and_those_who_leave_in_order_end_nothing(tmp_path):
    """A process that connects without the password, and ranks that say bye: the monitor ends."""
    address, process = heartbeat.start_monitor("127.0.0.1", "n", 2, str(tmp_path), None)
    stranger = socket.create_connection(address[:2])
    stranger.sendall(b'{"hello": 0, "token": "guess"}\n{"failed": "x"}\n')
    ends = []
    dogs = [heartbeat.Watchdog(FlightRecorder(), address, r, "here", ends.append) for r in range(2)]
    wait_until(lambda: all(dog.clock_error < 60.0 for dog in dogs))  # all have been answered
    for dog in dogs:
        dog.close()
        dog.close()
    assert process.wait(10) == 0
    assert ends == []
    assert not (tmp_path / "hang").exists()


def test_who_ends_the_job_on_purpose_ends_the_others_unexamined(tmp_path):
    """As a second signal does: no report, and the same status everywhere."""
    address, process = heartbeat.start_monitor("127.0.0.1", "n", 2, str(tmp_path), None)
    ends = []
    dogs = [heartbeat.Watchdog(FlightRecorder(), address, r, "away", ends.append) for r in range(2)]
    wait_until(lambda: all(dog.clock_error < 60.0 for dog in dogs))
    dogs[1].end_job(143)
    wait_until(lambda: ends)
    faulthandler.cancel_dump_traceback_later()  # it would end this process
    for dog in dogs:
        dog.close()
    assert ends == [143]
    assert process.wait(15) == 0
    assert not (tmp_path / "hang").exists()


@pytest.mark.slow
def test_hundreds_of_ranks_are_heard_and_the_odd_one_is_named_in_time(tmp_path):
    """Nothing may grow with the square of the ranks: with limits and waits found for each rank
    alone, 512 took a quarter of a core, and 1,024 a whole one, and there was no report.
    """
    outcome = start([sys.executable, "tests/crowd_worker.py", str(tmp_path), "512"], timeout=120)
    assert outcome.status == 0, outcome.err[-2000:]
    result = json.loads(outcome.out)
    assert result["ended"]
    assert result["named"] == [result["culprit"]]
    assert result["files"] == 512
    assert result["cores"] < 0.15
    assert result["seconds"] < 20
    assert len(outcome.err.splitlines()) < 60
    again = start([sys.executable, "cluster.py", "explain", str(tmp_path)])
    assert again.out.strip() == (tmp_path / "hang/report.txt").read_text().strip()
    (tmp_path / "hang/case.json").unlink()  # as if it had not come to be written
    again = start([sys.executable, "cluster.py", "explain", str(tmp_path)])
    assert f"CULPRIT: rank {result['culprit']} (" in again.out


def test_process_states():
    own = os.getpid()
    assert heartbeat.process_state(own, heartbeat.start_of(own)) in ("running", "asleep")
    assert heartbeat.process_state(own, 1) == "gone"
    assert heartbeat.start_of(2**22 + 1) is None


# ------------------------------------------------------------------------------------------------
# Real faults
# ------------------------------------------------------------------------------------------------

# Every axis alone and with another, first ranks and others; each fault with several.
JOBS = [
    ("--tp 2", 2, "killed", 1),
    ("--pp 2", 2, "killed", 0),
    ("--tp 2", 2, "stopped", 0),
    ("--tp 2 --pp 2", 4, "stopped", 3),
    ("", 2, "data", 1),
    ("--tp 2 --pp 2", 4, "data", 1),
    ("--pp 2", 2, "loop", 1),
    ("--pp 2", 4, "gil", 2),
    ("", 2, "raise", 1),
    ("--tp 2", 4, "raise", 0),
    ("", 2, "evaluate", 0),
    ("", 2, "write", 1),
    ("--tp 2", 2, "suspended", None),
]


def plant(folder: Path, jobs: list[tuple]) -> list[tuple[Path, dict]]:
    """Run jobs one after the other; the folder and the result of each."""
    keys = ("layout", "ranks", "fault", "culprit")
    folder.mkdir()
    source = folder / "jobs.json"
    source.write_text(json.dumps([dict(zip(keys, job)) for job in jobs]))
    outcome = start([sys.executable, WORKER, str(folder), str(source)], timeout=60 * len(jobs))
    assert outcome.status == 0, outcome.err[-4000:]
    results = [json.loads(line) for line in outcome.out.splitlines()]
    return [(folder / f"job{number}", result) for number, result in enumerate(results)]


@pytest.mark.slow
def test_each_fault_ends_the_job_and_its_rank_is_named(tmp_path, capsys):
    halves = [(tmp_path / name, JOBS[at::2]) for at, name in enumerate("ab")]
    with ThreadPoolExecutor(2) as pool:  # they mostly wait
        results = [pair for half in pool.map(plant, *zip(*halves)) for pair in half]
    assert len(results) == len(JOBS)
    for folder, result in results:
        if result["fault"] == "suspended":  # a job that goes on is no hang
            assert result["named"] is None, result["output"]
            assert set(result["statuses"].values()) == {75}, result["output"]
            continue
        fault_worker.check(result)
        if result["fault"] == "raise":
            assert result["output"].count("Traceback") == 1
            continue
        assert f"CULPRIT: rank {result['culprit']} (" in result["output"]
        assert "who waits for whom:" in result["output"]
        context.run_command(["explain", str(folder)])
        again = capsys.readouterr().out
        assert f"CULPRIT: rank {result['culprit']} (" in again
        assert again.strip().splitlines()[1] in result["output"]
        told = json.loads((folder / f"hang/rank_{result['culprit']:05d}.json").read_text())
        if result["fault"] == "gil":
            assert "hold_the_lock" in told["raw"]
        if result["fault"] in ("data", "loop"):
            assert "fault_worker.py" in told["stacks"]["main"][0]
        if result["fault"] == "stopped":
            assert told["process"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "culprit", "seconds"), [("killed", 2, 12), ("stopped", 0, 30)])
def test_under_mpirun(tmp_path, fault, culprit, seconds):
    """MPICH's mpirun kills all ranks when one is dead: the report comes from what outlives them."""
    job, out = tmp_path / "job.json", tmp_path / "out"
    job.write_text(json.dumps({"layout": "--tp 2 --pp 2", "fault": fault, "culprit": culprit}))
    outcome = mpirun(4, WORKER, str(out), str(job), "rank", timeout=90)
    assert outcome.status != 0
    case = json.loads((out / "hang/case.json").read_text())
    assert case["culprits"] == [culprit]
    assert f"CULPRIT: rank {culprit} (tp " in outcome.err
    rows = (out / "metrics.jsonl").stat()
    assert time.time() - rows.st_mtime < seconds
    assert none_left(str(job)) == []
    again = start([sys.executable, "cluster.py", "explain", str(out)])
    assert f"CULPRIT: rank {culprit} (tp " in again.out


def test_explain_without_a_report(tmp_path):
    outcome = start([sys.executable, "cluster.py", "explain", str(tmp_path)])
    assert outcome.status == 2
    assert outcome.err.startswith(f"error: no report of a hang in {tmp_path}")
