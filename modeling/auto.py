"""The models' entries in the Auto classes of transformers, and an Auto class for policies."""

from collections import OrderedDict

from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from . import modeling_delta_family, modeling_ids4, modeling_mamba3_nplr


class AutoModelForBehaviorCloning(_BaseAutoModelClass):
    """Loads a behaviour-cloning policy by its configuration."""

    _model_mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())


AUTO_CLASSES = (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForBehaviorCloning,
)
FAMILIES = {
    modeling_mamba3_nplr: modeling_mamba3_nplr.Mamba3NPLRPreTrainedModel,
    modeling_delta_family: modeling_delta_family.DeltaFamilyPreTrainedModel,
    modeling_ids4: modeling_ids4.IDS4PreTrainedModel,
}

for module, family in FAMILIES.items():
    for auto_class in AUTO_CLASSES:
        auto_class.register(family.config_class, getattr(module, family.auto_classes[auto_class.__name__]))
