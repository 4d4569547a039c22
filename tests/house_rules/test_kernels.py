"""No kernel has a pattern that Triton is known to compile wrongly."""

import pytest

from tests.house_rules.kernels import transposed_product_findings
from tests.house_rules.source import report, source, sources

KERNELS = ("megatron_moe/kernels/backends/triton", "megatron_moe/kernels/backends/hopper")


def test_no_kernel_multiplies_a_transposed_product():
    assert len(sources(*KERNELS)) > 30
    findings = [finding for file in sources(*KERNELS) for finding in transposed_product_findings(file)]
    report(findings, "transposed results of dot as operands of dot: compute the transposed product with another dot")


@pytest.mark.parametrize(
    "text",
    [
        "p = tl.dot(a, b)\nc = tl.dot(tl.trans(p), d)",
        "p = dot(a, b, None, WIDEN)\nc = dot(d, tl.trans(p.to(d.dtype)), c, WIDEN)",
        "p = tl.dot(a, b, p)\nq = p * scale\nt = tl.trans(q)\nc = tl.dot(t, d)",
        "p += tl.dot(a, b)\nc = dot(p.trans(), d)",
        "c = tl.dot(tl.trans(tl.dot(a, b)), d)",
    ],
)
def test_the_check_finds_transposed_products(text):
    body = text.replace("\n", "\n    ")
    assert len(transposed_product_findings(source("a.py", f"def kernel():\n    {body}"))) == 1


@pytest.mark.parametrize(
    "text",
    ["p = tl.dot(tl.trans(a), b)\nc = tl.dot(p, d)", "p = tl.dot(a, b)\nc = tl.dot(d, e, tl.trans(p))", "tl.trans(a)"],
)
def test_the_check_accepts_other_products(text):
    body = text.replace("\n", "\n    ")
    assert transposed_product_findings(source("a.py", f"def kernel():\n    {body}")) == []
