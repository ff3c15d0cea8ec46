"""Every error that Headrace raises on purpose, and the exit code each one means.

    HeadraceError                      exit 1   the work failed
    ├── UsageError (ValueError)        exit 2   bad usage, config or input; nothing was started
    │   ├── ConfigError                         a config file or option is wrong: names file and key
    │   ├── InputError                          input data is wrong: names file and line
    │   └── SpecMismatchError                   states, rows, target or drafter do not belong together
    ├── PreflightError                 exit 3   a check before the work refused it
    ├── StoreError                     exit 1
    │   ├── CorruptError                        bytes on disk are not what was written: names the file
    │   ├── GoneError (FileNotFoundError)       a shard is gone since its store was opened
    │   └── StorageFullError (OSError)          no space, quota or inodes left
    ├── EngineError                    exit 1
    │   ├── EngineUnavailableError              cannot be reached or started (ConnectionError)
    │   └── CaptureError                        an answer that breaks the contract: names the row's key
    ├── TrainingError                  exit 1
    ├── IncompleteError                exit 1   the run ended with work undone; it can be run again
    └── Interrupted                    exit 130 stopped by the user; resumable

A message is one sentence that names the file, line, key or layer, and a second that says the mend.
To add an error: put it in the tree above, derive from the nearest class and, where one fits, from the
built-in it specializes, so that callers can catch either. All are picklable: arguments are plain values.
"""

from typing import ClassVar


class HeadraceError(Exception):
    """The root: the work failed."""

    exit_code: ClassVar[int] = 1


class HeadraceWarning(UserWarning):
    """Something the user should know and the work survives. Tests turn it into an error."""


class UsageError(HeadraceError, ValueError):
    """The command, config or input is wrong; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A config file or option is wrong."""


class InputError(UsageError):
    """Input data is wrong. The message names the file and line."""


class SpecMismatchError(UsageError):
    """Two things that must share a capture spec, tokenizer or target do not."""


class PreflightError(HeadraceError):
    """A check made before the work starts refused it."""

    exit_code = 3


class StoreError(HeadraceError):
    """A store cannot do what was asked of it."""


class CorruptError(StoreError):
    """Bytes on disk are not the bytes that were written."""


class GoneError(StoreError, FileNotFoundError):
    """A shard is gone since its store was opened: repaired away, or deleted."""


class StorageFullError(StoreError, OSError):
    """No space, quota or inodes left; everything sealed before stays valid."""


class EngineError(HeadraceError):
    """An inference engine failed or refused."""


class EngineUnavailableError(EngineError, ConnectionError):
    """The engine cannot be reached or started."""


class CaptureError(EngineError):
    """An engine's answer breaks the contract (wrong ids, rows, dtype, checksum)."""


class TrainingError(HeadraceError):
    """Training cannot go on."""


class IncompleteError(HeadraceError):
    """The run ended with work undone; run it again to go on."""


class Interrupted(HeadraceError):
    """Stopped by the user; what is sealed stays, run again to go on."""

    exit_code = 130
