"""Other users of the machine and the network can do nothing to a job."""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist
from ranks import Job, fork_ranks, free_port, mpi_command
from strangers import HOST, Strangers

from base.errors import UserError
from distributed import store as job_store
from distributed.early_end import node_name
from watchdog import handshake, heartbeat, monitor
from watchdog.flight_recorder import FlightRecorder
from watchdog.handshake import Process

KEY = "ab" * 32
SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8"
WORDS = f"{SHAPE} --device cpu --lr-schedule constant --steps 30".split()
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run(out: Path, ranks: int, *words: str) -> Job:
    command = [*mpi_command(ranks), sys.executable, "tests/strangers_worker.py", str(out)]
    return Job([*command, *WORDS, *words, "--out", str(out)], out, **ONE_THREAD)


def listening(job: Job, monitor: bool) -> list[int]:
    """Loopback ports of rank 0 or of its monitor, the oldest first."""
    for process in psutil.Process(job.process.pid).children(recursive=True):
        if "python" in process.name() and monitor == ("-c" in process.cmdline()):
            found = sorted(process.net_connections("tcp"), key=lambda c: c.fd)
            return [c.laddr.port for c in found if c.status == "LISTEN" and c.laddr.ip == HOST]
    raise AssertionError(job.text[-4000:])


def go(job: Job, place: str) -> None:
    (job.out / f"{place}.go").touch()


def wait_at(job: Job, place: str) -> None:
    job.wait_for((job.out / f"{place}.waits").exists)


@pytest.mark.slow
def test_strangers_change_nothing(tmp_path):
    """36 before the ranks have found the monitor, 36 while they train: all kinds, at both ports."""
    alone = tmp_path / "alone"
    alone.mkdir()
    for place in ("store", "monitor", "step"):
        (alone / f"{place}.go").touch()
    words = ("tests/strangers_worker.py", str(alone), *WORDS, "--tp", "2", "--out", str(alone))
    done = fork_ranks(2, *words)
    assert done.status == 0, done.err[-4000:]

    with run(tmp_path / "visited", 2, "--tp", "2") as job:
        wait_at(job, "store")
        wait_at(job, "open")
        store = listening(job, monitor=False)[-1]  # MPI may listen too
        go(job, "store")

        wait_at(job, "monitor")
        (monitor,) = listening(job, monitor=True)
        meanwhile = Strangers([store, monitor], 36)
        meanwhile.wait()
        go(job, "monitor")

        wait_at(job, "step")
        assert listening(job, monitor=True) == []
        during = Strangers([store, monitor], 36)
        during.wait()
        assert meanwhile.made + during.made == 72
        assert (meanwhile.clients, during.clients, during.socks) == ([], [], [])
        go(job, "step")
        assert job.status() == 0, job.text[-4000:]
        for strangers in (meanwhile, during):
            strangers.close()
    straight = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    losses = [[row["loss"] for row in rows] for rows in (straight, job.rows)]
    assert len(losses[0]) == 30
    assert losses[0] == losses[1]
    assert not (job.out / "hang").exists()


# ---- The store -----------------------------------------------------------------------------------


def meet(server: job_store.Server, invitation: job_store.Invitation | None = None):
    """The stores of two ranks, both in this process."""
    invitation = invitation or server.invitation
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(job_store.meet, invitation, 0, 2, server)
        second = pool.submit(job_store.meet, invitation, 1, 2)
        return [first.result(120), second.result(120)]


def stranger_in(server: job_store.Server) -> dist.TCPStore:
    return dist.TCPStore(HOST, server.address.port, wait_for_workers=False)


# Whether the ranks have the secret before they meet, or (torchrun between nodes) its fingerprint.
@pytest.mark.parametrize("knows", [True, False])
def test_a_closed_store_is_the_ranks_alone(knows):
    server = job_store.Server(HOST, 2)
    planted = "a" * 64
    stranger = stranger_in(server)
    stranger.set("values/value", "from a stranger")
    stranger.set(job_store.SECRET, planted)
    stranger.set(f"{planted}/values/value", "from a stranger")
    stranger.add("met", -5)
    del stranger
    invitation = server.invitation if knows else replace(server.invitation, secret="")
    opened = meet(server, invitation)
    assert opened[0].secret == opened[1].secret == server.secret
    assert not opened[0].part("values").check(["value"])
    opened[0].part("values").set("value", "1")
    assert opened[1].part("values", second=True).get("value") == b"1"
    before = psutil.Process().cpu_times()
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, server.address.port), 5.0)
    time.sleep(0.5)
    after = psutil.Process().cpu_times()
    assert after.system - before.system < 0.3  # the server's thread does not spin
    with pytest.raises(UserError, match=r"cannot reach the store of this job at 127\.0\.0\.1"):
        job_store.meet(server.invitation, 1, 2)


