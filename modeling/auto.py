"""The models' entries in the Auto classes of transformers, and an Auto class for policies."""

from collections import OrderedDict

from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ..configuration.configuration_mamba3_nplr import Mamba3NPLRConfig
from .modeling_mamba3_nplr import (
    Mamba3NPLRForBehaviorCloning,
    Mamba3NPLRForSequenceClassification,
    Mamba3NPLRForTokenClassification,
    Mamba3NPLRModel,
)


class AutoModelForBehaviorCloning(_BaseAutoModelClass):
    """Loads a behaviour-cloning policy by its configuration."""

    _model_mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())


AutoModel.register(Mamba3NPLRConfig, Mamba3NPLRModel)
AutoModelForSequenceClassification.register(Mamba3NPLRConfig, Mamba3NPLRForSequenceClassification)
AutoModelForTokenClassification.register(Mamba3NPLRConfig, Mamba3NPLRForTokenClassification)
AutoModelForBehaviorCloning.register(Mamba3NPLRConfig, Mamba3NPLRForBehaviorCloning)
