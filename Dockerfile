# The gateway alone: no compiler, no test tools, no embedded PostgreSQL, not root.
# Health is asked over HTTP (/healthz, /readyz on the monitor listener), so there is no HEALTHCHECK.

FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m venv /opt/gateway
ENV PATH=/opt/gateway/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements.lock ./
RUN pip install --require-hashes --only-binary=:all: --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
RUN pip install --no-deps . && python -m compileall -q /opt/gateway/lib

FROM python:3.11-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin gateway
COPY --from=build /opt/gateway /opt/gateway
ENV PATH=/opt/gateway/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /etc/gateway
EXPOSE 8080 9090
ENTRYPOINT ["idempotency-gateway"]
CMD ["serve", "/etc/gateway/gateway.yaml"]
