# The image of operator, webhook, controllers and agents, for every architecture that it is built for:
#
#   docker buildx build --platform linux/amd64,linux/arm64 --tag REGISTRY/sftriage:0.1.0 --push \
#     --build-arg BASE=python:3.12-slim-bookworm@sha256:... .
#
# Pin BASE by its digest, which `docker buildx imagetools inspect python:3.12-slim-bookworm` prints: it is not here, for
# a digest that was not looked up is worse than none. Each platform's image has the recorder's writer for it.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
# For agents alone, nats,store,stacks,nvml is enough (docs/kubernetes.md).
ARG EXTRAS=k8s,nats,store,metrics,otel,stacks,nvml
# hadolint ignore=DL3008 # of the compiler nothing stays, and a version of it is not kept by Debian for long
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY . .
RUN SFTRIAGE_COMPILE=1 python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
RUN python -m venv --without-pip /opt/sftriage && python -m pip --python /opt/sftriage/bin/python install --no-cache-dir \
      --constraint constraints.txt "$(ls /wheels/sftriage-*.whl)[$EXTRAS]"

FROM ${BASE}
COPY --from=build /opt/sftriage /opt/sftriage
# Nothing is written outside of volumes, whatever the user.
ENV PATH=/opt/sftriage/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /
USER 65532:65532
ENTRYPOINT ["sftriage"]
