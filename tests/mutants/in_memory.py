"""Bugs of what runs again in the backward, and of what waits on the host."""

from tests.mutants.bug import Bug

SAME_BITS = "tests/memory/test_recompute.py::test_losses_metrics_gradients_and_statistics_are_the_same_bits"
PAGED = "tests/memory/test_paged_stash.py::test_steps_over_ranks_of_experts_are_the_same_bits"
MOVED = "tests/memory/test_activation_offload.py::test_gradients_are_the_same_bits_and_nothing_is_left"

MEMORY = (
    Bug(
        name="a balancing loss is reported by both forwards",
        file="megatron_moe/memory/saved_tensors.py",
        old="unrecorded = replace(mb, metrics=None)",
        new="unrecorded = mb",
        select=(SAME_BITS + "[moe-GQA]",),
        reason="reported upstream: the logged loss is twice the loss",
    ),
    Bug(
        name="the first of two forwards counts the load of the experts too",
        file="megatron_moe/moe/router.py",
        old="        if torch.is_grad_enabled():\n            self._count(",
        new="        if mb.training:\n            self._count(",
        select=(SAME_BITS + "[moe-GQA]",),
        reason="the expert bias follows a load that is not the load",
    ),
    Bug(
        name="dropout is drawn anew in the second forward",
        file="megatron_moe/memory/saved_tensors.py",
        old="unrecorded = replace(mb, metrics=None)",
        new='unrecorded = replace(mb, metrics=None, rng=mb.rng and mb.rng.within("again"))',
        select=(SAME_BITS + "[uniform, layer by layer-GQA]",),
        reason="the gradient is that of another function",
    ),
    Bug(
        name="a view of a forgotten output is read from its beginning",
        file="megatron_moe/memory/output_discard.py",
        old="as_strided(self.shape, self.stride, self.offset)",
        new="as_strided(self.shape, self.stride, 0)",
        select=("tests/memory/test_recompute.py::test_what_somebody_else_holds_is_not_freed_and_not_made_again",),
        reason="values are a view of what keys are made of",
    ),
    Bug(
        name="what waits on the host is read there",
        file="megatron_moe/memory/activation_offload.py",
        old="self._flat, self._copied = self._pool.reload(self._buffer, self._copied, self._device)",
        new="self._flat = self._buffer",
        select=(MOVED,),
        reason="the computation would read over the bus",
    ),
    Bug(
        name="pages of one layer are overwritten by the next",
        file="megatron_moe/kernels/reference_pages.py",
        old="pages.ends[0] += torch.where(fits, wanted, 0)",
        new="pages.ends[0] += 0",
        select=(PAGED, "tests/kernels/test_pages.py"),
        reason="gradients would be those of another layer's rows, and every number finite",
    ),
    Bug(
        name="rows that found no room come back as whatever was there",
        file="megatron_moe/kernels/reference_pages.py",
        old="masked_fill(lost, torch.nan)",
        new="masked_fill(lost, 0)",
        select=("tests/memory/test_paged_stash.py::test_a_step_whose_rows_find_no_room_is_refused_on_every_rank",),
        reason="the step would count as sound",
    ),
)
