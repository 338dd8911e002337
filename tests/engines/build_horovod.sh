#!/usr/bin/env bash
# build_horovod.sh FOLDER: an environment in FOLDER with distlab and Horovod 0.28.1.
#
# Horovod's last release (2023) asks for C++14 and an old CMake; torch's headers need
# C++20. The standard is changed in its source, and CMake is told to accept the old
# files; then it is built, with gloo and torch alone.
# Needs cmake, a C++ compiler and the Python headers. About 6 minutes of CPU time.
set -euo pipefail
folder=$(realpath -m "$1")
cd "$(dirname "$0")/../.."

"${PYTHON:-python3}" -m venv "$folder"
python=$folder/bin/python
"$python" distlab/install.py
"$python" -m pip install -q "setuptools<80" wheel packaging cmake psutil pyyaml cffi

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
"$python" -m pip download -q --no-deps --no-build-isolation --no-binary :all: \
  --dest "$source" horovod==0.28.1
tar -xf "$source"/horovod-0.28.1.tar.gz -C "$source"
cd "$source/horovod-0.28.1"
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' \
  CMakeLists.txt horovod/torch/CMakeLists.txt

export PATH="$folder/bin:$PATH" CMAKE_POLICY_VERSION_MINIMUM=3.5
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
"$python" -m pip install -q --no-build-isolation --no-deps .
"$python" -c "import horovod.torch"
