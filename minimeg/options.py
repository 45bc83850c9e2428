"""What a training run is told, and every reason to refuse it, found before any process group exists.

:meth:`Options.faults` lists all that is wrong at once, each sentence naming the field, the values and a legal alternative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from minimeg.data import VOCAB_SIZE, microbatch_count
from minimeg.grid import Grid
from minimeg.models.config import GPTConfig
from minimeg.models.recomputation import Recomputation
from minimeg.schedule import Schedule, build, forward_only

DTYPES = ("float32", "float64", "bfloat16", "float16")
OPTIMIZERS = ("adamw", "sgd")
ON_NONFINITE = ("stop", "skip")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


@dataclass(frozen=True)
class Options:
    """What a run is told. Field names are the flags' with underscores."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    schedule: str | None = None
    num_layers: int = 4
    hidden_size: int = 64
    num_attention_heads: int = 4
    vocab_size: int = VOCAB_SIZE
    seq_length: int = 64
    micro_batch_size: int = 2
    global_batch_size: int = 16
    train_iters: int = 100
    lr: float = 1e-3
    min_lr: float = 1e-4
    lr_warmup_iters: int | None = None
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    optimizer: str = "adamw"
    seed: int = 1234
    data_path: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "float32"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    whole_dropout_masks: bool = False
    untie_embeddings_and_output_weights: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_keep_microbatches: int = 0
    distribute_saved_activations: bool = False
    check_recompute: bool = False
    eval_interval: int = 0
    eval_iters: int = 4
    log_interval: int = 10
    timeout: float = 60.0
    compare_with_single_process: bool = False
    trace: Path | None = None
    loss_curve: Path | None = None
    sample: int = 0
    run_dir: Path | None = None
    peak_tflops: float = 0.0
    use_distributed_optimizer: bool = False
    on_nonfinite: str = "stop"
    check_invariants: bool = False
    save: Path | None = None
    load: Path | None = None
    save_interval: int = 0
    keep: int = 2
    async_save: bool = False
    dry_run: bool = False
    rank: int = 0
    world_size: int | None = None

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            vocab_size=self.vocab_size,
            max_sequence_length=self.seq_length,
            hidden_dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout,
            tied=not self.untie_embeddings_and_output_weights,
            sequence_parallel=self.sequence_parallel,
            whole_dropout_masks=self.whole_dropout_masks,
        )

    @property
    def recomputation(self) -> Recomputation:
        """Which micro-batches are left alone follows from the schedule and the rank: the trainer's part."""
        return Recomputation(
            self.recompute_granularity,
            self.recompute_method,
            self.recompute_num_layers,
            self.recompute_modules,
            self.distribute_saved_activations,
            self.check_recompute,
        )

    def in_one_process(self) -> Options:
        """The same training without any parallelism or recomputation."""
        return replace(
            self,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=1,
            sequence_parallel=False,
            schedule=None,
            **{
                name: getattr(Options, name)
                for name in vars(self)
                if "recompute" in name or "saved_activations" in name
            },
        )

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved" if self.virtual_pipeline_model_parallel_size > 1 else "1f1b")

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up: as asked for, or half of all, at most 10."""
        return min(10, self.train_iters // 2) if self.lr_warmup_iters is None else self.lr_warmup_iters

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    def microbatches(self, world_size: int) -> int:
        """m: micro-batches of one data-parallel rank in a step."""
        return microbatch_count(self.global_batch_size, self.micro_batch_size, self.data_parallel_size(world_size))

    def training_schedule(self, world_size: int) -> Schedule:
        p, n = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        return build(self.schedule_name, p, self.microbatches(world_size), chunks=n)

    def evaluation_schedule(self, world_size: int) -> Schedule:
        """Forwards only, through the chunks where the training schedule placed them."""
        training = self.training_schedule(world_size)
        return forward_only(training.stages, training.microbatches, training.chunks, placement=training.placement)

    def faults(self, world_size: int) -> list[str]:
        """Everything that forbids this run on ``world_size`` processes; an empty list means that it can start."""
        unschedulable = self._schedule_faults()
        found = [
            *self._value_faults(),
            *unschedulable,
            *self._comparison_faults(),
            *self._dry_run_faults(),
            *self._checkpoint_faults(),
        ]
        t, p, n = (
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.virtual_pipeline_model_parallel_size,
        )
        if min(t, p, n, self.context_parallel_size) < 1:
            return found  # already named; nothing can be divided by them
        chunks = 2 if self.schedule_name == "zb-v" else n
        # The model's name for the longest sequence is not the flag's.
        found += [fault.replace("max_sequence_length", "seq_length") for fault in self.config.faults(t, p * chunks)]
        found += self.recomputation.faults(self.num_layers, t, self.sequence_parallel)
        layout = _fault_of(lambda: Grid(world_size, tp=t, cp=self.context_parallel_size, pp=p))
        found += layout
        if not layout:
            batch = _fault_of(lambda: self.microbatches(world_size))
            found += batch
            if not batch and not unschedulable:
                found += _fault_of(lambda: self.training_schedule(world_size))
        return found

    def _value_faults(self) -> list[str]:
        found = []
        positive = (
            "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
            "context_parallel_size train_iters log_interval eval_iters keep"
        )
        for name in positive.split():
            if getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("eval_interval", "lr_warmup_iters", "sample", "recompute_keep_microbatches"):
            if (getattr(self, name) or 0) < 0:
                found.append(f"{name}={getattr(self, name)} must be at least 0")
        for name in ("min_lr", "weight_decay", "clip_grad", "peak_tflops"):
            if not 0 <= getattr(self, name) < float("inf"):
                found.append(f"{name}={getattr(self, name)} must be a number of at least 0, e.g. 0.1")
        for name in ("lr", "timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                found.append(f"{name}={getattr(self, name)} must be a positive number, e.g. {getattr(Options, name)}")
        for name, legal in (
            ("dtype", DTYPES),
            ("optimizer", OPTIMIZERS),
            ("device", DEVICES),
            ("on_nonfinite", ON_NONFINITE),
        ):
            if getattr(self, name) not in legal:
                found.append(f"{name}={getattr(self, name)} is unknown; use one of {', '.join(legal)}")
        if self.recompute_keep_microbatches > 0 and self.recompute_granularity is None:
            found.append(
                f"recompute_keep_microbatches={self.recompute_keep_microbatches} needs a recompute_granularity, full or selective: "
                "without one all keep everything"
            )
        if self.min_lr > self.lr > 0:
            found.append(f"min_lr={self.min_lr} exceeds lr={self.lr}; use at most {self.lr}")
        if self.warmup > self.train_iters > 0:
            found.append(
                f"lr_warmup_iters={self.lr_warmup_iters} exceeds train_iters={self.train_iters}; use at most {self.train_iters}"
            )
        if 0 < self.vocab_size < VOCAB_SIZE:
            found.append(
                f"vocab_size={self.vocab_size} is less than the {VOCAB_SIZE} bytes that text is made of; use {VOCAB_SIZE} or more"
            )
        if self.context_parallel_size > 1:
            found.append(f"context_parallel_size={self.context_parallel_size}: its attention is not built yet; use 1")
        return found

    def _schedule_faults(self) -> list[str]:
        name, n = self.schedule_name, self.virtual_pipeline_model_parallel_size
        if name not in SCHEDULES:
            return [f"schedule={name} is not for training; use one of {', '.join(SCHEDULES)}"]
        field = f"virtual_pipeline_model_parallel_size={n}"
        if name == "zb-v" and n > 2:
            return [f"{field}: schedule={name} has two chunks a rank; use --vpp 2 or --schedule interleaved"]
        if n > 1 and name not in ("interleaved", "zb-v"):
            return [f"{field}: schedule={name} has one chunk a rank; use --vpp 1 or --schedule interleaved"]
        return []

    def _checkpoint_faults(self) -> list[str]:
        found = []
        if self.save is None and (self.save_interval or self.async_save):
            found.append("save_interval and async_save say how to save, but there is no --save DIR")
        if self.load is not None and self.compare_with_single_process:
            found.append("compare_with_single_process repeats a run from its first step; leave out --load")
        return found

    def _dry_run_faults(self) -> list[str]:
        if not self.dry_run:
            given = {"world_size": self.world_size is not None, "rank": self.rank != 0}
            return [f"{name} is for --dry-run; torchrun says it otherwise" for name, there in given.items() if there]
        size = self.world_size or 0
        if size < 1:
            return [f"world_size={self.world_size} must be at least 1 in a dry run, e.g. --world-size 1024"]
        return [] if 0 <= self.rank < size else [f"rank={self.rank} must lie in 0..{size - 1}, as world_size={size}"]

    def _comparison_faults(self) -> list[str]:
        """Dropout masks that depend on the tensor-parallel index have no twin in one process."""
        if not self.compare_with_single_process or self.whole_dropout_masks:
            return []
        found = []
        if self.tensor_model_parallel_size > 1 and self.attention_dropout > 0:
            found.append(
                f"compare_with_single_process with tp={self.tensor_model_parallel_size} and attention_dropout="
                f"{self.attention_dropout}: the masks differ by tp index; use --attention-dropout 0, --tp 1 or --whole-dropout-masks"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size > 1 and self.hidden_dropout > 0:
            found.append(
                f"compare_with_single_process with sequence_parallel and hidden_dropout={self.hidden_dropout}: the masks differ by "
                "tp index; use --hidden-dropout 0, no --sequence-parallel, or --whole-dropout-masks"
            )
        return found


def _fault_of(attempt: Callable[[], object]) -> list[str]:
    try:
        attempt()
    except ValueError as error:
        return [str(error)]
    return []
