"""What the configurations of all model families share: inputs, outputs, losses, and the refusal of misspelled names."""

import difflib
import inspect
from dataclasses import fields
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

# 2: the blocks of Mamba-3 stand in norms and residual connections by default.
FORMAT_VERSION = 2

# Keywords that are not fields but that transformers itself passes to, or keeps in, a configuration.
TRANSFORMERS_KEYWORDS = frozenset(
    {
        "attn_implementation",
        "auto_map",
        "custom_pipelines",
        "experts_implementation",
        "is_decoder",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "per_layer_config",
        "quantization_config",
        "task_specific_params",
        "tie_last_hidden_states",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
    }
)


@strict
class SequenceModelConfig(PreTrainedConfig):
    r"""
    The fields that every model family has; a family adds its own, and its own defaults.

    Args:
        vocab_size (`int`, defaults to 128): Number of tokens, when `input_type` is `"tokens"`.
        num_hidden_layers (`int`, defaults to 1): Number of blocks.
        input_type (`"tokens"`, `"observations"` or `"embeddings"`, defaults to `"tokens"`): What the model reads:
            token ids, continuous observations, or only `inputs_embeds`. Behaviour cloning always reads observations.
        observation_size (`int`, defaults to 16): Numbers in an observation.
        action_size (`int`, defaults to 2): Numbers in an action.
        cue_weight (`float`, defaults to 1): Weight in the behaviour-cloning loss of the frames with a cue on: those
            whose last observed number is above one half. At 1 nothing is a cue, and all frames weigh alike.
        episode_loss (`bool`, defaults to `False`): Whether each episode's loss is divided by its own length before
            the mean over episodes, instead of weighing all frames alike.
        label_smoothing (`float`, defaults to 0.0): Label smoothing of the classification losses.
        token_names (`list[str]`, *optional*): Names of the tokens in order, by which pipelines read words as text.
        norm_eps (`float`, defaults to 1e-5): Added to the variance in all norms.
        use_cache (`bool`, defaults to `True`): Whether the model returns its state outside training.
        pad_token_id (`int`, *optional*): Token that sequence classification takes for padding if no mask is given.
        bos_token_id (`int`, *optional*): Kept for tokenizers; the model does not use it.
        eos_token_id (`int`, *optional*): Kept for tokenizers; the model does not use it.
        format_version (`int`, defaults to 2): Version of this configuration format; another one is refused.
    """

    keys_to_ignore_at_inference = ["past_key_values"]
    # Whether the maps of observations and to predictions have a bias.
    projection_bias = False
    # What stands around the mixers: a norm before each and one after the last block, and whether what a mixer gives is
    # added to what the block was given. A family may make fields of these.
    block_norm = "layer_norm"
    residual = True

    vocab_size: int = 128
    num_hidden_layers: int = 1
    input_type: Literal["tokens", "observations", "embeddings"] = "tokens"
    observation_size: int = 16
    action_size: int = 2
    cue_weight: float | int = 1.0
    episode_loss: bool = False
    label_smoothing: float | int = 0.0
    token_names: list[str] | None = None
    norm_eps: float | int = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    format_version: int = FORMAT_VERSION

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # So that help() of a family describes every field. Running with -OO leaves no docstrings.
        if cls.__doc__ and SequenceModelConfig.__doc__:
            shared = inspect.getdoc(SequenceModelConfig).partition("Args:\n")[2]
            cls.__doc__ = inspect.cleandoc(cls.__doc__) + "\n" + shared

    def __post_init__(self, **kwargs):
        # First of all: another format may hold fields that this version would call unknown.
        self._refuse_other_format()
        self._refuse_unknown_keywords(kwargs)
        if not __name__.startswith("transformers_modules."):
            # With the package the pipelines are registered; this entry would ask to trust the checkpoint's own code.
            kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)

    def _refuse_other_format(self):
        version = self.format_version
        if isinstance(version, int) and version != FORMAT_VERSION:
            newer = version > FORMAT_VERSION
            raise ValueError(
                f"format_version={version} was written by {'a newer' if newer else 'an older'} mamba3_nplr; this one "
                f"reads {FORMAT_VERSION}. {'Upgrade the package' if newer else 'Train the model again'}, or load the "
                "checkpoint's own code with trust_remote_code=True."
            )

    def _refuse_unknown_keywords(self, keywords):
        names = {field.name for field in fields(self)}
        tolerated = TRANSFORMERS_KEYWORDS | names | set(GenerationConfig._get_default_generation_params())
        for name, value in keywords.items():
            if name.startswith("_") or name in tolerated:
                continue
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean `{close[0]}`?" if close else f"The fields are: {', '.join(sorted(names))}."
            raise ValueError(f"{type(self).__name__} has no field `{name}` (given: {value!r}). {hint}")

    def validate_architecture(self):
        """Checks the ranges and combinations that types cannot express; part of `@strict`. Families add their own."""
        for name in ("vocab_size", "num_hidden_layers", "observation_size", "action_size"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        for name in ("cue_weight", "norm_eps"):
            self._require(getattr(self, name) >= 0, name, "at least 0")
        self._require(0 <= self.label_smoothing < 1, "label_smoothing", "at least 0 and below 1")
        names = self.token_names or []
        self._require(
            len(set(names)) == len(names) <= self.vocab_size and not any(len(x.split()) != 1 for x in names),
            "token_names",
            f"at most vocab_size={self.vocab_size} names, all different and without spaces",
        )

    def _require(self, condition, name, allowed):
        if not condition:
            raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: it must be {allowed}.")

    @property
    def action_head_size(self) -> int:
        """Numbers that the map to actions puts out; the first `action_size` of them are the action."""
        return self.action_size

    @property
    def layer_types(self) -> list[str]:
        return ["linear_attention"] * self.num_hidden_layers

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Does nothing: `save_pretrained` of the models writes the code and the Auto map of a checkpoint."""


__all__ = ["SequenceModelConfig"]
