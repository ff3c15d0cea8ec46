"""Headrace: exact hidden states of large models at engine speed, and the drafters trained from them."""

from headrace._version import __version__
from headrace.errors import HeadraceError, HeadraceWarning
from headrace.types import Capture, CaptureSpec, Failure, Origin, Row, Tap

__all__ = [
    "Capture",
    "CaptureSpec",
    "Failure",
    "HeadraceError",
    "HeadraceWarning",
    "Origin",
    "Row",
    "Tap",
    "__version__",
]
