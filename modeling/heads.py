"""The heads that every model family of this package shares; a family adds its own base class and base model."""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput, can_return_tuple, logging

from .control_loop import ControlLoopMixin
from .losses import behavior_cloning_loss, classification_loss
from .model_inputs import Sequences, find_sequences, take_packing

logger = logging.get_logger(__name__)


@dataclass
class PrefixClassifierOutput(SequenceClassifierOutputWithPast):
    """`prefix_logits` (batch, length, num_labels) are there when asked for, and with labels for every position."""

    prefix_logits: torch.FloatTensor | None = None


@dataclass
class TokenClassifierOutputWithPast(TokenClassifierOutput):
    """Token classification with the state."""

    past_key_values: Cache | None = None


@dataclass
class BehaviorCloningOutput(ModelOutput):
    """Actions (batch, time, action_size) for every frame."""

    loss: torch.FloatTensor | None = None
    actions: torch.FloatTensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


class HeadMixin:
    """
    Builds the base model of a family under `model`. A head sets `head_name`, the attribute that holds its map from
    hidden states, and `output_name`, the field of its output for what the map gives; a family sets `base_model_class`.
    """

    head_name: str
    output_name: str
    base_model_class: type

    def __init__(self, config):
        super().__init__(config)
        self.model = self.base_model_class(config)

    def encode(
        self,
        inputs: dict[str, torch.Tensor | None],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        past_key_values: Cache | None,
        use_cache: bool | None,
        **kwargs,
    ) -> tuple[BaseModelOutputWithPast, Sequences]:
        """
        Runs the base model on the one of the inputs that is given; also returns where the sequences lie.

        A forward that calls it writes out its arguments: Trainer keeps those columns of a dataset that are names in
        the signature, and takes for labels what is called so there.
        """
        given = next((x for x in inputs.values() if torch.is_tensor(x)), None)
        cu_seqlens = take_packing(cu_seqlens, kwargs)
        sequences = Sequences(None, None)
        # Without a batch there is nothing to find, and the model says what is missing.
        if given is not None and given.dim() >= 2:
            sequences = find_sequences(*given.shape[:2], attention_mask, position_ids, cu_seqlens)
        where = {"attention_mask": sequences.mask, "cu_seqlens": sequences.cu_seqlens}
        states = {"past_key_values": past_key_values, "use_cache": use_cache}
        return self.model(**inputs, **where, **states, **kwargs, return_dict=True), sequences

    @property
    def output_size(self) -> int:
        """How many of the numbers that the map gives are the output, from the first on."""
        return getattr(self, self.head_name).out_features

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.model.set_input_embeddings(value)


def passed_on(outputs: BaseModelOutputWithPast) -> dict:
    """What the output of every head has from the base model."""
    return {name: getattr(outputs, name) for name in ("past_key_values", "hidden_states", "attentions")}


class ClassificationMixin(HeadMixin):
    """What both classifiers share: the map to labels and the loss."""

    head_name, output_name = "score", "logits"

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=config.projection_bias)
        self.post_init()

    def label_loss(self, logits, labels, problem_type, valid, num_items_in_batch) -> torch.Tensor:
        labels, smoothing = labels.to(logits.device), self.config.label_smoothing
        return classification_loss(logits, labels, problem_type, valid, smoothing, num_items_in_batch)


