"""An update rule for whole matrices: momentum, preconditioned by the covariance of the gradient's rows.

For a matrix with gradient G: M = beta M + G, L = L + G G^T, and the weights move by lr (L + eps)^-1 M. M has the shape
of the matrix, L [rows, rows]. AdamW updates embeddings, norms, biases and the output layer.
"""

import torch

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.registry import UPDATE_RULES
from megatron_moe.config.update_rules import StateSpec, UpdateRuleSpec
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.state import StepScalars, UpdateOperands


class PreconditionedMomentum:
    def __init__(self, config: OptimizerConfig, precision: PrecisionConfig) -> None:
        self.beta, self.eps = config.adam_beta1, 1e-2

    def step(self, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        lr, decay = scalars.lr_of(operands.buffer_key), scalars.weight_decay_of(operands.buffer_key)
        for param in operands.param_slices:
            master, momentum = operands.master(param), operands.values("momentum", param)
            grad = operands.grad(param).to(master.dtype) * scalars.grad_scale
            momentum = self.beta * momentum + grad
            whole = param.gathered(grad)
            covariance = operands.values("covariance", param) + whole @ whole.mT
            eye = torch.eye(whole.shape[-2], dtype=whole.dtype, device=whole.device)
            direction = torch.linalg.solve(covariance + self.eps * eye, param.gathered(momentum))
            new = master * (1 - lr * decay) - lr * param.shard_of(direction)
            operands.commit(scalars, param, new, momentum=momentum, covariance=covariance)


UPDATE_RULES.register(
    "preconditioned_momentum",
    UpdateRuleSpec(
        rule=PreconditionedMomentum,
        states=lambda config, precision: (
            StateSpec("momentum"),
            StateSpec("covariance", matrix_shape=lambda rows, columns: (rows, rows)),
        ),
        alignment="matrix",
        covers=lambda name, meta: meta.role == "matrix",
    ),
)
