"""The nightly table counts passed, failed and unselected tests."""

import xml.etree.ElementTree as xml

from tests.nightly import Line, report, slow_lines, slow_tests

NAMES = ("tests/a.py::test_a_layout_is_right[x y]", "tests/a.py::test_a_layout_is_right[z]", "tests/b.py::test_other")
RAN = xml.fromstring(
    "<suite><testcase name='test_a_layout_is_right[x y]' time='1.5'/>"
    "<testcase name='test_other' time='2'><failure/></testcase></suite>"
)


def test_every_function_of_the_slow_tests_has_a_line():
    assert list(slow_lines(NAMES, list(RAN))) == [
        Line("a layout is right", passed=1, failed=0, not_run=1, seconds=1.5),
        Line("other", passed=0, failed=1, not_run=0, seconds=2.0),
    ]


def test_a_run_without_a_report_counts_as_not_run():
    assert sum(line.not_run for line in slow_lines(NAMES, [])) == len(NAMES)


def test_the_table_has_a_row_per_line():
    assert "| other | 0 | 1 | 0 | 2 |" in report(list(slow_lines(NAMES, list(RAN))), 4.0)


def test_cases_that_ci_leaves_out_of_its_sample_are_run():
    test = "tests/pipeline/test_simulator.py::test_options_keep_schedules_complete_at_every_depth"
    lines = slow_tests([test], None)
    assert sum(line.passed for line in lines) > 0
    assert all(line.failed == 0 and line.not_run == 0 for line in lines)
