"""Train one rank, in the same way on every engine.

    an engine starts the ranks ─▶ train(job) on each ─▶ Outcome, the same on all

Every `log_every_n_steps` steps, we sum the losses of the steps over the ranks, together
with each rank's seconds, so all ranks make the same decision to stop.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.cost import cost_of
from distlab.engines import saving
from distlab.engines.callbacks import Callback, Profile, Training
from distlab.engines.config import DistributedConfig, with_world_size
from distlab.engines.expect import EngineError, expect_float32
from distlab.engines.history import EpochRow, History
from distlab.engines.job import Outcome, TrainingJob
from distlab.engines.loaders import DrawnOrder, Loading, set_epoch
from distlab.engines.randomness import random_numbers_kept, seed_all, seed_of
from distlab.engines.records import Records
from distlab.engines.samples import Microbatch, epoch_order, epoch_plan
from distlab.engines.schedules import Schedule
from distlab.engines.strategies import find_strategy
from distlab.engines.strategy import Moved, Strategy
from distlab.monitor import StepRecord
from distlab.monitor.meter import gpu_utilization, peak_memory_bytes

IN_AN_EPOCH = ("max_steps", "max_cost")  # these end a training within an epoch
CALLBACK = "callback"  # this does so, or ends it after an epoch


def train(job: TrainingJob, strategy: Strategy | None = None) -> Outcome:
    """Train `job` as this process's rank, which its environment names; collective.

    Raises:
        EngineError: the job doesn't fit the ranks, or we can't use a checkpoint.
    """
    if job.config.precision:
        expect_float32("mixed_precision", job.model)
    job = job.with_copy()
    if strategy is None:
        factory = find_strategy(job.config.backend).factory
        strategy = factory(job.config, job.model, job.optimizer)
    try:
        fitting = with_world_size(job.config, strategy.world_size)
        strategy.take_loss(job.loss)
        records = Records(replace(job, config=fitting), strategy.rank)
        with contextlib.closing(records), random_numbers_kept():
            loop = TrainingLoop(replace(job, config=fitting), strategy, records)
            try:
                return loop.run()
            finally:
                loop.call("on_train_end")
    finally:
        strategy.close()


class TrainingLoop:
    """Loops over the epochs and steps of one rank."""

    def __init__(self, job: TrainingJob, strategy: Strategy, records: Records) -> None:
        self.job, self.strategy, self.records = job, strategy, records
        self.config: DistributedConfig = job.config
        self.rates = rates_of(strategy.rates(), self.config.learning_rate)
        self.schedule = self._make_schedule()
        self.orders: dict[int, DrawnOrder] = {}
        self.rows: list[EpochRow] = []
        self.losses: list[float] = []
        self.num_steps = 0  # taken since the very beginning
        self.spent_s = 0.0
        self.began = time.time()  # of a resumed training when the first part began
        self.stopped_by = ""
        self.epoch_began = (0, 0)  # steps and losses before this epoch
        self.pending: list[Tensor] = []  # losses of steps since the last record
        self.is_in_epoch = False  # True if the newest epoch lacks steps
        self.grad_norm = self.rate = 0.0
        self.data_wait_s, self.num_own = 0.0, 0  # since the last record
        model, optimizer = strategy.model_and_optimizer
        self.training = Training(
            rank=strategy.rank,
            world_size=strategy.world_size,
            device=strategy.device,
            model=model,
            optimizer=optimizer,
        )
        self.callbacks: list[Callback] = []  # those that have begun

    def run(self) -> Outcome:
        """Train until the last epoch, or until something ends it earlier."""
        began = time.perf_counter()
        self._expect_to_save()
        self._resume()
        self._open_folder()
        if self._has_all_steps():
            self.stopped_by = "max_steps"
        elif self.rows and self._has_stalled():
            self.stopped_by = "early_stopping"
        elif self.rows and self._is_too_expensive():
            self.stopped_by = "max_cost"
        self.epoch_began = self.num_steps, len(self.losses)
        self.strategy.share_state(self._live_state, self._take_live_state)
        self._begin_callbacks()
        while not self.stopped_by and len(self.rows) < self.config.epochs:
            with contextlib.suppress(Moved):
                self._epoch(len(self.rows) + 1)
        config = self.config
        history = History(
            backend=config.backend,
            num_gpus=config.world_size,
            total_time=time.perf_counter() - began,
            epochs=tuple(self.rows),
            losses=tuple(self.losses),
            stopped_by=self.stopped_by,
            cost=self._cost(),
        )
        strategy = self.strategy
        return Outcome(
            history=history,
            weights=strategy.weights(),
            loss_weights=strategy.loss_weights(),
            optimizer_state=(
                strategy.optimizer_state() if self.job.keeps_optimizer else None
            ),
            schedule=self._schedule_state(),
        )

    # ── callbacks ───────────────────────────────────────────────────────────────────

    def _begin_callbacks(self) -> None:
        folder = self.config.profile_dir
        own = [] if folder is None else [Profile(folder)]
        for one in (*own, *self.job.callbacks):
            self.callbacks.append(one)
            self._note_progress()
            one.on_train_begin(self.training)
        self._stop_by_callback()

    def call(self, moment: str) -> None:
        """Call this method of each callback that has begun."""
        self._note_progress()
        for one in self.callbacks:
            getattr(one, moment)(self.training)

    def _note_progress(self) -> None:
        training = self.training
        training.step, training.rows = self.num_steps, self.rows
        training.learning_rate, training.grad_norm = self.rate, self.grad_norm

    def _stop_by_callback(self) -> None:
        """Stop if a callback of any rank wants to; collective."""
        if self.job.callbacks and self._mean(float(self.training.wants_to_stop)):
            self.stopped_by = self.stopped_by or CALLBACK

    # ── an epoch ────────────────────────────────────────────────────────────────────

    def _epoch(self, number: int) -> None:
        seed_all(seed_of(self.config.seed, number, self.strategy.rank))
        began = time.perf_counter()
        plan = self._plan(self.job.train, epoch=number, training=True)
        self._train(plan)
        first = self.epoch_began[1]
        seconds = self._mean(time.perf_counter() - began)
        values = self._validate(number)
        losses = self.losses[first:]
        sizes = [one.num_in_step for one in plan if one.ends_step][: len(losses)]
        num_samples = sum(sizes)
        row = EpochRow(
            epoch=number,
            loss=sum(map(mul, losses, sizes)) / max(1, num_samples),
            learning_rate=self.rate,
            grad_norm=self.grad_norm,
            seconds=seconds,
            throughput=num_samples / seconds,
            val_loss=values[0],
            accuracy=values[1],
        )
        self.rows.append(row)
        self.epoch_began = self.num_steps, len(self.losses)
        self.records.epoch(self.num_steps, row)
        if self._has_stalled():
            self.stopped_by = self.stopped_by or "early_stopping"
        self.call("on_epoch_end")
        self._stop_by_callback()
        if not self._ended_in_epoch:
            self._step_schedule("epoch", row)
        self._save()

    def _train(self, plan: list[Microbatch]) -> None:
        """Run the steps of an epoch, until something ends the training."""
        strategy = self.strategy
        strategy.set_training(True)
        per_epoch = sum(one.ends_step for one in plan)
        plan = plan[self._num_passed(plan) :]
        began = time.perf_counter()
        part = torch.zeros((), dtype=torch.double, device=strategy.device)
        batches = self._timed(strategy.batches(self.job.train, plan))
        for micro, batch in zip(plan, batches, strict=True):
            self.num_own += micro.num_samples
            part += strategy.learn(self.job.loss, batch, micro)
            if not micro.ends_step:
                continue
            self.rate = self._set_rate(per_epoch)
            self.grad_norm = strategy.step()
            self.num_steps += 1
            self._step_schedule("step")
            self.call("on_step_end")
            self.pending.append(part * strategy.factor)
            part = torch.zeros_like(part)
            is_last = self._has_all_steps()
            if is_last or len(self.pending) >= self.config.log_every_n_steps:
                began = self._record(began)
            if is_last:
                self.stopped_by = "max_steps"
            if self.stopped_by:
                break
        if self.pending:
            self._record(began)
        self.is_in_epoch = self.num_steps - self.epoch_began[0] < per_epoch

    @property
    def _ended_in_epoch(self) -> bool:
        """Return True if this epoch isn't complete, so that it can't be saved."""
        is_cut = self.stopped_by == CALLBACK and self.is_in_epoch
        return is_cut or self.stopped_by in IN_AN_EPOCH

    def _num_passed(self, plan: list[Microbatch]) -> int:
        """Return the number of microbatches in the epoch's steps that we have taken."""
        num_steps = self.num_steps - self.epoch_began[0]
        ends = [index + 1 for index, one in enumerate(plan) if one.ends_step]
        return ends[num_steps - 1] if num_steps else 0

    def _set_rate(self, per_epoch: int) -> float:
        """Set the rate, scaled by the ranks; in the warm-up it grows every step."""
        scale = self.config.scale_of_rate
        warmup = round(self.config.warmup_epochs * per_epoch)
        if self.num_steps < warmup:
            scale *= (self.num_steps + 1) / warmup
        rates = [rate * scale for rate in self.rates]
        self.strategy.set_rate(rates)
        return rates[0]

    def _make_schedule(self) -> Schedule | None:
        job = self.job
        if job.scheduler is None:
            return None
        optimizer, interval = self.strategy.optimizer, job.scheduler_interval
        schedule = Schedule(job.scheduler, optimizer, self.rates, interval)
        self.rates = schedule.rates
        return schedule

    def _step_schedule(self, interval: str, row: EpochRow | None = None) -> None:
        if self.schedule and self.schedule.interval == interval:
            self.rates = self.schedule.step(row)

    def _schedule_state(self) -> dict[str, Any]:
        return self.schedule.state() if self.schedule else {}

    def _record(self, began: float) -> float:
        """Sum the pending losses over the ranks; return the current time."""
        now = time.perf_counter()
        strategy = self.strategy
        own = torch.stack(self.pending)
        self.pending = []
        more = [now - began, float(self.training.wants_to_stop)]
        more_of_rank = torch.tensor(more, dtype=torch.double, device=own.device)
        mean = strategy.sum(torch.cat([own, more_of_rank])) / strategy.group_size
        *losses, spent, wishes = mean.tolist()
        self.losses += losses
        self.spent_s += spent
        if self.config.monitor_dir is not None:
            self.records.ranks(self._of_all_ranks(losses, now - began))
        else:
            self.records.steps(
                self.num_steps,
                {
                    "loss": losses[-1],
                    "learning_rate": self.rate,
                    "grad_norm": self.grad_norm,
                    "step_s": spent / len(losses),
                    "num_gpus": float(strategy.world_size),
                },
            )
        if wishes:
            self.stopped_by = CALLBACK
        if self._is_too_expensive():
            self.stopped_by = "max_cost"
        return now

    def _timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and add up how long we waited for them."""
        each = iter(batches)
        while True:
            asked_s = time.perf_counter()
            try:
                batch = next(each)
            except StopIteration:
                return
            finally:
                self.data_wait_s += time.perf_counter() - asked_s
            yield batch

    def _of_all_ranks(self, losses: list[float], seconds: float) -> list[StepRecord]:
        """Return a record of each rank; communication counts as computation.

        Collective.
        """
        strategy = self.strategy
        rows = torch.zeros(
            strategy.world_size, 4, dtype=torch.double, device=strategy.device
        )
        memory = float(peak_memory_bytes(strategy.device))
        own = [seconds, self.data_wait_s, self.num_own, memory]
        rows[strategy.rank] = torch.tensor(own, dtype=torch.double)
        self.data_wait_s, self.num_own = 0.0, 0
        return [
            StepRecord(
                rank=rank,
                step=self.num_steps,
                epoch=len(self.rows) + 1,
                time_s=time.time(),
                num_steps=len(losses),
                seconds=spent_s,
                samples=int(num_samples),
                loss=sum(losses) / len(losses) if num_samples else None,
                data_wait_s=min(wait_s, spent_s),
                communication_s=0.0,
                learning_rate=self.rate,
                grad_norm=self.grad_norm,
                memory_bytes=int(num_bytes),
                gpu_utilization=gpu_utilization(strategy.device),
            )
            for rank, (spent_s, wait_s, num_samples, num_bytes) in enumerate(
                strategy.sum(rows).tolist()
            )
        ]

    def _is_too_expensive(self) -> bool:
        most = self.config.max_cost
        return most is not None and self._cost() >= most

    def _cost(self) -> float:
        config = self.config
        return cost_of(config.world_size, self.spent_s, config.cost_per_gpu_hour)

    # ── validation ──────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _validate(self, epoch: int) -> tuple[float | None, float | None]:
        """Return mean loss and accuracy over all samples; None if there are none."""
        if self.job.val is None:
            return None, None
        self.strategy.set_training(False)
        plan = self._plan(self.job.val, epoch=epoch, training=False)
        sums = torch.zeros(4, dtype=torch.double, device=self.strategy.device)
        batches = self.strategy.batches(self.job.val, plan)
        for micro, batch in zip(plan, batches, strict=True):
            judged = self.strategy.judge(self.job.loss, batch)
            if not micro.num_samples:
                continue
            count = micro.num_samples if judged.count is None else judged.count
            sums[0] += judged.loss * (1 if judged.is_sum else count)
            sums[1] += count
            sums[2] += judged.num_right
            sums[3] += judged.num_judged
        total, num, right, num_judged = self.strategy.sum(sums).tolist()
        mean = total / num if num else float("nan")
        return mean, right / num_judged if num_judged else None

    def _has_all_steps(self) -> bool:
        most = self.job.max_steps
        return most is not None and self.num_steps >= most

    def _has_stalled(self) -> bool:
        losses = [r.loss if r.val_loss is None else r.val_loss for r in self.rows]
        return has_stalled(losses, self.config.early_stopping)

    # ── checkpoints ─────────────────────────────────────────────────────────────────

    def _expect_to_save(self) -> None:
        """Fail now if we couldn't save a checkpoint after the first epoch."""
        folder, error = self.config.checkpoint_dir, None
        if folder is None:
            return
        try:
            state = self.strategy.settings(), self._schedule_state()
            saving.expect_loadable(state)
            if self.strategy.saves:
                saving.expect_folder(Path(folder))
        except EngineError as found:
            error = found
        self._agree(error)

    def _open_folder(self) -> None:
        """Open the folder of records on rank 0; all ranks end if that fails."""
        if self.config.monitor_dir is None:
            return
        error: EngineError | None = None
        try:
            self.records.open_folder(self.num_steps)
        except EngineError as found:
            error = found
        self._agree(error)

    def _save(self) -> None:
        config, number = self.config, len(self.rows)
        if config.checkpoint_dir is None:
            return
        if self._ended_in_epoch:
            return
        is_last = bool(self.stopped_by) or number == config.epochs
        if number % config.checkpoint_frequency and not is_last:
            return
        state = self._state()
        error: EngineError | None = None
        if self.strategy.saves:
            try:
                folder, kind = Path(config.checkpoint_dir), config.checkpoint_format
                saving.save(folder, number, state, kind)
            except EngineError as found:
                error = found
        self._agree(error)

    def _state(self) -> dict[str, Any]:
        """Return everything that a training needs to continue after this epoch."""
        strategy = self.strategy
        return {
            "weights": strategy.weights(),
            "optimizer": strategy.optimizer_state(),
            "loss": strategy.loss_weights(),
            "scaler": strategy.scaler.state_dict() if strategy.scaler else {},
            "schedule": self._schedule_state(),
            "rows": [asdict(row) for row in self.rows],
            "losses": self.losses,
            "num_steps": self.num_steps,
            "spent_s": self.spent_s,
            "began": self.began,
            "scaler_init_scale": self.config.scaler_init_scale,
        }

    def _live_state(self) -> dict[str, Any]:
        """Return the state for a rank that joins now, before a step."""
        more = {"epoch_began": self.epoch_began, "pending": self.pending}
        return {**self._state(), **more}

    def _take_live_state(self, state: dict[str, Any]) -> None:
        """Continue where another rank is."""
        self._take_state(state)
        self.epoch_began = tuple(state["epoch_began"])
        self.pending = list(state["pending"])

    def _resume(self) -> None:
        config = self.config
        if config.resume_from_checkpoint is False:
            return
        state, error = None, None
        try:
            state = saving.load(config.resume_from_checkpoint, config.checkpoint_dir)
            if state is not None:
                self._expect_whole(state)
        except EngineError as found:
            error = found
        self._agree(error)
        self._expect_same_steps(state["num_steps"] if state else 0)
        if state is None:
            return
        for line in state.get("passed_over", ()):
            self.records.warn(f"skipped a checkpoint: {line}")
        self._take_state(state)

    def _take_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            EngineError: it's from another model or optimizer.
        """
        strategy = self.strategy
        strategy.expect_fits(state)
        try:
            strategy.load(state["weights"], state["optimizer"])
            strategy.load_loss(state.get("loss", {}))
            if strategy.scaler and state["scaler"]:
                strategy.load_scaler(state["scaler"])
            if self.schedule:
                self.rates = self.schedule.load(state["schedule"])
            self.rows = [EpochRow(**row) for row in state["rows"]]
        except (RuntimeError, KeyError, ValueError, TypeError) as failed:
            raise EngineError(
                "the checkpoint does not fit this model and optimizer: "
                f"{' '.join(str(failed).split())}"
            ) from failed
        self.losses, self.began = list(state["losses"]), state.get("began", 0.0)
        self.num_steps, self.spent_s = state["num_steps"], state["spent_s"]

    def _expect_whole(self, state: dict[str, Any]) -> None:
        own, usual = self.config.scaler_init_scale, DistributedConfig.scaler_init_scale
        before = state.get("scaler_init_scale", own)
        if own not in (usual, before) and state.get("scaler"):
            raise EngineError(
                f"scaler_init_scale is {own:g}, but a resumed training continues with "
                f"the scale it had, and this one began with {before:g}: leave it out"
            )
        if bool(state.get("schedule")) != bool(self.schedule):
            raise EngineError(
                "the checkpoint was saved with a scheduler, and this training has "
                "none: pass the same one"
                if self.schedule is None
                else "the checkpoint was saved without a scheduler, so it can't say "
                "where yours stands: leave it out, or start a new run"
            )
        missing = [key for key in saving.KEYS if key not in state]
        if missing:
            raise EngineError(f"the checkpoint has no {missing[0]!r}")

    def _agree(self, error: EngineError | None) -> None:
        """Raise on all ranks if one has an error, so none waits for a rank that ended.

        Raises:
            EngineError: this rank's `error`, or one that names the rank that failed.
        """
        strategy = self.strategy
        failed = torch.zeros(
            strategy.group_size, dtype=torch.double, device=strategy.device
        )
        failed[strategy.group_rank] = error is not None
        ranks = strategy.sum(failed).nonzero().flatten().tolist()
        if error is not None:
            raise error
        if ranks:
            raise EngineError(f"rank {ranks[0]} could not save, load or record")

    def _expect_same_steps(self, found: int) -> None:
        """Require that all ranks found the same steps, before anything is loaded.

        Only rank 0 has saved, so a rank with its own disk finds other steps. We check
        first, because with shards, loading is collective.

        Raises:
            EngineError: on every rank, if a rank has found other steps.
        """
        strategy = self.strategy
        steps = torch.zeros(
            strategy.group_size, dtype=torch.double, device=strategy.device
        )
        steps[strategy.group_rank] = found
        if len(strategy.sum(steps).unique()) > 1:
            raise EngineError(
                "the ranks found different checkpoints: checkpoint_dir must be a "
                "folder that all nodes share"
            )

    # ── helpers ─────────────────────────────────────────────────────────────────────

    def _plan(
        self, loading: Loading, *, epoch: int, training: bool
    ) -> list[Microbatch]:
        order = self._order(loading, epoch, training=training)
        strategy = self.strategy
        plan = epoch_plan(
            order,
            rank=strategy.rank if training else strategy.group_rank,
            world_size=strategy.world_size if training else strategy.group_size,
            batch_size=loading.batch_size,
            num_microbatches=(
                self.config.gradient_accumulation_steps if training else 1
            ),
            drop_last=loading.drop_last,
        )
        if not plan:
            raise EngineError(
                f"{len(order)} samples give no full step of "
                f"{self.strategy.world_size} × {loading.batch_size}: turn drop_last "
                "off"
            )
        return plan

    def _order(self, loading: Loading, epoch: int, *, training: bool) -> list[int]:
        """Return the order of all samples in an epoch; collective with a sampler."""
        set_epoch(loading.dataset, epoch)
        seed = self.config.seed if loading.seed is None else loading.seed
        if loading.sampler is None:
            return epoch_order(
                loading.num_samples,
                shuffles=training and loading.shuffles,
                seed=seed,
                epoch=epoch,
            )
        strategy, key = self.strategy, id(loading)
        drawn: list[int] = []
        refused: EngineError | None = None
        if strategy.group_rank == 0:
            if key not in self.orders:
                num = loading.num_samples
                self.orders[key] = DrawnOrder(loading.sampler, seed, num)
            try:
                drawn = self.orders[key].of(epoch)
            except EngineError as error:
                refused = error
        own = [0.0 if refused else len(drawn), 1.0 if refused else 0.0]
        found = torch.tensor(own, dtype=torch.double, device=strategy.device)
        num, is_refused = strategy.sum(found).tolist()
        if is_refused:
            raise refused or EngineError(
                "the sampler failed on rank 0: look for the reason in its error"
            )
        order = torch.zeros(int(num), dtype=torch.double, device=strategy.device)
        if strategy.group_rank == 0:
            order += torch.tensor(drawn, dtype=torch.double, device=strategy.device)
        return [int(index) for index in strategy.sum(order).tolist()]

    def _mean(self, value: float) -> float:
        device = self.strategy.device
        tensor = torch.tensor([value], dtype=torch.double, device=device)
        return float(self.strategy.sum(tensor)) / self.strategy.group_size


def has_stalled(losses: Sequence[float], patience: int | None) -> bool:
    """Return True if the last `patience` epochs brought no improvement.

    A loss of nan, inf or -inf counts as worse than any finite loss.
    """
    if patience is None or len(losses) <= patience:
        return False
    worst = [loss if math.isfinite(loss) else math.inf for loss in losses]
    return min(worst[-patience:]) >= min(worst[:-patience])


def rates_of(own: list[float], wanted: float | None) -> list[float]:
    """Return the learning rate of each group of parameters, before scaling.

    Raises:
        EngineError: you ask for one rate, but the groups have different ones.
    """
    if wanted is None:
        return own
    if len(set(own)) > 1:
        raise EngineError(
            f"learning_rate is {wanted:g}, but the optimizer's groups have "
            f"{', '.join(f'{rate:g}' for rate in own)}: leave learning_rate out"
        )
    return [wanted] * len(own)
