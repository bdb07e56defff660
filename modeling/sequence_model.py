"""What all model families share: from inputs to blocks and back, with their states in a cache."""

import math
from functools import partial

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import capture_outputs

from .families import HEADS, auto_class_without_package, own_name
from .hub.self_contained import SelfContainedMixin
from .mixers.fused_step import is_known, known_method, submodule
from .mixers.letters import Letters, find_equal_observations, find_letters, is_unseen
from .model_inputs import (
    check_embeddings,
    check_observations,
    check_tokens,
    find_sequences,
    refuse_unknown_keywords,
    take_packing,
)
from .pixel_encoder import PixelEncoder
from .recurrent_cache import LayerStates, check_cache, read_state, write_state


def make_norm(config) -> nn.Module:
    """The norm that stands before a mixer, or after the last block."""
    norms = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm, "none": nn.Identity}
    return norms[config.block_norm](config.hidden_size, eps=config.norm_eps)


class RecurrentBlock(GradientCheckpointingLayer):
    """
    x + mixer(norm(x)), as far as the configuration has a norm and a residual connection; the state of the mixer is kept
    in `past_key_values`. A family sets `mixer_class`, built from the configuration. A mixer maps hidden states, a
    state, a mask and bounds of packed sequences to hidden states and the next state, tells the shapes of a state by
    `state_shapes(rows)`, and the state before the first token of each row by `initial_state(hidden_states)`.
    """

    mixer_class: type[nn.Module]

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.residual = config.residual
        self.mixer_norm = make_norm(config)
        self.mixer = self.mixer_class(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        letters: Letters | None = None,
    ) -> torch.Tensor:
        rows = hidden_states.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        state = read_state(past_key_values, self.layer_idx, partial(self.mixer.state_shapes, rows))
        keeps_state = past_key_values is not None
        hidden_states, state = self.advance(hidden_states, state, mask, cu_seqlens, letters, keeps_state)
        write_state(past_key_values, self.layer_idx, state)
        # A norm has a bias, so that padding would not stay 0 by itself.
        return hidden_states if mask is None else hidden_states.masked_fill(~mask[..., None], 0.0)

    def advance(
        self, hidden_states, state, mask, cu_seqlens, letters=None, keeps_state=True
    ) -> tuple[torch.Tensor, tuple | None]:
        """What the block makes of these tokens, and the state after them, which nobody reads without `keeps_state`."""
        inputs, index = (hidden_states, None) if letters is None else letters
        mixed, state = self.mix(self.mixer_norm(inputs), state, mask, cu_seqlens, index, keeps_state)
        return hidden_states + mixed if self.residual else mixed, state

    def mix(self, inputs, state, mask, cu_seqlens, index, keeps_state) -> tuple[torch.Tensor, tuple | None]:
        """The mixer; one whose state costs more than all else may leave it out."""
        return self.mixer(inputs, state, mask, cu_seqlens, *(() if index is None else (index,)))

    def may_take_letters(self) -> bool:
        """Whether the block may be given letters, once for all tokens that are the same."""
        mixer, norm = submodule(self, "mixer"), submodule(self, "mixer_norm")
        if not all(is_known(type(module)) and is_unseen(module, type(module)) for module in (self, norm)):
            return False
        return is_unseen(mixer, self.mixer_class) and mixer.may_take_letters()


class SequencePreTrainedModel(SelfContainedMixin, PreTrainedModel):
    """
    Initialisation, loading and saving. A family annotates `config` with the class of its configuration, and names two
    linear maps of its mixer: `main_projection`, which holds most of the weights, and, if it has heads,
    `readout_projection`, which takes what they read, one head after another.
    """

    main_projection: str
    readout_projection: str | None = None
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _can_compile_fullgraph = True
    _is_stateful = True

    @classmethod
    def auto_classes(cls) -> dict[str, str]:
        """The name of each Auto class -> the name of the class of this family that it loads from a checkpoint."""
        family = cls.config_class.__name__.removesuffix("Config")
        names = {x.__name__ for x in cls.__mro__}
        head = next((x for x in HEADS if family + x in names), "Model")
        loaded = {own_name(auto_class): family + x for x, auto_class in HEADS.items()}
        return loaded | {auto_class_without_package(head): family + head}

    @classmethod
    def custom_pipelines(cls) -> dict[str, dict]:
        # Not before: pipelines load much that a model does not need.
        from .pipelines import custom_pipelines

        return custom_pipelines(cls)

    @property
    def dtype(self) -> torch.dtype:
        """That of the projections: the first parameter may be one of those kept in float32."""
        return getattr(self.base_model.layers[0].mixer, self.main_projection).weight.dtype

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv1d):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        elif isinstance(module, nn.Conv2d):
            # What pictures differ in must not fade from one convolution to the next, down to what the norm of the first
            # block adds to a variance.
            init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Embedding):
            self.init_embeddings(module)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.BatchNorm1d):
            init.ones_(module.weight)
            init.zeros_(module.running_mean)
            init.ones_(module.running_var)
            init.zeros_(module.num_batches_tracked)
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)

    def init_embeddings(self, module: nn.Embedding) -> None:
        if self.config.embedding_init == "uniform":
            # As a linear map of one-hot tokens.
            bound = 1 / math.sqrt(module.num_embeddings)
            init.uniform_(module.weight, -bound, bound)
        elif module.num_embeddings <= module.embedding_dim:
            # A channel for each token, so that a rate of its own for each weight is one for each token.
            init.eye_(module.weight)
        else:
            init.orthogonal_(module.weight)


