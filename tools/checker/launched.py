"""Another program on the ranks of a launcher: `mpirun -n 4 python check.py --program FILE`.

    launched = meet_launched(launch, program, on_gpus=False)     on every rank of the launch
    status = launched.lead(judge)                                judge() is called on rank 0 alone

Programs keep their groups in globals, so that each run needs fresh processes. So every rank of the
launch is an agent: it forks its rank of each run, and outlives it. Rank 0 leads: a layout of fewer
ranks runs on the first agents. What ranks answer comes to rank 0 over connections with a key that
the agents alone have.
"""

import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from base.errors import UserError
from config.run_options import Run
from distributed.launch import Launch
from distributed.local_ranks import free_port
from distributed.rendezvous import Meeting as AgentMeeting
from distributed.rendezvous import meet
from distributed.store import SEALED_BY, StoreExchange, host_address
from tools.checker.program_runs import Meeting, ProgramWorker
from tools.checker.programs import Program
from tools.checker.ranks import FORK, Fork, Meet, Work

ERROR = 3  # the status of the other ranks if rank 0 ends by an error of this program


class Agent:
    """A rank of the launch other than 0: does what rank 0 says, until that says the status."""

    def __init__(self, launched: "Launched"):
        """Connect to rank 0."""
        self.launched = launched
        self.fork: Fork | None = None

    def serve(self) -> int:
        """Return the status of the check."""
        rank_0 = self.launched.connect()
        with tempfile.TemporaryDirectory(prefix="trine-check-") as folder:
            while True:
                try:
                    word, given = rank_0.recv()
                except (EOFError, OSError):  # rank 0 has died, and says why
                    word, given = "end", ERROR
                if word == "end":
                    self._kill()
                    return int(given)
                rank_0.send(self._do(word, given, folder))

    def _do(self, word: str, given: Any, folder: str) -> Any:
        """Do what rank 0 asks of this rank: begin or kill a fork, or call a method of it.

        word: which. given: for begin, the size, the port, and one rank's tensors and shapes.
        """
        launched = self.launched
        if word == "begin":
            size, port, reference, shapes = given
            work = ProgramWorker(launched.program, reference, shapes)
            pipe = launched.connect()
            self.fork = Fork(pipe, work, launched.meeting, launched.rank, size, port, folder)
            return None
        if word == "kill":
            return self._kill()
        assert self.fork is not None  # rank 0 asks after it has begun one
        return getattr(self.fork, word)()

    def _kill(self) -> None:
        """Kill the rank of the last run."""
        if self.fork is not None:
            self.fork.kill()
            self.fork.join()


class Far:
    """A rank that an agent has forked, with the methods of a Fork."""

    def __init__(self, agent: Connection):
        """Keep the connection to the agent."""
        self.agent = agent

    def _ask(self, word: str) -> Any:
        """Have the agent do something, and return its answer."""
        self.agent.send((word, None))
        return self.agent.recv()

    def write_stack(self) -> None:
        """See Fork."""
        self._ask("write_stack")

    def stack(self) -> list[str]:
        """See Fork."""
        found: list[str] = self._ask("stack")
        return found

    def status(self) -> int | None:
        """See Fork."""
        found: int | None = self._ask("status")
        return found

    def kill(self) -> None:
        """See Fork; returns when the rank has ended."""
        self._ask("kill")

    def join(self) -> None:
        """Return at once: `kill` has waited."""


class Launched:
    """The ranks of a launch, one of which is this process."""

    def __init__(self, of_agents: AgentMeeting, program: Program, on_gpus: bool):
        """Agree where rank 0 listens; collective over the launch."""
        self.of_agents = of_agents  # with the store, which others may read later than rank 0
        self.rank, self.size = of_agents.rank, of_agents.size
        self.launcher = of_agents.launch.launcher
        self.program = program
        nodes = tuple(place.node for place in of_agents.places)
        self.is_one_node = of_agents.local.one_node
        self.key = of_agents.monitor_key.encode()
        if not self.key:  # who connects is believed: what comes is unpickled
            raise UserError(
                f"{len(set(nodes))} nodes under torchrun have no secret in common: set {SEALED_BY} "
                f"to the same text on each of them"
            )
        self.listener: Listener | None = None
        here = None
        if self.rank == 0:
            host = host_address(of_agents.local)
            self.listener = Listener((host, 0), backlog=self.size, authkey=self.key)
            here = list(self.listener.address)
        exchange = StoreExchange(of_agents.store, self.rank, self.size, "check")
        host, port = exchange.agree(here, lambda values: values[0])
        self.address = host, port
        self.meeting = Meeting(on_gpus, nodes, host)
        self.agents: dict[int, Connection] = {}  # by rank; on rank 0 alone

    def connect(self) -> Connection:
        """Return a connection to rank 0, which knows whose it is; not on rank 0."""
        pipe = Client(self.address, authkey=self.key)
        pipe.send(self.rank)
        return pipe

    def lead(self, judge: Callable[[], int]) -> int:
        """On rank 0 check the program and return the status of judge(); on others the same."""
        if self.rank:
            return Agent(self).serve()
        self.agents = self._accept(self.size - 1)
        status = ERROR
        try:
            status = judge()
        except UserError as mistake:
            status = mistake.status
            raise
        finally:
            for agent in self.agents.values():
                agent.send(("end", status))
        return status

    def _accept(self, count: int) -> dict[int, Connection]:
        """Return so many connections of other ranks, by rank."""
        assert self.listener is not None  # rank 0 has one
        pipes = [self.listener.accept() for _ in range(count)]
        return {pipe.recv(): pipe for pipe in pipes}

    def start(
        self, size: int, work: Work, meet: Meet, folder: str
    ) -> tuple[list[Connection], list[Any]]:
        """Start a world on the first `size` ranks; return its pipes and ranks, as ranks.Start does.

        work: a ProgramWorker.
        """
        assert isinstance(work, ProgramWorker)  # what agents can make anew
        port = free_port(self.address[0])
        begin = pickle.dumps(("begin", (size, port, work.reference, work.shapes)))
        agents = [self.agents[rank] for rank in range(1, size)]
        for agent in agents:
            agent.send_bytes(begin)
        ours, theirs = FORK.Pipe()
        mine = Fork(theirs, work, meet, 0, size, port, folder)
        pipes = self._accept(size - 1) | {0: ours}
        for agent in agents:
            agent.recv()
        return [pipes[rank] for rank in range(size)], [mine, *map(Far, agents)]


def meet_launched(launch: Launch, program: Program, on_gpus: bool) -> Launched:
    """Let the ranks of a launch meet; collective over them. No process group is made."""
    run = Run(device="cpu", watchdog=False, bind_cores=False)  # the forks take GPUs, not the agents
    return Launched(meet(launch, run), program, on_gpus)
