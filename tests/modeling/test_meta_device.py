"""Models on the meta device, where there are shapes but no numbers: what a forward pass would give."""

import pytest
import torch

from helpers.family_cases import CASES, case_class, case_config, case_inputs
from helpers.model_cases import OPTIONS, small_config
from mamba3_nplr import Mamba3NPLRForBehaviorCloning, Mamba3NPLRForSequenceClassification, Mamba3NPLRModel
from mamba3_nplr.modeling.families import HEADS


def shapes(output):
    return {name: tuple(x.shape) for name, x in output.items() if torch.is_tensor(x)}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("case", ["gdn", "gdp_everything", "ids4"])
def test_every_family_has_the_shapes_it_has_elsewhere(case, head, masked):
    assert_same_shapes(case_class(case, head)(case_config(case)), case_inputs(head, 2, 7, torch.float32), masked)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_the_shapes_it_has_elsewhere(option, masked):
    model = Mamba3NPLRForSequenceClassification(small_config(option))
    assert_same_shapes(model, case_inputs("Model", 2, 7), masked)


def assert_same_shapes(model, inputs, masked):
    if masked:
        inputs |= {"attention_mask": torch.tensor([[1] * 7, [0] * 3 + [1] * 4]), "position_ids": torch.arange(7)[None]}
    expected = shapes(model(**inputs))
    model, inputs = model.to("meta"), {name: x.to("meta") for name, x in inputs.items()}
    for _ in range(2):
        found = model(**inputs)
        assert found[0].is_meta and shapes(found) == expected
        found = model(**inputs, past_key_values=found.past_key_values)
        assert found[0].is_meta and shapes(found) == expected


@pytest.mark.parametrize("case", [case for case in CASES if case in ("deltanet", "ids4")])
def test_a_model_may_be_built_there(case):
    with torch.device("meta"):
        model = case_class(case)(case_config(case))
    assert model(torch.zeros(2, 5, dtype=torch.long, device="meta")).last_hidden_state.shape == (2, 5, 12)


def test_losses_and_gradients_have_shapes_too():
    with torch.device("meta"):
        policy, classifier = (
            head(small_config()) for head in (Mamba3NPLRForBehaviorCloning, Mamba3NPLRForSequenceClassification)
        )
        policy(torch.zeros(2, 5, 16), labels=torch.zeros(2, 5, 2)).loss.backward()
        classifier(torch.zeros(2, 5, dtype=torch.long), labels=torch.zeros(2, 5, dtype=torch.long)).loss.backward()
    for model in (policy, classifier):
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_a_backend_that_cannot_run_there_says_so():
    with torch.device("meta"):
        model = Mamba3NPLRModel(small_config(scan_backend="cpu"))
        with pytest.raises(ValueError, match="scan_backend='cpu' cannot run.*on meta.*These can: .*chunkwise"):
            model(torch.zeros(2, 5, dtype=torch.long))
