# Two images, for every architecture that they are built for: `operator`, the default, runs operator, webhook, controllers
# and agents; `agent` runs agents alone, which every training node pulls, without the Kubernetes client.
#
#   docker buildx build --platform linux/amd64,linux/arm64 --tag REGISTRY/sftriage:0.1.0 --push .
#   docker buildx build --platform linux/amd64,linux/arm64 --tag REGISTRY/sftriage-agent:0.1.0 --target agent --push .
#
# Each has a list of what it contains, /opt/sftriage/sbom.cdx.json. BASE is an index of both architectures; after
# `docker buildx imagetools inspect python:3.12-slim-bookworm`, replace its digest.
ARG BASE=python:3.12.14-slim-bookworm@sha256:a116514e19457bcb7af7efe9c3dd0b9b71e85b317694e7882a1c52aa15a78134

FROM ${BASE} AS wheel
# hadolint ignore=DL3008,DL3009 # of the compiler nothing stays, and a version of it is not kept by Debian for long
RUN apt-get update && apt-get install --yes --no-install-recommends binutils gcc libc6-dev
WORKDIR /src
COPY . .
RUN SFTRIAGE_COMPILE=1 python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . && \
    python -m venv /sbom && /sbom/bin/python -m pip install --no-cache-dir cyclonedx-bom==7.5.0

FROM wheel AS operator-venv
ARG EXTRAS=k8s,nats,store,metrics,otel,stacks,nvml
RUN python -m venv --without-pip /opt/sftriage && python -m pip --python /opt/sftriage/bin/python install --no-cache-dir \
      --constraint constraints.txt "$(ls /wheels/sftriage-*.whl)[$EXTRAS]" && \
    /sbom/bin/cyclonedx-py environment /opt/sftriage/bin/python --output-reproducible -o /opt/sftriage/sbom.cdx.json

FROM wheel AS agent-venv
# Of the packages stays what runs: neither their tests nor what compilers and type checkers read. Byte code is kept of
# what an agent imports. (A library that auditwheel has laid out is damaged by strip.)
RUN python -m venv --without-pip /opt/sftriage && python -m pip --python /opt/sftriage/bin/python install --no-cache-dir \
      --no-compile --constraint constraints.txt "$(ls /wheels/sftriage-*.whl)[agent]" && \
    /sbom/bin/cyclonedx-py environment /opt/sftriage/bin/python --output-reproducible -o /opt/sftriage/sbom.cdx.json && \
    find /opt/sftriage/lib -depth \( -name tests -o -name f2py -o -name '*.pyi' -o -name '*.pxd' -o -name '*.[ah]' \) \
      -exec rm -r {} + && \
    find /opt/sftriage/lib /opt/sftriage/bin/py-spy -type f \( -name '*.so' -o -name py-spy \) ! -path '*.libs/*' \
      -exec strip --strip-unneeded {} + && \
    /opt/sftriage/bin/sftriage agent --help > /dev/null

# Nothing is written outside of volumes, whatever the user.
FROM ${BASE} AS base
ENV PATH=/opt/sftriage/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /
USER 65532:65532
ENTRYPOINT ["sftriage"]

FROM base AS agent
COPY --from=agent-venv /opt/sftriage /opt/sftriage

FROM base AS operator
COPY --from=operator-venv /opt/sftriage /opt/sftriage
