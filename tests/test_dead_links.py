"""Links to nothing where a program reads or writes: if this failed, an error would mislead."""

import os
import re

import pytest

from base.errors import UserError
from base.paths import check_folder, dead_link
from checkpointing import folders
from config.command_line import parse
from config.run_paths import check_paths
from tools.supervisor.command import run_options

BASE = "--layers 1 --hidden 16 --heads 2 --steps 1"


@pytest.mark.parametrize("name", ["checkpoints", "hang", "tensorboard", "."])
def test_a_folder_of_a_run_that_is_a_link_to_nothing_says_so(name, tmp_path):
    out = tmp_path / "run"
    if name != ".":
        out.mkdir()
    link = os.path.normpath(out / name)
    os.symlink("/nowhere/x", link)
    sentence = f"{link} is a link to /nowhere/x, and nothing is there"
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_paths(parse([*BASE.split(), "--out", str(out)]))


def test_links_to_folders_and_other_dead_links_are_taken(tmp_path):
    out = tmp_path / "run"
    (tmp_path / "elsewhere").mkdir()
    out.mkdir()
    os.symlink(tmp_path / "elsewhere", out / "checkpoints")
    os.symlink("/nowhere/x", out / "notes-of-mine")
    check_paths(parse([*BASE.split(), "--out", str(out)]))
    assert dead_link(str(out / "checkpoints")) == ""


def test_a_cache_and_a_checkpoint_that_are_links_to_nothing(tmp_path):
    link = str(tmp_path / "link")
    os.symlink("/nowhere/x", link)
    with pytest.raises(
        UserError, match=r"^--cache .*/link/trine-0: .*/link is a link to /nowhere/x"
    ):
        check_folder("--cache", os.path.join(link, "trine-0"))
    with pytest.raises(UserError, match=r"--resume .*/link is a link to /nowhere/x, and nothing"):
        check_paths(parse([*BASE.split(), "--out", str(tmp_path / "run"), "--resume", link]))
    with pytest.raises(UserError, match=r"link is a link to /nowhere/x, and nothing is there"):
        folders.read_manifest(link)


def test_the_supervisor_reads_keys_of_set():
    words = ["--layers", "1", "--set", "out=runs/b", "kv_heads=1", "--set", "resume=auto"]
    assert run_options(words) == {"out": "runs/b", "resume": "auto"}
    assert run_options([*words, "--out", "runs/a"])["out"] == "runs/a"
