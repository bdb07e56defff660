"""The configuration of IDS4, a model whose state is a running product of input-dependent matrices."""

from huggingface_hub.dataclasses import strict

from .configuration_sequence_model import SIZE, SequenceModelConfig


@strict
class IDS4Config(SequenceModelConfig):
    r"""
    Configuration of input-dependent S4. The defaults are the model of the paper.

    Args:
        hidden_size (`int`, defaults to 255): Width of the input and output of a block.
        state_size (`int`, defaults to 110): Rows and columns of the matrices (s).
        chunk_elements (`int`, defaults to 8388608): Numbers in the matrices that are computed together, which bounds
            the memory; a chunk is at least one step. It changes no result beyond its rounding.
    """

    model_type = "input_dependent_s4"
    projection_bias = True
    # The mixer has a norm and a residual connection of its own.
    block_norm = "none"
    residual = False
    ranges = SequenceModelConfig.ranges | {"hidden_size": SIZE, "state_size": SIZE, "chunk_elements": SIZE}

    hidden_size: int = 255
    state_size: int = 110
    chunk_elements: int = 2**23


__all__ = ["IDS4Config"]
