"""What the configurations of all model families share: inputs, outputs, losses, and the refusal of misspelled names."""

import difflib
import inspect
from dataclasses import dataclass, fields
from numbers import Integral
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


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; `above` excludes the first of the two, `below` the second."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def __contains__(self, number: float) -> bool:
        # Comparisons with what is not a number are false.
        high_enough = number > self.low if self.above else number >= self.low
        return high_enough and (number < self.high if self.below else number <= self.high)

    def __str__(self) -> str:
        low, high = "above" if self.above else "at least", "below" if self.below else "at most"
        return f"{low} {self.low} and {high} {self.high}"


SIZE = Range(1, 2**31 - 1)
COUNT = Range(0, 2**31 - 1)
# transformers writes out a list of them.
LISTED = Range(1, 10**6)
STEP_SIZE = Range(1e-12, 1000)


@strict
class SequenceModelConfig(PreTrainedConfig):
    r"""
    The fields that every model family has; a family adds its own, and its own defaults.

    Args:
        vocab_size (`int`, defaults to 128): Number of tokens, when `input_type` is `"tokens"`.
        num_hidden_layers (`int`, defaults to 1): Number of blocks.
        input_type (`"tokens"`, `"observations"`, `"pixels"` or `"embeddings"`, defaults to `"tokens"`): What the model
            reads: token ids, continuous observations, observations that are the bytes of a picture, or only
            `inputs_embeds`. Behaviour cloning always reads observations, of pixels or not.
        observation_size (`int`, defaults to 16): Numbers in an observation.
        pixel_shape (`list[int]`, *optional*): Channels, height and width of a picture, when `input_type` is
            `"pixels"`; their product is `observation_size`.
        action_size (`int`, defaults to 2): Numbers in an action.
        cue_weight (`float`, defaults to 1): Weight in the behaviour-cloning loss of the frames with a cue on: those
            whose last observed number is above one half. At 1 nothing is a cue, and all frames count equally.
        episode_loss (`bool`, defaults to `False`): Whether each episode's loss is divided by its own length before
            the mean over episodes, instead of counting all frames equally.
        label_smoothing (`float`, defaults to 0.0): Label smoothing of the classification losses.
        embedding_init (`"uniform"` or `"orthogonal"`, defaults to `"uniform"`): What the embeddings of tokens start
            from: as a linear map of one-hot tokens does, or from vectors of length one, each orthogonal to all others
            as long as there are no more tokens than hidden channels. What is learned of one token then disturbs no
            other.
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
    # What the numbers may be, by the names of their fields; a family adds its own. At both ends of those that are not
    # sizes, a new model still has finite losses and gradients.
    ranges = {
        "vocab_size": SIZE,
        "num_hidden_layers": LISTED,
        "observation_size": SIZE,
        "action_size": SIZE,
        "cue_weight": Range(0, 10**6),
        "label_smoothing": Range(0, 1, below=True),
        # With 0 the norm of a row of zeros is not a number.
        "norm_eps": Range(1e-12, 1),
    }

    vocab_size: int = 128
    num_hidden_layers: int = 1
    input_type: Literal["tokens", "observations", "pixels", "embeddings"] = "tokens"
    observation_size: int = 16
    pixel_shape: list[int] | None = None
    action_size: int = 2
    cue_weight: float | int = 1.0
    episode_loss: bool = False
    label_smoothing: float | int = 0.0
    embedding_init: Literal["uniform", "orthogonal"] = "uniform"
    token_names: list[str] | None = None
    norm_eps: float | int = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    format_version: int = FORMAT_VERSION
    # Fields of transformers, which declares them in a way that `@strict` cannot check.
    id2label: dict[int, str] | dict[str, str] | None = None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None

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
        # Before transformers makes as many layers and labels.
        self._check_ranges()
        if "num_labels" in kwargs:
            self._check_num_labels(kwargs["num_labels"])
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
        self._check_ranges()
        self._check_labels()
        if self.input_type == "tokens":
            tokens = Range(0, self.vocab_size - 1)
            for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
                token = getattr(self, name)
                self._require(token is None or token in tokens, name, f"None, or a token of the vocabulary: {tokens}")
        if self.input_type == "pixels":
            shape = self.pixel_shape or []
            self._require(
                len(shape) == 3 and min(shape) > 0 and shape[1] % 8 == 0 and shape[2] % 8 == 0,
                "pixel_shape",
                "channels, height and width of the pictures, the latter two multiples of 8",
            )
            size = shape[0] * shape[1] * shape[2]
            self._require(
                self.observation_size == size, "observation_size", f"{size}, the numbers in pixel_shape={shape}"
            )
        names = self.token_names or []
        self._require(
            len(set(names)) == len(names) <= self.vocab_size and not any(len(x.split()) != 1 for x in names),
            "token_names",
            f"at most vocab_size={self.vocab_size} names, all different and without spaces",
        )

    def _check_ranges(self):
        for name, allowed in self.ranges.items():
            self._require(getattr(self, name) in allowed, name, allowed)

    def _check_num_labels(self, number):
        # A property and not a field: transformers keeps the names of the labels in its place.
        if not isinstance(number, Integral) or isinstance(number, bool) or number not in LISTED:
            raise ValueError(f"num_labels={number!r} is not allowed: it must be a whole number, {LISTED}.")

    def _check_labels(self):
        numbers = self.id2label if self.id2label is not None else [0]
        if not numbers:
            raise ValueError("id2label is empty, which makes num_labels=0: there must be at least one label.")
        if set(numbers) != set(range(len(numbers))):
            shown = ", ".join(map(repr, list(numbers)[:12])) + (", ..." if len(numbers) > 12 else "")
            raise ValueError(
                f"id2label has the keys {shown}; with {len(numbers)} labels they must be the whole numbers 0 to "
                f"{len(numbers) - 1}."
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
