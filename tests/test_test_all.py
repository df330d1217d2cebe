"""test_all.py: if this failed, a chosen test would wait for three processes to load every file."""

import os

import test_all


def test_only_the_whole_suite_runs_in_several_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert test_all.in_processes(["--durations", "20"])[:2] == ["-n", "3"]
    for alone in (["-k", "word"], ["-kword"], ["tests/test_zero.py"], ["-n", "1"], ["--pdb"]):
        assert test_all.in_processes(alone) == []


def test_slow_tests_run_with_all_or_when_they_are_chosen():
    assert test_all.selected(["-x"]) == ["-m", "not slow", "-x"]
    assert test_all.selected(["--all", "-x"]) == ["-x"]
    for chosen in (["-k", "word"], ["-m", "cuda"], ["tests/test_zero.py::test_a"]):
        assert test_all.selected(chosen) == chosen
