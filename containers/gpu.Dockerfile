# rhyme-openrlhf for NVIDIA GPUs: OpenRLHF 0.11.2's own pins (vLLM 0.29.0, torch 2.13.0 for CUDA 13.0).
#
#   docker build -f containers/gpu.Dockerfile -t rhyme-openrlhf .
#   docker run --gpus all --ipc=host -v "$PWD/data:/data" rhyme-openrlhf rhyme verify
#
# --ipc=host, or --shm-size of at least two copies of the model's weights: weight versions and draft indexes go through
# /dev/shm, and Docker's default is 64 MB. Not built or run by us yet: no GPU machine was at hand.
#
# "devel" because flash-attn is compiled against nvcc and torch when it is installed.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# libnuma1: vLLM. git: run directories record the versions of what runs. libaio-dev: DeepSpeed's offload to disk.
# wget: KubeRay asks by it whether Ray's head and workers live.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-venv python3-dev g++ git libaio-dev libnuma1 wget \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/rhyme PATH=/opt/rhyme/bin:$PATH CUDA_HOME=/usr/local/cuda PIP_NO_CACHE_DIR=1
RUN python3 -m venv "$VIRTUAL_ENV"

# What flash-attn, DeepSpeed and our C++ core are built with, before what needs it: pip asks flash-attn for its
# requirements before it installs anything, and its setup.py imports torch, packaging and wheel; psutil counts its jobs.
RUN pip install torch==2.13.0 packaging ninja wheel "setuptools>=77" psutil numpy "pybind11>=3.0"

# The slow part before our code, so that a change of ours does not compile flash-attn again. Jobs: each takes about 8 GB.
# Architectures: 80 A100, 90 H100 and H200, 100 B200, 120 RTX 50; each one more takes as long again.
ARG MAX_JOBS=4
ARG FLASH_ATTN_CUDA_ARCHS=80;90
COPY pyproject.toml /src/
RUN python3 -c 'import tomllib; p = tomllib.load(open("/src/pyproject.toml", "rb"))["project"]; \
print(*p["dependencies"], *p["optional-dependencies"]["gpu"], sep="\n")' > /tmp/requirements.txt \
    && MAX_JOBS="$MAX_JOBS" FLASH_ATTN_CUDA_ARCHS="$FLASH_ATTN_CUDA_ARCHS" \
        pip install --no-build-isolation -r /tmp/requirements.txt

COPY . /src
RUN pip install --no-deps --no-build-isolation /src

WORKDIR /workspace
CMD ["rhyme", "--help"]
