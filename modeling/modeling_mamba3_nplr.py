"""Mamba-3 with an input-dependent reflection (NPLR) as transformers models."""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_mamba3_nplr import Mamba3NPLRConfig
from .heads import BehaviorCloningMixin, SequenceClassificationMixin, TokenClassificationMixin
from .mixer_mamba3 import Mamba3Mixer, RMSNorm
from .model_inputs import check_observations, check_tokens, find_sequences, refuse_unknown_keywords, take_packing
from .recurrent_cache import check_cache, read_state, write_state
from .scan import check_backend_name
from .self_contained import SelfContainedMixin


class Mamba3NPLRBlock(GradientCheckpointingLayer):
    """One mixer, with its state kept in `past_key_values`, and a residual connection if configured."""

    def __init__(self, config: Mamba3NPLRConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.residual = config.residual
        self.mixer = Mamba3Mixer(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        rows = hidden_states.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        state = read_state(past_key_values, self.layer_idx, self.mixer.state_shapes(rows))
        mixed, state = self.mixer(hidden_states, state, mask, cu_seqlens)
        write_state(past_key_values, self.layer_idx, state)
        return hidden_states + mixed if self.residual else mixed


class Mamba3NPLRPreTrainedModel(SelfContainedMixin, PreTrainedModel):
    """Initialisation, loading and saving of all models of this family."""

    config: Mamba3NPLRConfig
    config_class = Mamba3NPLRConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Mamba3NPLRBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    # As in the official module; half precision would move the smallest steps by several per cent.
    _keep_in_fp32_modules_strict = ["dt_bias", "C_bias", "D"]
    _can_record_outputs = {"hidden_states": Mamba3NPLRBlock}
    _can_compile_fullgraph = True
    _is_stateful = True
    auto_classes = {
        "AutoModel": "Mamba3NPLRModel",
        "AutoModelForSequenceClassification": "Mamba3NPLRForSequenceClassification",
        "AutoModelForTokenClassification": "Mamba3NPLRForTokenClassification",
        "AutoModelForBehaviorCloning": "Mamba3NPLRForBehaviorCloning",
    }

    @property
    def dtype(self) -> torch.dtype:
        """That of the projections: the first parameter may be one of those kept in float32."""
        return self.base_model.layers[0].mixer.in_proj.weight.dtype

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight)
        elif isinstance(module, RMSNorm):
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


class Mamba3NPLRModel(Mamba3NPLRPreTrainedModel):
    """
    A stack of blocks over tokens, continuous observations or given embeddings; `config.input_type` says which of the
    first two it has a map for.
    """

    def __init__(self, config: Mamba3NPLRConfig):
        super().__init__(config)
        # Fields may have been changed since the configuration was made.
        config.validate()
        check_backend_name(config.scan_backend)
        if config.input_type == "tokens":
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        elif config.input_type == "observations":
            self.embed_observations = nn.Linear(config.observation_size, config.hidden_size, bias=False)
            self._input_embed_layer = "embed_observations"
        optional = {"A_bias": config.gate_form == "exact", "B_bias": config.injection == "trapezoid"}
        self._keep_in_fp32_modules_strict = self._keep_in_fp32_modules_strict + [x for x in optional if optional[x]]
        self.layers = nn.ModuleList([Mamba3NPLRBlock(config, index) for index in range(config.num_hidden_layers)])
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        observations: torch.FloatTensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids (batch, length), inputs_embeds (batch, length, hidden_size) or observations (batch, length,
                observation_size): Exactly one of them.
            attention_mask, position_ids, cu_seqlens: See `find_sequences`. Padding, wherever it stands, changes nothing
                and reads as 0; an all-padding row leaves its state as it was.
            past_key_values: State after the tokens before these, read and updated; with `cu_seqlens`, of each sequence.
            use_cache: Whether to return the state if none was given. By default outside training.
        """
        cu_seqlens = take_packing(cu_seqlens, kwargs)
        refuse_unknown_keywords(kwargs)
        given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "observations": observations}
        given = {name: x for name, x in given.items() if x is not None}
        if len(given) != 1:
            names = ", ".join(given) or "none"
            raise ValueError(f"Exactly one of input_ids, inputs_embeds and observations is needed; given: {names}.")
        [(name, values)] = given.items()
        if values.dim() < 2:
            raise ValueError(f"{name} have shape {tuple(values.shape)}; they must be (batch, length) or more.")
        batch, length = values.shape[:2]
        mask, cu_seqlens = find_sequences(batch, length, attention_mask, position_ids, cu_seqlens)
        hidden_states = self.embed(name, values, mask)
        past_key_values = self.prepare_cache(
            past_key_values, use_cache, batch if cu_seqlens is None else len(cu_seqlens) - 1
        )

        for layer in self.layers:
            hidden_states = layer(hidden_states, mask=mask, cu_seqlens=cu_seqlens, past_key_values=past_key_values)
        if mask is not None:
            hidden_states = hidden_states.masked_fill(~mask[..., None], 0.0)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def embed(self, name: str, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The input of the first block, (batch, length, hidden_size), 0 at padding whatever stands there."""
        wanted = {"input_ids": "tokens", "observations": "observations"}.get(name, self.config.input_type)
        if wanted != self.config.input_type:
            raise ValueError(
                f"{name} need input_type={wanted!r}; this model has input_type={self.config.input_type!r}."
            )
        if name == "input_ids":
            check_tokens(values, self.config.vocab_size)
            values = self.embed_tokens(values)
        if name == "observations":
            check_observations(values, self.config.observation_size, mask)
        if mask is not None:
            # Before the map of observations: what is not a number there would reach the gradient of its weight.
            values = values.masked_fill(~mask[..., None], 0.0)
        return self.embed_observations(values) if name == "observations" else values

    def prepare_cache(self, cache: Cache | None, use_cache: bool | None, rows: int) -> Cache | None:
        """The given cache once checked, or a new one if the caller wants the state back."""
        checkpointing = self.gradient_checkpointing and self.training
        if cache is not None:
            if checkpointing:
                raise ValueError(
                    "past_key_values cannot be used with gradient checkpointing in training: the backward pass runs "
                    "the blocks again, and would write the state again."
                )
            check_cache(cache, len(self.layers), self.layers[0].mixer.state_shapes(rows))
            return cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return DynamicCache(config=self.config) if use_cache and not checkpointing else None


class Mamba3NPLRForSequenceClassification(SequenceClassificationMixin, Mamba3NPLRPreTrainedModel):
    base_model_class = Mamba3NPLRModel


class Mamba3NPLRForTokenClassification(TokenClassificationMixin, Mamba3NPLRPreTrainedModel):
    base_model_class = Mamba3NPLRModel


class Mamba3NPLRForBehaviorCloning(BehaviorCloningMixin, Mamba3NPLRPreTrainedModel):
    base_model_class = Mamba3NPLRModel
    # transformers has no Auto class for policies: where this package is not, AutoModel loads the policy.
    auto_classes = Mamba3NPLRPreTrainedModel.auto_classes | {"AutoModel": "Mamba3NPLRForBehaviorCloning"}


__all__ = [
    "Mamba3NPLRForBehaviorCloning",
    "Mamba3NPLRForSequenceClassification",
    "Mamba3NPLRForTokenClassification",
    "Mamba3NPLRModel",
    "Mamba3NPLRPreTrainedModel",
]
