"""torch's dtypes under Transformer Engine's names."""

import torch

TE_DType = {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16", torch.int64: "kInt64", torch.int32: "kInt32"}
