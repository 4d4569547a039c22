"""AdamW with master weights (Loshchilov and Hutter, arXiv 1711.05101)."""

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.kernels.ops import AdamWState, AdamWStep, Kernels
from megatron_moe.optim.state import StepScalars, UpdateOperands
from megatron_moe.precision.optimizer_state import PackedState


class AdamW:
    """AdamW update rule: elementwise, with decoupled weight decay."""

    def __init__(self, config: OptimizerConfig, precision: PrecisionConfig) -> None:
        self._config = config

    def step(self, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        """Updates weights, master weights and moments of a range of elements in place (`UpdateRule.step`)."""
        key, stored, weights = operands.buffer_key, operands.stored, operands.weights
        step = AdamWStep(
            lr=scalars.lr_of(key),
            beta1=self._config.adam_beta1,
            beta2=self._config.adam_beta2,
            eps=self._config.adam_eps,
            weight_decay=scalars.weight_decay_of(key),
            step=scalars.step,
            grad_scale=scalars.grad_scale,
            apply_update=scalars.apply_update,
            nonfinite=scalars.nonfinite,
        )
        master, rounded = stored.master, weights
        if master is None:
            assert weights is not None, "neither weights nor master weights"
            master, rounded = PackedState("plain", weights), None
        exp_avg, exp_avg_sq = stored.states.values()
        if all(each.format == "plain" for each in (master, exp_avg, exp_avg_sq)):
            kernels.adamw_(master.data, operands.grads, exp_avg.data, exp_avg_sq.data, step, rounded)
        else:
            state = AdamWState(master, exp_avg, exp_avg_sq)
            kernels.adamw_packed_(state, operands.grads, step, rounded, operands.start)
