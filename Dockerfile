# syntax=docker/dockerfile:1
# Two images from one file:
#   docker build --target cpu  -t megatron-moe:cpu  .     tests and small runs on any machine
#   docker build --target cuda -t megatron-moe:cuda .     training on NVIDIA GPUs (the default target), with Transformer
#                                                         Engine, grouped_gemm, apex and DeepEP for Hopper
# Run:
#   docker run --rm megatron-moe:cpu --help moe
#   docker run --rm --entrypoint make megatron-moe:cpu check
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/runs:/project/runs" -v "$PWD/data:/project/data" \
#       megatron-moe:cuda --recipe quickstart              with the data that scripts/quickstart.sh made

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG CUDA_IMAGE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel

# --- the sources that both images install -------------------------------------------------------------------------
FROM scratch AS sources
WORKDIR /project
COPY setup.py pyproject.toml constraints.txt README.md pretrain_moe.py ./
COPY arguments ./arguments
COPY megatron_moe ./megatron_moe
COPY scripts ./scripts
COPY tools ./tools

# --- CPU: the tested set of versions, with what the tests need ----------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu
ARG TORCH_VERSION=2.13.0
RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /project
COPY --from=sources /project ./
# torch first and as its CPU build, so that nothing pulls the CUDA one
RUN pip install --no-cache-dir -c constraints.txt "torch==${TORCH_VERSION}+cpu" \
        --extra-index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir -c constraints.txt -e ".[test]"
# everything else: tests read the documents, the benchmarks, these images and the rest of the repository
COPY . ./
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["python", "pretrain_moe.py"]
CMD ["--help"]

# --- CUDA: kernel packages, built once against the torch of the base image -----------------------------------------
# DeepEP and apex come from source: the package index holds an obsolete and an unrelated program under their names.
FROM ${CUDA_IMAGE} AS kernels
ARG TE_VERSION=2.20.2
ARG GROUPED_GEMM_VERSION=0.3.0
ARG APEX_COMMIT=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4
ARG DEEPEP_TAG=v1.2.1
ARG TORCH_CUDA_ARCH_LIST="9.0"
ENV PIP_BREAK_SYSTEM_PACKAGES=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST} MAX_JOBS=8
RUN apt-get update && apt-get install -y --no-install-recommends git ninja-build && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir setuptools wheel pybind11 nvidia-nvshmem-cu13
WORKDIR /wheels
RUN pip wheel --no-cache-dir --no-build-isolation --no-deps "transformer-engine-torch==${TE_VERSION}"
RUN pip wheel --no-cache-dir --no-build-isolation --no-deps "grouped-gemm==${GROUPED_GEMM_VERSION}"
RUN git clone https://github.com/NVIDIA/apex /src/apex && git -C /src/apex checkout ${APEX_COMMIT} \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip wheel --no-cache-dir --no-build-isolation --no-deps /src/apex
RUN git clone --branch ${DEEPEP_TAG} https://github.com/deepseek-ai/DeepEP /src/DeepEP \
    && pip wheel --no-cache-dir --no-build-isolation --no-deps /src/DeepEP

# --- CUDA: the program --------------------------------------------------------------------------------------------
FROM ${CUDA_IMAGE} AS cuda
ARG TORCH_VERSION=2.11.0
ARG TE_VERSION=2.20.2
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /project
COPY --from=sources /project ./
COPY --from=kernels /wheels /wheels
# torch is the base image's: named again, so that nothing else brings another one
RUN pip install --no-cache-dir --no-build-isolation "torch==${TORCH_VERSION}" -e . \
    && pip install --no-cache-dir --find-links /wheels "transformer-engine[core-cu13,pytorch]==${TE_VERSION}" \
        nvidia-nvshmem-cu13 \
    && pip install --no-cache-dir --no-deps /wheels/*.whl \
    && rm -rf /wheels
# what is installed, in the build's log; without a GPU it cannot say more
RUN python tools/doctor.py --device cpu
ENTRYPOINT ["python", "pretrain_moe.py"]
CMD ["--help"]
