"""Mamba-3 with an input-dependent reflection (NPLR) as transformers models."""

import math

import torch
from torch import nn
from transformers import initialization as init

from ..configuration.configuration_mamba3_nplr import Mamba3NPLRConfig
from .fused_policy import step_policy
from .heads import BehaviorCloningMixin, SequenceClassificationMixin, TokenClassificationMixin
from .mixers.fused_step import (
    METHODS,
    has_plain_parameters,
    is_bare,
    known_method,
    known_to_compiled_code,
    may_step,
    submodule,
)
from .mixers.mamba3 import Mamba3Mixer, RMSNorm
from .mixers.mamba3_cpu import BlockFrame, PolicyBlock
from .scan.dispatch import check_backend_name
from .sequence_model import RecurrentBlock, SequenceModel, SequencePreTrainedModel


@known_to_compiled_code
class Mamba3NPLRBlock(RecurrentBlock):
    """One mixer with its norm and residual connection, as configured."""

    mixer_class = Mamba3Mixer

    @known_method
    def advance(self, hidden_states, state, mask, cu_seqlens, letters=None, *rest) -> tuple[torch.Tensor, tuple]:
        if letters is None and may_step(hidden_states, mask, cu_seqlens):
            mixer, frame = submodule(self, "mixer"), self.frame()
            if frame is not None and is_bare(mixer, Mamba3Mixer):
                stepped = mixer.step(hidden_states, state, frame)
                if stepped is not None:
                    return stepped
        return super().advance(hidden_states, state, mask, cu_seqlens, letters, *rest)

    def policy_block(self, dtype: torch.dtype, rows: int) -> PolicyBlock | None:
        """What the compiled step of a whole policy takes of this block; None if it must not stand for it."""
        mixer, frame = submodule(self, "mixer"), self.frame()
        if frame is None or not is_bare(mixer, Mamba3Mixer) or type(mixer).step not in METHODS:
            return None
        return mixer.policy_block(dtype, rows, frame)

    def frame(self) -> BlockFrame | None:
        """What stands around the mixer, for compiled code that takes it in one piece; None if it does not know it."""
        norm = submodule(self, "mixer_norm")
        if is_bare(norm, nn.Identity):
            return BlockFrame(residual=bool(self.residual))
        centred = is_bare(norm, nn.LayerNorm)
        if not centred and not is_bare(norm, nn.RMSNorm):
            return None
        if not has_plain_parameters(norm):
            return None
        bias = norm._parameters["bias"] if centred else None
        return BlockFrame(norm._parameters["weight"], bias, norm.eps, centred, bool(self.residual))


class Mamba3NPLRPreTrainedModel(SequencePreTrainedModel):
    """Initialisation, loading and saving of all models of this family."""

    config: Mamba3NPLRConfig
    main_projection, readout_projection = "in_proj", "out_proj"
    _no_split_modules = ["Mamba3NPLRBlock"]
    # As in the official module; half precision would move the smallest steps by several per cent.
    _keep_in_fp32_modules_strict = ["dt_bias", "C_bias", "D"]
    _can_record_outputs = {"hidden_states": Mamba3NPLRBlock}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, Mamba3Mixer):
            self._init_mixer(module)

    def _init_mixer(self, mixer: Mamba3Mixer) -> None:
        init.uniform_(mixer.dt_bias, math.log(self.config.dt_min), math.log(self.config.dt_max))
        dt = mixer.dt_bias.exp()
        init.copy_(mixer.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
        init.ones_(mixer.C_bias)
        init.ones_(mixer.D)
        if self.config.injection == "trapezoid":
            init.ones_(mixer.B_bias)
        if self.config.gate_form == "exact":
            init.constant_(mixer.A_bias, -2.0)
        if self.config.initial_state == "learned":
            init.normal_(mixer.h0, std=1 / math.sqrt(self.config.state_size))
        if self.config.reflection_rank:
            init.zeros_(mixer.beta_proj.weight)
            init.constant_(mixer.beta_proj.bias, self.config.beta_bias_init)


class Mamba3NPLRModel(SequenceModel, Mamba3NPLRPreTrainedModel):
    """The blocks and a last norm without a head; `config.input_type` says whether they read tokens or observations."""

    block_class = Mamba3NPLRBlock

    def set_up(self, config: Mamba3NPLRConfig) -> None:
        check_backend_name(config.scan_backend)
        optional = {"A_bias": config.gate_form == "exact", "B_bias": config.injection == "trapezoid"}
        self._keep_in_fp32_modules_strict = self._keep_in_fp32_modules_strict + [x for x in optional if optional[x]]


class Mamba3NPLRForSequenceClassification(SequenceClassificationMixin, Mamba3NPLRPreTrainedModel):
    base_model_class = Mamba3NPLRModel


class Mamba3NPLRForTokenClassification(TokenClassificationMixin, Mamba3NPLRPreTrainedModel):
    base_model_class = Mamba3NPLRModel


class Mamba3NPLRForBehaviorCloning(BehaviorCloningMixin, Mamba3NPLRPreTrainedModel):
    base_model_class = Mamba3NPLRModel
    compiled_step = staticmethod(step_policy)
