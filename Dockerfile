# A server with this package: `docker compose --profile cpu up`, or with a GPU `--profile gpu`.
# Everything comes from Debian and PyPI. SGLang, torch and CUDA's libraries are wheels (11 GB).
FROM python:3.11-slim

# Triton compiles its launchers with a C compiler; SGLang and torch load libnuma and libgomp.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*

# SGLang first: this layer changes only with its version.
COPY .ci/constraints.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt sglang==0.5.23

COPY . /src
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt "/src[sglang]" \
    && mv /src/examples/reasoner /model \
    && rm -rf /src

RUN useradd --create-home server
USER server
WORKDIR /home/server
# compose.yaml mounts a volume here: made by root it would shut the caches beside it.
RUN mkdir --parents .cache/huggingface
EXPOSE 30000
ENTRYPOINT ["python", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000"]
# The bundled model, so that the image starts without a network.
CMD ["--model-path", "/model"]
