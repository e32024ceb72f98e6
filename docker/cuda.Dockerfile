# A machine with NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t roll:cuda .
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends \
    python3 python3-dev python3-venv g++ make util-linux && rm -rf /var/lib/apt/lists/*
WORKDIR /roll
COPY . .
RUN make setup PLATFORM=cuda
ENV PATH="/roll/.venv/bin:$PATH"
RUN for run in examples/*/*.yaml; do roll check "$run" || exit 1; done && pytest tests/repo
# Ray keeps its objects in /dev/shm: docker run --gpus all --shm-size=16g
CMD ["roll", "doctor"]
