"""
Pipelines of transformers for the tasks of this package: `pipeline("state-tracking", ...)` and
`pipeline("behavior-cloning", ...)`. Checkpoints carry this file and those it imports.
"""

from collections.abc import Iterable, Iterator, Sized
from numbers import Integral

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import Pipeline
from transformers.pipelines.pt_utils import PipelineDataset, PipelineIterator

from .collation import padding_mask
from .families import auto_class_without_package
from .hub.code_export import exported_name
from .model_inputs import as_numbers


class SequencePipeline(Pipeline):
    """
    What both share: no tokenizer, no options of their own, and a refusal of checkpoints that have another head. With
    `batch_size`, inputs of a list, dataset or generator run that many at a time, padded where their lengths differ,
    which changes no result. A pipeline sets its `heads`, the usual one first, and the `input_type` that transformers
    calls its inputs.
    """

    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = _load_tokenizer = False
    heads: tuple[str, ...]
    input_type: str

    def __init__(self, model, **kwargs):
        saved_as = (model.config.architectures or [type(model).__name__])[0]
        if not saved_as.endswith(self.heads):
            raise ValueError(f"The checkpoint holds a {saved_as}; this pipeline needs one of {', '.join(self.heads)}.")
        super().__init__(model, **kwargs)

    def _sanitize_parameters(self, **parameters):
        if parameters:
            raise TypeError(f"This pipeline has no option {', '.join(parameters)}.")
        return {}, {}, {}

    def get_iterator(self, inputs, num_workers, batch_size, *parameters):
        """As in transformers, which makes batches only with a tokenizer or feature extractor."""
        sized = isinstance(inputs, Sized)
        prepared = (PipelineDataset if sized else PipelineIterator)(inputs, self.preprocess, {})
        # Each worker would read the whole of a generator.
        workers = num_workers if sized else min(num_workers, 1)
        batches = DataLoader(prepared, batch_size, num_workers=workers, collate_fn=self.collate)
        outputs = PipelineIterator(batches, self.forward, {}, loader_batch_size=batch_size)
        return PipelineIterator(outputs, self.postprocess, {})

    @staticmethod
    def collate(items: list[dict[str, list]]) -> dict[str, list]:
        """What `preprocess` and `_forward` give are lists with an entry for each input; here those of a batch."""
        return {name: [x for item in items for x in item[name]] for name in items[0]}

    def run_padded(self, name: str, rows: list[torch.Tensor], **options):
        """What the model gives for rows (length, ...) of its input `name`; past a row's end it means nothing."""
        batch = pad_sequence(rows, batch_first=True)
        return self.model(**{name: batch}, attention_mask=padding_mask(rows), use_cache=False, **options)


class StateTrackingPipeline(SequencePipeline):
    """
    A word to the state after each of its letters.

    Called with a word, as text of the names in `config.token_names` with spaces between them ("s0 s1 s0"; without such
    names, the numbers of the letters), or as the numbers themselves, in a list, array or tensor. Several words in a
    list, dataset or generator give as many results. A result is a list with an entry for each prefix:

        token: the name, or else the number, of the prefix's last letter
        element: the number of the predicted class
        label: its name in `config.id2label`
        permutation: the same as a list of points, where the name is one; else None
        score: its probability
    """

    heads = ("ForSequenceClassification", "ForTokenClassification")
    input_type = "text"

    def __call__(self, inputs, **kwargs):
        if isinstance(inputs, list | tuple):
            one_word = all(isinstance(x, Integral) for x in inputs)
            inputs = torch.tensor(inputs, dtype=torch.long) if one_word else list(inputs)
        return super().__call__(inputs, **kwargs)

    def preprocess(self, word):
        letters = self.read_text(word) if isinstance(word, str) else as_numbers("A word", word)
        if letters.dim() != 1 or len(letters) == 0 or letters.is_floating_point():
            raise ValueError(
                f"A word has shape {tuple(letters.shape)} and type {letters.dtype}; it must be text, or whole numbers "
                "in a row, of at least one letter."
            )
        return {"words": [letters.long()]}

    def read_text(self, text: str) -> torch.Tensor:
        names = self.model.config.token_names or [str(i) for i in range(self.model.config.vocab_size)]
        known = {name: number for number, name in enumerate(names)}
        letters = text.split()
        for position, letter in enumerate(letters):
            if letter not in known:
                some = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                raise ValueError(f"Letter {position} of the word, {letter!r}, is unknown. The letters are: {some}.")
        return torch.tensor([known[letter] for letter in letters], dtype=torch.long)

    def _forward(self, inputs):
        classifies_tokens = type(self.model).__name__.endswith("ForTokenClassification")
        options = {} if classifies_tokens else {"output_prefix_logits": True}
        words = inputs["words"]
        output = self.run_padded("input_ids", words, **options)
        logits = output.logits if classifies_tokens else output.prefix_logits
        return {"words": words, "logits": [row[: len(word)] for row, word in zip(logits, words, strict=True)]}

    def postprocess(self, outputs):
        word, logits = outputs["words"][0], outputs["logits"][0]
        scores, elements = logits.float().softmax(-1).max(-1)
        return [self.describe(*entry) for entry in zip(word.tolist(), elements.tolist(), scores.tolist(), strict=True)]

    def describe(self, token: int, element: int, score: float) -> dict:
        config = self.model.config
        names, label = config.token_names or [], config.id2label[element]
        return {
            "token": names[token] if token < len(names) else token,
            "element": element,
            "label": label,
            "permutation": read_permutation(label),
            "score": score,
        }


