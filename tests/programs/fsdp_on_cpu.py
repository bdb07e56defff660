"""
train_hf.py under FSDP on processors. Accelerate takes FSDP for GPUs only and would silently run DDP here; its state is
made to say FSDP, and all else is as with GPUs.
"""

import sys

from accelerate import state

from helpers.training_program import load_program
from mamba3_nplr.training.trainer import ResumableTrainer

initialise = state.AcceleratorState.__init__


def with_fsdp(self, *arguments, fsdp_plugin=None, **keywords):
    initialise(self, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
    if fsdp_plugin is not None:
        self._shared_state["fsdp_plugin"] = fsdp_plugin
    if self._shared_state.get("fsdp_plugin") is not None:
        self._shared_state["distributed_type"] = state.DistributedType.FSDP


state.AcceleratorState.__init__ = with_fsdp
save = ResumableTrainer._save_checkpoint


def check_and_save(self, model, trial):
    # After an evaluation the outermost weights are still gathered; those of the blocks never are.
    blocks = {type(x).__name__ for x in self.model.model.layers.parameters()}
    assert self.is_fsdp_enabled and blocks == {"DTensor"}, blocks
    save(self, model, trial)


ResumableTrainer._save_checkpoint = check_and_save
load_program().main(sys.argv[1:])
