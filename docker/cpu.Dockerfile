# A machine without an accelerator: docker build -f docker/cpu.Dockerfile -t roll:cpu .
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ make util-linux \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /roll
COPY . .
RUN make setup PLATFORM=cpu
ENV PATH="/roll/.venv/bin:$PATH"
RUN for run in examples/*/*.yaml; do roll check "$run" || exit 1; done && pytest tests/repo
# Ray keeps its objects in /dev/shm: docker run --shm-size=4g
CMD ["make", "quickstart"]
