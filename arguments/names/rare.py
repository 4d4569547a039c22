"""Megatron-LM's flags for what this program does not do: known, so that a command line that has one is told why.

They are no flags here: there is a sentence for each, made from its topic, and nothing more.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RareName:
    """Why a flag of Megatron-LM is refused."""

    reason: str
    """Completes "--flag ..." and says what to use."""
    harmless: bool
    """Leaving it out changes no number."""


def rare_name(option: str) -> RareName | None:
    """What is known about an option of Megatron-LM that has no meaning here; None if it is none of these."""
    for topic in _TOPICS:
        if option in topic.names.split():
            return RareName(topic.reason, topic.harmless)
    return None


def is_rare_switch_off(option: str) -> bool:
    """Does it switch off what is not there anyway?"""
    return option.startswith("--no-") and rare_name("--" + option.removeprefix("--no-")) is not None


def rare_names() -> Iterator[tuple[str, RareName]]:
    """All of them, by topic."""
    for topic in _TOPICS:
        for name in topic.names.split():
            yield name, RareName(topic.reason, topic.harmless)


@dataclass(frozen=True)
class _Topic:
    reason: str
    harmless: bool
    names: str


_TOPICS = (
    _Topic(
        "belongs to reinforcement learning; this program pretrains",
        False,
        """
        --perform-rl-step --rl-prompts-per-eval --grpo-prompts-per-step --grpo-group-size --rl-generation-lag
        --rl-max-inflight-requests --rl-submission-granularity --rl-consumption-granularity
        --rl-durable-rollout-bank --rl-rollout-bank-dir --rl-rollout-bank-max-bytes --grpo-iterations
        --grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-kl-beta --grpo-entropy-term-weight
        --grpo-filter-groups-with-same-reward --langrl-env-config --rl-default-temperature --rl-default-top-p
        --rl-default-top-k --rl-offload-optimizer-during-inference --rl-kv-cache-management-mode
        --rl-persist-cuda-graphs --rl-partial-rollouts --rl-inference-logprobs-is-correction
        --rl-importance-sampling-truncation-coef --rl-use-sequence-packing
        --rl-sequence-packing-max-sequences-per-bin --rl-sequence-packing-algo --rl-training-cuda-graphs
        --rl-inference-tensor-model-parallel-size --rl-inference-pipeline-model-parallel-size
        --rl-inference-expert-model-parallel-size --rl-inference-expert-tensor-model-parallel-size
        --rl-inference-model-unified-memory-level --rl-offload-inference-model-weights-when-idle --refit-method
        --rl-verify-model-weights-swap --rl-skip-bos-token --rl-profile --rl-profile-dir --rl-inference-parsers
        """,
    ),
    _Topic(
        "concerns inference; save the weights for Hugging Face and serve those",
        True,
        """
        --inference-cuda-graph-scope --flash-decode --nccl-all-reduce-for-prefill
        --inference-fuse-tp-communication --inference-disable-triton-nvls-kernels
        --inference-grouped-gemm-backend --inference-moe-disable-fused-quant-kernels
        --inference-moe-token-dispatcher-type --mlp-chunks-for-prefill --inference-rng-tracker
        --inference-batch-times-seqlen-threshold --max-tokens-to-oom --output-bert-embeddings
        --bert-embedder-type --use-legacy-static-engine --inference-max-requests --inference-max-seq-length
        --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb
        --inference-dynamic-batching-paused-buffer-size-gb --inference-dynamic-batching-mamba-memory-ratio
        --inference-dynamic-batching-block-size --inference-dynamic-batching-max-requests
        --inference-dynamic-batching-max-tokens --inference-dynamic-batching-num-cuda-graphs
        --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs
        --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens
        --inference-dynamic-batching-unified-memory-level --enable-chunked-prefill --num-speculative-tokens
        --inference-dynamic-batching-prefix-caching --inference-dynamic-batching-prefix-caching-eviction-policy
        --inference-dynamic-batching-prefix-caching-coordinator-policy
        --inference-dynamic-batching-prefix-caching-routing-alpha
        --inference-dynamic-batching-prefix-caching-mamba-gb
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count
        --inference-dynamic-batching-cuda-graph-sizing-distribution
        --inference-dynamic-batching-sampling-backend --use-same-sampling-seed-across-dp-ranks
        --inference-dynamic-batching-async-sched-mode --inference-dynamic-batching-logprobs-mode
        --inference-logging-step-interval --inference-text-gen-server-logging --inference-wandb-logging
        --inference-coordinator-port --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype
        --inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus --inference-shards
        --inference-dynamic-batching-cuda-graph-max-tokens
        """,
    ),
    _Topic(
        "belongs to vision models; this program trains language models",
        False,
        """
        --num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction --data-per-class-fraction
        --no-data-sharding --head-lr-mult --vision-pretraining --vision-pretraining-type --vision-backbone-type
        --swin-backbone-type --mask-type --mask-factor --iter-per-epoch --dino-local-img-size
        --dino-local-crops-number --dino-head-hidden-size --dino-bottleneck-size --dino-freeze-last-layer
        --dino-norm-last-layer --dino-warmup-teacher-temp --dino-teacher-temp --dino-warmup-teacher-temp-epochs
        """,
    ),
    _Topic(
        "belongs to BERT and retrieval models; this program trains causal language models",
        False,
        """
        --bert-no-binary-head --sample-rate --mask-prob --short-seq-prob --ict-head-size
        --biencoder-projection-dim --biencoder-shared-query-context-model --ict-load --bert-load
        --titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path
        --retriever-report-topk-accuracies --retriever-score-scaling --block-data-path --embedding-path
        --indexer-batch-size --indexer-log-interval
        """,
    ),
    _Topic(
        "belongs to distillation and quantised export; train here and do that with another program",
        False,
        """
        --logits-save-top-k --logits-save-top-p --logits-save-top-p-min-k --logits-save-dir --logits-save-dtype
        --logits-load-dir --logits-load-decode-threads --logits-load-prefetch-factor
        --logits-load-msc-prefetch-depth --logits-load-kd-loss-alpha --logits-load-ignore-errors
        --export-model-type --export-legacy-megatron --export-te-mcore-model --export-default-te-spec
        --export-kv-cache-quant --export-real-quant-cfg --export-quant-cfg --export-kd-teacher-load
        --export-kd-teacher-model-config --export-kd-teacher-ckpt-format --export-kd-cfg --finetune-hf-dataset
        --finetune-data-split --finetune-data-files --qad-train-target --freeze-base-for-mtp --export-qk-l2-norm
        --export-moe-apply-probs-on-input --export-offline-model --modelopt-enabled
        """,
    ),
    _Topic(
        "belongs to fine-tuning data; prepare documents with tools/preprocess_data.py and give --data-path",
        False,
        """
        --phase-transition-iterations --per-dataset-sequences-path --allow-ambiguous-pad-tokens --fim-data
        --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix --fim-prefix-token
        --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token --vocab-extra-ids --chat-template
        --sft --sft-tokenizer-prompt-format --sft-mock-dataset-config-json --use-varlen-dataset
        --varlen-sbhd-validation --varlen-mock-dataset-config-json
        """,
    ),
    _Topic(
        "belongs to packed fine-tuning data; --dataloader-inter-document-masking packs pretraining documents",
        False,
        """
        --min-dynamic-context-parallel-size --sequence-packing-scheduler --pad-packed-seq-alignment
        --thd-tail-padding-policy --thd-max-packed-sequences
        """,
    ),
    _Topic(
        "belongs to object storage; copy the files to a disk",
        True,
        """
        --object-storage-cache-path --enable-msc --disable-msc
        """,
    ),
    _Topic(
        "changes how a tokenizer cuts text; make that choice in the tokenizer's own files",
        False,
        """
        --tokenizer-metadata --tokenizer-sentencepiece-legacy
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-include-special-tokens
        --use-gigatoken
        """,
    ),
    _Topic(
        "does not exist; evaluations use the training batch, see --eval-interval and --eval-iters",
        False,
        """
        --start-eval-at-iter --eval-global-batch-size --eval-micro-batch-size
        """,
    ),
    _Topic(
        "belongs to a kind of layer that does not exist; layers are attention and feed-forward blocks",
        False,
        """
        --mtp-standalone --mtp-hsm --mtp-hybrid-override-pattern --dsa-indexer-topk-freq
        --dsa-indexer-skip-topk-offset --dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation
        --disable-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu --disable-dsa-indexer-scoring-relu
        --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32 --mhc-init-gating-factor --mrope-section
        --gdp-num-householder --relative-attention-num-buckets --relative-attention-max-distance
        --freeze-all-layers --mamba-training-ssm-states-dtype --heterogeneous-layers-config-path
        --heterogeneous-layers-config-encoded-json --rotary-base-per-layer --head-wise-attn-gate
        --csa-dense-mode --mrope-interleaved
        """,
    ),
    _Topic(
        "belongs to maximal-update parametrisation; choose --init-method-std and --lr for the width",
        False,
        """
        --use-mup --mup-width-mult --mup-base-hidden-size --mup-embedding-mult --mup-output-mult
        --mup-base-head-dim --mup-attn-scale-power
        """,
    ),
    _Topic(
        "belongs to an optimizer that does not exist; use --optimizer adam",
        False,
        """
        --sgd-momentum --lion-beta1 --lion-beta2
        """,
    ),
    _Topic(
        "splits weights over more ranks than compute; use --tensor-model-parallel-size",
        False,
        """
        --tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards
        --gtp-remat-opt-in-modules --gtp-remat-reduce-scatter-with-fp32-accumulation --gtp-remat-nccl-ub
        --gtp-expert-remat-nccl-ub
        """,
    ),
    _Topic(
        "belongs to sharded parameters; use --use-distributed-optimizer",
        True,
        """
        --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load --megatron-fsdp-version
        --disable-symmetric-registration --fsdp-manual-registration --create-all-gather-group
        --keep-fp8-transpose-cache --enable-full-sharding-in-hsdp --torch-fsdp2-no-reshard-after-forward
        --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
        --fsdp-db-use-persist-buf-on-alloc-fail --disable-grad-buffers-cpu-backup
        --disable-param-buffers-cpu-backup --megatron-fsdp-prefetch-recompute-forward-weights
        --megatron-fsdp-cache-param-bucket-views
        """,
    ),
    _Topic(
        "sends rows in low precision; they travel in the format of the activations",
        False,
        """
        --moe-dispatch-fwd-dtype --moe-combine-bwd-dtype
        """,
    ),
    _Topic(
        "belongs to a library of number formats that is not supported; use --bf16",
        False,
        """
        --fp8-quantizer-factory --use-kitchen-attention --kitchen-attention-backend --fp4-quantizer-factory
        --kitchen-config-file --kitchen-recipe-number
        """,
    ),
    _Topic(
        "chooses the format of single gradients; all accumulate in fp32 unless --grad-reduce-in-bf16",
        False,
        """
        --ddp-param-name-patterns-for-fp32-local-accumulation
        """,
    ),
    _Topic(
        "makes results independent of the batch; --deterministic-mode repeats them bit for bit",
        False,
        """
        --batch-invariant-mode
        """,
    ),
    _Topic(
        "belongs to loss scaling for fp16; use --bf16, which needs none",
        True,
        """
        --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis
        """,
    ),
    _Topic(
        "injects faults for tests; leave it out",
        False,
        """
        --error-injection-rate --error-injection-type --fault-injector-ranks --fault-injector-num-ranks
        --fault-injector-fault-types --fault-injector-fault-probabilities --fault-injector-fault-delay
        --fault-injector-delay-start-iteration --fault-injector-mtti-seconds --fault-injector-offset-seconds
        --fault-injector-seed
        """,
    ),
    _Topic(
        "belongs to restarts and health checks of another program; let the launcher start the run again",
        True,
        """
        --gpu-sniff-test-interval --exit-signal-handler-for-dataloader --exit-signal-handler-for-training
        --result-rejected-tracker-filename --flight-recorder-dump-path --flight-recorder-trace-buffer-size
        --no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout
        --flight-recorder-include-stack-trace --no-flight-recorder-include-only-active
        --disable-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec
        --disable-flight-recorder-extra-dump-on-exec --test-mode --adlr-autoresume --adlr-autoresume-interval
        --inprocess-restart --inprocess-max-iterations --inprocess-monitor-thread-interval
        --inprocess-monitor-process-interval --inprocess-progress-watchdog-interval
        --inprocess-heartbeat-interval --inprocess-soft-timeout --inprocess-hard-timeout
        --inprocess-heartbeat-timeout --inprocess-barrier-timeout --inprocess-completion-timeout
        --inprocess-last-call-wait --inprocess-termination-grace-time --inprocess-granularity
        --inprocess-active-world-size --inprocess-empty-cuda-cache --enable-ft-package --calc-ft-timeouts
        --ft-num-warmup-iters
        """,
    ),
    _Topic(
        "belongs to checkpoint formats of another program; there is one format here, which needs no settings",
        True,
        """
        --non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --use-mp-args-from-checkpoint-args
        --no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args
        --ckpt-convert-update-legacy-dist-opt-format --async-ckpt-cpu-priority --async-ckpt-io-priority
        --ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-save-process-group
        --ckpt-fully-parallel-load-process-group --ckpt-pg-tensors-cache-path --ckpt-pg-tensors-cache-create
        --dist-ckpt-save-pre-mcore-014 --distrib-optim-fully-reshardable-mem-efficient
        --no-save-tokenizer-assets --disable-save-tokenizer-assets --replication --replication-jump
        --replication-factor --dist-ckpt-workers
        """,
    ),
    _Topic(
        "writes internal tensors to files; see --log-params-norm and --moe-per-layer-logging",
        True,
        """
        --save-params-interval --save-activations-interval --save-wgrads-interval --save-dgrads-interval
        --moe-routing-trace-max-training-iters --moe-routing-trace-capture-logits
        --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
        """,
    ),
    _Topic(
        "belongs to a logger that does not exist; see --tensorboard-dir, --wandb-project and metrics.jsonl",
        True,
        """
        --config-logger-dir --dump-param-to-param-group-map --validation-set-names --otel-enabled
        --otel-service-name --otel-span-groups --straggler-ctrlr-port
        --disable-straggler-on-startup --no-one-logger --one-logger-project --one-logger-run-name
        --one-logger-async --app-tag-run-name --app-tag-run-version --log-moe-overload-factor
        """,
    ),
    _Topic(
        "belongs to a profiler setting that does not exist; see --profile",
        True,
        """
        --pytorch-profiler-collect-chakra --record-shapes --run-workload-inspector-server
        """,
    ),
    _Topic(
        "tunes a kernel or library that is not used; leave it out",
        True,
        """
        --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad
        --disable-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag
        --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --no-tp-comm-split-ag
        --disable-tp-comm-split-ag --no-tp-comm-split-rs --disable-tp-comm-split-rs --tp-comm-bootstrap-backend
        --use-ring-exchange-p2p --cpu-offloading-retain-pinned-cpu-buffers --flash-attention-version
        --dsa-kernel-backend --fp8-interval --use-grouped-gemm-for-shared-expert
        --moe-shared-expert-glu-interleave-size --use-grouped-gemm-for-dense-mlp
        --moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute
        --moe-hybridep-num-sms-preprocessing --moe-ncclep-zero-copy --mhc-recompute-layer-num
        --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding
        --batch-invariant-backend --symmetric-ar-type --disable-mamba-mem-eff-path --gdp-cutedsl-kernel
        --gdp-num-chunk-states-to-recompute --mlp-chunks-for-training --onnx-safe --muon-fp32-matmul-prec
        --muon-use-syrk --optimizer-cuda-graph --lazy-mpu-init --use-sharp --sharp-enabled-group
        --disable-jit-fuser --no-gradient-reduce-div-fusion --cp-partition-mode
        --gdn-pre-gated-delta-rule-fusion --gdn-conv-pad-alignment --dense-grouped-gemm
        --moe-hybridep-pad-variable-tokens --moe-ncclep-static-shape --moe-ncclep-use-symm-mem --linear-cp-mode
        --cuda-graph-dynamic-microbatches --fallback-to-eager-attn --no-dsa-kernel-fusion
        """,
    ),
)
