"""
`transformers.Trainer` for runs that may be killed at any moment: checkpoints that are whole or not there, a resume that
is exact to the bit, and an end with a reason where numbers stop being finite.

Weights are safetensors. What else a run needs to resume (optimizer, schedule, random numbers) stays in the form in
which Trainer writes it and reads it back, with `weights_only=True`: it comes from this machine and is never published.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..modeling.hub.atomic_files import publish_folder, write_atomically
from ..modeling.hub.contents import write_contents
from .checkpoints import UNFINISHED, CheckpointError, files_in, last_whole_checkpoint, whole_checkpoints
from .consistency import Consistency, DropHeads, without_states
from .finite import NotFiniteError, all_finite, first_not_finite


class ResumableTrainer(Trainer):
    """
    Args:
        train_dataset: `FreshBatches` of this process.
        evaluator: Called with the model; returns the figures to log, by name.
        record: Files to write into every checkpoint, by name: what to tell someone who finds it.
        consistency: A term of the loss, if there is one.
    """

    def __init__(
        self,
        model,
        args,
        train_dataset,
        evaluator: Callable[[nn.Module], dict],
        record: dict[str, str],
        consistency: Consistency | None = None,
    ):
        # Trainer wants a dataset where an evaluation strategy is set; what is evaluated is the evaluator's affair.
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=train_dataset)
        self.evaluator = evaluator
        self.record = record
        self.consistency = consistency
        self.step_loss = None
        self.saving = False
        self.started, self.seconds_before = time.monotonic(), 0.0
        if consistency is not None:
            self.add_callback(DropHeads(consistency, self.accelerator))
        if self.pop_callback(ProgressCallback):
            self.add_callback(ProgressBar())

    def get_train_dataloader(self):
        args = self.args
        return self.train_dataset.loader(
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
        )

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """As in Trainer, by the evaluator."""
        metrics = {f"{metric_key_prefix}_{name}": x for name, x in self.evaluator(self.model_wrapped).items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def training_step(self, *arguments, **keywords) -> torch.Tensor:
        self.step_loss = super().training_step(*arguments, **keywords)
        return self.step_loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.consistency is None or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = self.consistency.begin(inputs, self.state.global_step / self.args.max_steps)
        found = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return self.consistency.add_to(found, 1 / self.args.gradient_accumulation_steps)

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm)
        # With float16 the scaler expects infinite gradients now and then, and leaves the step out.
        checked = self.step_loss if getattr(self.accelerator, "scaler", None) else self.step_loss + grad_norm
        if not math.isfinite(checked):
            self.refuse_numbers(grad_norm)
        return grad_norm

    def refuse_numbers(self, grad_norm) -> None:
        step = self.state.global_step
        inputs = without_states(self.train_dataset[step * self.args.gradient_accumulation_steps])
        where = first_not_finite(self.model, inputs)
        kept = last_whole_checkpoint(self.args.output_dir)
        raise NotFiniteError(
            f"Step {step}: the loss is {float(self.step_loss)}, the gradient norm {float(grad_norm)}. First not "
            f"finite: {where}. Batch: {self.train_dataset.describe(step)}. Last whole checkpoint: {kept or 'none'}."
        )

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        # A pickle, which nothing here reads.
        Path(output_dir or self.args.output_dir, "training_args.bin").unlink(missing_ok=True)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # Losses since the last log entry, so that the next one is their mean in a resumed run too.
        waiting = {"loss": float(self._tr_loss), "last_logged": self._globalstep_last_logged, "seconds": self.seconds()}
        self.loss_file(output_dir).write_text(json.dumps(waiting), encoding="utf-8")

    def _load_rng_state(self, checkpoint):
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and self.loss_file(checkpoint).exists():
            waiting = json.loads(self.loss_file(checkpoint).read_text(encoding="utf-8"))
            self._tr_loss += waiting["loss"]
            self._globalstep_last_logged = waiting["last_logged"]
            # Trainer's mean at the end is over the updates of this process only.
            self._total_loss_scalar -= waiting["loss"]
            self.seconds_before = waiting.get("seconds")  # earlier versions did not note it

    def train(self, *arguments, **keywords):
        self.started = time.monotonic()
        return super().train(*arguments, **keywords)

    def seconds(self) -> float | None:
        """Of the training up to now, with that before a resume up to its checkpoint; None if that is not known."""
        return None if self.seconds_before is None else self.seconds_before + time.monotonic() - self.started

    def loss_file(self, folder) -> Path:
        return Path(folder, f"loss_{self.args.process_index}.json")

    def _get_output_dir(self, trial=None) -> str:
        return str(self.unfinished_folder) if self.saving else super()._get_output_dir(trial)

    @property
    def unfinished_folder(self) -> Path:
        return Path(self.args.output_dir, UNFINISHED)

    def _save_checkpoint(self, model, trial):
        """Writes under another name, renames once all is on the disk, and only then deletes older checkpoints."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        part, whole = self.unfinished_folder / name, Path(self.args.output_dir, name)
        for parameter_name, parameter in self.model.named_parameters():
            if not all_finite(parameter):
                raise NotFiniteError(f"Step {self.state.global_step}: {parameter_name} is not finite; it is not saved.")
        if self.args.should_save:
            shutil.rmtree(self.unfinished_folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.saving = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.finish_checkpoint(part, whole)
        except Exception as error:
            shutil.rmtree(self.unfinished_folder, ignore_errors=True)
            kept = last_whole_checkpoint(self.args.output_dir)
            raise CheckpointError(
                f"{name} could not be saved ({error}). Last whole checkpoint: {kept or 'none'}."
            ) from error
        finally:
            self.saving = False
        self.accelerator.wait_for_everyone()

    def finish_checkpoint(self, part: Path, whole: Path) -> None:
        for file_name, text in self.record.items():
            (part / file_name).write_text(text, encoding="utf-8")
        if self.state.best_global_step:
            best = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            self.state.best_model_checkpoint = str(best)
            self.state.save_to_json(str(part / "trainer_state.json"))
        write_contents(part, files_in(part))
        self.set_aside(whole)  # one that is damaged, if any
        publish_folder(part, whole)
        self.delete_older(keep=whole)
        shutil.rmtree(self.unfinished_folder, ignore_errors=True)

    def set_aside(self, checkpoint: Path) -> None:
        """Takes away its name first, all at once: if a kill leaves half of it, it is where no whole one can be."""
        with contextlib.suppress(OSError):
            os.replace(checkpoint, self.unfinished_folder / f"old-{checkpoint.name}")

    def delete_older(self, keep: Path | None) -> None:
        """Leaves `save_total_limit` checkpoints. Trainer's own rotation counts folders that are not whole."""
        if keep is None:
            return
        kept = {str(keep), self.state.best_model_checkpoint or str(keep)}
        others = [path for path in whole_checkpoints(self.args.output_dir) if str(path) not in kept]
        excess = len(others) + len(kept) - (self.args.save_total_limit or len(others) + len(kept))
        for path in others[: max(0, excess)]:
            self.set_aside(path)

    def save_finished(self) -> list[str]:
        """
        The trained model in the run's own folder; its weights, which make it loadable, come last. Returns the names of
        its files, in the process that writes them.
        """
        part, whole, names = self.unfinished_folder, Path(self.args.output_dir), []
        try:
            self.save_model(str(part), _internal_call=True)
            if self.args.should_save:
                names = sorted(files_in(part), key=lambda name: name.endswith(".safetensors"))
                for name in names:
                    write_atomically(whole / name, lambda path, name=name: shutil.copyfile(part / name, path))
                self.delete_older(keep=last_whole_checkpoint(whole))  # a kill may have come before it was their turn
                shutil.rmtree(part)
        except Exception as error:
            shutil.rmtree(part, ignore_errors=True)
            kept = last_whole_checkpoint(whole)
            raise CheckpointError(f"The model could not be saved ({error}). Last whole checkpoint: {kept}.") from error
        self.accelerator.wait_for_everyone()
        return names


class ProgressBar(ProgressCallback):
    """The last loss and evaluation beside the bar, instead of a line for each log entry."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            short = {name.removeprefix("eval_"): x for name, x in logs.items() if name == "loss" or name[:5] == "eval_"}
            self.shown = getattr(self, "shown", {}) | {name: f"{x:.4g}" for name, x in short.items()}
            self.training_bar.set_postfix(self.shown)


class StopOnSignal(TrainerCallback):
    """
    Saves a checkpoint after the step in which SIGTERM or SIGINT arrives and ends training; `stopped` is the signal's
    number. A second signal ends the program at once. For a single process: several would have to agree on a step, and
    their launcher gives them no time for it.
    """

    def __init__(self):
        self.stopped = None
        self.before = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if args.world_size == 1:
            self.before = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(self, number, frame):
        self.stopped = number
        self.restore()

    def on_step_end(self, args, state, control, **kwargs):
        if self.stopped:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self.restore()

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
