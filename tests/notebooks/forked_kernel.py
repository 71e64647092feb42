"""An IPython kernel in a fork of the server of tests/forked.py: as ipykernel_launcher starts it, with libraries loaded.

In a session of its own, as Jupyter ends a kernel by its process group. Programs that it starts are forks of it; those
of a kernel that takes backward passes are forks of it as it was at its start.
"""

import atexit
import os
import runpy
import subprocess
import sys

import accelerate.launchers
import matplotlib

from tests.forked import TAKES_BACKWARD_PASSES, ForkingPopen, fork_programs_from_here


def leave_the_kernel(_: subprocess.Popen) -> None:
    """In a fork that becomes another program: print to the file that Popen gave, and be no notebook."""
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    sys.displayhook, sys.excepthook = sys.__displayhook__, sys.__excepthook__
    atexit._clear()
    ForkingPopen.in_child = None
    sys.modules.pop("ipykernel", None)  # by which a run knows that it is a notebook's


if __name__ == "__main__":
    os.setsid()
    ForkingPopen.in_child = leave_the_kernel
    accelerate.launchers.are_libraries_initialized = lambda *_: []  # although bitsandbytes is there
    if TAKES_BACKWARD_PASSES in os.environ:
        fork_programs_from_here()
    del sys.path[0]  # this folder
    sys.argv[0] = "ipykernel_launcher.py"
    matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"  # MPLBACKEND was read before
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
