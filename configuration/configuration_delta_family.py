"""The configuration of the delta family: DeltaNet, Gated DeltaNet, DeltaProduct and Gated DeltaProduct."""

from huggingface_hub.dataclasses import strict

from .configuration_sequence_model import COUNT, SIZE, STEP_SIZE, Range, SequenceModelConfig


@strict
class DeltaFamilyConfig(SequenceModelConfig):
    r"""
    Configuration of the models whose state follows the delta rule. The defaults are Gated DeltaNet as in the paper;
    `MODELS` of `configuration/presets.py` has the others.

    Args:
        hidden_size (`int`, defaults to 128): Width of the input and output of a block.
        num_heads (`int`, defaults to 4): Number of heads.
        head_key_dim (`int`, defaults to 32): Numbers in a key or query of a head.
        head_value_dim (`int`, defaults to 64): Numbers in a value of a head.
        num_householder (`int`, defaults to 1): Delta steps a token (n_h), each with its own key, value and strength:
            1 is (Gated) DeltaNet, more is (Gated) DeltaProduct.
        use_decay (`bool`, defaults to `True`): Whether the state decays by an input-dependent gate before the first
            delta step of a token: the "Gated" models.
        beta_max (`float`, defaults to 2): The strength of a delta step lies between 0 and this; 1 keeps the
            eigenvalues of a step positive, 2 lets it reflect.
        conv_size (`int`, defaults to 4): Width of the short convolutions of queries, keys and values; 0 for none.
        use_output_gate (`bool`, defaults to `True`): Whether the normalised readout is multiplied by a gate.
        intermediate_size (`int`, defaults to 512): Width of the SwiGLU network after the mixer; 0 for none.
        dt_min (`float`, defaults to 0.001): Lower end of the step sizes of the decay drawn at initialisation.
        dt_max (`float`, defaults to 0.1): Upper end of the step sizes of the decay drawn at initialisation.
        decay_rate_max (`float`, defaults to 16): Upper end of the decay rates drawn at initialisation.
        chunk_size (`int`, defaults to 64): Delta steps computed together by the chunkwise scan. It changes no result.
        scan_backend (`str`, defaults to `"auto"`): Which implementation of the scan to run: `"reference"`,
            `"chunkwise"`, `"cpu"` (compiled code), or the fastest that can run here.
    """

    model_type = "delta_family"
    ranges = SequenceModelConfig.ranges | {
        **dict.fromkeys(("hidden_size", "num_heads", "head_key_dim", "head_value_dim"), SIZE),
        **dict.fromkeys(("num_householder", "chunk_size"), SIZE),
        **dict.fromkeys(("conv_size", "intermediate_size"), COUNT),
        **dict.fromkeys(("dt_min", "dt_max"), STEP_SIZE),
        "beta_max": Range(0, 2, above=True),
        "decay_rate_max": Range(0, 10**6, above=True),
    }

    hidden_size: int = 128
    num_heads: int = 4
    head_key_dim: int = 32
    head_value_dim: int = 64
    num_householder: int = 1
    use_decay: bool = True
    beta_max: float | int = 2.0
    conv_size: int = 4
    use_output_gate: bool = True
    intermediate_size: int = 512
    dt_min: float | int = 0.001
    dt_max: float | int = 0.1
    decay_rate_max: float | int = 16.0
    chunk_size: int = 64
    scan_backend: str = "auto"

    def validate_architecture(self):
        super().validate_architecture()
        self._require(self.dt_min <= self.dt_max, "dt_min", f"at most dt_max={self.dt_max}")


__all__ = ["DeltaFamilyConfig"]
