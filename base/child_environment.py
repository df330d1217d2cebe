"""The environment of a command that a run starts for its user: without the job's secrets.

    environment = plain_environment() | {"TRINE_STEP": "500"}

Variables of a job may hold keys and tokens (WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY), and
those of launchers (PMI_RANK, RANK, SLURM_PROCID, MASTER_ADDR) would make a program that the command
starts a rank of this job. So only the variables named here are passed on. What a command needs
besides, it reads from a file of its user, such as ~/.aws/credentials.
"""

import os

KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
KEPT_BEGINNING = "LC_"  # of the locale


def plain_environment() -> dict[str, str]:
    """Return the variables of this process that a user's command gets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or name.startswith(KEPT_BEGINNING)
    }
