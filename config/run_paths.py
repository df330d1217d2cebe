"""Checks of the paths in a run's options, before it begins: --out, --cache, switches, --resume."""

import os

from base.errors import UserError
from base.paths import check_folder, dead_link
from config.schema import Config

# Folders of a run that it makes in --out.
MADE_BY_RUN = ("checkpoints", "tensorboard", "hang", "numerics", "after_save")


def check_paths(config: Config) -> None:
    """Raise UserError if --out, --cache, a switch file or --resume cannot be used as given.

    Called by train.py on rank 0 before training begins. A switch file is a file whose appearance
    stops or saves the run; its folder must exist, or be the run's folder or a folder on the way to
    it, which the run makes.
    """
    run = config.run
    for folder in (run.out, *(os.path.join(run.out, name) for name in MADE_BY_RUN)):
        check_folder("--out", folder)
    # Whether the run reads token files: then it keeps orders of their samples in the cache.
    reads = config.data.data != ("synthetic",) or config.data.eval_data
    if config.data.cache_folder and reads:
        check_folder("--cache", config.data.cache_folder)
    for flag, path in (("--kill-switch", run.kill_switch), ("--save-switch", run.save_switch)):
        if path and os.path.isdir(path):
            raise UserError(f"{flag} {path} is a folder, not a file that may appear")
        folder = os.path.dirname(os.path.abspath(path)) if path else os.sep
        # Both paths get a "/" at their ends, so that `folder` matches whole names only.
        out = os.path.join(os.path.abspath(run.out), "")
        made_by_run = out.startswith(os.path.join(folder, ""))
        if not os.path.isdir(folder) and not made_by_run:
            raise UserError(f"{flag} {path} can never appear: there is no folder {folder}")
    if run.kill_switch and os.path.exists(run.kill_switch):
        raise UserError(f"--kill-switch {run.kill_switch} exists: remove it to train")
    if run.record_routing and run.pin_routing:
        raise UserError(
            "--record-routing and --pin-routing: a run writes the file or takes from it"
        )
    if run.resume not in (None, "auto") and not os.path.isdir(run.resume):
        why = dead_link(os.path.normpath(run.resume)) or "there is no such folder"
        raise UserError(f"--resume {run.resume}: {why}")
