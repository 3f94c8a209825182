"""A run's options: what may be asked, how it is read, how it is documented.

An unknown key is an error that suggests the nearest one; well-known synonyms are taken with a
notice; every key of TrainingArguments and SFTConfig is honoured, met by design, or refused by name.
"""

from megatrain.config.documentation import document
from megatrain.config.options import TrainConfig
from megatrain.config.read import make_config, parse_overrides, read_config
from megatrain.config.resuming import changes

__all__ = ["TrainConfig", "changes", "document", "make_config", "parse_overrides", "read_config"]
