"""A cluster's first day: `check.py --cluster` under srun or mpirun, and the page that it writes.

    srun --mpi=pmi2 python check.py --cluster --gpu h100 --line-rate 400 --out runs/card

Every rank of the launch is an agent, which starts the ranks of each part as processes of its own
and outlives them: a part may hang, fail or be killed, and the page is written. Parts, in order:

    network    bandwidth within and between nodes, beside the line rate (cluster_worker.py)
    layouts    twelve layouts of a small model against one rank, in fp64 (cluster_worker.py)
    straight   a small run to its end, to compare the next two with
    killed     the same run, of which a rank is killed when it has saved: who is named?
    resumed    the rest of it, in another layout
    known      the first of recipes/, on a corpus that is made here: is it the known run?
    model      tokens/s, MFU and memory of a model that others know, beside the planner's

The agents meet as ranks of train.py do, and then use no collective: they agree through the store.
DIR/card.md is a page that can be put into an issue, DIR/card.json the same for programs. It is
written anew after every part.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from base import errors
from base.cli import Parser
from base.errors import ClusterError, UserError, exit_with
from base.paths import check_folder
from config import command_line, validation
from config.run_options import Run
from distributed.launch import Launch, discover
from distributed.local_ranks import RankPlace, environment_of_rank, free_port
from distributed.stop_conditions import STOPPED_EARLY
from tools.checker.card import (
    RIGHT,
    killed_result,
    known_result,
    launch_facts,
    layouts_result,
    model_result,
    network_result,
    resumed_result,
    straight_result,
    verdict,
    write,
)

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "dense-1m"
SAMPLES_OF_RECIPE = 640  # on CPU ranks: 40 of its 240 steps, with the first evaluation
# The shares of --minutes that a part may take. What is not used is left to the others.
SHARES = {
    "network": 0.2,
    "layouts": 0.4,
    "straight": 0.15,
    "killed": 0.15,
    "resumed": 0.15,
    "known": 0.4,
    "model": 0.4,
}
MOST_RANKS_OF_LAYOUTS = 8  # a small model has no more blocks, heads and samples to divide
SMALL = (
    "--layers 4 --hidden 64 --heads 4 --seq-length 64 --vocab-size 512 --micro-batch-size 1 "
    "--precision fp32 --lr-schedule constant --lr 1e-3 --no-preflight"
)
# The small run's steps and the steps between saves: on a GPU a step takes a few milliseconds.
STEPS = {"cuda": (400, 40), "cpu": (60, 6)}
# The model that others know. The GPU day (benchmarks/gpu/gpu_day.py) trains it on one GPU, with as
# many samples a GPU, so that the ratio of tokens/s is what more GPUs lose.
KNOWN = {
    "cuda": "--model 1b3 --precision bf16 --micro-batch-size 4",
    "cpu": "--layers 4 --hidden 128 --heads 4 --seq-length 128 --vocab-size 2048 --precision fp32 "
    "--micro-batch-size 2",
}
STEPS_OF_KNOWN = 12
MICRO_BATCHES = {"cuda": 8, "cpu": 2}  # of a step of the known model, on each replica
SECONDS_TO_FOLLOW = 20.0  # that ranks get to end by themselves when another one has failed
SECONDS_BETWEEN_LOOKS = 0.05


def main(arguments: list[str]) -> int:
    """Check the cluster on this rank of the launch, and return the exit status.

    Status 0: every part is as it should be; 1: one is not, as the page says; 2: a mistake.
    """
    launch = Launch("python")
    try:
        launch = discover()
        given = _parse(arguments)
        if launch.size < 2:
            raise ClusterError(
                "one rank is no cluster: start check.py --cluster with srun or mpirun"
            )
    except UserError as mistake:
        exit_with(mistake, launch.rank == 0, launch.exit_delay)
    with errors.installed():
        import torch  # noqa: F401

        from distributed.context import start

    # The agents use no GPU, and leave the cores to the ranks of the parts.
    context = start(launch, Run(device="cpu", watchdog=False, bind_cores=False))
    with context.failing_loudly():
        status = Agent(context, given).run()
    context.stop(status)
    return status


def _parse(arguments: list[str]) -> Namespace:
    """Return the options of check.py --cluster; raise UserError if one is wrong."""
    parser = Parser("check.py --cluster", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cluster", action="store_true", help="test this launch's nodes, not a config"
    )
    parser.add_argument(
        "--out",
        default="runs/card",
        help="folder of results, on a shared file system (default: runs/card)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="machine of plan.py to compare with; default: by the GPU's name",
    )
    parser.add_argument(
        "--line-rate",
        type=float,
        metavar="GBIT",
        help="rate of a node's network in Gbit/s; default: as its adapters report",
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="time limit (default: 20)")
    parser.add_argument("--parts", help=f"some of {','.join(SHARES)}; default: all")
    given = parser.parse_args(arguments)
    if not 0 < given.minutes < float("inf"):
        raise UserError(f"--minutes is a number above 0, not {given.minutes:g}")
    if given.line_rate is not None and not 0 < given.line_rate < float("inf"):
        raise UserError(f"--line-rate is a number above 0, not {given.line_rate:g}")
    given.parts = given.parts.split(",") if given.parts else list(SHARES)
    for name in given.parts:
        if name not in SHARES:
            raise UserError(f"--parts are of {', '.join(SHARES)}, not {name!r}")
    if "resumed" in given.parts and not {"straight", "killed"} <= set(given.parts):
        raise UserError("the part resumed needs the parts straight and killed")
    for name, part in (("line_rate", "network"), ("gpu", "model")):
        if getattr(given, name) is not None and part not in given.parts:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} is for the part {part}, which --parts leaves out")
    if given.gpu:
        from costs import hardware

        hardware.load(given.gpu)  # raises UserError for an unknown one
    check_folder("--out", given.out)
    return given


def make_stories(out: Path) -> str:
    """Make the corpus of RECIPE in a folder; return what a program said that failed, or nothing."""
    of_others = ["--stories", "600", "--seed", "2"]
    stories, others = str(out / "stories"), str(out / "others")
    for words in (
        ["scripts/make_stories.py", "--out", f"{stories}.jsonl"],
        ["scripts/make_stories.py", "--out", f"{others}.jsonl", *of_others],
        ["scripts/prepare_data.py", "--out", stories, "--vocab-size", "512", f"{stories}.jsonl"],
        ["scripts/prepare_data.py", "--out", others, f"{others}.jsonl"]
        + ["--tokenizer", f"{stories}.tokenizer.json"],
    ):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return f"{words[0]}: {(done.stderr.splitlines() or ['nothing'])[-1]}"
    return ""


def known_model(device: str, replicas: int) -> list[str]:
    """Return the options of the model that others know, with a batch for so many replicas."""
    known = KNOWN[device].split()
    samples = int(known[known.index("--micro-batch-size") + 1]) * MICRO_BATCHES[device] * replicas
    return [*known, "--global-batch-size", str(samples)]


class Agent:
    """One rank of the launch: starts its rank of each part; rank 0 writes the page."""

    def __init__(self, context: Any, given: Namespace):
        """Start no part yet. context: of the launch, whose ranks agree through its store."""
        from distributed.store import StoreExchange

        self.context = context
        self.given = given
        self.out = Path(given.out).resolve()
        self.until = time.monotonic() + 60.0 * given.minutes
        seconds = 60.0 * given.minutes + 120.0
        self.exchange = StoreExchange(
            context.store, context.rank, context.size, "cluster", context.recorder, seconds
        )
        self.number = 0  # of the parts that were started
        self.card: dict[str, Any] = {"parts": {}}
        self.device = given.device

    def run(self) -> int:
        """Do all parts, write the page, and return the exit status."""
        first = self.context.rank == 0
        if first:
            for name in ("straight", "killed", "known", "model", "logs"):
                shutil.rmtree(self.out / name, ignore_errors=True)
            (self.out / "logs").mkdir(parents=True, exist_ok=True)
            (self.out / "layouts.jsonl").unlink(missing_ok=True)
        if self.device == "auto":
            import torch

            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        devices = set(self.exchange.gather("device", self.device))
        if len(devices) > 1:
            raise ClusterError("some ranks have a GPU and others have none: give --device cpu")
        if first:
            options = {"device": self.device, "line_rate": self.given.line_rate, "seconds": 1.0}
            (self.out / "options.json").write_text(json.dumps(options))
            self.card |= launch_facts(self.context, self.given)
        self.exchange.agree(None, lambda values: None, "ready")
        for name in SHARES:
            if name in self.given.parts:
                getattr(self, f"_{name}")()
                if first:
                    write(self.card, self.out)
        wrong = self.exchange.agree(self._wrong(), lambda values: values[0], "wrong")
        if first:
            print(verdict(self.card))
            print(f"written: {self.out}/card.md, card.json; what the ranks said: {self.out}/logs")
        return int(bool(wrong))

    def _wrong(self) -> list[str]:
        """Return the parts that are not as they should be, on rank 0."""
        parts = self.card["parts"]
        return [name for name, part in parts.items() if part["status"] != RIGHT]

    # ---- Parts -----------------------------------------------------------------------------------

    def _network(self) -> None:
        """Measure the network."""
        statuses = self._start("network", self._worker("network"))
        self._end("network", statuses, lambda: network_result(self.out, self.device))

    def _layouts(self) -> None:
        """Compare layouts with one rank, on some of the ranks: the first ones of each node."""
        statuses = self._start("layouts", self._worker("layouts"), ranks=self._few_ranks())
        self._end("layouts", statuses, lambda: layouts_result(self.out))

    def _straight(self) -> None:
        """Train the small run to its end."""
        statuses = self._start("straight", self._train("straight", self._layout(0)))
        self._end("straight", statuses, lambda: straight_result(self.out))

    def _killed(self) -> None:
        """Train the small run, and kill the last rank when a checkpoint is there."""
        victim = self.context.size - 1
        out = self.out / "killed"

        def is_saved() -> bool:
            return any(out.glob("checkpoints/step_*/manifest.json"))

        kill = is_saved if self.context.rank == victim else None
        words = self._train("killed", self._layout(0))
        statuses = self._start("killed", words, kill=kill, follows=False)
        found = partial(killed_result, self.out, victim, statuses)
        self._end("killed", statuses, found, fails=True)

    def _resumed(self) -> None:
        """Go on with the killed run in another layout."""
        words = [*self._train("killed", self._layout(1)), "--resume", "auto"]
        statuses = self._start("resumed", words)
        self._end("resumed", statuses, lambda: resumed_result(self.out, self._layout(1)))

    def _known(self) -> None:
        """Train the first known run with tensor ranks, on two, four or eight of the ranks."""
        said = None
        if self.context.rank == 0:
            said = make_stories(self.out)
        said = self.exchange.agree(said, lambda values: values[0], "stories")
        ranks = self._few_ranks()
        ranks = ranks[: 2 ** (len(ranks).bit_length() - 1)]  # which divides the run's samples
        words = ["train.py", "--config", str(RECIPE / "run.toml"), "--seed", "1", "--tp", "2"]
        # One micro-batch a step, of the 16 samples by as many replicas as there are pairs of ranks.
        words += ["--micro-batch-size", str(16 * 2 // len(ranks))]
        words += ["--precision", "fp32", "--data", str(self.out / "stories")]
        words += ["--eval-data", f"others={self.out}/others:512"]
        words += ["--out", str(self.out / "known"), "--device", self.device]
        if self.device == "cpu":
            words += ["--stop-at-samples", str(SAMPLES_OF_RECIPE)]
        statuses = [] if said else self._start("known", words, ranks=ranks)
        statuses = [0 if status == STOPPED_EARLY else status for status in statuses]
        self._end("known", statuses, lambda: known_result(self.out, RECIPE, said))

    def _model(self) -> None:
        """Train a model that others know, with replicas of it alone."""
        words = ["train.py", *known_model(self.device, self.context.size)]
        words += ["--steps", str(STEPS_OF_KNOWN), "--log-every", "1"]
        words += ["--out", str(self.out / "model"), "--device", self.device]
        statuses = self._start("model", words)
        self._end("model", statuses, lambda: model_result(self.out, self.given.gpu))

    # ---- What parts run --------------------------------------------------------------------------

    def _worker(self, part: str) -> list[str]:
        """Return the words of a part of cluster_worker.py."""
        return ["-m", f"{__package__}.cluster_worker", part, str(self.out)]

    def _train(self, name: str, layout: list[str]) -> list[str]:
        """Return the words of the small run in a layout, into the folder `name`."""
        steps, every = STEPS[self.device]
        words = ["train.py", *SMALL.split(), *layout, "--steps", str(steps)]
        words += ["--save-every", str(every), "--global-batch-size", str(2 * self.context.size)]
        words += ["--out", str(self.out / name), "--device", self.device, "--log-every", "1"]
        return words

    def _layout(self, number: int) -> list[str]:
        """Return the flags of the first and of the second layout of the small run.

        They are the first two of a list that this number of ranks can have.
        """
        found = []
        wanted = ("--tp 2 --zero 1", "--pp 2 --zero 2", "--pp 2 --tp 2", "--zero 1", "--zero 2")
        for flags in wanted:
            words = self._train("straight", flags.split())[1:]
            try:
                validation.check(command_line.parse(words), self.context.size)
            except UserError:
                continue
            found.append(flags.split())
        return found[number]

    def _few_ranks(self) -> list[int]:
        """Return the ranks that compare layouts: of as many nodes as possible, up to eight."""
        of_nodes: dict[str, list[int]] = {}
        for rank, node in enumerate(self.context.nodes):
            of_nodes.setdefault(node, []).append(rank)
        nodes = list(of_nodes.values())[:MOST_RANKS_OF_LAYOUTS]
        each = max(1, MOST_RANKS_OF_LAYOUTS // len(nodes))
        found = [rank for ranks in nodes for rank in ranks[:each]]
        # An odd number divides nothing of a small model.
        return found[: len(found) // 2 * 2] if len(found) > 3 else found

    def _start(
        self,
        name: str,
        words: list[str],
        ranks: list[int] | None = None,
        kill: Callable[[], bool] | None = None,
        follows: bool = True,
    ) -> list[int | None]:
        """Run a part on every rank, or on `ranks`, and return their statuses; None: killed late.

        kill: this rank's process is killed when it is true. follows: whether ranks are ended when
        another one has failed; else they must end by themselves.
        """
        context = self.context
        ranks = ranks or list(range(context.size))
        self.number += 1
        place = [_address(context), free_port("")] if context.rank == 0 else None
        address, port = self.exchange.agree(place, lambda values: values[0], "place")
        self.began = time.monotonic()
        share = SHARES[name] * 60.0 * self.given.minutes
        limit = max(10.0, min(share, self.until - self.began))
        status: int | None = 0
        if context.rank in ranks:
            nodes = [context.nodes[rank] for rank in ranks]
            own = RankPlace(ranks.index(context.rank), nodes, address, port)
            variables = environment_of_rank(own, str(ROOT))
            path = self.out / "logs" / f"{name}-{context.rank}.txt"
            with open(path, "w") as log:
                child = subprocess.Popen(
                    [sys.executable, *words],
                    cwd=ROOT,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                status = self._wait(child, limit, kill, follows)
        statuses = self.exchange.gather("status", status)
        return [statuses[rank] for rank in ranks]

    def _wait(
        self,
        child: subprocess.Popen,
        limit: float,
        kill: Callable[[], bool] | None,
        follows: bool,
    ) -> int | None:
        """Wait for this rank's process of a part; return its status, None if its time was over."""
        store, key = self.context.store, f"cluster failed {self.number}"
        until = time.monotonic() + limit
        told = False
        while child.poll() is None and time.monotonic() < until:
            if kill is not None and kill():
                child.kill()
                return child.wait()
            if follows and not told and store.check([key]):
                told = True
                until = min(until, time.monotonic() + SECONDS_TO_FOLLOW)
            time.sleep(SECONDS_BETWEEN_LOOKS if kill else 10 * SECONDS_BETWEEN_LOOKS)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return None
        if child.returncode:
            store.set(key, "1")
        return child.returncode

    def _end(
        self,
        name: str,
        statuses: list[int | None],
        found: Callable[[], dict[str, Any]],
        fails: bool = False,
    ) -> None:
        """Keep on rank 0 what came of a part. fails: whether its ranks are meant to fail."""
        if self.context.rank:
            return
        part: dict[str, Any] = {"seconds": round(time.monotonic() - self.began, 1)}
        late = [rank for rank, status in enumerate(statuses) if status is None]
        failed = [rank for rank, status in enumerate(statuses) if status]
        try:
            part |= {"status": RIGHT} | found()
        except (OSError, ValueError, LookupError, UserError) as error:
            part |= {"status": "nothing was written", "why": f"{error}"}
        if late:
            part |= {"status": "over its time", "why": f"ranks {late[:4]} were ended"}
        elif failed and not fails:
            part |= {"status": "failed", "why": self._said(name, failed[0])}
        self.card["parts"][name] = part
        print(f"{name}: {part['status']}, {part['seconds']:.0f} s", flush=True)

    def _said(self, name: str, rank: int) -> str:
        """Return the last words of a rank of a part."""
        path = self.out / "logs" / f"{name}-{rank}.txt"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        errors = [line for line in lines if line.startswith("error")]
        return f"rank {rank}: {(errors or lines or ['nothing'])[-1][:300]}"


def _address(context: Any) -> str:
    """Return the address at which the ranks of all nodes reach this one."""
    from distributed.store import host_address

    return host_address(context.local)
