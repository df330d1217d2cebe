"""If this failed, ranks would wait for ever, or the wrong one be named for it."""

import contextlib
import faulthandler
import json
import math
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random

import fault_worker
import pytest
from handmade_records import Ranks
from ranks import ROOT, Job, Outcome, mpi_command, mpirun, none_left, start

from config import schema as configuration
from config.schema import Layout
from telemetry.step_stats import StepStats
from telemetry.stragglers import StragglerCheck, medians_of_others
from watchdog import flight_recorder, heartbeat, monitor
from watchdog.flight_recorder import FlightRecorder

WORKER = "tests/fault_worker.py"
KEY = "ab" * 32  # a job's key
# ---- Slow ranks, options -------------------------------------------------------------------------


def speed_check(layout: Layout, nodes: list[str], every: int) -> StragglerCheck:
    model = configuration.ModelShape(layers=1, hidden=8, heads=1)
    run = configuration.Run(check_speed_every=every, slow_rank_percent=20.0)
    return StragglerCheck(configuration.Config(model, layout, run=run), nodes, print)


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


def test_steps_whose_waits_were_not_timed_are_not_compared():
    """On nccl waits are timed in measured steps alone: the others say nothing about a rank."""
    check = speed_check(Layout(dp=3), ["a", "b", "c"], 3)
    untimed = [StepStats(0, 0, 9.0, math.nan, 0) for _ in range(3)]
    timed = [StepStats(0, 0, 1.0, waiting, 0) for waiting in (0.5, 0.5, 0.1)]
    assert check.add(untimed) == check.add(timed) == []
    (line,) = check.add(untimed)
    assert "rank 2 (tp 0, pp 0, dp 2) on c computed 0.9000 s a step over 1 measured steps" in line
    assert "of the last 3, 80% longer" in line
    assert all(check.add(untimed) == [] for _ in range(4)), "it waits for a measured step"
    assert len(check.add(timed)) == 1


def test_the_median_of_the_others_is_that_of_each_without_itself():
    random = Random(0)
    for count in (2, 3, 4, 5, 10, 11):
        for values in (random.choices(range(4), k=count), [random.random() for _ in range(count)]):
            expected = [
                statistics.median(values[:place] + values[place + 1 :]) for place in range(count)
            ]
            assert medians_of_others(values) == expected
    assert medians_of_others([2.5]) == [2.5]


def test_thousands_of_ranks_are_compared_by_one_sort():
    """A median for each rank would sort all seconds for each of them: 2e8 comparisons."""
    comparisons = 0

    class Counted(float):
        def __lt__(self, other):
            nonlocal comparisons
            comparisons += 1
            return float(self) < float(other)

    random = Random(0)
    medians_of_others([Counted(random.random()) for _ in range(4000)])
    assert comparisons < 4000 * 12  # log2(4000) is 12


# ---- The monitor ---------------------------------------------------------------------------------


