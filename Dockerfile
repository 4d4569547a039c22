# syntax=docker/dockerfile:1
# Two images from one file:
#   docker build --target cpu  -t megatron-moe:cpu  .     tests and small runs on any machine
#   docker build --target cuda -t megatron-moe:cuda .     training on NVIDIA GPUs (the default target)
# Run:
#   docker run --rm megatron-moe:cpu --help moe
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/runs:/project/runs" megatron-moe:cuda --recipe quickstart

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

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
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /project
COPY --from=sources /project ./
# torch first and as its CPU build, so that nothing pulls the CUDA one
RUN pip install --no-cache-dir -c constraints.txt "torch==${TORCH_VERSION}+cpu" \
        --extra-index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir -c constraints.txt -e ".[test]"
COPY tests ./tests
COPY Makefile ./
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["python", "pretrain_moe.py"]
CMD ["--help"]

# --- CUDA: torch for CUDA 13, a compiler for Triton and for kernel packages ---------------------------------------
FROM ${CUDA_IMAGE} AS cuda
ARG TORCH_VERSION=2.11.0
ARG EXTRAS=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV
WORKDIR /project
COPY --from=sources /project ./
# EXTRAS="[te]" adds Transformer Engine; it is built against the torch that is already there
RUN pip install --no-cache-dir setuptools wheel \
    && pip install --no-cache-dir "torch==${TORCH_VERSION}+cu130" \
        --extra-index-url https://download.pytorch.org/whl/cu130 \
    && pip install --no-cache-dir --no-build-isolation -e ".${EXTRAS}"
ENTRYPOINT ["python", "pretrain_moe.py"]
CMD ["--help"]
