"""The errors a user of ds-engine may meet, one class per kind of cause.

Every message names the offending value, the rule that it breaks and the fix. Entry points catch
``DsEngineError``, print the message without a traceback and exit with ``exit_code``.
"""


class DsEngineError(Exception):
    """Base of all errors that a user can act on; ``exit_code`` is the process's exit status."""

    exit_code = 1


class ConfigError(DsEngineError):
    """A configuration value that cannot work; found before any process starts."""

    exit_code = 2


class DataError(DsEngineError):
    """A missing, truncated, corrupt or unsuitable data file."""

    exit_code = 3


class CheckpointError(DsEngineError):
    """A checkpoint that is missing, torn, corrupt or does not fit the run."""

    exit_code = 4


class LaunchError(DsEngineError):
    """Processes that cannot be started, found or kept together."""

    exit_code = 5


class NumericsError(DsEngineError):
    """Training that went wrong numerically, such as too many steps without finite gradients."""

    exit_code = 6
