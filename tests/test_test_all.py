"""test_all.py: if this failed, a chosen test would wait for three processes to load every file."""

import os

import test_all


def test_only_the_whole_suite_runs_in_several_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert test_all.in_processes(["--durations", "20"])[:2] == ["-n", "3"]
    for alone in (["-k", "word"], ["-kword"], ["tests/test_zero.py"], ["-n", "1"], ["--pdb"]):
        assert test_all.in_processes(alone) == []
