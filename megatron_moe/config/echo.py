"""Config of the clones of busy experts on other ranks (`--moe-enable-echo`)."""

from dataclasses import dataclass

TOLERANCE_PERCENT = 5
"""Rows by which a rank may exceed the mean over ranks before its experts are cloned, in percent. A clone costs the
transfer of its weights and gradients, which fewer rows do not repay."""


@dataclass(frozen=True, kw_only=True)
class EchoConfig:
    """Clones of busy experts on other expert-parallel ranks. They change no result."""

    moe_num_echo_experts: int
    """Clone slots of a layer on all expert-parallel ranks together."""
    moe_echo_expert_dispatch_overlap: bool = False
    """Starts to send weights to clones together with the tokens, so that the transfer overlaps with the rank's own
    experts."""
    moe_echo_recompute_expert_dispatch: bool = False
    """Frees the weights of clones after forward and sends them again in backward."""
