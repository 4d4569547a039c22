"""Spike detection and findings."""

import math

import torch

from megatron_moe.resilience.numerics_guard import Finding, SpikeLimit, Spikes


def test_spike_is_reported_after_a_hundred_values() -> None:
    values = [2.0 + 0.01 * (i % 7) for i in range(99)]
    spikes = Spikes("loss")
    assert not any(spikes.spike_message(value, i) for i, value in enumerate([*values[:50], 500.0, *values[50:]]))
    spikes = Spikes("loss")
    for i, value in enumerate([*values, 2.0]):
        assert spikes.spike_message(value, i) is None
    assert spikes.spike_message(20.5, 101) is None, "ten times 2.06 is 20.6"
    message = "iteration 102: loss 206 is 10.0 times the maximum of the previous 100 iterations (20.5)"
    assert spikes.spike_message(206.0, 102) == message
    assert spikes.spike_message(206.0, 103) is not None, "spikes do not enter the maximum"
    assert spikes.spike_message(math.inf, 104) is not None


def test_nonfinite_values_do_not_enter_the_maximum() -> None:
    spikes = Spikes("gradient norm")
    for i in range(100):
        assert spikes.spike_message(1.0, i) is None and (i > 50 or spikes.spike_message(math.nan, i) is None)
    assert spikes.spike_message(11.0, 100) is not None


def test_text_of_findings() -> None:
    assert str(Finding(kind="gradient", name="a.weight", experts=(3,))) == "the gradient of a.weight (expert 3)"
    assert str(Finding(kind="gradient", name="a.weight", experts=tuple(range(10)))).endswith("6, 7 and 2 more)")
    assert str(Finding(kind="activation", name="a")) == "the output of a"


def test_device_spike_limit_equals_the_host_rule() -> None:
    values = [1.0, 2.0, 3.0, 31.0, 29.0, math.nan, 300.0, 290.0, 1.0, 1.0, 1.0, 11.0, 9.0]
    limit = SpikeLimit(torch.device("cpu"), window=3)
    usual = [bool(limit.is_normal(torch.tensor(value), torch.tensor(True))) for value in values]
    # a spike exceeds ten times the maximum of three finite values that are not spikes
    assert [value for value, fine in zip(values, usual, strict=True) if not fine] == [31.0, 300.0, 11.0]


def test_invalid_values_do_not_enter_the_window_of_the_device_spike_limit() -> None:
    limit = SpikeLimit(torch.device("cpu"), window=2)
    values, valid = [1.0, 500.0, 2.0, 21.0], [True, False, True, True]
    usual = [bool(limit.is_normal(torch.tensor(v), torch.tensor(each))) for v, each in zip(values, valid, strict=True)]
    assert usual == [True, True, True, False]
