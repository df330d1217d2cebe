"""Records and reports of hangs: if this failed, the wrong rank would be named for a hang."""

import json
import math
from types import SimpleNamespace

import pytest
from handmade_records import DeviceEvent, Ranks, hang

from watchdog import flight_recorder, hang_report
from watchdog.flight_recorder import FlightRecorder
from watchdog.hang_report import WaitGraph

# ---- Records -------------------------------------------------------------------------------------


class Work:
    """A handle that counts its waits, each of which takes `seconds` of a clock set by hand."""

    now = 100.0

    def __init__(self, seconds=0.0):
        self.seconds, self.waits = seconds, 0

    def wait(self):
        Work.now += self.seconds
        self.waits += 1


def test_a_wait_is_recorded_while_it_lasts_and_its_time_is_kept(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: Work.now)
    monkeypatch.setattr(flight_recorder, "time", clock)
    recorder = FlightRecorder()
    recorder.begin_step(7)
    recorder.at("F", 3)
    work = Work(5.0)
    operation = recorder.group_log("tp", (4, 5)).enter("all_reduce", 64).under_way(work)
    assert recorder.snapshot(1)["wait"] is None
    recorder.waiting = operation
    wait = recorder.snapshot(1)["wait"]
    assert (wait["role"], wait["ranks"], wait["number"]) == ("tp", (4, 5), 1)
    assert wait["place"] == ("train", 7, "F", 3)
    operation.wait()
    operation.wait()
    assert work.waits == 1
    assert recorder.take_waited() == 5.0
    assert recorder.take_waited() == 0.0
    assert recorder.snapshot(1)["wait"] is None
    last = recorder.snapshot(1)["last"][0]
    assert (last["seconds"], last["waiting"], last["ended"]) == (5.0, 5.0, 0.0)


class Event:
    """A CUDA event of a device that has passed the first `Event.passed` events."""

    passed, clock, made, queries = 0, 0, 0, 0

    def __init__(self):
        Event.made += 1

    def record(self):
        Event.clock += 1
        self.at = Event.clock

    def query(self):
        Event.queries += 1
        return self.at <= Event.passed

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def stamp() -> Event:
    """An event that is recorded now, as a measured step takes it."""
    event = Event()
    event.record()
    return event


@pytest.fixture
def no_events(monkeypatch):
    """The class Event, of which nothing is recorded yet."""
    for name in ("passed", "clock", "made", "queries"):
        monkeypatch.setattr(Event, name, 0)


def wait_for_some(recorder: FlightRecorder, count: int) -> list[flight_recorder.Operation]:
    """Operations that the rank has started, and for which its stream waits."""
    group_log = recorder.group_log("tp", (0, 1))
    operations = [group_log.enter("all_reduce", 4) for _ in range(count)]
    for operation in operations:
        operation.under_way(Work()).wait()
    return operations


def test_waits_of_a_stream_are_seen_by_events(monkeypatch, no_events):
    """On nccl the host goes on: the device waits for the first operation it has not passed."""
    monkeypatch.setattr(flight_recorder, "SECONDS_TO_ASK", 0.0)
    recorder = FlightRecorder(Event)
    operations = wait_for_some(recorder, 3)
    Event.passed = 3 + 1  # behind the three that were recorded before the operations
    assert recorder.stream.not_passed() is operations[1]
    with recorder.waiting_for("device"):
        assert recorder.snapshot(0)["wait"]["number"] == 2
    assert recorder.snapshot(0)["wait"]["number"] == 2  # also when the host does not wait
    with recorder.waiting_for("writer"):
        assert recorder.snapshot(0)["wait"]["kind"] == "writer"
    Event.passed = 6
    assert recorder.stream.not_passed() is recorder.snapshot(0)["wait"] is None


def test_waits_of_a_stream_are_timed_in_measured_steps_alone(monkeypatch, no_events):
    """A timing event before and after each wait; in other steps two events, and no query."""
    monkeypatch.setattr(flight_recorder, "DEVICE_WAITS", 5)
    recorder = FlightRecorder(Event)
    recorder.begin_step(1)
    wait_for_some(recorder, 20)
    assert (Event.clock, Event.made, Event.queries) == (40, 10, 0)
    assert math.isnan(recorder.take_waited())
    recorder.keep_spans(stamp)
    wait_for_some(recorder, 2)  # between the steps
    recorder.begin_step(2)
    recorded = Event.clock
    wait_for_some(recorder, 3)
    assert Event.clock == recorded + 12
    assert recorder.take_waited() == 3 * 2.0  # this clock counts events
    assert recorder.take_waited() == 0.0
    Event.passed = Event.clock - 3  # not the last wait's
    assert recorder.stream.not_passed().number == 25, "also where events are used again"


