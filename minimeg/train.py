"""The main job: train a GPT on text over tp x pp x dp processes.

    python -m minimeg.train                                                        # one process
    python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2
    python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2 --dtype float64 --train-iters 20 \\
        --compare-with-single-process

``--help`` lists all flags; bad layouts are refused before any process group exists, all faults at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from minimeg.arguments import parse
from minimeg.comparison import compare_with_single_process
from minimeg.data import TextDataset, fingerprint, load_text
from minimeg.dry_run import dry_run, imagine, report
from minimeg.faults import BOX, Fault, watch
from minimeg.loop import History, tell, train
from minimeg.models.generate import generate
from minimeg.options import Options
from minimeg.parallel_state import ParallelState, initialize_model_parallel, world_size_of_environment
from minimeg.parameter import full_state
from minimeg.plots import loss_curve
from minimeg.trainer import Trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if the comparison failed, 2 for flags or data that cannot be used, 130 after Ctrl-C."""
    options = parse(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("minimeg.train: interrupted", file=sys.stderr, flush=True)
        return 130


def _run(options: Options) -> int:
    try:
        dataset = _prepare(options)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":  # every rank finds the same; one says it
            print(f"minimeg.train: error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)  # torchrun ends all at the first exit: let the one that speaks be first
        return 2
    if options.dry_run:
        with imagine(options, options.rank, options.world_size or 1) as state:
            tell(report(dry_run(options, state, dataset)))
        return 0
    _limit_threads()
    try:
        state = initialize_model_parallel(
            options.tensor_model_parallel_size,
            options.pipeline_model_parallel_size,
            options.context_parallel_size,
            timeout_seconds=options.timeout,
            device=options.device,
        )
    except (ValueError, ConnectionError) as error:  # the environment, the device, the port
        print(f"minimeg.train: error: {error}", file=sys.stderr, flush=True)
        return 2
    talks = state.rank == 0
    grace = options.timeout if options.save else 5.0  # Ctrl-C: time to save
    with watch(state, silence=min(20.0, options.timeout), grace=grace):
        _require_same_text(dataset, state)
        trainer = Trainer(options, state, dataset)
        if talks:
            tell(_describe(options, state))
        history = train(trainer, talks)
        BOX.enter("gather")
        needs_model = options.sample or options.compare_with_single_process
        parameters = full_state(trainer.chunks, state) if needs_model else {}
        if dist.is_initialized():
            dist.destroy_process_group()
    # What follows needs nobody else; the other ranks are done.
    return _conclude(options, dataset, history, parameters, str(state.device)) if talks else 0


def _prepare(options: Options) -> TextDataset:
    """Everything that can be refused without talking to anybody. ValueError with all faults."""
    faults = options.faults((options.dry_run and options.world_size) or world_size_of_environment())
    dataset = None
    try:
        Fault.from_environment(world_size_of_environment())
    except ValueError as error:
        faults.append(str(error))
    try:
        dataset = TextDataset(load_text(options.data_path or None), options.seq_length)
    except ValueError as error:
        faults.append(str(error))
    if faults or dataset is None:
        raise ValueError("this run cannot start:\n  " + "\n  ".join(faults))
    return dataset


def _limit_threads() -> None:
    """cores / ranks threads each, unless the user decided (torchrun itself decides 1 for several ranks)."""
    if "OMP_NUM_THREADS" not in os.environ:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))


def _require_same_text(dataset: TextDataset, state: ParallelState) -> None:
    """Two machines with different Python patch versions hold different default texts: their ranks would train on a mixture."""
    seen = state.world.all_gather_json(fingerprint(dataset.train_tokens)[:16])
    odd = [rank for rank, text in enumerate(seen) if text != seen[0]]
    if odd:
        raise RuntimeError(f"ranks {odd} read another text than rank 0; give all the same files with --data-path")


def _describe(options: Options, state: ParallelState) -> str:
    sizes = state.grid.sizes
    m = options.microbatches(state.grid.world_size)
    return (
        f"minimeg: {state.grid.world_size} process(es) on {state.device.type}, tp={sizes['tp']} pp={sizes['pp']} dp={sizes['dp']}, "
        f"schedule {options.schedule_name}, {m} micro-batches of {options.micro_batch_size} x {options.seq_length} tokens\n"
        f"model: L={options.num_layers} h={options.hidden_size} a={options.num_attention_heads} v={options.config.vocab_size}, "
        f"{'tied' if options.config.tied else 'untied'}, {options.dtype}"
    )


def _conclude(
    options: Options,
    dataset: TextDataset,
    history: History,
    parameters: dict[str, torch.Tensor],
    device: str,
) -> int:
    """What rank 0 makes of a finished run: sample, comparison, pictures."""
    losses = [report.loss for report in history.reports]
    passed = True
    twin: tuple[float, ...] = ()
    if options.sample:
        text = generate(options.config, parameters, "def ", options.sample, seed=options.seed)
        tell(f"a sample of {options.sample} characters:\n{'-' * 72}\n{text}\n{'-' * 72}")
    if options.compare_with_single_process:
        verdict = compare_with_single_process(options, dataset, losses, parameters, device)
        passed, twin = verdict.passed, verdict.losses
        tell(verdict.text)
    if options.loss_curve:
        loss_curve(options.loss_curve, losses, history.validation, twin, f"{options.schedule_name}, {options.dtype}")
    for path in filter(None, (options.loss_curve, options.trace)):
        tell(f"drawn: {path}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