def test_a_stranger_in_the_store_ends_the_start(monkeypatch):
    monkeypatch.setattr(job_store, "SECONDS_TO_CLOSE", 0.2)
    server = job_store.Server(HOST, 1)
    stranger = stranger_in(server)
    with pytest.raises(UserError, match="has 3 connections, and its ranks have 2: another program"):
        job_store.meet(server.invitation, 0, 1, server)
    assert stranger.compare_set(job_store.SECRET, "", "") == b""
    assert server.secret not in str([stranger.get(key) for key in stranger.list_keys()])


def test_a_stranger_does_not_take_the_place_of_a_late_rank():
    """Who knows no secret cannot announce a rank, with as many connections as a rank has."""
    server = job_store.Server(HOST, 2)
    strangers = [stranger_in(server) for _ in range(job_store.CONNECTIONS)]
    replayed = replace(server.invitation, secret="")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(job_store.meet, server.invitation, 0, 2, server)
        for stranger in strangers:
            stranger.add("met", 5)
            stranger.set(replayed.announcement(1), "")
        time.sleep(10 * job_store.SECONDS_BETWEEN_LOOKS)
        for key in strangers[0].list_keys():  # rank 0's announcement too: it comes again
            strangers[0].delete_key(key)
        time.sleep(10 * job_store.SECONDS_BETWEEN_LOOKS)
        assert strangers[0].compare_set(job_store.SECRET, "", "") == b""
        assert not first.done()
        del stranger
        strangers.clear()
        second = pool.submit(job_store.meet, server.invitation, 1, 2)
        assert first.result(120).secret == second.result(120).secret == server.secret


def test_under_torchrun_a_file_of_this_user_has_the_invitation(tmp_path):
    """torchrun's store takes values of everybody: it only names the file."""
    host = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    invitation = job_store.Server(HOST, 2).invitation
    channels = [job_store.TorchrunChannel(host, one_node=True) for _ in range(2)]
    assert channels[0].share(invitation) == invitation
    assert channels[1].receive() == invitation
    named = host.get(job_store.KEY)
    assert invitation.secret.encode() not in named
    for channel in channels:
        channel.check()
    with pytest.raises(UserError, match="has an address of this job's store already"):
        job_store.TorchrunChannel(host, one_node=True).share(invitation)
    readable = (tmp_path / "readable").open("w+")
    readable.write(invitation.to_json())
    readable.flush()
    piped = os.pipe()
    planted = [b"", b"[1]", b"{}", b"[" * 5000, b'["a", "b"]', invitation.to_json().encode()]
    planted += [json.dumps([os.getpid(), number]) for number in (readable.fileno(), *piped, 9999)]
    for text in planted:
        host.set(job_store.KEY, text)
        with pytest.raises(UserError, match="another program has put it there"):
            channels[1].receive()
        with pytest.raises(UserError, match="another program connects to MASTER_PORT"):
            channels[0].check()
    host.delete_key(job_store.KEY)
    with pytest.raises(UserError, match="another program connects to MASTER_PORT"):
        channels[0].check()


def test_between_nodes_torchruns_store_has_no_secret():
    host = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    invitation = job_store.Server(HOST, 2).invitation
    shared = job_store.TorchrunChannel(host, one_node=False).share(invitation)
    assert job_store.TorchrunChannel(host, one_node=False).receive() == shared
    assert shared == replace(invitation, secret="")
    assert invitation.secret.encode() not in host.get(job_store.KEY)


def test_between_nodes_a_password_of_the_user_hides_the_secret_and_the_address():
    """Then ranks know the secret before they meet, and nobody can send them elsewhere."""
    host = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    server = job_store.Server(HOST, 2)
    of = partial(job_store.TorchrunChannel, host, False)
    invitation = of("mine").share(server.invitation)
    assert of("mine").receive() == invitation == server.invitation
    text = host.get(job_store.KEY)
    assert server.secret.encode() not in text
    for password, sentence in (("", "not on here: export"), ("other", "rank 0 has another")):
        with pytest.raises(UserError, match=sentence.replace("here", node_name())):
            of(password).receive()
    values = json.loads(text)
    elsewhere = ["127.0.0.2", *values[1:]], [HOST, values[1] + 1, *values[2:]]
    forged = [HOST, values[1], job_store.fingerprint_of("a" * 64), "a" * 64]
    for planted in (*elsewhere, forged, [*values[:3], "short"], [*values[:3], "x" * 64]):
        host.set(job_store.KEY, json.dumps(planted))
        with pytest.raises(UserError, match="or another program has put the address there"):
            of("mine").receive()
    host.set(job_store.KEY, json.dumps([*values[:3], ""]))
    with pytest.raises(UserError, match="and not on rank 0's node: export it on all nodes"):
        of("mine").receive()
    assert len({store.secret for store in meet(server, invitation)}) == 1


