"""IDS4 (input-dependent S4) as transformers models."""

import math

import torch
from torch import nn
from transformers import initialization as init

from ..configuration.configuration_ids4 import IDS4Config
from .heads import BehaviorCloningMixin, SequenceClassificationMixin, TokenClassificationMixin
from .mixers.fused_step import known_to_compiled_code
from .mixers.ids4 import IDS4Mixer
from .sequence_model import RecurrentBlock, SequenceModel, SequencePreTrainedModel


@known_to_compiled_code
class IDS4Block(RecurrentBlock):
    """One mixer, which holds the residual connection and the norm too."""

    mixer_class = IDS4Mixer

    def mix(self, inputs, state, mask, cu_seqlens, index, keeps_state):
        return self.mixer(inputs, state, mask, cu_seqlens, index, keep_state=keeps_state)


class IDS4PreTrainedModel(SequencePreTrainedModel):
    """Initialisation, loading and saving of all models of this family."""

    config: IDS4Config
    main_projection = "C"
    _no_split_modules = ["IDS4Block"]
    _can_record_outputs = {"hidden_states": IDS4Block}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and module.bias is not None:
            bound = 1 / math.sqrt(module.in_features)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, IDS4Mixer):
            size = self.config.state_size
            init.normal_(module.A, std=1 / math.sqrt(size))
            init.copy_(module.A, module.A + torch.eye(size, dtype=module.A.dtype, device=module.A.device))


class IDS4Model(SequenceModel, IDS4PreTrainedModel):
    """The blocks without a head; `config.input_type` says whether they read tokens or observations."""

    block_class = IDS4Block


class IDS4ForSequenceClassification(SequenceClassificationMixin, IDS4PreTrainedModel):
    base_model_class = IDS4Model


class IDS4ForTokenClassification(TokenClassificationMixin, IDS4PreTrainedModel):
    base_model_class = IDS4Model


class IDS4ForBehaviorCloning(BehaviorCloningMixin, IDS4PreTrainedModel):
    base_model_class = IDS4Model