def wait_until(condition, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_rank_with_a_thousand_connections_hears_the_monitor(tmp_path):
    """Rank 0 has two of each rank to its store: the numbers of later files are above select's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"this process may open {hard} files")
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        address, process = heartbeat.start_monitor("127.0.0.1", "n", 1, str(tmp_path), 60.0, KEY)
        for _ in range(1030):
            files.enter_context(open(os.devnull))
        ends = []
        watchdog = heartbeat.Watchdog(FlightRecorder(), address, 0, "n", ends.append, process)
        files.callback(watchdog.end_monitor, 30.0)
        files.callback(watchdog.close)
        assert watchdog._socket.fileno() > 1023
        limit = time.monotonic() + 60
        while watchdog.clock_error == 3600.0 and watchdog._thread.is_alive():
            assert time.monotonic() < limit
            time.sleep(0.02)
        assert watchdog.clock_error < 3600.0
        assert watchdog._thread.is_alive()
    assert ends == []


def test_a_rank_that_ends_the_job_on_purpose_ends_the_others_without_a_report(tmp_path):
    """The end is the same as after a second signal: no report, the same status everywhere."""
    address, process = heartbeat.start_monitor("127.0.0.1", "n", 2, str(tmp_path), None, KEY)
    ends = []
    watchdogs = [
        heartbeat.Watchdog(FlightRecorder(), address, r, "away", ends.append) for r in range(2)
    ]
    wait_until(lambda: all(watchdog.clock_error < 60.0 for watchdog in watchdogs))
    watchdogs[1].end_job(143)
    wait_until(lambda: ends)
    faulthandler.cancel_dump_traceback_later()  # it would end this process
    for watchdog in watchdogs:
        watchdog.close()
    assert ends == [143]
    assert process.wait(15) == 0
    assert not (tmp_path / "hang").exists()


@pytest.mark.slow
def test_of_hundreds_of_ranks_the_culprit_is_named(tmp_path):
    outcome = start([sys.executable, "tests/crowd_worker.py", str(tmp_path), "512"], timeout=120)
    assert outcome.status == 0, outcome.err[-2000:]
    result = json.loads(outcome.out)
    assert result["ended"]
    assert result["named"] == [result["culprit"]]
    assert result["files"] == 512
    assert len(outcome.err.splitlines()) < 60
    (tmp_path / "hang/case.json").unlink()  # written last, and perhaps not at all
    report = (tmp_path / "hang/report.txt").read_text()
    assert report.strip() == outcome.err.strip()
    assert f"CULPRIT: rank {result['culprit']} (" in report


@pytest.mark.parametrize("path", ["", "{user}"], ids=["PYTHONSAFEPATH", "PYTHONPATH"])
def test_the_monitor_starts_from_any_folder_and_environment(tmp_path, path):
    """The user's folder has modules of the same names as ours, which the monitor must not take."""
    (tmp_path / "watchdog").mkdir()
    for name in ("watchdog/__init__.py", "watchdog/monitor.py", "config.py"):
        (tmp_path / name).write_text("raise ImportError('this is not ours')")
    code = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); "
        "from watchdog import heartbeat; from watchdog.flight_recorder import FlightRecorder; "
        f"os.chdir({str(tmp_path)!r}); "
        "address, process = heartbeat.start_monitor('127.0.0.1', 'n', 1, 'out', None, 'key'); "
        "heartbeat.Watchdog(FlightRecorder(), address, 0, 'n', os._exit).close(); "
        "sys.exit(process.wait(60))"
    )
    safe = "" if path else "1"
    environment = {"PYTHONPATH": path.format(user=tmp_path), "PYTHONSAFEPATH": safe}
    outcome = start([sys.executable, "-c", code], **environment)
    assert (outcome.status, outcome.err) == (0, "")