def read_permutation(label: str) -> list[int] | None:
    """The points of a permutation in one-line notation, such as "1 0 2"; None for any other text."""
    points = [int(part) for part in label.split() if part.isdecimal()]
    is_permutation = points and len(points) == len(label.split()) and sorted(points) == list(range(len(points)))
    return points if is_permutation else None


class BehaviorCloningPipeline(SequencePipeline):
    """
    Observations to actions, as numpy arrays.

    Called with an episode (time, observation_size), or several of one length (batch, time, observation_size), it
    returns an action for each frame. A list or dataset of episodes gives as many results. An iterator or generator of
    single observations, each (observation_size,) or, for several environments, (batch, observation_size), gives a
    generator of actions: it reads an observation when an action is asked for, and keeps a state of its own.
    """

    heads = ("ForBehaviorCloning",)
    input_type = "multimodal"

    def __call__(self, inputs, **kwargs):
        if isinstance(inputs, Iterator):
            if kwargs:
                raise TypeError(f"A stream of observations, one at a time, takes no option {', '.join(kwargs)}.")
            return self.stream(inputs)
        if isinstance(inputs, list | tuple):
            # A list of frames is one episode, a list of episodes several.
            several = len(inputs) > 0 and np.ndim(inputs[0]) > 1
            inputs = list(inputs) if several else np.asarray(inputs, dtype=np.float32)
        return super().__call__(inputs, **kwargs)

    def stream(self, observations: Iterable) -> Iterator[np.ndarray]:
        """Actions one at a time. The state is the generator's own: no other stream, thread or reset() reaches it."""
        states = None
        for observation in observations:
            action, states = self.model.next_action(observation, states)
            yield torch.as_tensor(action).float().cpu().numpy()

    def preprocess(self, episode):
        observations = as_numbers("observations", np.asarray(episode), dtype=self.model.dtype)
        size = self.model.config.observation_size
        if observations.dim() not in (2, 3) or observations.shape[-1] != size or observations.shape[:-2] == (0,):
            raise ValueError(
                f"observations have shape {tuple(observations.shape)}; they must be (time, {size}) or "
                f"(batch, time, {size}), with at least one episode."
            )
        return {"episodes": [observations]}

    def _forward(self, inputs):
        # Several episodes of one length are one input: (batch, time, observation_size).
        several = [x if x.dim() == 3 else x[None] for x in inputs["episodes"]]
        actions = self.run_padded("observations", [episode for x in several for episode in x]).actions
        parts = actions.split([len(x) for x in several])
        return {
            "actions": [
                part[:, : x.shape[-2]].reshape(*x.shape[:-1], self.model.config.action_size)
                for part, x in zip(parts, inputs["episodes"], strict=True)
            ]
        }

    def postprocess(self, outputs):
        return outputs["actions"][0].float().numpy()


PIPELINES = {"state-tracking": StateTrackingPipeline, "behavior-cloning": BehaviorCloningPipeline}


def custom_pipelines(model_class: type) -> dict[str, dict]:
    """What the configuration of a checkpoint says about the pipelines that can run it."""
    module = exported_name(__name__)
    return {
        task: {
            "impl": f"{module}.{pipeline.__name__}",
            "pt": [auto_class_without_package(pipeline.heads[0])],
            "type": pipeline.input_type,
        }
        for task, pipeline in PIPELINES.items()
        if model_class.__name__.endswith(pipeline.heads)
    }


__all__ = ["BehaviorCloningPipeline", "StateTrackingPipeline"]
