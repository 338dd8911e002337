#!/bin/bash
# All GPUs of one machine; without a GPU, two processes on the CPU.
#
#   ./train_single_node.sh --data /data/imagenet --checkpoint runs/one
#
# A rank that dies is started again, with all others, at most MAX_RESTARTS times. LOGS
# names a folder in which the output of each rank is kept.
set -eu

if [ -z "${RANKS:-}" ]; then
  RANKS=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
  [ "$RANKS" -gt 0 ] || RANKS=2
fi
# The trainer stays in your folder, so relative paths among its flags are yours.
ROOT=$(cd "$(dirname "$0")/../../.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -m distlab.launch --nproc-per-node "$RANKS" \
  --max-restarts "${MAX_RESTARTS:-3}" ${LOGS:+--log-dir "$LOGS"} \
  "${TRAIN:-$ROOT/solutions/phase4_production/imagenet_trainer.py}" "$@"