class SequenceClassificationMixin(ClassificationMixin):
    """
    Classifies a sequence by its last token, or every prefix of it.

    `labels` for the sequence train the last valid position: (batch,) class indices, or as `config.problem_type` says
    elsewhere in transformers. `labels` with one more axis, the length, train every position.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        observations: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_prefix_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> PrefixClassifierOutput:
        """
        Args:
            input_ids, inputs_embeds or observations, attention_mask, position_ids, cu_seqlens, past_key_values,
                use_cache: As in the base model. Without a mask, `config.pad_token_id` among the tokens is padding.
            labels: (batch,) class indices for the last position, or (batch, length) for every position; with another
                `config.problem_type` than single labels, one more axis (num_labels). An entry of -100 does not count.
                Packed sequences have one label each, or one at every position (1, length).
            output_prefix_logits: Whether to return `prefix_logits` also without labels for every position.
            num_items_in_batch: Divides the sum over labels; their number if None.
        """
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "observations": observations}
        outputs, (valid, cu_seqlens) = self.encode(
            inputs, attention_mask, position_ids, cu_seqlens, past_key_values, use_cache, **kwargs
        )
        hidden_states = outputs.last_hidden_state
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            valid = input_ids != self.config.pad_token_id
        logits = self.score(last_token(hidden_states, valid, cu_seqlens))

        if labels is None and num_items_in_batch is not None and not output_prefix_logits:
            warn_of_outer_loss(num_items_in_batch, len(logits))
        loss, prefix_logits = None, None
        by_prefix = labels is not None and self.labels_every_prefix(labels, logits, hidden_states)
        if by_prefix or output_prefix_logits:
            prefix_logits = self.score(hidden_states)
        if labels is not None:
            predicted, counted = (prefix_logits, valid) if by_prefix else (logits, None)
            loss = self.label_loss(predicted, labels, self.problem_type(labels), counted, num_items_in_batch)
        return PrefixClassifierOutput(loss=loss, logits=logits, prefix_logits=prefix_logits, **passed_on(outputs))

    def problem_type(self, labels: torch.Tensor) -> str:
        """The configured problem type, or the one that transformers would infer from the labels."""
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def labels_every_prefix(self, labels, logits, hidden_states) -> bool:
        """Whether the labels are for every position, by their shape; other shapes than the two are an error."""
        target = () if self.problem_type(labels) == "single_label_classification" else (self.num_labels,)
        whole, prefixes = (logits.shape[0], *target), (*hidden_states.shape[:2], *target)
        shapes = {whole: False, prefixes: True}
        if target == (1,):
            shapes |= {prefixes[:-1]: True, whole[:-1]: False, whole: False}
        if tuple(labels.shape) not in shapes:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}; with problem_type={self.problem_type(labels)!r} they must "
                f"be {whole} for the last position or {prefixes} for every position."
            )
        return shapes[tuple(labels.shape)]


def warn_of_outer_loss(num_items_in_batch: torch.Tensor | int, sequences: int) -> None:
    """Trainer's `label_smoothing_factor` keeps the labels, and so whether they are for every position, to itself."""
    if not torch.compiler.is_compiling() and int(num_items_in_batch) > sequences:
        logger.warning_once(
            "num_items_in_batch was given without labels: a loss outside of the model, such as that of Trainer's "
            "label_smoothing_factor, meets the logits of the last position. If the labels are for every position, give "
            "label_smoothing in the configuration of the model instead."
        )


