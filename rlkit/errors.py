"""Every error that rlkit raises on purpose. One root, so that `except RlkitError` catches them all.

A message says what was given, what was expected and what to do about it.
"""


class RlkitError(Exception):
    """Root of all errors that rlkit raises on purpose."""


class ConfigError(RlkitError, ValueError):
    """A configuration key or value is unknown or out of range."""


class DataError(RlkitError, ValueError):
    """A prompt, dataset row or batch cannot be used as it is."""


class DataflowError(RlkitError, ValueError):
    """Controllers are connected in a way that cannot run."""


class RewardError(RlkitError, ValueError):
    """A reward function failed or returned something that is no reward."""


class GenerationError(RlkitError, RuntimeError):
    """Sampling responses failed or was asked for in a way that is not supported."""


class ModelError(RlkitError, ValueError):
    """A model or tokenizer cannot be found, loaded or used in the role it was given."""


class PlacementError(RlkitError, ValueError):
    """A device map names devices that do not exist or a strategy that cannot run here."""


class RunError(RlkitError, RuntimeError):
    """A run folder is in a state that does not allow what was asked."""


class CheckpointError(RlkitError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit what it is loaded into."""


class RequestRefused(RlkitError, RuntimeError):
    """A live request was refused by the driver; the message holds its reason. The run went on unchanged."""
