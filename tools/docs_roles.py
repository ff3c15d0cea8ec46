"""For the API pages: docstrings name things by ``:class:`X``` so that editors find them; Markdown shows them as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`~?([^`]+)`")


class Roles(Extension):
    """Turns ``:role:`name``` into plain code."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Called for every object when its members are known."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
