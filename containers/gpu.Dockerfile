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
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-venv python3-dev g++ git libaio-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/rhyme PATH=/opt/rhyme/bin:$PATH CUDA_HOME=/usr/local/cuda PIP_NO_CACHE_DIR=1
RUN python3 -m venv "$VIRTUAL_ENV"

# The slow part first, so that a change of our code does not compile flash-attn again. Jobs: each takes about 8 GB.
ARG MAX_JOBS=4
COPY pyproject.toml README.md LICENSE /src/
RUN pip install torch==2.13.0 packaging ninja wheel setuptools psutil numpy \
    && mkdir /src/rhyme_openrlhf \
    && touch /src/rhyme_openrlhf/__init__.py \
    && MAX_JOBS=$MAX_JOBS pip install --no-build-isolation "/src[gpu]" \
    && pip uninstall -y rhyme-openrlhf

COPY . /src
RUN pip install --no-deps /src

WORKDIR /workspace
CMD ["rhyme", "--help"]