def test_a_device_with_an_error_leaves_the_heartbeats(monkeypatch, no_events):
    """The main thread reports it through the watchdog's, which must go on until then."""
    monkeypatch.setattr(flight_recorder, "SECONDS_TO_ASK", 0.0)
    recorder = FlightRecorder(Event)
    wait_for_some(recorder, 1)
    assert recorder.snapshot(0)["before"]["number"] == 1
    Event.passed = 1
    assert recorder.snapshot(0)["device"]["number"] == 1

    def failed(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Event, "query", failed)
    assert recorder.snapshot(0)["device"] is recorder.snapshot(0)["before"] is None


def test_the_driver_is_asked_only_when_progress_stands(monkeypatch, no_events):
    """It may wait for a lock of the driver, and the rank would look silent to the monitor."""
    clock = SimpleNamespace(monotonic=lambda: Work.now)
    monkeypatch.setattr(flight_recorder, "time", clock)
    recorder = FlightRecorder(Event)
    wait_for_some(recorder, 4)
    asked = []
    monkeypatch.setattr(Event, "query", lambda self: asked.append(self) or False)
    assert recorder.snapshot(0)["device"] is None
    Work.now += flight_recorder.SECONDS_TO_ASK - 0.1
    assert recorder.snapshot(0)["device"] is None
    assert asked == []
    Work.now += 0.2
    assert recorder.snapshot(0)["device"]["number"] == 1
    assert len(asked) == 2  # for the waits, and for the operations that it has not come to


# ---- The wait graph ------------------------------------------------------------------------------


def test_waits_are_followed_over_axes():
    """0 waits in tp for 1, 1 in the pipeline for 5, 5 in dp for 7, which does not wait."""
    ranks = Ranks()
    ranks.collective("tp", (0, 1), [0])
    group_log = ranks.recorders[1].group_log("forward", (1, 5))
    ranks.wait(1, group_log.enter_receive(4, 1))
    ranks.recorders[5].group_log("forward", (1, 5))
    ranks.collective("dp", (5, 7), [5])
    ranks.collective("world", tuple(range(8)), [2, 3, 4, 6])
    assert ranks.culprits() == [7]
    values = ranks.to_dict()
    assert [WaitGraph(values).blockers(rank) for rank in (0, 1)] == [[1], [5]]
    report = hang_report.format_report(hang(culprits=[7]), values, "out")
    assert "never entered all_reduce 2 of dp (ranks 5, 7), 4 bytes, in which rank 5 waits" in report
    assert "  0 in all_reduce 2 of tp (ranks 0-1), 4 bytes: for 1" in report


@pytest.mark.parametrize("kind", ["send", "receive"])
def test_messages_count_by_pair(kind):
    """A neighbour that has entered the other half of a message does not block it."""
    ranks = Ranks()
    ours, theirs = (r.group_log("forward", (0, 1)) for r in ranks.recorders[:2])
    for _ in range(3):
        ours.enter_send(4, 1)
        theirs.enter_receive(4, 0)
        ours.enter_receive(4, 1)
        theirs.enter_send(4, 0)
    ranks.wait(0, ours.enter_send(4, 1) if kind == "send" else ours.enter_receive(4, 1))
    assert WaitGraph(ranks.to_dict()).blockers(0) == [1]
    theirs.enter_receive(4, 0) if kind == "send" else theirs.enter_send(4, 0)
    assert WaitGraph(ranks.to_dict()).blockers(0) == []


