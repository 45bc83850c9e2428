"""The loop around the steps: what happens between two of them, and what is told about it.

    step -> numbers          one line of metrics (records.py), a progress bar on a terminal, a plain line every k steps elsewhere
    every --eval-interval    the validation loss, at the end always
    every --save-interval    a checkpoint, at the end too, and on Ctrl-C
    the last step            its timeline, measured above simulated

See it run: ``python -m minimeg.train --run-dir out/run --eval-interval 20``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

import torch
from tqdm import tqdm

from minimeg.checkpoint import Writer
from minimeg.comm import ledger
from minimeg.cost import GPTShape, model_flops_per_iteration, utilisation
from minimeg.options import Options
from minimeg.pipeline import Recorder
from minimeg.records import TIMELINE, Records
from minimeg.resume import changes, resume, save
from minimeg.schedule import Timeline, simulate
from minimeg.schedule.drawing import gantt_stack
from minimeg.trainer import StepReport, Trainer


@dataclass
class History:
    """What the steps of this process gave: reports, and {steps done: validation loss}."""

    reports: list[StepReport] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)


def train(trainer: Trainer, talks: bool) -> History:
    """All steps that are left. Collective over all ranks; the rank that ``talks`` prints and writes.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the step in progress was finished and, with --save, saved.
    """
    options, state = trainer.options, trainer.state
    about = vars(options) | {"world_size": state.grid.world_size, **state.grid.sizes}
    history = History()
    last = options.train_iters - 1  # traced: by then everything is warm
    with (
        Records(options.run_dir if talks else None, about) as records,
        Progress(options, talks) as progress,
        Checkpoints(trainer, progress) as checkpoints,
    ):
        for step in range(checkpoints.resume(), options.train_iters):
            recorder = Recorder(state.device) if step == last or (step + 1) % options.log_interval == 0 else None
            start = time.perf_counter()
            with ledger() as book:
                report = trainer.step(step, recorder)
            seconds = time.perf_counter() - start
            timeline = recorder.timeline(trainer.schedule, state.pp) if recorder else None
            numbers = _numbers(options, report, seconds, state.grid.world_size)
            numbers["wire_bytes"] = book.total("wire")
            numbers["bubble"] = timeline.bubble_of_total if timeline else None
            history.reports.append(report)
            done = step + 1
            progress.step(report, seconds)
            if trainer.optimizer.skipped:
                progress.say(trainer.optimizer.skipped)
            if trainer.invariants is not None and step == last:
                progress.say(str(trainer.invariants))
            if done == options.train_iters or (options.eval_interval and done % options.eval_interval == 0):
                numbers["validation_loss"] = history.validation[done] = trainer.evaluate()
                progress.say(f"step {done:>5}/{options.train_iters}  validation loss {history.validation[done]:.4f}")
            records.write(done, numbers)
            checkpoints.after(done)
            if timeline is not None and step == last and talks:
                for path in filter(None, [options.trace, options.run_dir and options.run_dir / TIMELINE]):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(measured_above_simulated(timeline), encoding="utf-8")
    return history


class Checkpoints:
    """When to save: every --save-interval steps, at the end, and once on Ctrl-C, which then ends the run."""

    def __init__(self, trainer: Trainer, progress: Progress) -> None:
        self.trainer, self.progress, options = trainer, progress, trainer.options
        self.writer = None
        if options.save is not None:
            self.writer = Writer(
                options.save, trainer.state, keep=options.keep, asynchronous=options.async_save, timeout=options.timeout
            )
        self.interrupted = False

    def resume(self) -> int:
        """The first step to take."""
        folder = self.trainer.options.load
        loaded = None if folder is None else resume(self.trainer, folder)
        if loaded is not None:
            for reason in loaded.refused:
                self.progress.say(f"not used: {reason}")
            self.progress.say(f"going on after step {loaded.step}, from {loaded.place}")
            for change in changes(self.trainer, loaded):
                self.progress.say(f"note: {change}")
        elif folder is not None:
            self.progress.say(f"{folder} holds no checkpoint: starting anew")
        self.progress.bar.update(loaded.step if loaded else 0)
        return loaded.step if loaded else 0

    def after(self, done: int) -> None:
        """``done``: steps done."""
        options = self.trainer.options
        if self.writer is None:
            return
        # A signal reaches the ranks at different times: whoever has it, all stop after the same step.
        asked = torch.tensor(float(self.interrupted), device=self.trainer.state.device)
        stop = bool(self.trainer.state.world.all_reduce(asked, "max"))
        due = bool(options.save_interval) and done % options.save_interval == 0
        if stop or due or done == options.train_iters:
            save(self.writer, self.trainer, done)
        if stop:
            self.writer.wait()
            self.progress.say(f"interrupted: saved after step {done}")
            raise KeyboardInterrupt(f"saved after step {done}")

    def __enter__(self) -> Checkpoints:
        self._before = None
        if self.writer is not None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, lambda number, frame: setattr(self, "interrupted", True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self.writer is not None and kind is None:
            self.writer.wait()


def _numbers(options: Options, report: StepReport, seconds: float, world_size: int) -> dict[str, float | None]:
    tokens = options.global_batch_size * options.seq_length
    numbers: dict[str, float | None] = {
        "loss": report.loss,
        "norm": report.norm,
        "learning_rate": report.learning_rate,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }
    if options.peak_tflops:
        config = options.config
        shape = GPTShape(
            config.num_layers, config.hidden_size, config.num_attention_heads, options.seq_length, config.vocab_size
        )
        flops = model_flops_per_iteration(shape, options.global_batch_size)
        numbers["model_flops_utilisation"] = utilisation(flops, seconds, world_size, options.peak_tflops * 1e12)
    return numbers


class Progress:
    """A bar on a terminal; elsewhere a line every ``--log-interval`` steps, and one for the first and the last."""

    def __init__(self, options: Options, talks: bool) -> None:
        self.options, self.talks = options, talks
        self.on_terminal = talks and sys.stderr.isatty()
        self.bar = tqdm(total=options.train_iters, desc="training", disable=not self.on_terminal, unit="step")
        self.tokens, self.seconds = 0, 0.0

    def step(self, report: StepReport, seconds: float) -> None:
        options, done = self.options, report.step + 1
        self.tokens += options.global_batch_size * options.seq_length
        self.seconds += seconds
        self.bar.update()
        self.bar.set_postfix_str(f"loss {report.loss:.3f}")
        if not self.on_terminal and (done % options.log_interval == 0 or done in (1, options.train_iters)):
            self.say(
                f"step {done:>5}/{options.train_iters}  loss {report.loss:.4f}  norm {report.norm:.3f}  "
                f"lr {report.learning_rate:.2e}  {self.tokens / self.seconds:,.0f} tokens/s"
            )

    def say(self, line: str) -> None:
        if self.talks:
            with tqdm.external_write_mode():
                tell(line)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()


def tell(text: str) -> None:
    """Print, or go on in silence when nobody reads any more (``| head``, a closed terminal): a run left alone must not die of it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def measured_above_simulated(measured: Timeline) -> str:
    """Both as one SVG. The simulation gets the measured mean time of each kind of action on each stage."""
    times = measured.mean_times()
    predicted = simulate(measured.schedule, forward=times["F"], backward=times["B"], weight=times["W"])
    return gantt_stack(
        [("measured, the last step of this run", measured), ("simulated with the measured times", predicted)]
    )
