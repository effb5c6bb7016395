# An image that trains on CPUs:
#   docker build --tag colossal-hetero .
#   docker run --rm --shm-size 1g colossal-hetero
# torch's ordinary wheel needs gigabytes for CUDA; --build-arg TORCH_INDEX=ADDRESS takes torch from another index, as that
# of its CPU wheels.
FROM python:3.11.13-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml PYPI.md LICENSE ./
COPY colossal_hetero colossal_hetero
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.13-slim-bookworm
ARG TORCH_INDEX=""
COPY --from=build /wheels /wheels
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.5.1 torchvision==0.20.1; fi \
    && pip install --no-cache-dir "colossal-hetero[examples] @ file://$(echo /wheels/*.whl)" \
    && useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer
COPY examples examples
CMD ["python", "examples/vit/train.py", "--balance", "auto", "--straggler", "1:4"]
