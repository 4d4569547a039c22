"""Stand-ins for the functions of Transformer Engine's extension module that its Python code calls."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):  # noqa: A002
    assert input.ndim == 2 and input.is_contiguous() and len(input) and ln_out is None and quantizer is None
    scale = (input.float().pow(2).mean(dim=1) + eps).rsqrt()
    factor = weight.float() + float(zero_centered_gamma)
    return (input.float() * scale[:, None] * factor).to(input.dtype), None, scale


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    assert dz.is_contiguous() and x.is_contiguous() and dz.shape == x.shape
    x_hat = x.float() * rsigma[:, None]
    grad = dz.float() * (gamma.float() + float(zero_centered_gamma))
    grad_x = rsigma[:, None] * (grad - x_hat * (grad * x_hat).mean(dim=1, keepdim=True))
    return grad_x.to(x.dtype), (dz.float() * x_hat).sum(dim=0).to(gamma.dtype)


def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):  # noqa: A002
    assert input.ndim == 2 and input.is_contiguous() and len(input) and ln_out is None and quantizer is None
    mean = input.float().mean(dim=1)
    scale = (input.float().var(dim=1, correction=0) + eps).rsqrt()
    factor = weight.float() + float(zero_centered_gamma)
    out = (input.float() - mean[:, None]) * scale[:, None] * factor + bias.float()
    return out.to(input.dtype), mean, scale


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    assert dz.is_contiguous() and x.is_contiguous() and dz.shape == x.shape
    x_hat = (x.float() - mu[:, None]) * rsigma[:, None]
    grad = dz.float() * (gamma.float() + float(zero_centered_gamma))
    inner = grad - grad.mean(dim=1, keepdim=True) - x_hat * (grad * x_hat).mean(dim=1, keepdim=True)
    grad_gamma = (dz.float() * x_hat).sum(dim=0).to(gamma.dtype)
    return (inner * rsigma[:, None]).to(x.dtype), grad_gamma, dz.float().sum(dim=0).to(gamma.dtype)


def swiglu(input: Tensor, quantizer: object) -> Tensor:  # noqa: A002
    assert input.is_contiguous() and quantizer is None
    gate, up = input.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(input.dtype)


def dswiglu(grad: Tensor, fwd_input: Tensor, quantizer: object) -> Tensor:
    assert grad.is_contiguous() and fwd_input.is_contiguous() and quantizer is None
    leaf = fwd_input.detach().float().requires_grad_()
    with torch.enable_grad():
        gate, up = leaf.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return torch.autograd.grad(out, leaf, grad.float())[0].to(fwd_input.dtype)


def quantize(tensor: Tensor, quantizer, output=None, noop=None):
    assert tensor.ndim == 2 and tensor.is_contiguous() and tensor.numel() and output is None and noop is None
    return quantizer.quantize_impl(tensor)
