"""How ranks are launched: if this failed, a wrong launch would hang, or train rank 0 twice."""

import ast
import json
import re
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ranks import (
    OPENMPI_LIBRARY,
    ROOT,
    Job,
    fork_ranks,
    mpi_command,
    openmpi_command,
    srun_command,
    start,
)

from base.errors import UserError
from corpora.token_files import IndexedDatasetWriter
from distributed import launch as launch_of_rank
from distributed.launch import BY_VARIABLES, Launch, Local, check_launch, discover, find_local

# The start of a run alone.
START = [
    sys.executable,
    "-c",
    "from config.run_options import Run; from distributed.context import start; "
    "from distributed.launch import discover; start(discover(), Run())",
]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch("python")),
        (
            {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "WORLD_SIZE": "4", "PMI_SIZE": "9"},
            Launch("torchrun", 2, 4),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("mpirun", 1, 2, mpi=True)),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"},
            Launch("mpirun of Open MPI", 0, 8, mpi=True),
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
            Launch("srun", 3, 4, mpi=True),
        ),
        # In a Slurm job MPICH's mpirun starts a helper process on each node with srun.
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "MPI_LOCALRANKID": "0",
                "PMI_RANK": "2",
                "PMI_SIZE": "4",
            },
            Launch("mpirun", 2, 4, mpi=True),
        ),
        # Left from a parent process, which a launcher had started as its only rank.
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, Launch("python")),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, Launch("python")),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "PMI_FD": "9", "PMI_ID": "0"}, Launch("python")),
        ({"PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, Launch("python")),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x", "PMIX_SERVER_URI2": "y"}, Launch("python")),
        # They hide no launcher of several ranks.
        (
            {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
            | {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"},
            Launch("mpirun", 3, 4, mpi=True),
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "SLURM_STEP_ID": "0"}
            | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            Launch("srun", 1, 2, mpi=True),
        ),
        # Inside salloc or an sbatch script plain python is one process, however many tasks.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Launch("python")),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            Launch("python"),
        ),
    ],
)
def test_the_launcher_is_read_from_its_variables(environment, expected):
    assert discover(environment) == expected


def cluster(task: str, **sizes: int) -> str:
    """The JSON of TF_CONFIG and CLUSTER_SPEC, with the addresses of tasks by kind."""
    addresses = {kind: [f"{kind}-{n}:2222" for n in range(size)] for kind, size in sizes.items()}
    return json.dumps({"cluster": addresses, "task": {"type": task, "index": sizes[task] - 1}})


PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}


