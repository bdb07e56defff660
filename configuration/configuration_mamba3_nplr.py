"""The configuration of every Mamba-3 + NPLR model: the only place where defaults live."""

import difflib
from dataclasses import fields
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

FORMAT_VERSION = 1

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
class Mamba3NPLRConfig(PreTrainedConfig):
    r"""
    Configuration of Mamba-3 with an input-dependent reflection. The defaults are the model of the paper; with
    `reflection_rank=0` it is plain Mamba-3.

    Args:
        vocab_size (`int`, defaults to 128): Number of tokens, when `input_type` is `"tokens"`.
        hidden_size (`int`, defaults to 64): Width of the input and output of a block (d_model).
        num_hidden_layers (`int`, defaults to 1): Number of blocks.
        state_size (`int`, defaults to 16): State elements of a channel (n).
        head_dim (`int`, defaults to 16): Channels of a head (P); it must divide `expand * hidden_size`.
        expand (`int`, defaults to 4): Inner width as a multiple of `hidden_size`.
        use_rope (`bool`, defaults to `True`): Whether B, C and k are rotated by the accumulated phase.
        num_rope_pairs (`int`, defaults to 4): Rotated coordinate pairs (m), at most `state_size // 2`.
        reflection_rank (`0` or `1`, defaults to 1): 0 is plain Mamba-3, 1 adds the reflection.
        reflection_form (`"additive"` or `"contractive"`, defaults to `"additive"`): The transition
            d_t I - beta_t k_t k_t' of the paper, or d_t (I - beta_t k_t k_t'), which never expands.
        injection (`"trapezoid"` or `"delta"`, defaults to `"trapezoid"`): How inputs enter the state; `"delta"` writes
            beta_t k_t u_t' in place of both trapezoid terms, and needs a reflection.
        gate_form (`"smooth"` or `"exact"`, defaults to `"smooth"`): `"exact"` gates reach beta = 0, beta = 2 and
            decay 1, which sigmoid and softplus only approach.
        initial_state (`"zero"` or `"learned"`, defaults to `"zero"`): Whether the first state is a parameter.
        decay_activation (`"softplus"` or `"heavy_tail"`, defaults to `"softplus"`): Activation of the decay rate;
            newer official releases of Mamba-3 use `"heavy_tail"`.
        a_min (`float`, defaults to 1e-4): Lower bound of the decay rate with smooth gates.
        chunk_size (`int`, defaults to 64): Steps computed together by the chunkwise scan. It changes no result.
        output_norm (`bool`, defaults to `True`): Whether the readout is normalised in each head before the gate.
        residual (`bool`, defaults to `False`): Whether a block adds its input to its output.
        dt_min (`float`, defaults to 0.001): Lower end of the step sizes drawn at initialisation.
        dt_max (`float`, defaults to 0.1): Upper end of the step sizes drawn at initialisation.
        beta_bias_init (`float`, defaults to 0.0): Initial bias of the reflection strength; 2 often learns faster.
        input_type (`"tokens"`, `"observations"` or `"embeddings"`, defaults to `"tokens"`): What the model reads:
            token ids, continuous observations, or only `inputs_embeds`. Behaviour cloning always reads observations.
        observation_size (`int`, defaults to 16): Numbers in an observation; the last one is the cue.
        action_size (`int`, defaults to 2): Numbers in an action.
        cue_weight (`float`, defaults to 20): Weight of the frames with the cue on in the behaviour-cloning loss.
        episode_loss (`bool`, defaults to `False`): Whether each episode's loss is divided by its own length before
            the mean over episodes, instead of weighing all frames alike.
        label_smoothing (`float`, defaults to 0.0): Label smoothing of the classification losses.
        scan_backend (`str`, defaults to `"auto"`): Which implementation of the scan to run: `"reference"`,
            `"chunkwise"`, `"cpu"` (compiled code), `"triton"` (GPUs), or the fastest that can run here.
        use_cache (`bool`, defaults to `True`): Whether the model returns its state outside training.
        pad_token_id (`int`, *optional*): Token that sequence classification takes for padding if no mask is given.
        bos_token_id (`int`, *optional*): Kept for tokenizers; the model does not use it.
        eos_token_id (`int`, *optional*): Kept for tokenizers; the model does not use it.
        format_version (`int`, defaults to 1): Version of this configuration format; a newer one is refused.
    """

    model_type = "mamba3_nplr"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 128
    hidden_size: int = 64
    num_hidden_layers: int = 1
    state_size: int = 16
    head_dim: int = 16
    expand: int = 4
    use_rope: bool = True
    num_rope_pairs: int = 4
    reflection_rank: Literal[0, 1] = 1
    reflection_form: Literal["additive", "contractive"] = "additive"
    injection: Literal["trapezoid", "delta"] = "trapezoid"
    gate_form: Literal["smooth", "exact"] = "smooth"
    initial_state: Literal["zero", "learned"] = "zero"
    decay_activation: Literal["softplus", "heavy_tail"] = "softplus"
    a_min: float | int = 1e-4
    chunk_size: int = 64
    output_norm: bool = True
    residual: bool = False
    dt_min: float | int = 0.001
    dt_max: float | int = 0.1
    beta_bias_init: float | int = 0.0
    input_type: Literal["tokens", "observations", "embeddings"] = "tokens"
    observation_size: int = 16
    action_size: int = 2
    cue_weight: float | int = 20.0
    episode_loss: bool = False
    label_smoothing: float | int = 0.0
    scan_backend: str = "auto"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        # First of all: a newer format may hold fields that this version would call unknown.
        self._refuse_newer_format()
        self._refuse_unknown_keywords(kwargs)
        super().__post_init__(**kwargs)

    def _refuse_newer_format(self):
        if isinstance(self.format_version, int) and self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version={self.format_version} was written by a newer mamba3_nplr; this one reads up to "
                f"{FORMAT_VERSION}. Upgrade the package, or load the checkpoint's own code with trust_remote_code=True."
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
        """Checks the ranges and combinations that types cannot express; part of `@strict`."""
        positive = ("vocab_size", "hidden_size", "num_hidden_layers", "state_size", "head_dim", "expand")
        for name in (*positive, "chunk_size", "observation_size", "action_size", "format_version"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        for name in ("num_rope_pairs", "a_min", "cue_weight"):
            self._require(getattr(self, name) >= 0, name, "at least 0")
        self._require(0 <= self.label_smoothing < 1, "label_smoothing", "at least 0 and below 1")
        self._require(0 < self.dt_min <= self.dt_max, "dt_min", f"above 0 and at most dt_max={self.dt_max}")
        inner = self.expand * self.hidden_size
        self._require(inner % self.head_dim == 0, "head_dim", f"a divisor of expand * hidden_size = {inner}")
        if self.use_rope:
            pairs = self.state_size // 2
            allowed = f"1 to {pairs} (half of state_size={self.state_size}) with use_rope=True"
            self._require(1 <= self.num_rope_pairs <= pairs, "num_rope_pairs", allowed)
        if self.reflection_rank == 0:
            self._require(self.injection != "delta", "injection", "'trapezoid' with reflection_rank=0")

    def _require(self, condition, name, allowed):
        if not condition:
            raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: it must be {allowed}.")

    @property
    def num_heads(self) -> int:
        return self.expand * self.hidden_size // self.head_dim

    @property
    def layer_types(self) -> list[str]:
        return ["linear_attention"] * self.num_hidden_layers

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Does nothing: `save_pretrained` of the models writes the code and the Auto map of a checkpoint."""


__all__ = ["Mamba3NPLRConfig"]
