"""Stand-in for Transformer Engine's attention module, computed by torch, and for its quantized tensors."""

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch.constants import DType as DType
from transformer_engine.pytorch.tensor import Float8BlockQuantizer as Float8BlockQuantizer
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensorStorage as Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor import Float8Quantizer as Float8Quantizer
from transformer_engine.pytorch.tensor import Float8TensorStorage as Float8TensorStorage
from transformer_engine.pytorch.tensor import MXFP8Quantizer as MXFP8Quantizer
from transformer_engine.pytorch.tensor import MXFP8TensorStorage as MXFP8TensorStorage
from transformer_engine.pytorch.tensor import NVFP4Quantizer as NVFP4Quantizer
from transformer_engine.pytorch.tensor import NVFP4TensorStorage as NVFP4TensorStorage


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert qkv_format == "sbhd" and attn_mask_type == "causal" and attention_dropout == 0.0
        assert num_gqa_groups is None or num_attention_heads % num_gqa_groups == 0
        self.num_heads, self.widths, self.groups = num_attention_heads, kv_channels, num_gqa_groups
        self.window, self.scale = window_size, softmax_scale

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> Tensor:
        assert query_layer.shape[2] == self.num_heads and key_layer.shape[2] == self.groups
        assert (query_layer.shape[3], value_layer.shape[3]) == self.widths
        size = len(query_layer)
        visible = torch.ones(size, size, dtype=torch.bool).tril()
        if self.window is not None and self.window[0] >= 0:
            visible &= torch.ones(size, size, dtype=torch.bool).triu(-self.window[0])
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)
