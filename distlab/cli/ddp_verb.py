"""Flags of `distlab ddp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distlab.cli.options import Json

Ranks = Annotated[int, typer.Option("-n", "--world-size", help="Number of ranks.")]
Epochs = Annotated[int | None, typer.Option(help="Number of passes over the data.")]
BatchSize = Annotated[
    int | None,
    typer.Option(
        help="Number of samples per step on each rank. Can't be combined with "
        "--global-batch-size."
    ),
]
GlobalBatchSize = Annotated[
    int | None, typer.Option(help="Number of samples per step over all ranks.")
]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
Scaling = Annotated[
    str,
    typer.Option(
        "--lr-scaling",
        help="How to scale the learning rate with the number of ranks if you pass "
        "--batch-size: none, linear or sqrt.",
    ),
]
Optimizer = Annotated[str, typer.Option(help="Optimizer to use: sgd, adam or adamw.")]
Momentum = Annotated[float | None, typer.Option(help="Momentum for sgd.")]
WeightDecay = Annotated[float, typer.Option(help="Strength of the weight decay.")]
Dataset = Annotated[
    str,
    typer.Option(
        help="Dataset to train on: digits (which needs no download), mnist, "
        "fashion-mnist, or idx for your own four files in the format of MNIST."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder that contains the dataset's four files, plain or .gz."),
]
Download = Annotated[
    bool, typer.Option("--download", help="Download any files that are missing.")
]
Device = Annotated[str, typer.Option(help="Device to train on: auto, cpu or cuda.")]
Code = Annotated[
    list[str] | None,
    typer.Option(
        help="Whose loader and fit to run: reference, mine, or a file. Can be "
        "repeated. The default is what you chose with `distlab use`."
    ),
]
Track = Annotated[
    str, typer.Option(help="Log the run to an experiment tracker: mlflow.")
]
Rate = Annotated[
    float,
    typer.Option("--cost-per-worker-hour", help="What one rank costs per hour."),
]
MaxCost = Annotated[
    float | None,
    typer.Option(help="Don't start if the estimated cost is higher than this."),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", help="Also train with one process, and compare the results."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed for the weights and the shuffle.")]
MonitorFolder = Annotated[
    Path | None,
    typer.Option(
        "--monitor",
        help="Create this folder and write the records of all ranks to it as JSON "
        "lines.",
    ),
]
Also = Annotated[
    list[str] | None,
    typer.Option(
        help="Also send the records to tensorboard, prometheus[:PORT], or by OTLP to "
        "the collector otlp[:[ADDRESS:]PORT]. Can be repeated."
    ),
]
LogEvery = Annotated[
    int | None,
    typer.Option(
        "--log-every-n-steps",
        help="Write a record every N steps. The default is 10.",
    ),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Also trace three steps on each rank with torch.profiler.",
    ),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        "--hang-after",
        help="If no rank makes progress for this many seconds, end the run and show "
        "where each rank was. The default is 600 with --monitor, and never without.",
    ),
]
Save = Annotated[
    Path | None,
    typer.Option("--save", help="Write the final model's weights to this file."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", help="Write a checkpoint to this folder after each epoch."
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        help="Write a checkpoint every N steps, instead of after each epoch.",
    ),
]
CheckpointFormat = Annotated[
    str,
    typer.Option(
        "--checkpoint-format",
        help="Format of the checkpoints: shards, or dcp for torch's own, which FSDP2 "
        "scripts can load.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue from the newest complete checkpoint."),
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
    checkpoint_format: CheckpointFormat = "shards",
    resume: Resume = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Run a complete data-parallel training, and report its cost and its accuracy."""
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
        checkpoint_format=checkpoint_format,
        resume=resume,
    )
    return ddp(wishes, order)
