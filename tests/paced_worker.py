"""train.py with a pause in every step: `python THIS SECONDS ARGUMENTS...`.

For tests of time limits: a run of known length that takes little processor time. A step with a
pause of a minute or more says so on each rank.
"""

import sys
import time

from base import errors

with errors.installed():
    import trainer
    from config import validation
    from config.command_line import parse
    from distributed.launch import discover
    from distributed.stop_conditions import Signals


def main() -> None:
    signals, launch, pause = Signals(), discover(), float(sys.argv[1])
    step = trainer.step

    def paced(*arguments):
        if pause >= 60.0:
            print("a long pause", flush=True)
        time.sleep(pause)
        return step(*arguments)

    trainer.step = paced
    trainer.main(validation.check(parse(sys.argv[2:]), launch.size), launch, signals)


if __name__ == "__main__":
    main()
