"""What runs inside SGLang's scheduler: found through the entry-point group ``sglang.srt.plugins``, no patch to SGLang.

It captures hidden states of the requests that ask, each row surely belonging to its request and position, into files of
the staging folder. It imports torch, xxhash, the standard library and :mod:`headrace.types`.

    protocol    what it is told and what it answers          compat      every name of SGLang's internals
    plugin      the hooks                                    capture     from packed states to requests
    coverage    which positions are there                    hostring    host memory for copies
    writer      threads that write staged files              stagedfile  their format
    staging     the folder: budget, releases, the dead
"""

import os


def register() -> None:
    """Entry point, called by SGLang in each of its processes. Does nothing unless ``headrace serve`` configured a capture.

    A configuration that cannot work ends the process: SGLang swallows exceptions of plug-ins, and a server that looks
    ready and captures nothing is worse than one that does not start.
    """
    text = os.environ.get("HEADRACE_SGLANG")
    if text:
        from headrace.sglang_plugin.plugin import Plugin

        Plugin.from_environment(text).register()