def test_a_gpu_that_stands_still_before_an_operation_is_named(monkeypatch):
    """The hosts of four ranks have run ahead to the ninth all-reduce."""
    monkeypatch.setattr(flight_recorder, "SECONDS_TO_ASK", -1.0)
    ranks = Ranks(4, DeviceEvent)
    for recorder in ranks.recorders:
        log = recorder.group_log("dp", (0, 1, 2, 3))
        for _ in range(9):
            log.enter("all_reduce", 4).under_way(Work()).wait()
    for rank in (0, 1, 3):  # before each operation one event, and one behind the wait
        ranks.passes(rank, 4 * 2 + 1)
    ranks.passes(2, 4 * 2)
    assert ranks.culprits(size=4) == [2]
    values = ranks.to_dict()
    assert [WaitGraph(values).blockers(rank) for rank in range(4)] == [[2], [2], [], [2]]
    report = hang_report.format_report(hang(culprits=[2], size=4), values, "out")
    assert "never entered all_reduce 5 of dp (ranks 0-3), 4 bytes, in which rank 0 waits" in report
    assert "its GPU stands before all_reduce 5 of dp (ranks 0-3), 4 bytes, which its host" in report
    # If all four have come to it, the network is the cause, or a device in the operation.
    ranks.passes(2, 4 * 2 + 1)
    assert ranks.culprits(size=4) == []
    assert "NO CULPRIT AMONG" in hang_report.format_report(hang(size=4), ranks.to_dict(), "out")


def test_a_gpu_that_stands_still_before_a_message_is_named(monkeypatch):
    """The host of rank 0 has sent, and its GPU has not come to the send."""
    monkeypatch.setattr(flight_recorder, "SECONDS_TO_ASK", -1.0)
    ranks = Ranks(2, DeviceEvent)
    sender, receiver = (r.group_log("forward", (0, 1)) for r in ranks.recorders)
    for _ in range(3):
        sender.enter_send(4, 1).under_way(Work())
        receiver.enter_receive(4, 0).under_way(Work()).wait()
    ranks.passes(0, 2)
    ranks.passes(1, 5)  # it has come to the third receive, and waits in it
    assert ranks.culprits(size=2) == [0]
    assert ranks.to_dict()[0]["snapshot"]["counts"] == [[0, {"1": 2}, {}]]


def test_a_silent_rank_is_named_even_if_it_had_entered():
    ranks = Ranks()
    ranks.collective("world", tuple(range(8)), range(8))
    assert ranks.culprits() == []
    report = hang_report.format_report(hang(), ranks.to_dict(), "out")
    assert "NO CULPRIT AMONG THE RANKS" in report
    ranks.states[3] = "silent"
    assert ranks.culprits() == [3]


def test_a_rank_that_makes_progress_is_no_culprit():
    ranks = Ranks()
    ranks.collective("world", tuple(range(8)), [0, 1, 2, 3, 4])
    ranks.still |= {5: 1.0, 6: 90.0, 7: 99.0}
    assert ranks.culprits() == [7, 6]


def test_a_cycle_and_different_operations_are_reported():
    ranks = Ranks()
    ranks.collective("tp", (0, 1), [0])
    ranks.collective("dp", (0, 1), [1])
    for rank in range(2, 8):
        ranks.states[rank] = "left"
        ranks.still[rank] = 0.0
    assert ranks.culprits() == []
    report = hang_report.format_report(hang(), ranks.to_dict(), "out")
    assert "wait for one another in a cycle" in report
    ranks = Ranks()
    ranks.collective("tp", (0, 1), [0])
    ranks.collective("tp", (0, 1), [1], kind="all_gather")
    ranks.recorders[0].group_log("tp", (0, 1)).entered = 3
    ranks.recorders[0].waiting.number = 3
    ranks.recorders[1].waiting.number = 3
    report = hang_report.format_report(hang(), ranks.to_dict(), "out")
    waits = report.partition("who waits for whom:")[2].partition("where the ranks")[0]
    assert "  0 in all_reduce 3 of tp (ranks 0-1)" in waits
    assert "  1 in all_gather 3 of tp (ranks 0-1)" in waits


# ---- Files of several reports --------------------------------------------------------------------


def test_a_later_report_keeps_the_earlier_one(tmp_path):
    ranks = Ranks()
    ranks.collective("world", tuple(range(8)), [0, 1, 2, 3, 4, 6, 7])
    case = hang(culprits=[5]).to_dict()
    for number in range(3):
        hang_report.write_files(str(tmp_path / "hang"), case, ranks.to_dict(), f"report {number}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hang", "hang.1", "hang.2"]
    assert (tmp_path / "hang.2/report.txt").read_text() == "report 1\n"
    assert json.loads((tmp_path / "hang/case.json").read_text())["culprits"] == [5]
    rank = json.loads((tmp_path / "hang/rank_00005.json").read_text())
    assert rank["snapshot"]["counts"] == [[1, {}, {}]]
