"""Flags of `distlab ddp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Ranks = Annotated[int, typer.Option("-n", "--world-size", help="Number of ranks.")]
Epochs = Annotated[int | None, typer.Option(help="Number of passes over the data.")]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Samples per step on each rank; excludes --global-batch-size."),
]
GlobalBatchSize = Annotated[
    int | None, typer.Option(help="Samples per step, over all ranks together.")
]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
Scaling = Annotated[
    str,
    typer.Option(
        "--lr-scaling",
        help="With --batch-size, scale the learning rate: none, linear or sqrt.",
    ),
]
Optimizer = Annotated[str, typer.Option(help="sgd, adam or adamw.")]
Momentum = Annotated[float | None, typer.Option(help="Momentum of sgd.")]
WeightDecay = Annotated[float, typer.Option(help="Strength of the weight decay.")]
Dataset = Annotated[
    str,
    typer.Option(
        help="digits (needs no download), mnist, fashion-mnist, or idx for four such "
        "files of your own."
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="The folder with the four files, plain or .gz.")
]
Download = Annotated[
    bool, typer.Option("--download", help="Download the files that are missing.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Code = Annotated[
    list[str] | None,
    typer.Option(
        help="Use this loader and fit: reference, mine, or a file. Repeatable. By "
        "default, `distlab use` decides."
    ),
]
Track = Annotated[str, typer.Option(help="Log the run to this tracker: mlflow.")]
Rate = Annotated[
    float, typer.Option("--cost-per-worker-hour", help="Cost of one rank per hour.")
]
MaxCost = Annotated[
    float | None, typer.Option(help="Don't start if the estimate is above this.")
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Also train with one process and compare.")
]
Seed = Annotated[int, typer.Option(help="Seed of the weights and the shuffle.")]
MonitorFolder = Annotated[
    Path | None,
    typer.Option(
        "--monitor", help="Write all ranks' records, as JSON lines, to this new folder."
    ),
]
Also = Annotated[
    list[str] | None,
    typer.Option(
        help="Also send them to tensorboard, prometheus or prometheus:PORT; "
        "can be repeated."
    ),
]
LogEvery = Annotated[
    int | None,
    typer.Option(
        "--log-every-n-steps", help="Write a record every N steps; 10 by default."
    ),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile", help="Also trace three steps of each rank with torch.profiler."
    ),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        "--hang-after",
        help="If no rank does anything for this many seconds, end the run and show "
        "where each rank was. 600 with --monitor, otherwise never.",
    ),
]
Save = Annotated[
    Path | None,
    typer.Option("--save", help="Write the final model's weights to this file."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", help="Write checkpoints to this folder, one after each epoch."
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option("--checkpoint-every", help="Save every N steps instead."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue from the newest complete checkpoint."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]


def ddp(
    n: Ranks = 2,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    global_batch_size: GlobalBatchSize = None,
    lr: LearningRate = None,
    lr_scaling: Scaling = "none",
    optimizer: Optimizer = "sgd",
    momentum: Momentum = None,
    weight_decay: WeightDecay = 0.0,
    dataset: Dataset = "digits",
    data_dir: DataDir = None,
    download: Download = False,
    device: Device = "auto",
    code: Code = None,
    track: Track = "",
    cost_per_worker_hour: Rate = 1.0,
    max_cost: MaxCost = None,
    compare: Compare = False,
    monitor: MonitorFolder = None,
    also: Also = None,
    log_every_n_steps: LogEvery = None,
    profile: Profile = False,
    hang_after: HangAfter = None,
    save: Save = None,
    checkpoint: Checkpoint = None,
    checkpoint_every: CheckpointEvery = None,
    resume: Resume = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Run a whole data-parallel training: shards, cost, accuracy, digests, MLflow."""
    from distlab.cli.ddp import Order, ddp
    from distlab.cli.ddp_monitor import MonitorOrder
    from distlab.training.ddp_config import Wishes

    wishes = Wishes(
        world_size=n,
        epochs=epochs,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        learning_rate=lr,
        lr_scaling=lr_scaling,
        optimizer=optimizer,
        momentum=momentum,
        weight_decay=weight_decay,
        dataset=dataset,
        device=device,
        seed=seed,
        code=tuple(code or ()),
    )
    order = Order(
        data_dir=data_dir,
        may_download=download,
        track=track,
        rate=cost_per_worker_hour,
        max_cost=max_cost,
        compare=compare,
        as_json=as_json,
        monitor=MonitorOrder(
            folder=monitor,
            also=tuple(also or ()),
            log_every_n_steps=log_every_n_steps,
            profile=profile,
            hang_after_s=hang_after,
        ),
        save=save,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
    )
    return ddp(wishes, order)
