# p2pd, the libp2p daemon of hivemind, from its source: where no binary of the project can be taken. UNTESTED: no Go
# modules could be fetched where this was written. The version is the one that hivemind 1.1.12 names in its setup.py.
#
#   docker build -f deploy/p2pd.Dockerfile --build-arg GOARCH=arm64 --output . deploy
#   install -m 755 p2pd "$(python -c 'import hivemind, pathlib; print(pathlib.Path(hivemind.__file__).parent)')/hivemind_cli/p2pd"
#
# GOOS: linux or darwin. GOARCH: amd64 or arm64. Go cross-compiles, so the machine that builds may be another.
FROM golang:1.20-bookworm AS build
ARG GOOS=linux
ARG GOARCH=amd64
ARG VERSION=v0.5.0.hivemind1
RUN git clone --depth 1 --branch ${VERSION} https://github.com/learning-at-home/go-libp2p-daemon /source
WORKDIR /source/p2pd
RUN CGO_ENABLED=0 GOOS=${GOOS} GOARCH=${GOARCH} go build -trimpath -o /p2pd

FROM scratch
COPY --from=build /p2pd /p2pd
