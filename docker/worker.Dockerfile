# The worker, with the default model and compiled kernels inside. Build from the repository's root.
# Where pip would take a PyTorch with GPU libraries, pass the index of its CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/tidegate
WORKDIR /src
COPY pyproject.toml requirements.lock README.md ./
# What PyTorch brings for building and testing extensions is not needed to run it: a tenth of the image.
RUN /opt/tidegate/bin/pip install --no-cache-dir --disable-pip-version-check -c requirements.lock '.[worker]' \
    && cd /opt/tidegate/lib/python3.11/site-packages/torch && rm -rf test include \
    && find bin -type f ! -name torch_shm_manager -delete
# The model before the code, which changes more often; only this module is needed to fetch it.
COPY common/__init__.py common/default_model.py /fetch/common/
RUN cd /fetch && /opt/tidegate/bin/python -c \
    "from pathlib import Path; from common.default_model import ensure_default_model as fetch; fetch(Path('/opt/model'), print)" \
    && rm -f /opt/model/*.lock
COPY protos protos
COPY common common
COPY worker worker
RUN /opt/tidegate/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --force-reinstall . \
    && /opt/tidegate/bin/pip uninstall --yes --quiet pip setuptools

FROM python:3.11-slim-bookworm
RUN groupadd --gid 10001 tidegate && useradd --uid 10001 --gid tidegate --no-create-home --home-dir /nonexistent tidegate
COPY --from=build /opt/model /opt/model
COPY --from=build /opt/tidegate /opt/tidegate
ENV PATH=/opt/tidegate/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/opt/kernels \
    TIDEGATE_CACHE_DIR=/opt/model \
    TIDEGATE_WORKER_LISTEN=0.0.0.0:50052 \
    TIDEGATE_WORKER_METRICS_LISTEN=0.0.0.0:9465
# Compiled kernels are kept for the kind of CPU that builds the image; another kind compiles its own at start.
RUN mkdir -p /opt/kernels && python -c \
    "from worker.app import load_engine; from worker.config import WorkerSettings; load_engine(WorkerSettings(kv_cache_mib=64))" \
    && chown -R tidegate:tidegate /opt/kernels
USER tidegate
WORKDIR /tmp
EXPOSE 50052 9465
# SERVING once the model is loaded and warmed up.
HEALTHCHECK --interval=2s --timeout=5s --start-period=180s --retries=5 \
    CMD ["python", "-m", "common.rpc.probe", "127.0.0.1:50052"]
ENTRYPOINT ["python", "-m", "worker"]
