"""If this failed, a measured run would correct other predictions by what it cannot tell."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_plan_runs import write_run

import plan
from base.errors import UserError
from config.schema import Layout, Training
from config.spelling import preset
from costs import hardware
from costs.job import Job
from tools.planner import calibration, measured
from tools.planner.run_files import MeasuredRun

H100 = hardware.load("h100-torch")
MODEL = replace(preset("llama-3-8b"), seq_length=4096)
LAYOUTS = [Layout(tp=tp, pp=pp, dp=16 // tp // pp, zero=1) for tp, pp in [(1, 1), (4, 2), (8, 1)]]


def job(layout: Layout, machine: hardware.Machine = H100) -> Job:
    return Job(MODEL, layout, Training(global_batch_size=64, precision="bf16"), machine)


def run(layout: Layout, truth: hardware.Machine, known: hardware.Machine = H100) -> MeasuredRun:
    seconds = measured.seconds_of(job(layout, truth))
    return MeasuredRun("a run", job(layout, known), seconds, 9, 0.0)


def corrected(runs, machine=H100) -> measured.Corrected:
    return measured.correct(machine, runs, measured.priors())


def test_a_run_moves_the_constants_that_it_depends_on_towards_the_truth():
    truth = calibration.changed(H100, "nvlink.fraction", 0.2 * H100.nvlink.fraction)
    found = corrected([run(LAYOUTS[2], truth)])
    moved = {move.name: move.after / move.before for move in found.moves}
    assert moved["nvlink.fraction"] < 0.9
    assert moved["network.fraction"] == pytest.approx(1, abs=0.05)
    # another layout with tp is predicted better, and one without tp not worse
    for layout, better in ((LAYOUTS[1], 0.8), (LAYOUTS[0], 1.2)):
        real = measured.seconds_of(job(layout, truth))
        off = [abs(math.log(measured.seconds_of(job(layout, at)) / real)) for at in _both(found)]
        assert off[1] < better * off[0] + 1e-3
    alone = corrected([run(LAYOUTS[0], truth)])
    moved = {move.name: move.after / move.before for move in alone.moves}
    assert moved["nvlink.fraction"] == pytest.approx(1, abs=0.02)


def _both(found: measured.Corrected) -> tuple[hardware.Machine, hardware.Machine]:
    return H100, found.machine


def test_what_was_predicted_moves_nothing_and_more_runs_tell_more():
    same = corrected([run(LAYOUTS[1], H100)])
    assert same.machine == H100 or all(abs(m.after / m.before - 1) < 1e-9 for m in same.moves)
    assert "no constant moved" in measured.lines(same)[-1]
    truth = calibration.changed(H100, "gemm_fraction", 0.9 * H100.gemm_fraction)
    one, three = corrected([run(LAYOUTS[0], truth)]), corrected([run(x, truth) for x in LAYOUTS])
    left = [
        next(move for move in found.moves if move.name == "gemm_fraction").left
        for found in (one, three)
    ]
    assert left[1] < left[0] < measured.priors().constants["gemm_fraction"]
    before, after = one.predicted[0]
    assert before < after < one.runs[0].seconds


def test_it_is_the_solution_of_the_normal_equations():
    """One round about the machine: the posterior mean, written in the other of its two forms."""
    truth = replace(H100, slowdown=1.01)
    runs = [run(layout, truth) for layout in LAYOUTS]
    prior = measured.priors()
    names = [name for name in prior.constants if calibration.value_of(H100, name)]
    at = dict.fromkeys(names, 0.0)
    slopes = np.array([measured.slopes_of(one, H100, names, at)[:-1] for one in runs])
    apart = np.full(len(runs), prior.layout)
    spread = np.array([prior.constants[name] for name in names])
    rest = np.array([math.log(one.seconds / measured.predicted(one, {})) for one in runs])
    weighted = slopes / apart[:, None]
    precision = weighted.T @ weighted + np.diag(spread**-2)
    expected = np.linalg.solve(precision, weighted.T @ (rest / apart))
    moved = {m.name: math.log(m.after / m.before) for m in corrected(runs).moves}
    assert [moved[name] for name in names] == pytest.approx(expected.tolist(), abs=2e-4)
    left = np.sqrt(np.diag(np.linalg.inv(precision)))
    assert [m.left for m in corrected(runs).moves] == pytest.approx(left.tolist(), rel=0.02)


def test_a_run_of_another_program_tells_nothing_of_this_one():
    other = replace(H100, software=replace(H100.software, host_per_operation=2e-5))
    slow = replace(H100, gemm_fraction=0.8 * H100.gemm_fraction)
    found = measured.correct(other, [run(LAYOUTS[0], slow)], measured.priors())
    moves = {move.name: move for move in found.moves}
    assert moves["gemm_fraction"].after < moves["gemm_fraction"].before
    host = moves["software.host_per_operation"]
    assert host.after == host.before
    assert host.left == host.prior


COMMAND = "layouts --model llama-3-8b --gpu h100 --nodes 2 --global-batch-size 128 --top 3"


def ask(*words: str):
    return plan.ask([*COMMAND.split(), *words])


def test_stated_runs_and_runs_folders_correct_the_table(tmp_path, capsys):
    plain = ask()
    stages = "--model llama-3-8b --tp 2 --pp 2 --global-batch-size 128 --precision bf16"
    folder = write_run(tmp_path / "a", stages, 16, "NVIDIA H100 80GB HBM3", [9.0] * 2 + [14.0] * 9)
    capsys.readouterr()
    stated = ("tp 2 pp 2 = 14 s", "--tp 2 --pp 2 gpus 16 = 14000ms", "tp 2 pp 2 dp 4=14s")
    for word in (*stated, folder):
        found = ask("--measured", word)
        assert capsys.readouterr().err == ""
        data = found.data["measured"]
        assert data["runs"][0]["measured_seconds"] == 14
        assert data["runs"][0]["predicted_seconds"] < data["runs"][0]["corrected_seconds"] < 14
        assert found.data["ranked"][0]["step_seconds"] > plain.data["ranked"][0]["step_seconds"]
        assert f"corrected by {word}" in found.text
    twice = ask("--measured", word, "--measured", "tp 1 pp 4 = 13 s")
    assert len(twice.data["measured"]["runs"]) == 2
    days = plan.ask(f"days{COMMAND[7:-8]} --tokens 1e11".split() + ["--measured", folder])
    assert "corrected by" in days.text


def test_a_run_of_train_py_tells_another_program_of_the_machine(tmp_path):
    found = ask("--for", "megatron", "--measured", "tp 4 pp 2 = 12 s")
    assert found.data["measured"]["constants"]["gemm_fraction"]["after_factor"] < 1
    words = "--model llama-3-8b --tp 4 --pp 2 --global-batch-size 128 --precision bf16"
    folder = write_run(tmp_path / "a", words, 16, "NVIDIA H100 80GB HBM3", [9.0] * 2 + [14.0] * 9)
    found = ask("--for", "megatron", "--measured", folder)
    assert found.data["measured"]["constants"]["flash_fraction"]["after_factor"] < 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp 4 pp 2", "neither a run's folder nor a layout with its seconds"),
        ("tp 4 pp 2 = 0 s", "neither a run's folder"),
        ("tp 4 pp 2 = 5 min", "neither a run's folder"),
        ("tp 4 pp 2 = 1.2.3 s", "neither a run's folder"),
        ("tp 4 dp x = 5 s", "dp is a number of ranks, not 'x'"),
        ("tp 4 dp = 5 s", "dp is a number of ranks, not ''"),
        ("tp 3 = 5 s", r"--measured 'tp 3 = 5 s': .*tp\(3\)"),
        ("tpp 3 = 5 s", "tpp"),
        ("tp 'x = 5 s", "neither a run's folder"),
    ],
)
def test_a_run_that_cannot_be_read_is_one_sentence(text, message):
    with pytest.raises(UserError, match=message):
        ask("--measured", text)


def test_a_run_that_no_constant_explains_is_said():
    found = ask("--measured", "tp 2 pp 2 = 90 s")
    assert "standard deviations off, more than constants explain" in found.text
    with pytest.raises(UserError, match="--measured goes with layouts"):
        plan.ask(["smallest", "--model", "llama-3-8b", "--measured", "tp 2 = 3 s"])
