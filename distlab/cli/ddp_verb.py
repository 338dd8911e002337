"""The flags of `distlab ddp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Ranks = Annotated[int, typer.Option("-n", "--world-size", help="Number of ranks.")]
Epochs = Annotated[int | None, typer.Option(help="Rounds over the data.")]
BatchSize = Annotated[
    int | None, typer.Option(help="Samples of one rank in a step; or see the next.")
]
GlobalBatchSize = Annotated[
    int | None, typer.Option(help="Samples of all ranks together in a step.")
]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
Scaling = Annotated[
    str,
    typer.Option(
        "--lr-scaling",
        help="How it grows with the ranks: none, linear or sqrt; with --batch-size.",
    ),
]
Optimizer = Annotated[str, typer.Option(help="sgd, adam or adamw.")]
Momentum = Annotated[float | None, typer.Option(help="Of sgd.")]
WeightDecay = Annotated[float, typer.Option(help="Pull of the weights towards 0.")]
Dataset = Annotated[
    str,
    typer.Option(
        help="digits (nothing to download), mnist, fashion-mnist, or idx: four such "
        "files of your own."
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="The folder of the four files, plain or .gz.")
]
Download = Annotated[
    bool, typer.Option("--download", help="Fetch the files that are not here yet.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Code = Annotated[
    list[str] | None,
    typer.Option(
        help="Whose loader and fit: reference, mine, a file; repeatable. Without it "
        "what `distlab use` shows."
    ),
]
Track = Annotated[str, typer.Option(help="mlflow: write the run down.")]
Rate = Annotated[
    float, typer.Option("--cost-per-worker-hour", help="What one rank costs an hour.")
]
MaxCost = Annotated[
    float | None, typer.Option(help="Don't begin if it is expected to cost more.")
]
Compare = Annotated[
    bool, typer.Option("--compare", help="The same by one process, side by side.")
]
Seed = Annotated[int, typer.Option(help="Of the weights and of the shuffle.")]
MonitorFolder = Annotated[
    Path | None,
    typer.Option(
        "--monitor", help="A new folder for the records of all ranks, as JSON lines."
    ),
]
Also = Annotated[
    list[str] | None,
    typer.Option(
        help="More places for them: tensorboard, prometheus or prometheus:PORT; "
        "repeatable."
    ),
]
LogEvery = Annotated[
    int | None,
    typer.Option("--log-every-n-steps", help="Steps in one record; 10 if not given."),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile", help="Also a torch.profiler trace of three steps of each rank."
    ),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        "--hang-after",
        help="End the run, and say where each rank is, when no rank has done anything "
        "for so many seconds. With --monitor 600, else never.",
    ),
]
Save = Annotated[
    Path | None, typer.Option("--save", help="A file for the final model's weights.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", help="A folder for checkpoints: one after each epoch."
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option("--checkpoint-every", help="Save after so many steps instead."),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue from the newest checkpoint that is complete."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")]


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
    """A whole data-parallel training: shards, cost, accuracy, digests, MLflow."""
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