@pytest.mark.slow
def test_torchruns_store_has_no_secret(tmp_path):
    """It takes connections of all programs."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port, out = free_port(), tmp_path / "run"
    command = [*torchrun, f"--master-port={port}", "tests/strangers_worker.py", str(out)]
    with Job([*command, *WORDS, "--out", str(out)], out, **ONE_THREAD) as job:
        wait_at(job, "store")
        for place in ("store", "monitor"):
            go(job, place)
        wait_at(job, "step")
        client = dist.TCPStore("localhost", port, wait_for_workers=False)
        (key,) = (key for key in client.list_keys() if key.endswith(job_store.KEY))
        process, _ = json.loads(client.get(key))  # and the number of its open file
        assert psutil.Process(process).uids().real == os.getuid()
        go(job, "step")
        assert job.status() == 0, job.text[-4000:]
        assert len(job.rows) == 30


# ---- The monitor ---------------------------------------------------------------------------------


def process_of(rank: int, pid: int | None = None) -> Process:
    pid = pid or os.getpid()
    return Process(rank, "here", pid, heartbeat.start_time(pid))


def hello(key: str = KEY, rank: int = 0, kind: str = "rank") -> bytes:
    return f"{key} {kind} {rank} here 1 1".encode().ljust(handshake.HELLO_BYTES)


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side ends a connection, perhaps after it has sent something."""
    sock.settimeout(30.0)
    with contextlib.suppress(ConnectionResetError):  # it has not read all that was sent: ended too
        while sock.recv(4096):
            pass
    return True


def test_strangers_cannot_end_a_job_or_kill_a_process(tmp_path):
    """One monitor; what was sent to it by hand in the attack."""
    sleeper = subprocess.Popen(["sleep", "600"])
    address, process = heartbeat.start_monitor(HOST, "here", 1, str(tmp_path), 60.0, KEY)
    started = heartbeat.start_time(sleeper.pid)
    json_of_old = {"rank": 0, "password": KEY, "pid": sleeper.pid, "started": started}
    said = [b"[" * 100_000, json.dumps(json_of_old).encode().ljust(handshake.HELLO_BYTES)]
    said += [hello("guess"), hello("0" * 64), hello(rank=1), hello(kind="other")]
    for line in said:
        sock = socket.create_connection(address[:2])
        sock.sendall(line)
        assert is_closed(sock)
    ends: list[int] = []
    watchdog = heartbeat.Watchdog(FlightRecorder(), address, 0, "here", ends.append)
    while watchdog.clock_error > 3000.0:  # the monitor has not answered yet
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):  # all ranks are there
        socket.create_connection(address[:2])
    watchdog.close()
    assert process.wait(30) == 0
    assert ends == []
    assert sleeper.poll() is None
    heartbeat.kill_process(sleeper.pid, started + 1)  # a process of that number, but another
    assert sleeper.poll() is None
    heartbeat.kill_process(sleeper.pid, started)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not (tmp_path / "hang").exists()


def test_a_process_of_another_user_is_not_killed(monkeypatch):
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        started = heartbeat.start_time(sleeper.pid)
        monkeypatch.setattr(os, "getuid", lambda: os.stat("/proc/self").st_uid + 1)
        heartbeat.kill_process(sleeper.pid, started)
        assert sleeper.poll() is None
        monkeypatch.undo()
        heartbeat.kill_process(sleeper.pid, started)


def test_a_rank_kills_ranks_of_its_job_alone(capfd):
    """Whatever the monitor says: one that a stranger runs knows the secret here."""
    with socket.create_server((HOST, 0)) as monitors:
        address = (*monitors.getsockname(), KEY)
        connects = f"import socket; s = socket.create_connection({address[:2]}); input()"
        command = [sys.executable, "-c", connects]
        rank = subprocess.Popen(command, stdin=subprocess.PIPE)
        accepted = [monitors.accept()]
        other = subprocess.Popen(command, stdin=subprocess.PIPE)
        accepted.append(monitors.accept())
        sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
        all_of_them = [rank, other, *sleepers]
        kill = [(process.pid, heartbeat.start_time(process.pid)) for process in all_of_them]
        ended: list[int] = []
        watchdog = heartbeat.Watchdog(
            FlightRecorder(), address, 0, "here", ended.append, ranks_here=[kill[0], kill[2]]
        )
        accepted.append(monitors.accept())
        connection, _ = monitors.accept()
        connection.sendall(heartbeat.encode({"end": 1, "kill": kill}))
        assert rank.wait(30) == -signal.SIGKILL
        while not ended:
            time.sleep(0.01)
        watchdog.close()
        alive = [process.poll() is None for process in all_of_them]
        assert alive == [False, True, True, True]
        said = capfd.readouterr().err
        assert said.count("which is no rank of this job: it is left alone") == 2
        for process in all_of_them[1:]:
            process.kill()
            process.wait()