class SequenceModel(SequencePreTrainedModel):
    """
    A stack of blocks and a last norm over tokens, continuous observations or given embeddings; `config.input_type` says
    which of the first two it has a map for. A family sets `block_class`, built from the configuration and the number of
    the layer.
    """

    block_class: type[RecurrentBlock]

    def __init__(self, config):
        super().__init__(config)
        # Fields may have been changed since the configuration was made.
        config.validate()
        if config.input_type == "tokens":
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        elif config.input_type == "observations":
            self.embed_observations = nn.Linear(
                config.observation_size, config.hidden_size, bias=config.projection_bias
            )
            self._input_embed_layer = "embed_observations"
        elif config.input_type == "pixels":
            self.embed_observations = PixelEncoder(config)
            self._input_embed_layer = "embed_observations"
        self.layers = nn.ModuleList([self.block_class(config, index) for index in range(config.num_hidden_layers)])
        self.norm = make_norm(config)
        self.set_up(config)
        self.gradient_checkpointing = False
        self.post_init()

    def set_up(self, config) -> None:
        """For what a family has beside its blocks."""

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
                observation_size): Exactly one of them. Pictures are bytes, or the same as floating numbers, 0 to 255;
                they may also be (batch, length, channels, height, width).
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
        if name == "observations":
            values = self.flat_observations(values)
        if values.dim() < 2:
            raise ValueError(f"{name} have shape {tuple(values.shape)}; they must be (batch, length) or more.")
        batch, length = values.shape[:2]
        mask, cu_seqlens = find_sequences(batch, length, attention_mask, position_ids, cu_seqlens)
        hidden_states = self.embed(name, values, mask)
        letters = self.find_letters(name, values, mask)
        past_key_values = self.prepare_cache(
            past_key_values, use_cache, batch if cu_seqlens is None else len(cu_seqlens) - 1
        )

        hidden_states = self.run_blocks(hidden_states, mask, cu_seqlens, past_key_values, letters)
        if mask is not None:
            hidden_states = hidden_states.masked_fill(~mask[..., None], 0.0)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    @known_method
    def run_blocks(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        past_key_values: Cache | LayerStates | None,
        letters: Letters | None = None,
    ) -> torch.Tensor:
        for layer in self.layers:
            # After the first block the same letter is no longer the same at each of its places.
            first = {} if letters is None or layer is not self.layers[0] else {"letters": letters}
            hidden_states = layer(
                hidden_states, mask=mask, cu_seqlens=cu_seqlens, past_key_values=past_key_values, **first
            )
        return self.norm(hidden_states)

    def embed(self, name: str, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The input of the first block, (batch, length, hidden_size), 0 at padding whatever stands there."""
        wanted = {"input_ids": ("tokens",), "observations": ("observations", "pixels")}.get(name)
        if wanted is not None and self.config.input_type not in wanted:
            raise ValueError(
                f"{name} need input_type={wanted[0]!r}; this model has input_type={self.config.input_type!r}."
            )
        if name == "input_ids":
            check_tokens(values, self.config.vocab_size)
            values = self.embed_tokens(values)
        if name == "inputs_embeds":
            check_embeddings(values, self.config.hidden_size)
        if name == "observations":
            check_observations(values, self.config.observation_size, mask)
        if mask is not None:
            # Before the map of observations: what is not a number there would reach the gradient of its weight.
            values = values.masked_fill(~mask[..., None], 0.0)
        return self.embed_observations(values) if name == "observations" else values

    def flat_observations(self, observations: torch.Tensor) -> torch.Tensor:
        """Observations (..., observation_size), which pictures (..., channels, height, width) may be given for."""
        if self.config.input_type == "pixels" and list(observations.shape[-3:]) == self.config.pixel_shape:
            return observations.flatten(-3)
        return observations

    def find_letters(self, name: str, values: torch.Tensor, mask: torch.Tensor | None) -> Letters | None:
        """What the first block may take in place of each token by itself."""
        if name == "inputs_embeds" or not self.layers[0].may_take_letters():
            return None
        if name == "input_ids":
            return find_letters(submodule(self, "embed_tokens"), values)
        if mask is not None:
            values = values.masked_fill(~mask[..., None], 0.0)
        return find_equal_observations(submodule(self, "embed_observations"), values)

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


__all__ = ["RecurrentBlock", "SequenceModel", "SequencePreTrainedModel"]
