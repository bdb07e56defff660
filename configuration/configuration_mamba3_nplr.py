"""The configuration of every Mamba-3 + NPLR model: the only place where defaults live."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_sequence_model import COUNT, SIZE, STEP_SIZE, Range, SequenceModelConfig


@strict
class Mamba3NPLRConfig(SequenceModelConfig):
    r"""
    Configuration of Mamba-3 with an input-dependent reflection. The defaults are the model of the paper; with
    `reflection_rank=0` it is plain Mamba-3.

    Args:
        hidden_size (`int`, defaults to 64): Width of the input and output of a block (d_model).
        state_size (`int`, defaults to 16): State elements of a channel (n).
        head_dim (`int`, defaults to 16): Channels of a head (P); it must divide `expand * hidden_size`.
        expand (`int`, defaults to 4): Inner width as a multiple of `hidden_size`.
        use_rope (`bool`, defaults to `True`): Whether B, C and k are rotated by the accumulated phase.
        num_rope_pairs (`int`, defaults to 4): Rotated coordinate pairs (m), at most `state_size // 2`.
        rope_per_head (`bool`, defaults to `False`): Whether each head has angular speeds of its own. The paper's heads
            share them, so that each can turn by other angles than the rest only as far as its step size allows.
        reflection_rank (`0` or `1`, defaults to 1): 0 is plain Mamba-3, 1 adds the reflection.
        reflection_form (`"additive"` or `"contractive"`, defaults to `"additive"`): The transition
            d_t I - beta_t k_t k_t' of the paper, or d_t (I - beta_t k_t k_t'), which never expands.
        injection (`"trapezoid"`, `"delta"` or `"overwrite"`, defaults to `"trapezoid"`): How inputs enter the state.
            In place of both trapezoid terms `"delta"` writes beta_t k_t u_t', and `"overwrite"`
            beta_t (2 - beta_t) k_t u_t': with beta_t = 1 it puts u_t in the place of what was there, and a full mirror,
            beta_t = 2, writes nothing. Both need a reflection.
        gate_form (`"smooth"` or `"exact"`, defaults to `"smooth"`): `"exact"` gates reach beta = 0, beta = 2,
            decay 1 and an angle of 0, which sigmoid and softplus only approach, and tanh only crosses.
        initial_state (`"zero"` or `"learned"`, defaults to `"zero"`): Whether the first state is a parameter.
        decay_activation (`"softplus"` or `"heavy_tail"`, defaults to `"softplus"`): Activation of the decay rate;
            newer official releases of Mamba-3 use `"heavy_tail"`.
        a_min (`float`, defaults to 1e-4): Lower bound of the decay rate with smooth gates.
        chunk_size (`int`, defaults to 64): Steps computed together by the chunkwise scan. It changes no result.
        block_norm (`"layer_norm"`, `"rms_norm"` or `"none"`, defaults to `"layer_norm"`): The norm of the input of each
            mixer and of the output of the last block; official language models have `"rms_norm"`.
        residual (`bool`, defaults to `True`): Whether a block adds its input to what its mixer gives.
        output_norm (`bool`, defaults to `False`): Whether the readout is normalised in each head before the gate.
        dt_min (`float`, defaults to 0.001): Lower end of the step sizes drawn at initialisation.
        dt_max (`float`, defaults to 0.1): Upper end of the step sizes drawn at initialisation.
        beta_bias_init (`float`, defaults to 0.0): Initial bias of the reflection strength; 2 often learns faster.
        scan_backend (`str`, defaults to `"auto"`): Which implementation of the scan to run: `"reference"`,
            `"chunkwise"`, `"cpu"` (compiled code), `"triton"` (GPUs), or the fastest that can run here.
    """

    model_type = "mamba3_nplr"
    ranges = SequenceModelConfig.ranges | {
        **dict.fromkeys(("hidden_size", "state_size", "head_dim", "expand", "chunk_size"), SIZE),
        **dict.fromkeys(("dt_min", "dt_max"), STEP_SIZE),
        "num_rope_pairs": COUNT,
        "a_min": Range(0, 1000),
        "beta_bias_init": Range(-100, 100),
    }

    hidden_size: int = 64
    state_size: int = 16
    head_dim: int = 16
    expand: int = 4
    use_rope: bool = True
    num_rope_pairs: int = 4
    rope_per_head: bool = False
    reflection_rank: Literal[0, 1] = 1
    reflection_form: Literal["additive", "contractive"] = "additive"
    injection: Literal["trapezoid", "delta", "overwrite"] = "trapezoid"
    gate_form: Literal["smooth", "exact"] = "smooth"
    initial_state: Literal["zero", "learned"] = "zero"
    decay_activation: Literal["softplus", "heavy_tail"] = "softplus"
    a_min: float | int = 1e-4
    chunk_size: int = 64
    block_norm: Literal["layer_norm", "rms_norm", "none"] = "layer_norm"
    residual: bool = True
    output_norm: bool = False
    dt_min: float | int = 0.001
    dt_max: float | int = 0.1
    beta_bias_init: float | int = 0.0
    scan_backend: str = "auto"

    def validate_architecture(self):
        super().validate_architecture()
        self._require(self.dt_min <= self.dt_max, "dt_min", f"at most dt_max={self.dt_max}")
        inner = self.expand * self.hidden_size
        self._require(inner % self.head_dim == 0, "head_dim", f"a divisor of expand * hidden_size = {inner}")
        if self.use_rope:
            pairs = self.state_size // 2
            allowed = f"1 to {pairs} (half of state_size={self.state_size}) with use_rope=True"
            self._require(1 <= self.num_rope_pairs <= pairs, "num_rope_pairs", allowed)
        if self.reflection_rank == 0:
            self._require(self.injection == "trapezoid", "injection", "'trapezoid' with reflection_rank=0")

    @property
    def num_heads(self) -> int:
        return self.expand * self.hidden_size // self.head_dim

    @property
    def action_head_size(self) -> int:
        # As in the paper: as wide as an observation, so that the first numbers are the action. A picture has too many.
        return self.action_size if self.input_type == "pixels" else max(self.observation_size, self.action_size)


__all__ = ["Mamba3NPLRConfig"]
