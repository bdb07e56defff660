"""transformers' own tests for any model, run on the models of this package. docs/transformers_tests.md says more."""

import unittest

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.testing_utils import torch_device

import mamba3_nplr
from helpers.transformers_common import ConfigTester, common
from mamba3_nplr import DeltaFamilyConfig, IDS4Config, Mamba3NPLRConfig
from mamba3_nplr.modeling.families import HEADS, in_transformers

# Sizes of the small model of each family, beside those that all share.
SIZES = {
    Mamba3NPLRConfig: {"state_size": 8, "head_dim": 8, "expand": 2, "num_rope_pairs": 2, "chunk_size": 8},
    DeltaFamilyConfig: {"head_key_dim": 8, "head_value_dim": 8, "intermediate_size": 16, "chunk_size": 8},
    IDS4Config: {"state_size": 6, "chunk_elements": 1000},
}
OPTIONS = {
    "reflection_form": "contractive",
    "injection": "delta",
    "gate_form": "exact",
    "rope_per_head": True,
    "initial_state": "learned",
    "output_norm": True,
}


class ModelTester:
    """A small configuration and inputs for it; the tests read the attributes."""

    batch_size = 5
    seq_length = 19  # two whole chunks and a part of one
    hidden_size = 32
    num_hidden_layers = 2
    is_training = True

    def __init__(self, config_class, **options):
        self.config_class = config_class
        self.options = options

    def get_config(self):
        return self.config_class(
            vocab_size=99,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            observation_size=6,
            **SIZES[self.config_class],
            **self.options,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        config = self.get_config()
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.long, device=torch_device)
        mask[0, :3] = 0
        mask[-1, -4:] = 0
        return config, {**self.prepare_main_input(config), "attention_mask": mask}

    def prepare_main_input(self, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
        return {"input_ids": common.ids_tensor([self.batch_size, self.seq_length], config.vocab_size)}


class PolicyTester(ModelTester):
    def prepare_main_input(self, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
        observations = common.floats_tensor([self.batch_size, self.seq_length, config.observation_size])
        return {"observations": observations.to(torch.get_default_dtype())}


class CommonTests(common.ModelTesterMixin):
    """What the test cases below share. A family has one for its models that read tokens, and one for its policy."""

    heads: list[str]
    model_tester_class = ModelTester
    config_class = Mamba3NPLRConfig
    # num_heads in place of num_attention_heads: the heads are those of a recurrence.
    common_properties = ["hidden_size", "num_heads", "num_hidden_layers"]
    options = {}
    has_attentions = False
    # Otherwise a model without the copyright line of a model inside transformers is taken for an old one.
    test_can_init_all_missing_weights_before_2023 = True

    @property
    def all_model_classes(self) -> tuple[type, ...]:
        family = self.config_class.__name__.removesuffix("Config")
        return tuple(getattr(mamba3_nplr, family + head) for head in self.heads)

    def setUp(self):
        self.model_tester = self.model_tester_class(self.config_class, **self.options)
        self.config_tester = ConfigTester(
            self, self.config_class, common_properties=self.common_properties, **self.options
        )

    def test_config(self):
        self.config_tester.run_common_tests()


class TokenModelsTest(CommonTests, unittest.TestCase):
    # The others have labels that transformers cannot know.
    heads = [head for head in HEADS if in_transformers(head)]


class TokenModelsWithOptionsTest(TokenModelsTest):
    options = OPTIONS


class PolicyTest(CommonTests, unittest.TestCase):
    model_tester_class = PolicyTester
    heads = ["ForBehaviorCloning"]

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels:
            inputs["labels"] = torch.ones(*inputs["observations"].shape[:2], 2, device=torch_device)
        return inputs

    # The next two are those of transformers with observations in the place of tokens.

    def test_inputs_embeds(self):
        config, inputs_dict = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            model = model_class(config).to(torch_device).eval()
            inputs = self._prepare_for_class(inputs_dict, model_class)
            with torch.no_grad():
                expected = model(**inputs)[0]
                inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("observations"))
                torch.testing.assert_close(model(**inputs)[0], expected)

    def test_model_get_set_embeddings(self):
        config, _ = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            model = model_class(config)
            self.assertIsInstance(model.get_input_embeddings(), nn.Linear)
            replacement = nn.Linear(10, 10)
            model.set_input_embeddings(replacement)
            self.assertIs(model.get_input_embeddings(), replacement)
            self.assertIsNone(model.get_output_embeddings())

    @unittest.skip("A policy has no vocabulary to resize: a linear map embeds its observations.")
    def test_resize_tokens_embeddings(self):
        pass


class PolicyWithOptionsTest(PolicyTest):
    options = OPTIONS


class DeltaFamilyTest(TokenModelsTest):
    config_class = DeltaFamilyConfig
    options = {"num_householder": 2}


class DeltaFamilyPolicyTest(PolicyTest):
    config_class = DeltaFamilyConfig
    options = {"num_householder": 2}


class BatchesInFloat64:
    """Products of random matrices magnify how a batch is rounded, in float32 past what the test allows (2.4e-5)."""

    def test_batching_equivalence(self):
        torch.set_default_dtype(torch.float64)
        self.addCleanup(torch.set_default_dtype, torch.float32)
        super().test_batching_equivalence(atol=1e-10, rtol=1e-10)


class IDS4Test(BatchesInFloat64, TokenModelsTest):
    config_class = IDS4Config
    common_properties = ["hidden_size", "num_hidden_layers"]


class IDS4PolicyTest(BatchesInFloat64, PolicyTest):
    config_class = IDS4Config
    common_properties = ["hidden_size", "num_hidden_layers"]
