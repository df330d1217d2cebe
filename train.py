"""Trains a GPT: one run, from its configuration to its last row of metrics.

    python train.py --model gpt2-124m --data synthetic --steps 20 --global-batch-size 8
    mpirun -n 4 python train.py --config run.toml --tp 2 --pp 2
    srun -n 384 python train.py --model bloom-176b --tp 4 --pp 12 ...
    torchrun --nproc-per-node 8 train.py --tp 8 ...

dp follows from the number of ranks. `python train.py --help` lists every option.
"""

import sys

from config.command_line import parse
from config.messages import UserError, exit_with
from config.validation import check
from distributed.context import prepare
from distributed.launch import check_launch, discover
from distributed.stop_conditions import Signals, check_kill_switch
from planner import memory


def main(arguments: list[str]) -> None:
    """Check the options, then train; exits with the status of the run.

    --help, a typo or a batch that does not divide is answered before torch is imported.
    """
    signals, launch = Signals(), discover()
    try:
        warning = check_launch(launch)
        if warning:
            print(f"note: {warning}", file=sys.stderr, flush=True)
        config = check(parse(arguments, __doc__), launch.size)
        check_kill_switch(config.run)
    except UserError as mistake:
        exit_with(mistake, launch.rank == 0, launch.exit_delay)
    prepare(config.run, config.layout.pp)
    import trainer

    trainer.main(config, launch, signals, memory.of_run)


if __name__ == "__main__":
    main(sys.argv[1:])
