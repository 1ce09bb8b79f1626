# The gateway: no PyTorch, no model. Build from the repository's root.
FROM python:3.11-slim-bookworm AS build
RUN python -m venv /opt/tidegate
WORKDIR /src
# Dependencies first: they change less often than the code.
COPY pyproject.toml requirements.lock README.md ./
RUN /opt/tidegate/bin/pip install --no-cache-dir --disable-pip-version-check -c requirements.lock '.[gateway]'
COPY protos protos
COPY common common
COPY gateway gateway
RUN /opt/tidegate/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --force-reinstall . \
    && /opt/tidegate/bin/pip uninstall --yes --quiet pip setuptools

FROM python:3.11-slim-bookworm
RUN groupadd --gid 10001 tidegate && useradd --uid 10001 --gid tidegate --no-create-home --home-dir /nonexistent tidegate
COPY --from=build /opt/tidegate /opt/tidegate
ENV PATH=/opt/tidegate/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TIDEGATE_GATEWAY_LISTEN=0.0.0.0:50051 \
    TIDEGATE_GATEWAY_METRICS_LISTEN=0.0.0.0:9464
USER tidegate
WORKDIR /tmp
EXPOSE 50051 9464
# SERVING once the queue's store answers and a worker is ready.
HEALTHCHECK --interval=2s --timeout=5s --start-period=60s --retries=5 \
    CMD ["python", "-m", "common.rpc.probe", "127.0.0.1:50051"]
ENTRYPOINT ["python", "-m", "gateway"]
