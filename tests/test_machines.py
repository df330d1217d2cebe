"""Files of hardware/: if this failed, a plan would rest on rates without a source."""

from pathlib import Path

import pytest

from base.errors import UserError
from config.schema import Layout, Training
from config.spelling import preset
from costs import hardware, step_time
from costs.job import Job
from tools.planner import engines

A100 = hardware.load("a100-80")
TRAINING = Training(global_batch_size=64, precision="fp16")


@pytest.mark.parametrize("name", hardware.names())
def test_every_machine_loads_with_sources(name):
    machine = hardware.load(name)
    assert 0.3 < machine.gemm_fraction < 1
    assert machine.sources
    assert 0.3e9 < machine.context < machine.memory < 400e9


def test_the_wanted_machines_are_there():
    wanted = {"v100-16", "v100-32", "a100-40", "a100-80", "h100", "h200", "b200"}
    wanted |= {"a10", "b300", "gb200", "h20", "l4", "l40s", "mi250x", "mi300x", "rtx-4090"}
    wanted |= {"gb300", "h800", "gh200", "mi350x", "mi355x", "a6000", "rtx-3090", "rtx-5090"}
    assert wanted <= set(hardware.names())


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A10", 125e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA GB300", 2500e12),
        ("NVIDIA H800", 989.4e12),
        ("AMD Instinct MI355X", 2516.6e12),
    ],
)
def test_the_name_of_a_device_that_is_a_part_of_another_ones_is_not_taken_for_it(device, peak):
    assert hardware.peak_of(device, "bf16") == peak


def test_constants_are_few_documented_and_used():
    constants = hardware.constants()
    paths = [path for path in hardware.FOLDER.glob("*.toml") if path.stem != "fitted"]
    paths += [engines.PROGRAMS, Path(engines.__file__)]
    text = "".join(path.read_text() for path in paths)
    assert len(constants) <= 26
    for constant in constants:
        assert constant.fitted_on
        assert f'"{constant.name}"' in text


def test_large_products_of_blackwell_are_as_fast_as_their_power_allows(tmp_path):
    """FLOP/s for each watt are one constant of B200 and GB200; a file may have another limit."""
    rates = {name: hardware.load(name) for name in ("b200", "gb200", "b300", "gb300")}
    per_watt = {n: m.gemm_fraction * m.peak / m.watts for n, m in rates.items()}
    assert per_watt["b200"] == pytest.approx(per_watt["gb200"])
    assert per_watt["b300"] == pytest.approx(per_watt["gb300"])
    file = tmp_path / "capped.toml"
    file.write_text('like = "b200"\nwatts = 700\n')
    capped = hardware.load(str(file))
    assert capped.gemm_fraction == pytest.approx(0.7 * rates["b200"].gemm_fraction)
    file.write_text('like = "b200"\ngemm_fraction = 0.4\n')
    assert hardware.load(str(file)).gemm_fraction == 0.4


@pytest.mark.parametrize("name", ["h800", "mi350x", "rtx-5090", "a6000"])
def test_a_machine_that_nobody_measured_says_so(name):
    job = Job(preset("gpt2-1.5b"), Layout(dp=8), TRAINING, hardware.load(name))
    assert f"no run on {name} was measured: predicted by its datasheet" in job.warnings


def test_unknown_machine_names_the_nearest():
    with pytest.raises(UserError, match="no machine is called 'a100-8'; did you mean 'a100-80'"):
        hardware.load("a100-8")
    with pytest.raises(UserError, match=r"for another GPU write a FILE\.toml: hardware/README\.md"):
        hardware.load("tpu")


def test_calibration_replaces_what_was_assumed(tmp_path):
    file = tmp_path / "measured.toml"
    device = 'device = "NVIDIA A100-SXM4-80GB"\n'
    file.write_text(device + "gemm_fraction = 0.5\n[nvlink]\nalpha = 1e-6\nbeta = 1e11\n")
    machine = hardware.load("a100-80", str(file))
    assert machine.gemm_fraction == 0.5
    assert machine.nvlink.speed == pytest.approx(1e11)
    assert machine.nvlink.latency == 1e-6
    assert machine.network == A100.network
    model, layout = preset("gpt2-1.5b"), Layout(dp=8, tp=1)
    slower = step_time.predict(Job(model, layout, TRAINING, machine)).seconds
    assert slower > step_time.predict(Job(model, layout, TRAINING, A100)).seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('device = "NVIDIA H100"', "was measured on 'NVIDIA H100', but a100-80 has 'A100'"),
        ("gemm_fraction = 0.5", "was measured on 'no stated device'"),
        ('device = "A100"\nspeed = 3', "says speed = 3; it may have gemm_fraction"),
        ('device = "A100"\n[nvlink]\nalpha = 1', "needs alpha and beta"),
        ('device = "A100"\n[nvlink]\nalpha = 1\nbeta = 0', "beta = 0"),
        ("device = ", "is not TOML"),
    ],
)
def test_bad_calibrations_are_one_sentence(tmp_path, text, message):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        hardware.load("a100-80", str(file))
