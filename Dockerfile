# distlab in a container, with PyTorch's CPU build, for whoever has Docker but no Linux:
#
#   docker build -t distlab .
#   docker run -it --shm-size=1g -v "$PWD/course:/course" distlab
#   distlab start        # in the container: copies the course to the folder course
#
# The folder stays on your machine, and you can edit the files in it with any editor.
FROM python:3.12-slim
COPY . /src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist /src \
    && python -m pip install --no-cache-dir --no-deps /dist/*.whl \
    && cd / && PIP_NO_CACHE_DIR=1 python -m distlab setup --torch cpu --extras notebook \
    && rm -r /src /dist
WORKDIR /course
CMD ["bash"]