def calls_to_find_a_hang(size: int) -> int:
    """Function calls of the monitor's check of so many ranks, all but one in a collective."""
    ranks = Ranks(size)
    ranks.collective("world", tuple(range(size)), [n for n in range(size) if n != size // 3])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job = {"size": size, "node": "n", "out": "out", "limit": 3.0, "key": ""}
        watched = monitor.Monitor(listener, monitor.WatchedJob(**job))
    for number, recorder in enumerate(ranks.recorders):
        recorder.steps_done = 100
        rank = watched.ranks[number] = monitor.Rank(number, heard=1000.0, moved=900.0)
        rank.groups, rank.snapshot = recorder.groups(), recorder.snapshot(4)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        case = watched._find_hang(1000.0)
    finally:
        sys.setprofile(None)
    assert case.kind == "hang"
    return calls


def test_the_check_for_a_hang_grows_with_the_ranks_and_not_with_their_square():
    few, many = calls_to_find_a_hang(100), calls_to_find_a_hang(400)
    assert few > 100
    assert many < 5 * few


# ---- Real faults ---------------------------------------------------------------------------------

# Each fault; every axis alone and with another; rank 0 and other culprits.
JOBS = [
    ("--tp 2", 2, "killed", 1),
    ("--pp 2", 2, "killed", 0),
    ("--tp 2 --pp 2", 4, "stopped", 3),
    ("--zero 3", 2, "stopped", 1),
    ("--zero 3 --tp 2", 4, "loop", 2),
    ("", 2, "data", 1),
    ("--pp 2", 4, "gil", 2),
    ("", 2, "raise", 1),
    ("--tp 2", 4, "raise", 0),
    ("", 2, "evaluate", 0),
    ("", 2, "write", 1),
    ("--tp 2", 2, "suspended", None),
]
CULPRITS = {"killed": 1, "stopped": 0}  # ranks, out of two under mpirun


def run_jobs(folder: Path, jobs: list[tuple]) -> list[tuple[Path, dict]]:
    """Run jobs one after the other; the folder and the result of each."""
    keys = ("layout", "ranks", "fault", "culprit")
    folder.mkdir()
    source = folder / "jobs.json"
    source.write_text(json.dumps([dict(zip(keys, job)) for job in jobs]))
    outcome = start([sys.executable, WORKER, str(folder), str(source)], timeout=120 * len(jobs))
    assert outcome.status == 0, outcome.err[-4000:]
    results = [json.loads(line) for line in outcome.out.splitlines()]
    return [(folder / f"job{number}", result) for number, result in enumerate(results)]


def run_under_mpirun(folder: Path) -> dict[str, tuple[Path, Outcome]]:
    """A job for each fault, one after the other: its folder, and how mpirun ended."""
    found = {}
    for fault, culprit in CULPRITS.items():
        job, out = folder / f"{fault}.json", folder / fault
        job.write_text(json.dumps({"layout": "--tp 2", "fault": fault, "culprit": culprit}))
        found[fault] = (out, mpirun(2, WORKER, str(out), str(job), "rank", timeout=120))
    return found


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Iterator[list[Future]]:
    """Two halves of JOBS and the jobs under mpirun, at once: most of the time they wait."""
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(3) as pool:
        halves = [pool.submit(run_jobs, folder / name, JOBS[at::2]) for at, name in enumerate("ab")]
        yield [*halves, pool.submit(run_under_mpirun, folder)]


@pytest.mark.slow
def test_each_fault_ends_the_job_and_its_rank_is_named(faults):
    results = [pair for half in faults[:2] for pair in half.result()]
    assert len(results) == len(JOBS)
    for folder, result in results:
        if result["fault"] == "suspended":  # a job that goes on does not hang
            assert result["named"] is None, result["output"]
            assert set(result["statuses"].values()) == {75}, result["output"]
            continue
        fault_worker.check(result)
        if result["fault"] == "raise":
            assert result["output"].count("Traceback") == 1
            continue
        assert f"CULPRIT: rank {result['culprit']} (" in result["output"]
        assert "who waits for whom:" in result["output"]
        report = (folder / "hang/report.txt").read_text()
        assert f"CULPRIT: rank {result['culprit']} (" in report
        assert report.strip().splitlines()[1] in result["output"]
        culprit = json.loads((folder / f"hang/rank_{result['culprit']:05d}.json").read_text())
        if result["fault"] == "gil":
            assert "hold_the_lock" in culprit["raw"]
        if result["fault"] in ("data", "loop"):
            assert "fault_worker.py" in culprit["stacks"]["main"][0]
        if result["fault"] == "stopped":
            assert culprit["process"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "culprit"), CULPRITS.items())
def test_under_mpirun(faults, fault, culprit):
    """MPICH's mpirun kills all ranks when one dies: the monitor survives that and reports."""
    out, outcome = faults[2].result()[fault]
    assert outcome.status != 0
    case = json.loads((out / "hang/case.json").read_text())
    assert case["kind"] == {"killed": "dead", "stopped": "hang"}[fault]
    assert case["culprits"] == [culprit]
    assert f"CULPRIT: rank {culprit} (tp " in outcome.err
    assert none_left(f"{out}.json") == []
    assert f"CULPRIT: rank {culprit} (tp " in (out / "hang/report.txt").read_text()


class Moving(FlightRecorder):
    """A rank whose heartbeats are late: its progress shows only when it is asked for all records.

    As long as `goes_on`; `asked` counts how often it was asked.
    """

    goes_on, asked, hidden = True, 0, 0

    def snapshot(self, records: int) -> dict:
        if records == flight_recorder.RING:
            self.asked += 1
            self.hidden += self.goes_on
        return super().snapshot(records) | {"progress": self.hidden, "steps_done": 100}


@pytest.mark.slow
def test_ranks_that_have_gone_on_when_they_are_asked_do_not_hang(tmp_path):
    """A rank with little processor time: judged again after its answer. Later it does hang."""
    address, process = heartbeat.start_monitor("127.0.0.1", "n", 1, str(tmp_path), 1.0, KEY)
    recorder, ends = Moving(), []
    watchdog = heartbeat.Watchdog(recorder, address, 0, "away", ends.append)
    wait_until(lambda: recorder.asked >= 3)
    assert ends == []
    assert process.poll() is None
    assert not (tmp_path / "hang").exists()
    recorder.goes_on = False
    wait_until(lambda: ends)
    faulthandler.cancel_dump_traceback_later()  # it would end this process
    watchdog.close()
    assert process.wait(30) == 0
    assert json.loads((tmp_path / "hang/case.json").read_text())["culprits"] == [0]


def test_a_report_that_nobody_reads_is_written(tmp_path):
    """The print fails when the launcher has ended."""
    code = (
        "import os; from watchdog import heartbeat, monitor; "
        "from watchdog.flight_recorder import FlightRecorder; "
        f"address, process = heartbeat.start_monitor('127.0.0.1', 'n', 1, {str(tmp_path)!r}, 60.0, "
        "'key'); heartbeat.Watchdog(FlightRecorder(), address, 0, 'n', os._exit); print('there', "
        "flush=True); os.kill(os.getpid(), 9)"
    )
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=write, env=environment) as child:
        os.close(write)
        assert child.stdout.read() == b"there\n"
    wait_until((tmp_path / "hang/case.json").exists)
    assert (tmp_path / "hang/report.txt").read_text().count("DEAD: rank 0") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_when_mpirun_is_killed_a_report_is_left(tmp_path, number):
    words = f"train.py {fault_worker.SHAPE} --out {tmp_path} --log-every 1".split()
    command = [*mpi_command(2), sys.executable, *words]
    with Job(command, tmp_path, OMP_NUM_THREADS="1") as job:
        job.wait_for(lambda: len(job.rows) > 1)
        job.send(number)
        assert job.status() != 0
        wait_until((tmp_path / "hang/case.json").exists)
        report = (tmp_path / "hang/report.txt").read_text()
        assert "ended without a goodbye" in report
    assert none_left(str(tmp_path)) == []


