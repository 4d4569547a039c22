"""Tolerances reject errors with a message."""

import pytest
import torch

from tests.helpers.tolerances import EXACT, FP64_LAYOUT, FP64_REF, Tolerance


def test_error_is_relative_to_the_largest_element_of_the_tensor():
    tenth = Tolerance(0.1, 0.0, "for this test")
    tenth.check(torch.tensor([10.0, 0.9]), torch.tensor([10.0, 0.0]))
    with pytest.raises(AssertionError, match="relative error 1.100e-01"):
        tenth.check(torch.tensor([10.0, 1.1]), torch.tensor([10.0, 0.0]))


def test_the_absolute_floor_admits_noise_around_zero():
    FP64_LAYOUT.check(torch.tensor([1e-15], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64))
    with pytest.raises(AssertionError):
        FP64_LAYOUT.check(torch.tensor([1e-13], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64))


def test_an_error_of_a_tenth_of_a_percent_is_rejected():
    reference = torch.linspace(0.0, 1.0, 100, dtype=torch.float64)
    with pytest.raises(AssertionError, match="grad"):
        FP64_LAYOUT.check(reference * 1.001, reference, "grad")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nonfinite_values_are_never_close(wrong):
    with pytest.raises(AssertionError, match="not finite"):
        Tolerance(1.0, 1e9, "for this test").check(torch.tensor([wrong]), torch.tensor([1.0]))
    with pytest.raises(AssertionError, match="not finite"):
        EXACT.check(float("nan"), float("nan"))


def test_equal_infinities_are_equal():
    EXACT.check(torch.tensor([float("-inf"), 1.0]), torch.tensor([float("-inf"), 1.0]))


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        EXACT.check(torch.zeros(2), torch.zeros(2, 1))


def test_exact_compares_every_bit_of_large_integers_and_python_numbers():
    with pytest.raises(AssertionError):
        EXACT.check(torch.tensor(2**53 + 1), torch.tensor(2**53))
    with pytest.raises(AssertionError):
        EXACT.check([0.1 + 0.2], [0.3])


def test_every_differing_tensor_of_a_collection_is_listed():
    one = torch.ones(2, dtype=torch.float64)
    with pytest.raises(AssertionError, match="(?s)2 of 3 differ.*b: .*c: "):
        FP64_REF.check_all({"a": one, "b": one * 2, "c": one * 3}, {"a": one, "b": one, "c": one})
    with pytest.raises(AssertionError, match=r"missing \['b'\], not expected \['c'\]"):
        FP64_REF.check_all({"c": one}, {"b": one})
