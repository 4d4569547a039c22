"""Pipeline stages and the order of their work."""

from dataclasses import dataclass

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class PipelineFlags:
    """How layers are spread over pipeline stages."""

    pipeline_model_parallel_size: int = flag(1, least=1)
    """Ranks that split the layers."""
    pipeline_model_parallel_layout: str | None = flag(
        None, status="close", note="`auto` besides a layout writes one that balances floating-point operations"
    )
    """Layers of every stage, written like Et*3|(tt|)*29m|L, or `auto`."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, least=1)
    """Layers of a virtual stage."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, least=1)
    """Virtual stages of a rank."""
    decoder_first_pipeline_num_layers: int | None = flag(None, least=0)
    """Layers of the first rank; the others share the rest."""
    decoder_last_pipeline_num_layers: int | None = flag(None, least=0)
    """Layers of the last rank; the others share the rest."""
    account_for_embedding_in_pipeline_split: bool = flag(False)
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = flag(False)
    """Count head and loss as a layer of the last stage."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(None, least=1)
    """Microbatches that a virtual stage takes in a row. Not set: the number of pipeline ranks."""