def last_token(
    hidden_states: torch.Tensor, valid: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """The hidden state of the last token of each sequence, (sequences, hidden_size); 0 for one that has no token."""
    if hidden_states.shape[1] == 0:
        raise ValueError("The sequence is empty: sequence classification needs at least one position.")
    if cu_seqlens is not None:
        last = hidden_states[0, (cu_seqlens[1:] - 1).clamp(min=0)]
        return last.masked_fill((cu_seqlens.diff() == 0)[:, None], 0.0)
    if valid is None:
        return hidden_states[:, -1]
    rows, length = torch.arange(len(valid), device=valid.device), valid.shape[1]
    # Where a row is all padding this is position 0, which then reads as 0.
    return hidden_states[rows, (valid * torch.arange(length, device=valid.device)).argmax(-1)]


class TokenClassificationMixin(ClassificationMixin):
    """Classifies every token: `labels` (batch, length), -100 where there is none."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        observations: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> TokenClassifierOutputWithPast:
        """
        Args:
            input_ids, inputs_embeds or observations, attention_mask, position_ids, cu_seqlens, past_key_values,
                use_cache: As in the base model.
            labels (batch, length): Class indices; at padding, and where they are -100, they do not count.
            num_items_in_batch: Divides the sum over labels; their number if None.
        """
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "observations": observations}
        outputs, (valid, _) = self.encode(
            inputs, attention_mask, position_ids, cu_seqlens, past_key_values, use_cache, **kwargs
        )
        logits = self.score(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            check_labels(labels, tuple(logits.shape[:2]))
            loss = self.label_loss(logits, labels, "single_label_classification", valid, num_items_in_batch)
        return TokenClassifierOutputWithPast(loss=loss, logits=logits, **passed_on(outputs))


class BehaviorCloningMixin(ControlLoopMixin, HeadMixin):
    """
    A policy: observations (batch, time, observation_size) to actions (batch, time, action_size).

    The first components of the output map are the action; its width is `config.action_head_size`. `labels` are
    demonstrated actions; frames that are masked out, or whose label is -100, do not count. In a control loop, `reset()`
    starts an episode and `select_action(observation)` runs one step on the kept state, for one environment or several.
    Finite observations so large that the model overflows have actions that are not finite, from their frame on, and
    leave such a state in `past_key_values`; only the control loop looks at what comes out, and refuses them.
    """

    main_input_name = "observations"
    head_name, output_name = "action_head", "actions"

    def __init__(self, config):
        if config.input_type not in ("observations", "pixels"):
            # A copy: the caller may build a model of another kind from the same configuration.
            config = copy.deepcopy(config)
            config.input_type = "observations"
        super().__init__(config)
        self.action_head = nn.Linear(config.hidden_size, config.action_head_size, bias=config.projection_bias)
        self.post_init()

    @property
    def output_size(self) -> int:
        return self.config.action_size

    @property
    def accepts_loss_kwargs(self) -> bool:
        # Trainer counts frames, not episodes; the mean of the batches' means is exact for episodes.
        return not self.config.episode_loss

    @can_return_tuple
    def forward(
        self,
        observations: torch.FloatTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.FloatTensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> BehaviorCloningOutput:
        """
        Args:
            observations or inputs_embeds, attention_mask, position_ids, cu_seqlens, past_key_values, use_cache: As in
                the base model.
            labels (batch, time, action_size): Demonstrated actions; at padding, and where they are -100, they do not
                count. Frames weigh as `config.cue_weight` and `config.episode_loss` say.
            num_items_in_batch: Divides the sum over the numbers in labels; how many there are if None.
        """
        inputs = {"observations": observations, "inputs_embeds": inputs_embeds}
        outputs, (valid, cu_seqlens) = self.encode(
            inputs, attention_mask, position_ids, cu_seqlens, past_key_values, use_cache, **kwargs
        )
        actions = self.action_head(outputs.last_hidden_state)[..., : self.config.action_size]
        loss = None
        if labels is not None:
            check_labels(labels, tuple(actions.shape))
            has_cue = self.config.cue_weight != 1
            if has_cue and observations is None:
                raise ValueError(
                    f"labels need observations: with cue_weight={self.config.cue_weight} the cue, which is their last "
                    "number, weighs the loss."
                )
            loss = behavior_cloning_loss(
                actions,
                labels.to(actions.device),
                observations[..., -1] if has_cue else None,
                self.config.cue_weight,
                valid,
                self.episodes(actions, cu_seqlens) if self.config.episode_loss else None,
                num_items_in_batch,
            )
        return BehaviorCloningOutput(loss=loss, actions=actions, **passed_on(outputs))

    @staticmethod
    def episodes(actions: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """The number of the episode that each frame belongs to, (batch, time)."""
        batch, time = actions.shape[:2]
        if cu_seqlens is None:
            return torch.arange(batch, device=actions.device)[:, None].expand(batch, time)
        frames = torch.arange(time, device=actions.device)
        return torch.searchsorted(cu_seqlens[1:].contiguous(), frames, right=True)[None]


def check_labels(labels: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(labels.shape) != shape:
        raise ValueError(f"labels have shape {tuple(labels.shape)}; they must be {shape}.")


__all__ = ["BehaviorCloningMixin", "SequenceClassificationMixin", "TokenClassificationMixin"]