def test_the_monitor_kills_only_a_process_that_is_connected_to_it(tmp_path):
    """A hello with the secret may name any process."""
    sleeper = subprocess.Popen(["sleep", "600"])
    address, process = heartbeat.start_monitor(HOST, "here", 1, str(tmp_path), 60.0, KEY)
    named = Process(0, "here", sleeper.pid, heartbeat.start_time(sleeper.pid))
    for kind in ("stacks", "rank"):
        handshake.connect(address, kind, named).close()
    assert process.wait(60) == 0
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


class Door:
    """An Entrance for one rank, read as the monitor does."""

    def __init__(self):
        self.poll = select.epoll()
        self.listener = socket.create_server((HOST, 0))
        self.address = (*self.listener.getsockname(), KEY)
        self.entrance = handshake.Entrance(self.listener, 1, KEY, self.poll)
        self.found = []

    def serve(self, events: int) -> None:
        """Handle so many events."""
        while events > 0:
            for number, _ in self.poll.poll(30.0, 1):
                events -= 1
                if number in self.entrance.newcomers:
                    self.found += [self.entrance.read(number)]
                else:
                    self.entrance.accept()


def test_strangers_say_little_and_not_for_long():
    door = Door()
    entrance = door.entrance
    socks = []
    for _ in range(20):
        socks.append(socket.create_connection(door.address[:2]))
        door.serve(1)
    socks[-1].sendall(b"x" * (handshake.HELLO_BYTES - 1))
    assert door.poll.poll(0.2) == []  # not even that is read
    socks[-1].sendall(b"x" * 100_000)
    door.serve(1)
    assert is_closed(socks[-1])
    socks[-2].close()
    door.serve(1)
    assert len(entrance.newcomers) == 18
    entrance.close_late(time.monotonic())
    assert len(entrance.newcomers) == 18
    entrance.close_late(time.monotonic() + handshake.MAX_SECONDS)
    assert entrance.newcomers == {}
    assert door.found == [None] * 2


def test_without_descriptors_the_oldest_gives_way_and_nothing_spins(monkeypatch):
    door, pauses = Door(), []
    sock = socket.create_connection(door.address[:2])
    door.serve(1)
    refusing = SimpleNamespace(accept=lambda: (_ for _ in ()).throw(OSError(errno.EMFILE, "")))
    door.entrance.listener = refusing
    monkeypatch.setattr(handshake, "time", SimpleNamespace(sleep=pauses.append))
    door.entrance.accept()
    door.entrance.accept()
    assert is_closed(sock)
    assert pauses == [handshake.FULL_SECONDS] * 2


def test_a_rank_that_sends_what_is_no_message_is_dead(tmp_path):
    """The monitor goes on and reports it, as if the rank's process had ended."""
    address, process = heartbeat.start_monitor(HOST, "away", 2, str(tmp_path), 60.0, KEY)
    sockets = [
        handshake.connect(address, kind, process_of(rank))
        for rank in range(2)
        for kind in ("stacks", "rank")
    ]
    sockets[3].sendall(b"[" * 100_000 + b"\n")
    assert is_closed(sockets[3])
    sockets[1].settimeout(30.0)
    assert b"inspect" in sockets[1].recv(1 << 16)
    for sock in sockets[:2]:
        sock.close()
    assert process.wait(60) == 0
    case = json.loads((tmp_path / "hang/case.json").read_text())
    assert (case["kind"], case["culprits"]) == ("dead", [1])
    assert (
        "it sent what is no message: RecursionError" in (tmp_path / "hang/report.txt").read_text()
    )


@pytest.mark.parametrize(
    "line",
    [b"{", b"[1]", b'"beat"', b'{"new": 1}', b'{"beat": 1, "memory": {}, "sent": 0}', b"\xff\xfe"],
    ids=["cut", "list", "text", "unknown", "number", "bytes"],
)
def test_what_is_no_message_ends_the_connection(monkeypatch, line):
    monkeypatch.setattr(monitor, "MAX_LINE", 1000)
    for sent in (line + b"\n", b"x" * 2000):
        door = Door()
        job = {"size": 1, "node": "n", "out": "out", "limit": 3.0, "key": KEY}
        watched = monitor.Monitor(door.listener, monitor.WatchedJob(**job))
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        watched.poll.register(theirs.fileno(), select.EPOLLIN)
        watched._admit(theirs, "rank", process_of(0))
        ours.sendall(sent)
        watched._receive()
        assert is_closed(ours)
        assert watched.dead == [0]
        assert "no message" in watched.ranks[0].error
