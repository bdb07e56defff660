"""One run from its start to its end: the model is made, trained, evaluated, saved and, if asked for, uploaded."""

import json
import sys
from pathlib import Path

import torch
import transformers
from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from ..datasets_scripts.show import NO_MATPLOTLIB, can_draw
from ..modeling.hub.atomic_files import write_atomically
from ..modeling.hub.contents import write_contents
from ..modeling.hub.errors import clear_errors
from ..modeling.hub.folder_lock import FolderInUseError, folder_lock
from ..modeling.scan.dispatch import select_backend
from . import record
from .arguments import TrainingRun
from .batches import FreshBatches
from .checkpoints import remove_unfinished
from .comparison import draw_comparison
from .consistency import Consistency
from .endings import StoppedError, UploadError
from .evaluation import evaluate, scalars
from .host_memory import keep_memory
from .model_card import model_card
from .models import new_model
from .progress import TellProgress, is_watched, tell, tell_failure
from .resume import find_checkpoint
from .threads import set_threads
from .trainer import ResumableTrainer, StopOnSignal
from .upload import PushCheckpoints, plan_run
from .usage import UsageError, make_folder


def train(run: TrainingRun, cores: int | None = None) -> dict:
    """
    Trains, evaluates and saves, alone in its folder; returns what `results.json` holds.

    Args:
        cores: That it may use; by default all, or its share of them.
    """
    if run.args.process_index:
        # The first process holds the folder, and the others wait for what it finds there.
        return train_alone(run, None, cores)
    folder = Path(run.args.output_dir)
    with tell_failure():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with folder_lock(folder):
                checkpoint = find_checkpoint(run)
                remove_unfinished(folder)
                return train_alone(run, checkpoint, cores)
        except FolderInUseError as error:
            raise UsageError(f"output_dir: {error}") from error


def train_alone(run: TrainingRun, checkpoint: str | None, cores: int | None) -> dict:
    args = run.args
    args.disable_tqdm = args.disable_tqdm or is_watched()  # there is another display
    keep_memory()
    [checkpoint] = broadcast_object_list([checkpoint])
    repository = create_repository(args)
    transformers.set_seed(args.seed)
    model = new_model(run.task, run.config)
    seed = args.seed if args.data_seed is None else args.data_seed
    accumulation = args.gradient_accumulation_steps
    shares = accumulation, args.process_index, args.world_size
    batches = FreshBatches(run.task, seed, args.max_steps, *shares, with_states=run.consistency is not None)
    # The last batch: no other is longer.
    tokens = batches[len(batches) - 1]["labels"].shape[:2].numel()
    set_threads(args, tokens * model.num_parameters(), cores)
    settings = record.run_settings(run)
    if args.process_index == 0:
        announce(run, model, checkpoint)
        compile_ahead(run)
        record.write_json(Path(args.output_dir, record.RUN), settings)
    trainer = ResumableTrainer(
        model,
        args,
        batches,
        lambda model: scalars(evaluate_run(model, run, ["validation"])["validation"]),
        record={record.RUN: json.dumps(settings, indent=2)},
        consistency=None if run.consistency is None else Consistency(model, run.consistency),
    )
    stop = StopOnSignal()
    trainer.add_callback(stop)
    if is_watched() and args.process_index == 0:
        trainer.add_callback(TellProgress(run.task, stop))
    if repository and args.hub_strategy == "every_save":
        api = HfApi(token=args.hub_token)
        trainer.add_callback(PushCheckpoints(api, repository, (record.RUN,), args.hub_revision))
    trainer.train(resume_from_checkpoint=checkpoint)
    if stop.stopped and trainer.state.global_step < args.max_steps:
        raise StoppedError(
            stop.stopped,
            f"Stopped at step {trainer.state.global_step}, after a checkpoint. To resume, give the same command with "
            "--resume_from_checkpoint",
        )
    return finish(run, settings, trainer, repository)


def finish(run: TrainingRun, settings: dict, trainer: ResumableTrainer, repository: str | None) -> dict:
    args, model, seconds = run.args, trainer.model, trainer.seconds()
    tell(stage="testing")
    results = evaluate_run(trainer.model_wrapped, run, progress=args.process_index == 0 and not args.disable_tqdm)
    trainer.log({f"{split}_{name}": x for split, found in results.items() for name, x in scalars(found).items()})
    saved = trainer.save_finished()
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    summary = record.summary(run, settings, model, results, losses, seconds)
    if args.process_index == 0:
        write_results(run, trainer, summary, repository, saved)
        if repository:
            push_finished(args, summary, repository)
    trainer.accelerator.wait_for_everyone()
    return summary


