"""``torchrun ... -m headrace.draft STORE ...``: `headrace train` with the same options, in the form that launchers take."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    # By name: the command line is above this package, and nothing here may import it.
    runpy.run_module("headrace", run_name="__main__", alter_sys=True)
