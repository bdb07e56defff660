"""The kinds of tasks, by the head of the models that learn them: what follows from the head and not from the task."""

from abc import abstractmethod
from dataclasses import replace
from typing import Self

import numpy as np
import torch

from .task import IGNORED, Task
from .task_texts import HubNames

TRACKING_EXAMPLE = """from transformers import pipeline

checkpoint = "{checkpoint}"
track = pipeline("state-tracking", model=checkpoint, trust_remote_code=True)
for prefix in track("{word}"):
    print(prefix["token"], prefix["{entry}"], prefix["score"])"""

POLICY_EXAMPLE = """import numpy as np
from transformers import pipeline

checkpoint = "{checkpoint}"
act = pipeline("behavior-cloning", model=checkpoint, trust_remote_code=True)
actions = act(np.zeros(({frames}, {size})))  # an episode at once
for action in act(iter(np.zeros((5, {size})))):  # or one observation at a time
    print(action)"""


class PrefixClassification(Task):
    """
    A label for every prefix of a sequence of tokens. The columns are `input_ids` and `labels`, both of whole numbers
    (rows, length).
    """

    auto_class = "AutoModelForSequenceClassification"
    input_column = "input_ids"
    main_metric = "final_accuracy"
    size_name = "length"
    rows_in_file = 100_000
    forward_options = {"output_prefix_logits": True}
    hub = HubNames("text-classification", "token-classification", "accuracy")
    example_entry = "label"  # of what the pipeline says of a prefix, in the example
    example_note = (
        "`AutoModelForSequenceClassification` loads the model itself, whose `prefix_logits` are\nthose of every prefix."
    )

    @property
    @abstractmethod
    def token_names(self) -> list[str]:
        """Names of the tokens in order, without spaces."""

    @property
    @abstractmethod
    def label_names(self) -> list[str]:
        """Names of the labels in order."""

    @property
    def model_fields(self) -> dict:
        return {"vocab_size": len(self.token_names), "num_labels": len(self.label_names)}

    @property
    def model_names(self) -> dict:
        return {
            "id2label": dict(enumerate(self.label_names)),
            "label2id": {name: number for number, name in enumerate(self.label_names)},
            "token_names": self.token_names,
        }

    def states(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"kinds": arrays[self.input_column], "states": arrays["labels"]}

    def predictions(self, output) -> torch.Tensor:
        return output.prefix_logits.argmax(-1)

    def metrics(self, predictions: np.ndarray, rows: dict[str, np.ndarray]) -> dict[str, float | list[float]]:
        """
        Args:
            predictions (rows, length): Predicted label at every position.
        """
        correct = np.asarray(predictions) == np.asarray(rows["labels"])
        by_position = correct.mean(0)
        return {
            "accuracy": float(correct.mean()),
            "final_accuracy": float(by_position[-1]),
            "accuracy_by_position": by_position.tolist(),
        }

    def features(self):
        from datasets import ClassLabel, Features, List, Value

        return Features({"input_ids": List(Value("int32")), "labels": List(ClassLabel(names=self.label_names))})

    def example(self, checkpoint: str, config) -> str:
        word = " ".join((config.token_names or [])[:3])
        return TRACKING_EXAMPLE.format(checkpoint=checkpoint, word=word, entry=self.example_entry)


class BehaviorCloning(Task):
    """
    An action for every observation of an episode. The columns are `observations` and `labels`, the demonstrated
    actions, both of numbers (rows, frames, size), and any others that the metrics need. Where `lengths` says that
    episodes differ in length, a task may have a field `packed`.
    """

    auto_class = "AutoModelForBehaviorCloning"
    input_column = "observations"
    loss_fields = ("cue_weight", "episode_loss")
    rows_in_file = 4_096
    packed = False  # whether batches of different lengths are packed with `cu_seqlens` instead of padded with a mask
    hub = HubNames("robotics", "robotics", "success-rate")
    example_frames = 100  # of the episode in the example
    example_note = (
        "`AutoModel` loads the policy itself: `reset()` starts an episode, `select_action(observation)` is a step."
    )

    @property
    @abstractmethod
    def observation_size(self) -> int:
        """Numbers in an observation."""

    @property
    @abstractmethod
    def action_size(self) -> int:
        """Numbers in an action."""

    @property
    def model_fields(self) -> dict:
        return {"observation_size": self.observation_size, "action_size": self.action_size}

    def model_inputs(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Episodes of one length as they are; of different lengths packed, or padded with a mask and labels of -100."""
        inputs = super().model_inputs(arrays)
        frames, num_frames = inputs["observations"].shape[1], self.lengths(arrays).get("observations")
        if num_frames is None or (num_frames == frames).all():
            return inputs
        num_frames = torch.from_numpy(num_frames)
        inside = torch.arange(frames) < num_frames[:, None]
        if self.packed:
            packed = {name: x[inside][None] for name, x in inputs.items()}
            return packed | {"cu_seqlens": torch.cat([num_frames.new_zeros(1), num_frames.cumsum(0)])}
        labels = inputs["labels"].masked_fill(~inside[..., None], IGNORED)
        return inputs | {"labels": labels, "attention_mask": inside.long()}

    @property
    def for_evaluation(self) -> Self:
        return replace(self, packed=False) if self.packed else self

    def predictions(self, output) -> torch.Tensor:
        return output.actions.float()

    def features(self):
        from datasets import Features, List, Value

        return Features(
            {
                "observations": List(List(Value("float32"), length=self.observation_size)),
                "labels": List(List(Value("float32"), length=self.action_size)),
            }
        )

    def example(self, checkpoint: str, config) -> str:
        return POLICY_EXAMPLE.format(checkpoint=checkpoint, frames=self.example_frames, size=self.observation_size)
