import math
import subprocess
import sys

import pytest

from ds_engine.training.metrics import (
    GIB,
    StepTimer,
    model_flops_utilisation,
    perplexity,
    process_peak_bytes,
)


class Clock:
    """A clock that moves only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_time(self, seconds):
        self.now += seconds


def test_a_window_counts_steps_tokens_and_waiting():
    clock = Clock()
    timer = StepTimer(clock=clock)
    for _ in range(4):
        with timer.waiting():
            clock.pass_time(0.5)
        clock.pass_time(1.5)
        timer.step(tokens=1000, samples=10)
    assert timer.report() == {
        "train/step_seconds": 2.0,
        "train/data_wait_seconds": 0.5,
        "train/tokens_per_second": 500.0,
        "train/samples_per_second": 5.0,
    }


def test_the_next_window_starts_at_the_report():
    clock = Clock()
    timer = StepTimer(clock=clock)
    clock.pass_time(1.0)
    timer.step(tokens=10, samples=10)
    timer.report()
    clock.pass_time(4.0)
    timer.step(tokens=10, samples=10)
    assert timer.report()["train/tokens_per_second"] == 2.5


def test_evaluation_and_checkpoints_do_not_slow_the_steps_down():
    clock = Clock()
    timer = StepTimer(clock=clock)
    clock.pass_time(2.0)
    timer.step(tokens=100, samples=10)
    with pytest.raises(RuntimeError), timer.excluded():
        clock.pass_time(50.0)
        raise RuntimeError
    assert timer.report()["train/step_seconds"] == 2.0


def test_a_report_inside_an_excluded_block_leaves_both_windows_right():
    clock = Clock()
    timer = StepTimer(clock=clock)
    with timer.excluded():
        clock.pass_time(10.0)
        timer.report()
        clock.pass_time(20.0)
    clock.pass_time(3.0)
    timer.step(tokens=6, samples=10)
    assert timer.report()["train/step_seconds"] == 3.0


def test_utilisation_is_left_out_unless_both_numbers_are_given():
    for numbers in ({"flops_per_sample": 1e9}, {"peak_tflops": 1.0}):
        clock = Clock()
        timer = StepTimer(clock=clock, **numbers)
        clock.pass_time(1.0)
        timer.step(tokens=1, samples=10)
        assert "train/mfu" not in timer.report()
    clock = Clock()
    timer = StepTimer(clock=clock, flops_per_sample=6e13, peak_tflops=300.0, devices=4)
    clock.pass_time(1.0)
    timer.step(tokens=100_000, samples=10)
    assert timer.report()["train/mfu"] == pytest.approx(0.5)


def test_utilisation_by_hand():
    # 1e9 parameters at 6 FLOPs each and 25 samples of 1000 tokens a second are 150 TFLOP/s.
    value = model_flops_utilisation(
        samples_per_second=25, flops_per_sample=6e12, peak_tflops=300, devices=1
    )
    assert value == pytest.approx(0.5)
    with pytest.raises(ValueError, match="peak_tflops = 0"):
        model_flops_utilisation(samples_per_second=1, flops_per_sample=1, peak_tflops=0, devices=1)


def test_no_step_no_speed_and_no_time_no_division():
    clock = Clock()
    timer = StepTimer(clock=clock, memory=lambda: 3 * GIB)
    assert timer.report() == {"train/memory_gib": 3.0}
    timer.step(tokens=5, samples=10)
    assert timer.report() == {
        "train/step_seconds": 0.0,
        "train/data_wait_seconds": 0.0,
        "train/memory_gib": 3.0,
    }


def test_the_peak_of_this_process_is_plausible_and_grows():
    code = (
        "from ds_engine.training.metrics import process_peak_bytes as peak\n"
        "print(peak()); block = b'x' * (64 << 20); print(peak())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 4 << 20 < before < 1 << 30
    assert 48 << 20 < after - before < 96 << 20
    assert process_peak_bytes() >= 4 << 20


def test_perplexity():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