# ---- A monitor that does not go on ---------------------------------------------------------------


def stopped_monitor(out: Path) -> tuple:
    """A watchdog of rank 0 whose monitor is stopped, and what it was told to end with."""
    address, process = heartbeat.start_monitor("127.0.0.1", "n", 1, str(out), None, KEY)
    ends = []
    watchdog = heartbeat.Watchdog(FlightRecorder(), address, 0, "n", ends.append, process)

    def end(status: int) -> None:
        """End the watchdog's thread in place of this process."""
        ends.append(status)
        watchdog._closing = True

    watchdog._end = end
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: heartbeat.process_state(process.pid) == "stopped")
    return watchdog, process, ends


@pytest.mark.parametrize("leave", ["close", "end_job"])
def test_a_stopped_monitor_is_not_left_behind(tmp_path, leave):
    watchdog, process, ends = stopped_monitor(tmp_path)
    watchdog.close() if leave == "close" else watchdog.end_job(1)
    assert process.wait(30) == -signal.SIGKILL
    watchdog.close()
    assert ends == []


def test_a_monitor_that_does_not_answer_or_end_is_killed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(heartbeat, "MAX_UNANSWERED", 1 + heartbeat.FEWER_BY_OWN)
    watchdog, process, ends = stopped_monitor(tmp_path)
    wait_until(lambda: ends)
    assert process.wait(30) == -signal.SIGKILL
    assert ends == [1]
    assert "no answer to 1 heartbeats" in capfd.readouterr().err
    faulthandler.cancel_dump_traceback_later()  # `close` would have
    watchdog, process, ends = stopped_monitor(tmp_path)
    watchdog.end_monitor(0.0)
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: ends)  # the thread has noticed it too


def test_a_monitor_that_ends_before_its_rank_does_not_change_the_status(tmp_path):
    """It ends as soon as the only rank says that it ends the job; the rank is still at work."""
    address, process = heartbeat.start_monitor("127.0.0.1", "n", 1, str(tmp_path), None, KEY)
    ends = []
    watchdog = heartbeat.Watchdog(FlightRecorder(), address, 0, "n", ends.append, process)
    wait_until(lambda: watchdog._dump_after != 60.0)  # the monitor has answered
    watchdog.end_job(130)
    assert process.wait(30) == 0
    watchdog._thread.join(30)
    assert ends == []


@pytest.mark.parametrize(("limit", "expected"), [(None, 120), (5.0, 120), (900.0, 900)])
def test_a_network_may_be_gone_for_two_minutes_or_the_hang_timeout(tmp_path, limit, expected):
    """The rank that started the monitor kills it before the other ranks end the job."""
    address, process = heartbeat.start_monitor("127.0.0.1", "n", 1, str(tmp_path), limit, KEY)
    recorder = FlightRecorder()
    watchdog = heartbeat.Watchdog(recorder, address, 0, "n", os._exit, process, limit=limit)
    assert watchdog._most_unanswered == expected - heartbeat.FEWER_BY_OWN
    watchdog.close()
    assert process.wait(30) == 0
