"""An IPython kernel in a fork of the server of tests/forked.py: as ipykernel_launcher starts it, with libraries loaded.

In a session of its own, as Jupyter ends a kernel by its process group; what it starts are real processes.
"""

import os
import runpy
import subprocess
import sys

import matplotlib

if __name__ == "__main__":
    os.setsid()
    subprocess.Popen = subprocess.Popen.__base__
    del sys.path[0]  # this folder
    sys.argv[0] = "ipykernel_launcher.py"
    matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"  # MPLBACKEND was read before
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
