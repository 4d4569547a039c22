"""Pipeline-parallel flags."""

from dataclasses import dataclass

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class PipelineFlags:
    """Assignment of layers to pipeline stages, and schedule."""

    pipeline_model_parallel_size: int = flag(1, least=1)
    """Pipeline-parallel size: ranks that divide the layers."""
    pipeline_model_parallel_layout: str | None = flag(
        None, status="close", note="`auto` is an addition: it computes a layout that balances FLOPs"
    )
    """Layers of each stage, written as in Et*3|(tt|)*29m|L, or `auto`."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, least=1)
    """Layers per virtual stage."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, least=1)
    """Virtual stages per rank."""
    decoder_first_pipeline_num_layers: int | None = flag(None, least=0)
    """Layers of the first rank; the other ranks divide the rest."""
    decoder_last_pipeline_num_layers: int | None = flag(None, least=0)
    """Layers of the last rank; the other ranks divide the rest."""
    account_for_embedding_in_pipeline_split: bool = flag(False)
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = flag(False)
    """Count the output layer and loss as a layer of the last stage."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(None, least=1)
    """Consecutive microbatches per virtual stage. Not set: the pipeline-parallel size."""
