"""Meet TensorFlow's other ranks, and open the strategy.

    RANK, MASTER_ADDR … ─▶ addresses of all ranks ─▶ TF_CONFIG ─▶ MultiWorkerMirrored

The strategy must be open before the first tensor exists, so tensorflow_rank.py opens it
before a user's script makes its model.

Source: TensorFlow's documentation, "Multi-worker training with Keras".
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from typing import Any

from distlab.engines.expect import EngineError
from distlab.engines.outside import engine

MEETING = timedelta(minutes=10)
_opened: list[Any] = []
_held: list[Any] = []  # the store, and a socket on this rank's port


def tensorflow() -> Any:
    """Import TensorFlow, without its messages about this machine's processor.

    Raises:
        EngineError: TensorFlow isn't installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # The socket that keeps a rank's port until TensorFlow listens there shares it.
    os.environ.setdefault("TF_GRPC_REUSE_PORT", "1")
    return engine("tensorflow", "tensorflow")


def keras() -> Any:
    """Import Keras on TensorFlow.

    Raises:
        EngineError: Keras isn't installed, or it runs on something else.
    """
    tensorflow()
    module = engine("keras", "tensorflow")
    if module.backend.backend() != "tensorflow":
        raise EngineError(
            f"Keras runs on {module.backend.backend()} here: set "
            "KERAS_BACKEND=tensorflow"
        )
    return module


def open_strategy(wire: str | None = None) -> Any:
    """Open this process's strategy: MultiWorkerMirroredStrategy with other ranks.

    A second call returns the same one. `wire` is nccl, or None to let TensorFlow
    choose.

    Raises:
        EngineError: TensorFlow isn't installed, the strategy can't be opened any more,
            or no other rank answers.
    """
    tf = tensorflow()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return tf.distribute.get_strategy()
    if not _opened:
        use_own_devices(tf)
        if "TF_CONFIG" not in os.environ:
            os.environ["TF_CONFIG"] = json.dumps(meet())
        way = tf.distribute.experimental.CommunicationImplementation
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=way.NCCL if wire == "nccl" else way.AUTO
        )
        try:
            _opened.append(
                tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
            )
        except RuntimeError as error:
            raise EngineError(
                "the model was made before the ranks had met: start the script with "
                "distlab train --backend tensorflow, or let its first lines call "
                "distlab.engines.tensorflow_start.open_strategy()"
            ) from error
    return _opened[0]


def use_own_devices(tf: Any) -> None:
    """Take this rank's GPU, if there are any, and its share of the processor."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            tf.config.set_visible_devices(gpus[local % len(gpus)], "GPU")
        if not tf.config.threading.get_intra_op_parallelism_threads():
            threads = max(1, (os.cpu_count() or 1) // num_local)
            tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        return  # TensorFlow has begun: opening the strategy says so


def meet() -> dict[str, Any]:
    """Create TF_CONFIG from the addresses that all ranks exchange; collective.

    Raises:
        EngineError: the others aren't at MASTER_ADDR.
    """
    from torch.distributed import (  # type: ignore[attr-defined]
        PrefixStore,
        rendezvous,
    )

    place = os.environ.get("MASTER_ADDR", "?"), os.environ.get("MASTER_PORT", "?")
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=MEETING))
        generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = PrefixStore(f"distlab.tensorflow/{generation}", store)
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("", 0))
        own.set(str(rank), f"{address_towards(place[0])}:{held.getsockname()[1]}")
        workers = [own.get(str(other)).decode() for other in range(world_size)]
    except (RuntimeError, ValueError, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        where = ":".join(place)
        raise EngineError(f"the ranks cannot meet at {where}: {first}") from error
    _held.extend((store, held))
    task = {"type": "worker", "index": rank}
    return {"cluster": {"worker": workers}, "task": task}


def address_towards(other: str) -> str:
    """Return this machine's address on the network that leads to `other`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return str(probe.getsockname()[0])