def write_results(
    run: TrainingRun, trainer: ResumableTrainer, summary: dict, repository: str | None, saved: list[str]
) -> None:
    """
    Results, picture and card, beside the weights they belong to, and a list of all: so that one can tell later which
    files of the folder are the run's, and whether they are still those that were evaluated.

    Args:
        saved: Names of the files of the model.
    """
    out = Path(run.args.output_dir)
    try:
        write_atomically(out / record.PLOT, lambda part: draw_comparison(run.task, {run.model_name: summary}, part))
    except Exception as error:  # whatever it is, the results are worth more than their picture
        (out / record.PLOT).unlink(missing_ok=True)  # the card then goes without
        if not isinstance(error, ImportError):  # which was said at the start
            print(f"No picture of the results could be drawn: {error}", file=sys.stderr)
    plot = (out / record.PLOT).exists()
    card = model_card(run, summary, repository or run.args.output_dir, plot)
    write_atomically(out / "trainer_state.json", lambda part: trainer.state.save_to_json(str(part)))
    write_atomically(out / record.CARD_FILE, lambda part: part.write_text(card, encoding="utf-8"))
    record.write_json(out / record.RESULTS, summary)
    written = [*saved, "trainer_state.json", record.RUN, record.RESULTS, record.CARD_FILE]
    write_contents(out, written + [record.PLOT] * plot)


def push_finished(args, summary: dict, repository: str) -> None:
    try:
        plan_run(Path(args.output_dir), repository, summary).push(HfApi(token=args.hub_token), args.hub_revision)
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        owner, _, name = repository.partition("/")
        revision = f" --revision {args.hub_revision}" if args.hub_revision else ""
        raise UploadError(
            f"The run is finished and in {args.output_dir}, but {error} Once that is fixed: "
            f"python -m mamba3_nplr.publish {args.output_dir} --owner {owner} --name {name}{revision}"
        ) from error


def evaluate_run(model, run: TrainingRun, splits: list[str] | None = None, progress: bool = False) -> dict[str, dict]:
    # Every process evaluates everything: the sets are small, and weights that are shared out need all of them anyway.
    return evaluate(model, run.task, splits, run.args.per_device_eval_batch_size, progress=progress)


def compile_ahead(run: TrainingRun) -> None:
    """What compiled code the model needs on this device is built now: later the progress bar would stand at 0."""
    backend = getattr(run.config, "scan_backend", None)
    if backend is not None:
        select_backend(backend, run.args.device)


def create_repository(args) -> str | None:
    """The repository to upload to, made before training: a wrong name or token shows now, and not at the end."""
    if not args.push_to_hub:
        return None
    if args.hub_strategy not in ("end", "every_save"):
        raise UsageError(
            f"hub_strategy={args.hub_strategy.value} is not allowed: it would publish the optimizer's state, a pickle. "
            "every_save uploads the model of every checkpoint, end only the finished one."
        )
    # Trainer would upload a card of its own, and files that are not published.
    args.push_to_hub = False
    if args.process_index:
        return None
    name = args.hub_model_id or Path(args.output_dir).name
    api = HfApi(token=args.hub_token)
    try:
        with clear_errors(name, "made", "Nothing has been trained."):
            repository = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
            if args.hub_revision:
                api.create_branch(repository, branch=args.hub_revision, exist_ok=True)
            return repository
    except (HTTPError, OSError, ValueError) as error:
        raise UsageError(f"push_to_hub: {error}") from error


def announce(run: TrainingRun, model, checkpoint: str | None) -> None:
    args = run.args
    print(
        f"{run.model_name} on {run.task_name} ({run.preset}, seed {args.seed}): {model.num_parameters():,} parameters, "
        f"{args.max_steps:,} updates of {run.task.batch_size}; processes: {args.world_size} on {args.device.type}, "
        f"threads of each: {torch.get_num_threads()}; {args.output_dir}",
        flush=True,
    )
    if checkpoint:
        print(f"Resumes from {checkpoint}", flush=True)


def prepare(*runs: TrainingRun) -> None:
    """What only the end of a run would show: whether its folder can be written, and whether there will be pictures."""
    if runs[0].args.process_index:
        return
    for run in runs:
        make_folder("output_dir", Path(run.args.output_dir))
        if len(runs) > 1:
            find_checkpoint(run)  # the first is trained for nothing if another cannot be
    if not can_draw():
        print(f"No picture will be drawn. {NO_MATPLOTLIB}", flush=True)
