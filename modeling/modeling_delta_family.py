"""DeltaNet, Gated DeltaNet, DeltaProduct and Gated DeltaProduct as transformers models."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from ..configuration.configuration_delta_family import DeltaFamilyConfig
from .heads import BehaviorCloningMixin, SequenceClassificationMixin, TokenClassificationMixin
from .mixers.delta import DeltaMixer
from .mixers.fused_step import known_to_compiled_code
from .mixers.joined_projections import project_joined
from .mixers.linear_maps import apply_linear
from .mixers.swiglu_cpu import swiglu_cpu
from .scan.dispatch import check_backend_name, choose_backend
from .sequence_model import RecurrentBlock, SequenceModel, SequencePreTrainedModel, make_norm


class SwiGLU(nn.Module):
    def __init__(self, config: DeltaFamilyConfig):
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if choose_backend(self.config.scan_backend, x.device) == "cpu":
            joined = project_joined(self, ["gate_proj", "up_proj"], x)
            if joined is not None:
                return apply_linear(self.down_proj, swiglu_cpu(joined))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@known_to_compiled_code
class DeltaFamilyBlock(RecurrentBlock):
    """A mixer, then a SwiGLU network if configured; each reads a norm of its input and is added to it."""

    mixer_class = DeltaMixer

    def __init__(self, config: DeltaFamilyConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.intermediate_size:
            self.mlp_norm = make_norm(config)
            self.mlp = SwiGLU(config)
        self.has_mlp = config.intermediate_size > 0

    def advance(self, hidden_states, *rest) -> tuple[torch.Tensor, tuple]:
        hidden_states, state = super().advance(hidden_states, *rest)
        if self.has_mlp:
            hidden_states = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        return hidden_states, state


class DeltaFamilyPreTrainedModel(SequencePreTrainedModel):
    """Initialisation, loading and saving of all models of this family."""

    config: DeltaFamilyConfig
    main_projection, readout_projection = "q_proj", "o_proj"
    _no_split_modules = ["DeltaFamilyBlock"]
    _can_record_outputs = {"hidden_states": DeltaFamilyBlock}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if not isinstance(module, DeltaMixer):
            return
        for part in module.children():
            if isinstance(part, nn.Linear):
                init.xavier_uniform_(part.weight, gain=2**-2.5)
        if self.config.use_decay:
            init.uniform_(module.dt_bias, math.log(self.config.dt_min), math.log(self.config.dt_max))
            dt = module.dt_bias.exp()
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
            init.uniform_(module.A_log, 0.0, self.config.decay_rate_max)
            init.copy_(module.A_log, module.A_log.clamp(min=1e-4 * self.config.decay_rate_max).log())


class DeltaFamilyModel(SequenceModel, DeltaFamilyPreTrainedModel):
    """The blocks and a last norm without a head; `config.input_type` says whether they read tokens or observations."""

    block_class = DeltaFamilyBlock

    def set_up(self, config: DeltaFamilyConfig) -> None:
        check_backend_name(config.scan_backend)
        if config.use_decay:
            # Exponents: half precision would move the slowest decays by several per cent.
            self._keep_in_fp32_modules_strict = ["A_log", "dt_bias"]


class DeltaFamilyForSequenceClassification(SequenceClassificationMixin, DeltaFamilyPreTrainedModel):
    base_model_class = DeltaFamilyModel


class DeltaFamilyForTokenClassification(TokenClassificationMixin, DeltaFamilyPreTrainedModel):
    base_model_class = DeltaFamilyModel


class DeltaFamilyForBehaviorCloning(BehaviorCloningMixin, DeltaFamilyPreTrainedModel):
    base_model_class = DeltaFamilyModel
