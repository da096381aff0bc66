# Two images, for every architecture that they are built for: `operator`, the default, runs operator, webhook, controllers
# and agents; `agent` runs agents alone, which every training node pulls, without the Kubernetes client.
#
#   docker buildx build --platform linux/amd64,linux/arm64 --tag REGISTRY/sftriage:0.1.0 --push .
#   docker buildx build --platform linux/amd64,linux/arm64 --tag REGISTRY/sftriage-agent:0.1.0 --target agent --push .
#
# Each has a list of what it contains, /opt/sftriage/sbom.cdx.json. BASE is an index of both architectures; after
# `docker buildx imagetools inspect python:3.12-slim-bookworm`, replace its digest.
ARG BASE=python:3.12.14-slim-bookworm@sha256:a116514e19457bcb7af7efe9c3dd0b9b71e85b317694e7882a1c52aa15a78134

# Every stage that runs a program runs on the building machine, whatever the image is for: nothing is emulated.
FROM --platform=$BUILDPLATFORM ${BASE} AS wheel
# hadolint ignore=DL3008,DL3009 # no image keeps it, and Debian soon drops a version of it
RUN apt-get update && apt-get install --yes --no-install-recommends binutils-multiarch
WORKDIR /src
COPY release/requirements.txt release/
RUN python -m venv /tools && /tools/bin/python -m pip install --no-cache-dir --constraint release/requirements.txt \
      build cyclonedx-bom hatchling ziglang
COPY . .
ARG TARGETARCH
RUN /tools/bin/python release/wheels.py --only $TARGETARCH --out /wheels

FROM wheel AS operator-venv
RUN /tools/bin/python release/image.py /wheels/*.whl k8s,nats,store,metrics,otel,stacks,nvml /opt/sftriage && \
    /opt/sftriage/bin/python -m compileall -q /opt/sftriage/lib

FROM wheel AS agent-venv
# Keeps what an agent may import, and no byte code, so that a start takes 0.8 s longer.
RUN /tools/bin/python release/image.py /wheels/*.whl agent /opt/sftriage && \
    find /opt/sftriage/lib -depth -regextype egrep \( -regex '.*/(tests|f2py|distutils|pydantic/v1|.*\.(pyi|pxd|h|a))' \
      -o -regex '.*/numpy/(fft|polynomial|random|testing|_core/_.*(simd|tests)\..*)' \
      -o -path '*/pygments/lexers/*.py' ! -regex '.*/(__init__|_mapping|python|special)\.py' \) -exec rm -r {} +

# Nothing is written outside of volumes, whatever the user.
# hadolint ignore=DL3065 # Debian 12's buildah otherwise uses that of the first stage
FROM --platform=$TARGETPLATFORM ${BASE} AS base
ENV PATH=/opt/sftriage/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /
USER 65532:65532
ENTRYPOINT ["sftriage"]

FROM base AS agent
COPY --from=agent-venv /opt/sftriage /opt/sftriage

FROM base AS operator
COPY --from=operator-venv /opt/sftriage /opt/sftriage
