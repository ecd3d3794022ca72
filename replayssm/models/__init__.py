"""transformers models that decode through checkpoint and ring: `enable`, `disable`, and their cache."""

from replayssm.models.cache import ReplayCache
from replayssm.models.support import SUPPORTED_MODELS
from replayssm.models.switch import disable, enable, last_cache

__all__ = ["SUPPORTED_MODELS", "ReplayCache", "disable", "enable", "last_cache"]
