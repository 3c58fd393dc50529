# An image in which pretrain_scripts/pretrain_gpt.py runs, kernels compiled in:
#     docker build -t megatron_magi .
#     docker run --gpus all --ipc host -it megatron_magi
#     torchrun --nproc-per-node 8 pretrain_scripts/pretrain_gpt.py --config configs/llama3_2_1b_32k_8h100.yaml ...
# With layers of Transformer Engine, whose C++ is compiled (10 minutes on two cores, 2 GB a job):
#     docker build --build-arg TE_VERSION=2.20.2 --build-arg MAX_JOBS=8 -t megatron_magi:te .

FROM python:3.12-slim-bookworm AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Triton compiles a few lines of C when it first launches a kernel, torch.compile C++ for what runs on the CPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH

# What changes seldom: torch and Megatron, as uv.lock has them.
FROM base AS dependencies
ARG UV_VERSION=0.13.8
RUN pip install --no-cache-dir "uv==${UV_VERSION}"
ENV UV_PROJECT_ENVIRONMENT=/opt/venv UV_PYTHON=/usr/local/bin/python3.12 UV_PYTHON_DOWNLOADS=never \
    UV_SYSTEM_CERTS=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
WORKDIR /src
COPY pyproject.toml uv.lock ./
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --no-install-project --no-default-groups --extra megatron --extra hf

# Transformer Engine, where it is asked for. Its libraries come as a wheel, its binding to torch is compiled against the
# headers that torch's own packages bring and those of nvcc, of the same CUDA release.
FROM dependencies AS layers
ARG TE_VERSION=
ARG MAX_JOBS=2
RUN --mount=type=cache,target=/root/.cache/uv if [ -n "${TE_VERSION}" ]; then \
      site=/opt/venv/lib/python3.12/site-packages; \
      install() { uv pip install --python /opt/venv/bin/python "$@"; }; \
      install numpy setuptools wheel packaging ninja; \
      install --no-deps nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85; \
      export CUDA_HOME="${site}/nvidia/cu13" NVTE_WITH_NCCL_EP=0 NVTE_PYTORCH_FORCE_BUILD=TRUE; \
      export CPATH="${site}/nvidia/cu13/include:${site}/nvidia/cudnn/include:${site}/nvidia/nccl/include"; \
      install --no-build-isolation --no-deps "transformer_engine==${TE_VERSION}" \
        "transformer_engine_cu13==${TE_VERSION}" "transformer_engine_torch==${TE_VERSION}"; \
      install einops onnx onnxscript 'pydantic<2.14' importlib-metadata packaging nvdlfw-inspect; \
    fi

# What changes often: this package, with its kernels, and its planner, which is C++.
FROM dependencies AS package
COPY setup.py README.md LICENSE ./
COPY csrc csrc
COPY megatron_magi megatron_magi
RUN uv build --wheel --no-build-isolation --python /opt/venv/bin/python --out-dir /dist \
    && uv pip install --no-deps --python /opt/venv/bin/python --prefix /package /dist/*.whl \
    && test -x /package/bin/magi && installed=/package/lib/python3.12/site-packages/megatron_magi \
    && test -d "$installed/prebuilt" && ls "$installed"/plan/_solver*.so "$installed"/backends/tiles/_tiles*.so \
        "$installed"/cuda/_calls*.so

FROM base
RUN useradd --create-home --uid 1000 magi
COPY --from=layers /opt/venv /opt/venv
COPY --from=package /package /opt/venv
WORKDIR /workspace
RUN chown magi:magi /workspace
COPY pretrain_scripts pretrain_scripts
COPY configs configs
# Transformer Engine would take any other cuDNN of the system first.
ENV CUDNN_HOME=/opt/venv/lib/python3.12/site-packages/nvidia/cudnn
USER 1000
CMD ["bash"]