def test_variables_for_torch_start_ranks():
    """As a PyTorchJob sets them; LOCAL_RANK and LOCAL_WORLD_SIZE for several ranks on a node."""
    launch = discover(PYTORCHJOB)
    assert launch == Launch(BY_VARIABLES, 1, 2)
    check_launch(launch, PYTORCHJOB)
    check_launch(launch, PYTORCHJOB | {"LOCAL_RANK": "0"})
    check_launch(launch, PYTORCHJOB | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(
        UserError, match=r"LOCAL_RANK is 1, so there are several .* LOCAL_WORLD_SIZE"
    ):
        check_launch(launch, PYTORCHJOB | {"LOCAL_RANK": "1"})
    with pytest.raises(UserError, match="RANK is 2, which is not below WORLD_SIZE, 2"):
        discover(PYTORCHJOB | {"RANK": "2"})
    assert discover(PYTORCHJOB | {"RANK": "0", "WORLD_SIZE": "1"}) == Launch("python")
    # A launcher that is known goes first.
    assert discover(PYTORCHJOB | {"PMI_RANK": "0", "PMI_SIZE": "4"}).launcher == "mpirun"


@pytest.mark.parametrize(
    ("local", "place"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Local(1, 2, True, 2, 1)),
        ({"LOCAL_RANK": "0"}, Local(0, 1, False, 1, 0)),
        ({}, Local(0, 1, False, 1, 0)),
    ],
    ids=["two on the node", "one with its number", "one"],
)
def test_ranks_by_variables_know_their_places(local, place, monkeypatch):
    """Else two ranks of a node would take the same GPU."""
    environment = PYTORCHJOB | local
    monkeypatch.setattr(launch_of_rank.os, "environ", environment)
    assert find_local(discover(environment)) == place


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "0"},
        {"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0"},
        {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_LOCAL_RANK": "3"},
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"},
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "0"},
        {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "n0"},
        {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"},
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
        {"AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "2"},
        {"TF_CONFIG": cluster("worker", chief=1, worker=2)},
        {"CLUSTER_SPEC": cluster("workerpool1", workerpool0=1, workerpool1=1)},
        {"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-1", "algo-2"]'},
        {"VC_TASK_INDEX": "0", "VC_MASTER_NUM": "1", "VC_WORKER_NUM": "1"},
        {"VC_WORKER_NUM": "2", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"},
        {"VK_TASK_INDEX": "1"},
        {"MA_TASK_INDEX": "0", "MA_NUM_HOSTS": "2"},
        {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "4"},
        {"JOB_COMPLETION_INDEX": "1"},
        {"NOMAD_ALLOC_INDEX": "2"},
        {"PBS_VNODENUM": "1"},
        {"ALPS_APP_PE": "5"},
        {"WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "n0", "MASTER_PORT": "1"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_a_rank_of_an_unknown_launcher_does_not_train_alone(environment):
    with pytest.raises(UserError, match="would train alone: start the ranks with srun, mpirun or"):
        discover(environment)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"TF_CONFIG": cluster("worker", chief=1, worker=2)},
            r"is worker 1 \(TF_CONFIG\) of 3 \(TF_CONFIG\) of TFJob or Vertex AI, and would train",
        ),
        (
            {"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-1", "algo-2"]'},
            r"is algo-2 \(SM_CURRENT_HOST\) of 2 \(SM_HOSTS\) of SageMaker, .*unset SM_C",
        ),
        (
            {"VC_TASK_INDEX": "0", "VC_MASTER_NUM": "1", "VC_WORKER_NUM": "2"},
            r"is number 0 \(VC_TASK_INDEX\) of 3 \(VC_\*_NUM\) of Volcano, and would train alone",
        ),
        ({"JOB_COMPLETION_INDEX": "1"}, r"is number 1 \(JOB_.*_INDEX\) of an indexed Kubernetes"),
        ({"WORLD_SIZE": "2", "NODE_RANK": "0"}, r"is one of 2 \(WORLD_SIZE\) .*unset WORLD_SIZE"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_mistake_has_both_numbers_with_their_variables(environment, sentence):
    with pytest.raises(UserError, match=f"^this process {sentence}"):
        discover(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        {"HISTSIZE": "1000", "GRID_SIZE": "4", "PAGE_RANK": "x"},
        {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "OMPI_UNIVERSE_SIZE": "8"},
        {"NODE_RANK": "0", "NNODES": "1", "NUM_NODES": "1", "WORLD_SIZE": "1"},
        {"NODE_RANK": "3", "K8S_NODE_INDEX": "2"},
        {"PET_NODE_RANK": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"},
        {"PMIX_RANK": "0", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"},
        {"TF_CONFIG": cluster("chief", chief=1)},
        {"TF_CONFIG": "{}", "CLUSTER_SPEC": "cluster.toml"},
        {"TF_CONFIG": "[1]", "CLUSTER_SPEC": '{"cluster": [1, 2]}'},
        {"SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-1"]'},
        {"VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0", "VC_WORKER_NUM": "1"},
        {"VC_TASK_INDEX": "0", "VC_NUM": "7"},
        {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"},
        {"NOMAD_ALLOC_INDEX": "0", "PBS_VNODENUM": "0", "MA_NUM_HOSTS": "1"},
        {"SLURM_ARRAY_TASK_ID": "3", "SGE_TASK_ID": "4", "AWS_BATCH_JOB_ARRAY_INDEX": "5"},
    ],
    ids=str,
)
def test_other_variables_refuse_nothing(environment):
    launch = discover(environment)
    assert launch == Launch("python")
    assert check_launch(launch, environment) is None


def test_the_first_pod_of_an_indexed_job_is_told_that_it_trains_alone():
    """No variable says whether the job has other pods."""
    environment = {"JOB_COMPLETION_INDEX": "0"}
    launch = discover(environment)
    assert launch == Launch("python")
    note = check_launch(launch, environment)
    assert note.startswith("this process is number 0 (JOB_COMPLETION_INDEX) of an indexed Kuber")
    assert check_launch(launch, environment | {"PET_NODE_RANK": "0", "PET_NNODES": "1"}) is None


@pytest.mark.parametrize(
    "node",
    [
        {"SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-1", "algo-2"]'},
        {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
        {"VC_TASK_INDEX": "0", "VC_WORKER_NUM": "2"},
    ],
    ids=lambda node: next(iter(node)),
)
def test_torchruns_of_several_nodes_that_are_each_alone_are_refused(node):
    ranks = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost"}
    ranks |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "MASTER_PORT": "1"}
    ranks |= {"GROUP_RANK": "0", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "8"}
    launch = discover(ranks | node)
    assert launch == Launch("torchrun", 0, 8)
    with pytest.raises(
        UserError, match=r"of 2 \(.*its torchrun is alone .* give torchrun --nnodes 2"
    ):
        check_launch(launch, ranks | {"GROUP_WORLD_SIZE": "1"} | node)
    assert check_launch(launch, ranks | {"GROUP_WORLD_SIZE": "2"} | node) is None
    assert check_launch(launch, ranks | {"GROUP_WORLD_SIZE": "1"}) is None


def test_python_without_the_programs_folder(tmp_path):
    """python -P, and PYTHONSAFEPATH in the environment of ranks."""
    command = [sys.executable, "-P", str(ROOT / "train.py"), "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("trine ")


PROGRAMS = sorted(
    path
    for pattern in ("*.py", "scripts/*.py", "benchmarks/*/*.py")
    for path in ROOT.glob(pattern)
    if "\nif __name__ ==" in path.read_text()
)
OWN = {path.stem for path in ROOT.glob("*.py")} | {
    path.parent.name for path in ROOT.glob("*/__init__.py")
}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_program_finds_its_modules_without_the_folder_of_the_program(path):
    """The first of our modules is imported after sys.path has been set, also inside of a `with`."""
    set_at = imported_at = None
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        if any(name.partition(".")[0] in OWN for name in names):
            imported_at = min(node.lineno, imported_at or node.lineno)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path":
            set_at = min(node.lineno, set_at or node.lineno)
    assert imported_at is None or (set_at or imported_at) < imported_at


def test_a_small_dev_shm_is_one_sentence_with_both_sizes(monkeypatch, capsys):
    sizes = SimpleNamespace(f_frsize=4096, f_bavail=256, f_blocks=1024)
    monkeypatch.setattr(launch_of_rank.os, "statvfs", lambda path: sizes)
    monkeypatch.setenv("MPI_LOCALRANKID", "0")
    monkeypatch.setenv("MPI_LOCALNRANKS", "4")
    check = launch_of_rank.check_shared_memory
    with pytest.raises(UserError, match=r"/dev/shm of .* has 1.0 MB free, and MPI needs 4.3 MB"):
        check()
    sizes.f_bavail = 2048
    sizes.f_blocks = 4096
    check()
    assert "/dev/shm of" in (said := capsys.readouterr().err)
    assert "has 16.8 MB, and MPI may need 42.0 MB there for 4 ranks" in said
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    sizes.f_bavail = 0
    check()
    assert capsys.readouterr().err == ""


def test_launcher_and_mpi_must_agree():
    """srun without PMI: every process is rank 0 of 1."""
    words = "--layers 1 --hidden 8 --heads 1 --vocab-size 16 --steps 1 --out runs/never"
    command = [sys.executable, "train.py", *words.split()]
    outcome = start(
        command, SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_NTASKS="4", OMP_NUM_THREADS="1"
    )
    assert outcome.status == 2
    assert "srun started 4 tasks and numbered this one 0, but MPI" in outcome.err
    assert "reports rank 0 of 1" in outcome.err
    assert "Traceback" not in outcome.err
    assert not (ROOT / "runs/never").exists()


# ---- Wrong launches, each with its own message ---------------------------------------------------


def check_refused(outcome, *parts: str) -> None:
    assert outcome.status not in (0, 75)
    assert "Traceback" not in outcome.err
    for part in parts:
        assert part in outcome.err, outcome.err
    assert sum(line.startswith("error: ") for line in outcome.err.splitlines()) == 1


def test_mpirun_of_another_mpi_than_mpi4py_has_loaded(openmpi):
    """Every process is then rank 0 of 1."""
    outcome = start([*mpi_command(2), *START], timeout=300, **OPENMPI_LIBRARY)
    check_refused(
        outcome,
        "mpirun started 2 tasks and numbered this one 0, but MPI (Open MPI v5",
        "reports rank 0 of 1; mpi4py has loaded Open MPI: start the ranks with Open MPI's own",
    )
    outcome = start([*openmpi_command(2), *START], timeout=300)
    check_refused(
        outcome,
        "mpirun of Open MPI started 2 tasks; mpi4py has loaded MPICH: start the ranks with MPICH's",
    )


def test_srun_with_the_wrong_pmi(slurm, openmpi):
    """Both ways to get four runs of one rank each."""
    outcome = start([*srun_command(4, "--mpi=none"), *START], timeout=300)
    check_refused(
        outcome,
        "srun started 4 tasks and numbered this one 0, but MPI (MPICH Version:",
        "reports rank 0 of 1; mpi4py has loaded MPICH: start the ranks with "
        "`srun --mpi=pmi2` (now: none;",
    )
    outcome = start([*srun_command(4), *START], timeout=300, **OPENMPI_LIBRARY)
    check_refused(
        outcome,
        "srun started 4 tasks and numbered this one 0, but MPI (Open MPI v5",
        "start the ranks with `srun --mpi=pmix` (now: pmi2;",
    )


def test_mpi4py_without_an_mpi_library():
    absent = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    if start([sys.executable, "-c", "from mpi4py import MPI"], **absent).status == 0:
        pytest.skip("mpi4py was built here, with the library of this machine's own MPI")
    outcome = start([*mpi_command(2), *START], timeout=300, **absent)
    check_refused(outcome, "mpirun started 2 tasks, but mpi4py cannot be used (cannot load MPI")


def test_torchruns_without_a_common_rendezvous():
    env = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    env |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
    launch = discover(env)
    assert check_launch(launch, env) is None
    for outer in (
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
        {"PMI_SIZE": "4"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
    ):
        with pytest.raises(UserError, match=r"4 torchruns were started, and each is alone"):
            check_launch(launch, env | outer)
        assert check_launch(launch, env | outer | {"GROUP_WORLD_SIZE": "4"}) is None


def test_plain_python_in_a_job_of_many_tasks():
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    words = "--layers 2 --hidden 8 --heads 2 --tp 3"
    outcome = start([sys.executable, "train.py", *words.split()], timeout=300, **job)
    assert "note: this Slurm job has 4 tasks, but this process was started without" in outcome.err
    assert "error: tp(3) * pp(1) * dp(?) does not divide 1 rank: start" in outcome.err
    assert check_launch(Launch("python"), job | {"SLURM_NTASKS": "1"}) is None
    assert check_launch(Launch("python"), job | {"SLURM_STEP_ID": "0"}) is None


def test_a_port_that_is_in_use():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        places |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1"}
        places |= {"MASTER_PORT": taken.getsockname()[1]}
        outcome = start(START, timeout=300, **{key: str(value) for key, value in places.items()})
    port = places["MASTER_PORT"]
    check_refused(outcome, f"port {port} (MASTER_PORT) of ", "give torchrun another --master-port")


def test_after_ranks_have_met_a_mistake_is_the_last_line(tmp_path):
    """MPI_Abort, which ends the other ranks, writes a line of its own."""
    with IndexedDatasetWriter(f"{tmp_path}/c", 16) as writer:
        writer.add_document([1] * 90)
    words = "--layers 1 --hidden 8 --heads 2 --vocab-size 16 --seq-length 8 --tp 2 --device cpu "
    words += f"--steps 1 --global-batch-size 2 --data {tmp_path}/c --eval-every 1 --eval-samples 2"
    outcome = start([*mpi_command(2), sys.executable, "train.py", *words.split()], timeout=300)
    assert outcome.status == 2
    last = outcome.err.splitlines()[-1]
    assert last.startswith("error: validation samples (--split 95,5,0)"), outcome.err


@pytest.mark.slow
def test_slow_placements_give_warnings(slurm, tmp_path):
    """Unequal nodes, and cores that srun did not inherit from the job."""
    words = "--layers 1 --hidden 8 --heads 1 --vocab-size 16 --pp 3 --steps 1 --device cpu"
    command = [*srun_command(3), "env", "SLURM_CPUS_PER_TASK=2", sys.executable, "train.py"]
    with Job([*command, *words.split(), "--out", str(tmp_path)], tmp_path) as job:
        assert job.status() == 0, job.text
        assert "note: nodes have unequal numbers of ranks: 2 on n1, 1 on n2" in job.text
        assert "have 1 cores, but the job asked for --cpus-per-task=2" in job.text


@pytest.mark.slow
def test_mpirun_in_a_slurm_job(slurm):
    """mpirun starts its helper processes with srun: its own variables count, not Slurm's."""
    mpirun = shutil.which(mpi_command(1)[0])
    command = ["salloc", "--quiet", "-N2", "-n2", mpirun, "-n", "2", sys.executable]
    for _ in range(5):
        outcome = start([*command, "tests/failing_worker.py", "port", "1"], timeout=120)
        if "control_cb" not in outcome.err:
            break  # else mpirun itself has failed at its end, as MPICH's does on a busy machine
    assert outcome.status == 0, outcome.err
    ranks = re.findall(r"rank (\d) of 2 mpirun", outcome.out)  # parts of lines may be joined
    assert sorted(ranks) == ["0", "1"]


@pytest.mark.slow
def test_experts_on_two_nodes_of_slurm_train_as_on_one(slurm, tmp_path):
    """A token is sent once to a node; evaluations and samples go the same way. With tp 2 some ranks
    have no token of a sample's pass.
    """
    model = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --no-bias --experts 8"
    run = f"{model} --experts-per-token 4 --ep 4 --tp 2 --precision fp64 --steps 3 --data synthetic"
    run += " --global-batch-size 8 --eval-every 1 --eval-samples 8 --sample-every 3"
    run += " --sample-prompt 3"
    found = []
    over_two = [*srun_command(4), "--distribution=block", sys.executable]
    for nodes in (1, 2):
        out = tmp_path / str(nodes)
        words = ["train.py", *run.split(), "--out", str(out)]
        outcome = fork_ranks(4, *words) if nodes == 1 else start([*over_two, *words], timeout=300)
        assert outcome.status == 0, outcome.out + outcome.err
        record = json.loads((out / "run.json").read_text())
        assert len(record["cluster"]["nodes"]) == nodes
        rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
        samples = [line for line in outcome.out.splitlines() if " sample at" in line]
        assert samples, outcome.out
        found.append((rows, samples))
    (rows, samples), (others, other_samples) = found
    assert samples == other_samples
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name in {"loss", "grad_norm", "validation_loss", "test_loss"} & row.keys():
            assert row[name] == pytest.approx(other[name], rel=1e-12)
